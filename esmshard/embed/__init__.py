"""Compute embeddings for any number of sequences, in one or many processes. An interrupted job can be continued."""
