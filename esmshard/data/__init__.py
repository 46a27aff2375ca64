"""Everything between input files and packed batches, and the tables that its folders read, without a model."""
