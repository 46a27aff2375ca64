"""The network for one device, without recipes and without torch.distributed."""
