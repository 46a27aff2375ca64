"""The model families (ESM-2, ESM-C, ...), with one module for each family."""
