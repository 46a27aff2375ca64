"""Reads labels, tracks, variants, structures and splits from input files, and plans the batches. No model is used."""
