"""SaProt: shapes, the vocabulary of pairs of residue and structure, and file layouts."""
