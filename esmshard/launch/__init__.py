"""The processes of a run: their start, their connection, their limits, and requests to stop."""
