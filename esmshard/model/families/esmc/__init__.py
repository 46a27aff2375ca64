"""ESM-C (ESM Cambrian): shapes, blocks, file layouts, and the comparison with the code in `transformers`."""
