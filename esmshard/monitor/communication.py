"""The time of FSDP's collectives, measured around the calls in every step at almost no cost.

FSDP allows replacing its all-gather and reduce-scatter. The replacements here are torch's own with a clock around them,
so results do not change. The all-reduce between copies of a model cannot be replaced: it runs between the allocation of
the reduce-scatter's output and a hook.
"""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

# The defaults have no public name; they are in the same module in torch 2.11 to 2.13. A copy of them would have to
# choose between `all_gather_into_tensor`, which 2.13 warns about, and `all_gather_single`, which 2.11 lacks.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

Mark = Any
"""A point in time: seconds of `perf_counter` on the CPU, a recorded event on a GPU."""


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the time that intervals cover together. Time that two intervals share counts once.

    >>> length([(3, 4), (0, 2), (1, 2.5)])
    3.5
    """
    total, covered = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


class CommunicationClock:
    """The times of the collectives of a step, recorded from `start` to `seconds`. Between steps nothing is recorded.

    On the CPU a collective blocks its caller, so its time is that of the call. On a GPU two events in the stream of the
    collective mark its beginning and end. The events are read when the step is over and the host has waited for the
    GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._running = False
        self._origin: Mark = 0.0
        self._intervals: list[tuple[Mark, Mark]] = []
        self._reduces: Mark = None

    def start(self) -> None:
        """Begin a step."""
        self._running, self._intervals, self._reduces = True, [], None
        self._origin = self.mark()

    def mark(self) -> Mark:
        """Return the current time; on a GPU, the time at which the current stream reaches this point."""
        if not self._running:
            return None
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, begin: Mark) -> None:
        """Record that the collective that began at this mark has ended."""
        if begin is not None and (end := self.mark()) is not None:
            self._intervals.append((begin, end))

    def reduces(self) -> None:
        """Mark the beginning of the sum of a group's gradients over ranks."""
        self._reduces = self.mark()

    def all_reduced(self, _: torch.Tensor) -> None:
        """Record the all-reduce over the copies of the model. This is FSDP's hook; the time includes the reduce-scatter
        again.
        """
        self.add(self._reduces)

    def seconds(self) -> float:
        """End the step. Return the seconds in which a collective was running, waiting for other ranks included."""
        self._running = False
        if not self._on_gpu:
            return length(self._intervals)
        since = self._origin.elapsed_time  # in milliseconds
        return length((since(begin), since(end)) for begin, end in self._intervals) / 1000


class _AllGather(DefaultAllGather):
    def __init__(self, clock: CommunicationClock) -> None:
        self._clock = clock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = self._clock.mark()
        work = super().__call__(*args, **kwargs)
        self._clock.add(begin)
        return work


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, clock: CommunicationClock) -> None:
        self._clock = clock

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # This is called for the input, then for the output. The second call is right before the reduce-scatter, or
        # before the all-reduce where each rank keeps a whole copy and no other function of this class is called.
        self._clock.reduces()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = self._clock.mark()
        work = super().__call__(*args, **kwargs)
        self._clock.add(begin)
        return work


def time_collectives(model: nn.Module, clock: CommunicationClock) -> None:
    """Measure the collectives of a sharded model. A model that is not sharded has no collectives.

    Args:
        model: the model after `shard`.
        clock: the clock of this rank's device.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_custom_all_gather(_AllGather(clock))
        module.set_custom_reduce_scatter(_ReduceScatter(clock))
        meshes = [p.device_mesh for p in module.parameters() if isinstance(p, DTensor)]
        if any("replicate" in (mesh.mesh_dim_names or ()) for mesh in meshes):
            # Only for several copies: with one copy the hook would run in another stream than the collective before it.
            module.set_all_reduce_hook(clock.all_reduced)
