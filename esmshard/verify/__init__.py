"""The certificate that a model computes here what it computes in fair-esm and in transformers."""
