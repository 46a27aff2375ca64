"""From FASTA to packed batches: records, token store, labels, packing. One process; rank and world size are two ints."""
