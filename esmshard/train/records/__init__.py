"""The records of a run: attempts, status, lock, goodput, verdict, and trackers."""
