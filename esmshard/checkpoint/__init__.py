"""Sharded checkpoints of a run, and the conversion of a checkpoint to a model directory."""
