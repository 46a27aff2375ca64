"""The arrays that a model computes for sequences, on one device or with offloaded layers."""
