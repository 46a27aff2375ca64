"""Charts and figures of a report."""
