"""Sharded checkpoints, and the consolidation of a checkpoint into a single model directory."""
