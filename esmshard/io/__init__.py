"""Reads and writes files: local paths, cloud buckets, sequences, tables, the token store, and results."""
