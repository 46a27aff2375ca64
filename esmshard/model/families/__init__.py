"""One folder for each family of models, the record that a family consists of, and the registry of all families."""
