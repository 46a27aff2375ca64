"""Sharded checkpoints, and one model out of them."""
