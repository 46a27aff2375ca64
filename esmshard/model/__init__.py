"""Models, their weights and their files, on one device. This folder does not use torch.distributed."""
