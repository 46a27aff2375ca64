"""The files of a run directory, read for a report."""
