"""Readers of PDB and mmCIF files: chains, coordinates of chains, and folders of structure files."""
