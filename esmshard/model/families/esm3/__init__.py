"""ESM3: shapes, sequence track, and file layouts."""
