"""Compute embeddings for any number of sequences, in one or many processes that can be restarted."""
