"""Readers of PDB and mmCIF files: chains, their coordinates, and folders of structures."""
