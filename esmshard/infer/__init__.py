"""Embeddings and predictions from a finished model, in one process."""
