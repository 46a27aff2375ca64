"""The HTML page and the charts of a run, which may be finished or still running."""
