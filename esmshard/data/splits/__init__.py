"""Training, validation and test sets: how records are assigned to the sets, and which records the sets share."""
