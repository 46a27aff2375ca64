"""The typed recipe: its sections, and the reading, checking and writing of YAML files, without torch."""
