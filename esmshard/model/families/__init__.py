"""The model families (ESM-2, ESM-C, ...): one module for each family, the class `Family`, and a registry."""
