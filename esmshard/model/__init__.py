"""Models, their weights and their files, on one device and without torch.distributed."""
