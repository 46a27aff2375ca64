"""Train, validation and test sets: how records are assigned to them, and what the sets share."""
