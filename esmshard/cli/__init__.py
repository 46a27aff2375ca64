"""The command line: the declarations of commands and options, without any computation."""
