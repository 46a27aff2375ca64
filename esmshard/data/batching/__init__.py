"""The records of each optimizer step and micro-batch, planned alike for every number of processes."""
