"""What torch and Python raise when memory does not suffice."""

import torch

_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What the messages of plain RuntimeErrors say: of the CPU's allocator, of CUDA itself, and of cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the device or of the machine did not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(sign in said for sign in _SIGNS)
