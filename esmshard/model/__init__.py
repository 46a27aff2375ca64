"""Defines models, and reads and writes their files, on one device and without torch.distributed."""
