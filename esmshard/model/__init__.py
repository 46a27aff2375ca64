"""The modules for models, their weights and their files, on one device. They do not use torch.distributed."""
