"""The tasks that a model can learn: registry, base class, heads, losses, baselines and metrics of tasks."""
