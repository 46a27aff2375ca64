"""The device of a computation: what a user names, what this machine has, and what is taken if nothing is named."""

import torch

from esmshard.errors import UsageError

DeviceName = str | torch.device | None
"""A device as a user names it, see `chosen_device`; None for the default."""

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts in the messages of plain RuntimeErrors of the CPU's allocator, of CUDA, and of cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the machine has not enough memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def chosen_device(name: DeviceName = None) -> torch.device:
    """Return the device of a name; by default the first GPU (CUDA, else Apple's), else the CPU.

    Args:
        name: `cpu`, `cuda` (the first GPU, or one for each process), `cuda:N` or `mps`.

    Raises:
        UsageError: if there is no such name, or this machine has no such device.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_apple = torch.backends.mps.is_available()
    if name is None:
        return torch.device("cuda" if gpus else "mps" if on_apple else "cpu")
    try:
        found = torch.device(name)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"device {name}: cpu, cuda, cuda:N (with N from 0) or mps is expected")
    is_there = {"cpu": True, "cuda": (found.index or 0) < gpus, "mps": on_apple}
    if not is_there[found.type]:
        of_cuda = ["cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"] if gpus else []
        names = " and ".join(["cpu", *of_cuda, *(["mps"] if on_apple else [])])
        raise UsageError(
            f"device {name}: this machine has {names}, as torch {torch.__version__} sees it; pass one that it has, "
            "or run `esmshard doctor` to see why a GPU is missing"
        )
    return torch.device("cpu") if found.type == "cpu" else found
