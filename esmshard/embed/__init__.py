"""The computation of embeddings for any number of sequences, by one or many processes that can be restarted."""
