"""How long FSDP's collectives take, timed around the calls, in every step and for next to nothing.

FSDP lets its all-gather and reduce-scatter be replaced. The replacements here are torch's own with a clock around them,
so the numbers that travel stay the same. The all-reduce between copies of a model has no such place: it lies between
the allocation of the reduce-scatter's output and a hook.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

# The defaults have no public name; they are in the same place in torch 2.11 to 2.13. Written anew they would have to
# choose between `all_gather_into_tensor`, which 2.13 warns about, and `all_gather_single`, which 2.11 lacks.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

Mark = Any
"""A point in time: seconds of `perf_counter` on the CPU, a recorded event on a GPU."""


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same stretches of time, in order and without overlaps.

    >>> merged([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    result: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """How much time they cover together; what two of them share counts once.

    >>> length([(3, 4), (0, 2), (1, 2.5)])
    3.5
    """
    return sum(end - start for start, end in merged(intervals))


class CommunicationClock:
    """Collects when a collective was under way, from `start` to `seconds`; between steps it does not run.

    On the CPU a collective blocks its caller, so its time is that of the call. On a GPU two events in the stream that
    it runs in say when it began and ended; they are read when the step is over and the host has waited for it anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._running = False
        self._origin: Mark = 0.0
        self._intervals: list[tuple[Mark, Mark]] = []
        self._reduces: Mark = None

    def start(self) -> None:
        """A step begins."""
        self._running, self._intervals, self._reduces = True, [], None
        self._origin = self.mark()

    def mark(self) -> Mark:
        """Now; on a GPU, when the current stream gets here."""
        if not self._running:
            return None
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, begin: Mark) -> None:
        """What began at this mark has ended."""
        if begin is not None and (end := self.mark()) is not None:
            self._intervals.append((begin, end))

    def reduces(self) -> None:
        """From here on the gradients of a group are added up over ranks."""
        self._reduces = self.mark()

    def all_reduced(self, _: torch.Tensor) -> None:
        """FSDP's hook when they are added up over the copies of the model, too. It covers the reduce-scatter again."""
        self.add(self._reduces)

    def seconds(self) -> float:
        """The step is over: in how much of its time some collective was under way, waiting for other ranks included."""
        self._running = False
        if not self._on_gpu:
            return length(self._intervals)
        since = self._origin.elapsed_time  # milliseconds
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
        # Called for the input, then for the output; the second time is right before the reduce-scatter, or before the
        # all-reduce where each rank keeps a whole copy and nothing else of this is called.
        self._clock.reduces()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = self._clock.mark()
        work = super().__call__(*args, **kwargs)
        self._clock.add(begin)
        return work


def time_collectives(model: nn.Module, clock: CommunicationClock) -> None:
    """Let the collectives of a sharded model run by the clock; of one that is not sharded there are none.

    Args:
        model: after `shard`.
        clock: of this rank's device.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_custom_all_gather(_AllGather(clock))
        module.set_custom_reduce_scatter(_ReduceScatter(clock))
        if any(isinstance(p, DTensor) and p.device_mesh.ndim > 1 for p in module.parameters()):
            # Only for copies: with one copy the hook would run in another stream than what it follows.
            module.set_all_reduce_hook(clock.all_reduced)
