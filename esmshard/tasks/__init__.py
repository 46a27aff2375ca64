"""What a model can learn: the registry of tasks, their base, heads, losses and metrics."""
