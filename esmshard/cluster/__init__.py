"""Makes jobs for Slurm and Kubernetes (`esmshard launch`), and checks machines (`esmshard doctor`)."""
