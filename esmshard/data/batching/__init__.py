"""The examples of a data set, and the plan of optimizer steps. The plan is the same for any number of processes."""
