"""Embeddings of any number of sequences, by one process or many, with restarts."""
