"""Computes predictions of fine-tuned models, zero-shot scores and rankings of variants, and writes them to files."""
