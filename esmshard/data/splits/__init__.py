"""Training, validation and test sets: how records are assigned to these sets, and which records are in several sets."""
