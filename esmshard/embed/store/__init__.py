"""The embedding store: part files, their index, and the reuse of rows of an earlier store."""
