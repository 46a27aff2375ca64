"""ESM-2, ESM-1b and ESM-1v: shapes, blocks, file layouts, and the comparison with the authors' code."""
