"""Starts and stops the processes (ranks) of a run, divides a model over the ranks, and loads the model's weights."""
