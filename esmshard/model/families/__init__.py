"""Families of models: one module for each, what several share, the class `Family`, and the registry."""
