"""FASTA files, plain or compressed: records, headers, rules for symbols, and the recognition of other files."""
