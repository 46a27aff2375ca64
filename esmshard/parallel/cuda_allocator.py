"""The settings of torch's allocator for the memory of a GPU during a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The environment variables with which a user configures the allocator."""
_PROBE = 32 << 20
"""The bytes of the test whether the driver supports this: a large block that no cached block can serve."""


@contextmanager
def expandable_segments(device: torch.device) -> Iterator[None]:
    """Let the allocator's segments grow within a `with` block, unless the user has configured the allocator.

    The sizes of micro-batches differ by a few tokens. By default each tensor has a segment of its own size. The tensors
    of a slightly larger micro-batch then fit into no free segment, and torch requests new memory. A run that plans to
    fill 90% of the GPU then fills all of it, must release all free segments and request them again, and may run out of
    memory although half of its memory is free. A segment that grows has no such gaps.

    Where the driver has no virtual memory management, as on some virtual GPUs, nothing is changed.
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
    # The deprecated `torch.cuda.memory._set_allocator_settings` calls this; the environment variables are read too
    # early.
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{on}")
