"""Processes, sharding, memory. Knows modules and numbers, no model, task or recipe."""
