"""The checks of `esmshard doctor`: versions, GPUs, links, disks, and whether a recipe fits."""
