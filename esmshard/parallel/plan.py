"""How many tokens fit: a memory estimate from the numbers of the model."""

import os

import torch

BYTES_FP32 = 4


def activation_bytes_per_token(n_layers: int, dim: int, checkpointing: bool, half: bool) -> int:
    """Estimate of what the trunk keeps of one token for the backward pass.

    A layer keeps about 21 vectors of width `dim`: inputs and outputs of both LayerNorms, q, k, v before and after the
    rotation, the attention output, both residual sums, and the feed-forward layer before and after gelu. With
    checkpointing only its input, and one layer at a time is computed again.
    """
    per_layer = 21 * dim * (2 if half else BYTES_FP32)
    if checkpointing:
        return n_layers * dim * BYTES_FP32 + per_layer
    return n_layers * per_layer


def state_bytes(n_parameters: int, world_size: int) -> int:
    """fp32 weights, gradients and the two AdamW moments, sharded evenly."""
    return 4 * BYTES_FP32 * n_parameters // world_size


def free_bytes(device: torch.device, local_processes: int) -> int:
    """Memory that one process may count on: the free memory of its GPU, or its share of the machine's free memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":  # a part of the machine's memory; Metal says how much it is meant to take
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if not hasattr(os, "sysconf"):  # Windows does not say; a share of what small machines have
        return 8 * 2**30 // local_processes
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") // local_processes


def tokens_that_fit(free: int, state: int, bytes_per_token: int, longest: int, share: int) -> int:
    """Largest micro-batch in tokens: what 60% of the free memory holds, at least the longest record, at most `share`.

    The rest is room for gathered layers, the allocator's gaps and an estimate that is no better than an estimate.
    """
    fitting = (int(0.6 * free) - state) // bytes_per_token
    return max(longest, min(share, fitting))
