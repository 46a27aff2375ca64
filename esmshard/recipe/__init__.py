"""The sections and keys of a recipe, and functions that read, check and write recipes, without torch."""
