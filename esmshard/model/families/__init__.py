"""Families of models: one module for each family, the class `Family`, and the registry."""
