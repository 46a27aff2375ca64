"""The typed recipe: its sections, and how YAML files are read, checked and written, without torch."""
