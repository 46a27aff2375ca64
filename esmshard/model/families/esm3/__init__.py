"""ESM3: shapes, tracks of sequence and structure, and file layouts."""
