"""The `embed` command from the request to the output, and its estimate in advance."""
