"""PDB and mmCIF files: chains, coordinates, and the contacts that follow from them."""
