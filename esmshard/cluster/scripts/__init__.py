"""Job scripts for Slurm and Kubernetes, made from a site profile."""
