"""Labels of proteins and residues: the sources of labels, and the matching of labels to FASTA records."""
