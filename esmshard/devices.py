"""Choose a device, compute batches on several CPU cores, and keep convolutions on a GPU exact."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from esmshard.errors import UsageError

S = TypeVar("S")
T = TypeVar("T")

DeviceName = str | torch.device | None
"""The type of a device argument: a device name, a torch device, or None for the default device."""

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts in the `RuntimeError` messages of torch, CUDA and cuBLAS when memory is exhausted."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the device or the machine has not enough memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def chosen_device(name: DeviceName = None) -> torch.device:
    """Return the device `name`; by default the first CUDA GPU, else Apple's GPU, else the CPU.

    Args:
        name: `cpu`, `cuda` (the first GPU; with several processes, one GPU for each process), `cuda:N` or `mps`.

    Raises:
        UsageError: if the name is unknown, or this machine does not have the device.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_apple = torch.backends.mps.is_available()
    if name is None:
        return torch.device("cuda" if gpus else "mps" if on_apple else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"device {name}: cpu, cuda, cuda:N (with N from 0) or mps is expected")
    is_available = {"cpu": True, "cuda": (device.index or 0) < gpus, "mps": on_apple}
    if not is_available[device.type]:
        cuda_names = ["cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"] if gpus else []
        names = " and ".join(["cpu", *cuda_names, *(["mps"] if on_apple else [])])
        raise UsageError(
            f"device {name}: this machine has {names}, as torch {torch.__version__} sees it; pass one of these "
            "names, or run `esmshard doctor` to see why a GPU is missing"
        )
    return torch.device("cpu") if device.type == "cpu" else device


def packs_at_once(device: torch.device) -> int:
    """Return how many batches of sequences to compute in parallel: one for each thread on the CPU, one on a GPU."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def side_by_side(
    function: Callable[[S], T], packs: Sequence[S], device: torch.device, *, threads: bool = True
) -> list[T]:
    """Call `function` without gradients on each batch in `packs`. Return the results in the order of `packs`.

    On the CPU, each core computes a different batch. This is 1.15 times as fast as all cores together on one batch.
    With fewer than two batches for each core, or with `threads=False`, all cores compute one batch at a time. Pass
    `threads=False` if calls must not overlap, because several processes compute the model together (`Trunk.shared_on`).
    """
    workers = packs_at_once(device) if threads else 1

    def alone(pack: S) -> T:
        with torch.no_grad():  # `no_grad` has an effect only in the thread that calls it
            return function(pack)

    if workers == 1 or len(packs) < 2 * workers:
        return [alone(pack) for pack in packs]
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        # The last batches take longest. They are computed first, so at the end no core waits for another core.
        return list(pool.map(alone, packs[::-1]))[::-1]


def halving(function: Callable[[Sequence[S]], Sequence[T]], pack: Sequence[S], device: torch.device) -> list[T | None]:
    """Return one result of `function` for each member of the batch `pack`. If a batch needs too much memory, compute
    each half separately. A single member that needs too much memory gets None.
    """
    try:
        return list(function(pack))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # These lines are after the `except` block, because inside the block the traceback keeps the tensors in memory.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if len(pack) == 1:
        return [None]
    half = len(pack) // 2
    return halving(function, pack[:half], device) + halving(function, pack[half:], device)


@contextmanager
def exact_convolutions(device: torch.device) -> Iterator[None]:
    """Keep cuDNN from rounding the inputs of fp32 convolutions to TF32 (10 bits of mantissa) during a `with` block.

    Newer NVIDIA GPUs (from Ampere on) round by default, and contact maps then differ by 1e-3 between a GPU and a CPU.
    The setting is valid for the whole process, and changes only if `device`, the device of the weights, is a CUDA GPU.
    """
    if device.type != "cuda":
        yield
        return
    # torch has an old and a new name for this setting. After a use of the new name, every read of the old name raises
    # an error, also in other libraries. So this function uses the new name only if the old name fails.
    settings: Any = torch.backends.cudnn
    name, exact = "allow_tf32", cast(Any, False)
    try:
        before = settings.allow_tf32
    except RuntimeError:
        settings, name, exact = settings.conv, "fp32_precision", "ieee"
        before = settings.fp32_precision
    setattr(settings, name, exact)
    try:
        yield
    finally:
        setattr(settings, name, before)
