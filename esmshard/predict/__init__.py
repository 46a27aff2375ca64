"""Predictions of fine-tuned heads, zero-shot scores and rankings of variants, and their files."""
