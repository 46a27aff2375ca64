"""The choice of a device, the computation of packs on several cores, and exact convolutions on a GPU."""

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
"""Parts of the messages of plain RuntimeErrors that the CPU's allocator, CUDA and cuBLAS raise."""


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
    """Return the number of packs to compute in parallel: on the CPU one for each thread, else one."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def side_by_side(
    function: Callable[[S], T], packs: Sequence[S], device: torch.device, *, threads: bool = True
) -> list[T]:
    """Return `function` of each pack, in order, computed without gradients.

    On the CPU each core computes another pack. This is 1.15 times as fast as one pack after the other with all cores,
    because the cores would wait for each other at the end of each operation. With too few packs, or without `threads`,
    all cores compute one pack after the other. A model that several processes compute together (`Trunk.shared_on`)
    takes one call at a time, and needs `threads=False`.
    """
    workers = packs_at_once(device) if threads else 1

    def alone(pack: S) -> T:
        with torch.no_grad():  # no_grad holds for one thread only
            return function(pack)

    if workers == 1 or len(packs) < 2 * workers:
        return [alone(pack) for pack in packs]
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        # The last packs are the longest. They come first, so that at the end no core waits for a long pack.
        return list(pool.map(alone, packs[::-1]))[::-1]


def halving(function: Callable[[Sequence[S]], Sequence[T]], pack: Sequence[S], device: torch.device) -> list[T | None]:
    """Return the results of `function` for the members of a pack. If memory does not suffice, the pack is halved, again
    and again. The result of a member that does not fit alone is None.
    """
    try:
        return list(function(pack))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # The traceback of the handler keeps the tensors alive, so these lines are outside the handler.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if len(pack) == 1:
        return [None]
    half = len(pack) // 2
    return halving(function, pack[:half], device) + halving(function, pack[half:], device)


@contextmanager
def exact_convolutions(device: torch.device) -> Iterator[None]:
    """Keep cuDNN from rounding the inputs of fp32 convolutions during a `with` block.

    From Ampere on, cuDNN uses TF32 by default, with 10 bits of mantissa, while torch computes matrix products of fp32
    numbers in fp32. The contact map of a model would differ by 1e-3 between a GPU and a CPU. The heads have few
    convolutions, so fp32 costs little; convolutions in bf16 and fp16 do not change. The setting holds for the whole
    process, and is changed only if `device`, the device of the weights, is a GPU of CUDA.
    """
    if device.type != "cuda":
        yield
        return
    # torch has an old and a new name for this setting. Once the new name has been used, reading the old name raises an
    # error for every library in the process. So the old name is used, unless the user has already used the new name.
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
