"""The comparison of a model with fair-esm and transformers, and the certificate of the result."""
