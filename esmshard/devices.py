"""Functions that choose a device, compute packs on several CPU cores, and keep convolutions on a GPU exact."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from esmshard.errors import UsageError

S = TypeVar("S")
T = TypeVar("T")

DeviceName = str | torch.device | None
"""The name of a device, see `chosen_device`; None for the default."""

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words in the `RuntimeError` messages of the CPU's allocator, CUDA and cuBLAS when memory is exhausted."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the machine has not enough memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def chosen_device(name: DeviceName = None) -> torch.device:
    """Return the device with this name; by default the first GPU (CUDA, else Apple's), or the CPU without a GPU.

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
            f"device {name}: this machine has {names}, as torch {torch.__version__} sees it; pass one that it has, "
            "or run `esmshard doctor` to see why a GPU is missing"
        )
    return torch.device("cpu") if device.type == "cpu" else device


def packs_at_once(device: torch.device) -> int:
    """Return the number of packs to compute in parallel: one for each thread on the CPU, one on a GPU."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def side_by_side(
    function: Callable[[S], T], packs: Sequence[S], device: torch.device, *, threads: bool = True
) -> list[T]:
    """Call `function` on each pack without gradients, and return the results in the order of `packs`.

    On the CPU each core computes a different pack. This is 1.15 times as fast as all cores on one pack at a time, where
    the cores wait for each other at the end of each operation. With fewer than two packs for each core, or with
    `threads=False`, all cores compute one pack at a time. A model that several processes compute together
    (`Trunk.shared_on`) allows only one call at a time, and needs `threads=False`.
    """
    workers = packs_at_once(device) if threads else 1

    def alone(pack: S) -> T:
        with torch.no_grad():  # no_grad has an effect only in its own thread
            return function(pack)

    if workers == 1 or len(packs) < 2 * workers:
        return [alone(pack) for pack in packs]
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        # The last packs are the longest. The pool computes them first, so at the end no core waits for a long pack.
        return list(pool.map(alone, packs[::-1]))[::-1]


def halving(function: Callable[[Sequence[S]], Sequence[T]], pack: Sequence[S], device: torch.device) -> list[T | None]:
    """Return the results of `function` for the members of a pack. If a pack needs too much memory, compute each half
    separately, down to single members. The result is None for a member that alone needs too much memory.
    """
    try:
        return list(function(pack))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # These lines are outside the handler, because inside it the traceback would keep the tensors in memory.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if len(pack) == 1:
        return [None]
    half = len(pack) // 2
    return halving(function, pack[:half], device) + halving(function, pack[half:], device)


@contextmanager
def exact_convolutions(device: torch.device) -> Iterator[None]:
    """Keep cuDNN from rounding the inputs of fp32 convolutions during a `with` block.

    On NVIDIA GPUs from Ampere on, cuDNN by default rounds the inputs of fp32 convolutions to TF32, with 10 bits of
    mantissa. Contact maps would then differ by 1e-3 between a GPU and a CPU. Exact convolutions cost little time,
    because the heads have few. Convolutions in bf16 and fp16 do not change. The setting changes for the whole process,
    and only if `device`, the device of the weights, is a CUDA GPU.
    """
    if device.type != "cuda":
        yield
        return
    # torch has an old and a new name for this setting. After the first use of the new name, every read of the old name
    # raises an error, in other libraries too. So only a process that has already used the new name uses it here.
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
