"""The records of a run: attempts, status, lease, goodput, verdict, and trackers."""
