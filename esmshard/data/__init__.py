"""From input files to packed batches: labels, tracks, variants, structures, splits and batching. No model is used."""
