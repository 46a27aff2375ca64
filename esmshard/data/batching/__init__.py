"""The examples of a split, and the plan of optimizer steps, which does not depend on the number of processes."""
