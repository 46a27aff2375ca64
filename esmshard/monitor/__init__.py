"""The observation of ranks during a run: speed, communication, memory errors and stuck ranks."""
