"""How torch's allocator takes the memory of a GPU during a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with which a user configures the allocator."""
_PROBE = 32 << 20
"""Bytes that are asked for to see whether the driver takes part: a large block, which no cached one may serve."""


@contextmanager
def expandable_segments(device: torch.device) -> Iterator[None]:
    """Let the allocator's segments grow for the length of a `with` block, unless the user has configured it.

    Micro-batches differ by a few tokens. By default each tensor has a segment of its own size, so the tensors of a
    micro-batch that is a little larger than all before it fit into no place that those have left: torch asks the GPU
    for as much again. A run that plans to fill 90% of it then fills all of it, has to give everything back and ask
    again, and may run out of memory although half of what it holds is free. One segment that grows has no such gaps.

    Where the driver has no virtual memory management, as some virtual GPUs, all stays as it was.
    """
    if device.type != "cuda" or any(name in os.environ for name in _VARIABLES):
        yield
        return
    torch.cuda.empty_cache()
    _switch(True)
    try:
        torch.empty(_PROBE, dtype=torch.uint8, device=device)
    except RuntimeError:
        _switch(False)
    try:
        yield
    finally:
        _switch(False)


def _switch(on: bool) -> None:
    # What the deprecated `torch.cuda.memory._set_allocator_settings` calls; the environment is read too early.
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{on}")
