"""Labels of proteins and residues: where a recipe finds labels, and how labels are matched to FASTA records."""
