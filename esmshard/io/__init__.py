"""Reading and writing: paths and buckets, sequences, tables, the token store, and the writers of results."""
