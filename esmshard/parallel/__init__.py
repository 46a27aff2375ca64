"""Starts and stops the ranks of a run, divides a model over the ranks, and loads its weights."""
