"""From FASTA to packed batches. No processes: rank and world size are two ints."""
