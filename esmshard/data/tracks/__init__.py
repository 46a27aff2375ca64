"""What models read of residues besides amino acids, such as 3Di letters: files, and arrays beside the tokens."""
