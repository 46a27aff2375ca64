"""The processes that claim and compute parts, alone or sharded over several GPUs."""
