"""Jobs for Slurm and Kubernetes (`esmshard launch`), and checks of machines (`esmshard doctor`)."""
