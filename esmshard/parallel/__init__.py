"""The ranks of a run: their start and their stop, the division of a model over them, and the loading of its parts."""
