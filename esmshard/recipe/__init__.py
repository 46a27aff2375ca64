"""Recipes with typed keys: the sections of a recipe, and reading, checking and writing of YAML files, without torch."""
