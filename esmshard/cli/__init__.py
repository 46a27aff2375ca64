"""The command line: options are declared here, and nothing is computed here."""
