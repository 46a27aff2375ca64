"""Clusters: scripts for their schedulers, and what is wrong with a machine."""
