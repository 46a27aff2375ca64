"""The token store: FASTA files as memory-mapped tokens, and the ingestion that writes it."""
