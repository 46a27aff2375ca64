"""The tasks that a model can learn: their registry, base class, heads, losses and metrics."""
