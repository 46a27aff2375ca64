"""Several runs of one recipe over seeds and folds, and the summary of their results."""
