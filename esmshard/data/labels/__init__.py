"""Labels of proteins and residues, where a recipe finds them, and how they are matched to FASTA records."""
