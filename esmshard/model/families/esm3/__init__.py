"""ESM3: shapes, tracks of sequence and structure, the encoder of structures, and file layouts."""
