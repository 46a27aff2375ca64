"""The errors that torch and Python raise when there is not enough memory."""

import torch

_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts in the messages of plain RuntimeErrors of the CPU's allocator, of CUDA, and of cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the machine has not enough memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(sign in said for sign in _SIGNS)
