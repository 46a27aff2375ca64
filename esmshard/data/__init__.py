"""Everything between input files and packed batches, without a model."""
