"""File formats of embeddings: the registry and one writer for each."""
