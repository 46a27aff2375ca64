"""The measurements of every rank in a step, and the report on them.

A step has one small collective for losses and norms. `Watch.numbers` are part of this collective, so watching needs no
collective and no wait of its own. The report is a mapping for metrics.jsonl (docs/watching.md) and messages to print.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn

from esmshard.monitor.communication import CommunicationClock, time_collectives
from esmshard.monitor.profiler import reading
from esmshard.monitor.start_up_checks import FULL, slow_ranks
from esmshard.monitor.stuck_ranks import Control
from esmshard.parallel.process_group import World
from esmshard.planner.machines import data_sheet

T = TypeVar("T")

WINDOW = 20
"""The number of steps over which a rank must be slow for a message."""

LISTED = 64
"""The most ranks whose values are written one by one."""


@dataclass(frozen=True)
class Numbers:
    """The measurements of one rank in a step. Values that a device does not report are NaN."""

    residues: float
    ideal_s: float
    """The seconds that the device would need at its peak for the FLOPs of the model."""
    gradients_s: float
    """The seconds from the beginning of the step until all gradients exist. After that the rank waits for the others.
    """
    data_wait_s: float
    communication_s: float
    peak_memory_bytes: float
    """The most bytes allocated on the GPU so far; on the CPU the most memory of the process."""
    reserved_memory_bytes: float
    """The most bytes of the GPU that the allocator has held."""
    memory_share: float
    """The same as a share of the device's memory."""
    allocation_retries: float
    """How often so far the allocator had to release all its free memory before it could serve a request."""

    @property
    def busy_s(self) -> float:
        """Return the time of the rank's own work: until all gradients exist, without collectives. Waiting for data
        counts.
        """
        return max(0.0, self.gradients_s - self.communication_s)


@dataclass(frozen=True)
class StepReport:
    """The report on a step of all ranks."""

    line: dict[str, Any]
    """The line for metrics.jsonl."""
    warnings: list[str]
    """The messages that are new in this step."""


class Watch:
    """The measurement of this rank's steps. Every rank creates one, after the model is divided over the ranks.

    Args:
        model: the model after `shard`. Its collectives are timed from now on.
        world: all ranks.
        control: has the names of ranks, and is notified when a step is done.
        peak: FLOP/s of this device at the precision of the run; None if unknown.
    """

    def __init__(self, model: nn.Module, world: World, control: Control, peak: float | None = None) -> None:
        self._world, self._control, self._peak = world, control, peak
        self._clock = CommunicationClock(world.device)
        time_collectives(model, self._clock)
        self._began = self._data_wait = self._flops = 0.0
        self._residues = 0
        self._recent: deque[list[Numbers]] = deque(maxlen=WINDOW)
        self._warned: set[tuple[str, int]] = set()

    def begin_step(self, step: int, residues: int, flops: float) -> None:
        """Begin a step, right before its first batch is requested. This may wait for the other ranks before the clock
        starts.

        Args:
            step: the step as users count them, from 1 on.
            residues: residues of this rank's share, without dummy micro-batches.
            flops: the FLOPs of the model for this share, forward and backward, without recomputation.
        """
        self._control.begin_step(step)
        self._residues, self._flops, self._data_wait = residues, flops, 0.0
        self._clock.start()
        self._began = time.perf_counter()

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the same batches. The time until each batch is ready counts as waiting for data."""
        waiting = iter(batches)
        while True:
            self._control.note("waiting for data")
            begin = time.perf_counter()
            with reading():
                try:
                    batch = next(waiting)
                except StopIteration:
                    return
                finally:
                    self._data_wait += time.perf_counter() - begin
                    self._control.note("computing")
            yield batch

    def wait_for_device(self) -> None:
        """Wait for the device before a step's numbers are read from it. `Stuck` if they do not come in time."""
        self._control.wait_for_device()

    def numbers(self) -> list[float]:
        """Return this rank's part of the step's collective. All gradients exist, and the host has waited for them."""
        seconds = time.perf_counter() - self._began
        own = Numbers(
            self._residues,
            math.nan if self._peak is None else self._flops / self._peak,
            seconds,
            self._data_wait,
            self._clock.seconds(),
            *_memory(self._world.device),
        )
        return list(vars(own).values())

    def report(self, rows: Sequence[Sequence[float]]) -> StepReport:
        """Turn the numbers of all ranks into a line and messages. Every rank calls this when the step is done.

        Model FLOPs utilisation is that of Chowdhery et al. (2022, PaLM, appendix B): the FLOPs that the model needs,
        divided by the FLOPs that the devices could do in the time of the step.

        Args:
            rows: the `numbers` of each rank, the same on all ranks.
        """
        ranks = [Numbers(*row) for row in rows]
        self._control.end_step(max(rank.gradients_s for rank in ranks))
        self._recent.append(ranks)
        # A rank that began late has a shorter step than the ranks that waited for it in a collective. The longest step
        # counts, so that no part of a step is longer than the whole.
        seconds = max(time.perf_counter() - self._began, *(rank.gradients_s for rank in ranks))
        line = {
            "step_s": _number(seconds),
            "residues_per_s": _number(sum(rank.residues for rank in ranks) / seconds),
            "mfu": _number(sum(rank.ideal_s for rank in ranks) / len(ranks) / seconds),
            "data_wait_s": _number(max(rank.data_wait_s for rank in ranks)),
            "communication_share": _number(sum(rank.communication_s for rank in ranks) / len(ranks) / seconds),
            "peak_memory_bytes": _count(max(rank.peak_memory_bytes for rank in ranks)),
            "reserved_memory_bytes": _count(max(rank.reserved_memory_bytes for rank in ranks)),
            "allocation_retries": _count(sum(rank.allocation_retries for rank in ranks)),
            "ranks": {
                "residues_per_s": spread([_number(rank.residues / seconds) for rank in ranks]),
                "mfu": spread([_number(rank.ideal_s / seconds) for rank in ranks]),
                "busy_s": spread([_number(rank.busy_s) for rank in ranks]),
                "data_wait_s": spread([_number(rank.data_wait_s) for rank in ranks]),
                "communication_share": spread([_number(rank.communication_s / seconds) for rank in ranks]),
                "peak_memory_bytes": spread([_count(rank.peak_memory_bytes) for rank in ranks]),
                "reserved_memory_bytes": spread([_count(rank.reserved_memory_bytes) for rank in ranks]),
                "allocation_retries": spread([_count(rank.allocation_retries) for rank in ranks]),
            },
        }
        return StepReport(line, [*self._slow(), *self._full(ranks)])

    def _slow(self) -> Iterator[str]:
        """Yield messages on ranks that became slow. A rank that was not slow for a whole window may be named again."""
        if len(self._recent) < WINDOW:
            return
        # The median shows a rank's typical step: one delay, such as a first use of the disk, makes no rank slow.
        busy = [median(step[rank].busy_s for step in self._recent) for rank in range(self._world.size)]
        seconds = [median(step[rank].gradients_s for step in self._recent) for rank in range(self._world.size)]
        slow = slow_ranks(busy, seconds)
        for rank in slow:
            if self._first_time("slow", rank):
                others = median([*busy[:rank], *busy[rank + 1 :]])
                data = median(step[rank].data_wait_s for step in self._recent)
                yield (
                    f"{self._name(rank)} is slow, and all wait for it: a step takes {busy[rank]:.3g} s of its own, "
                    f"{data:.3g} of them for data, against {others:.3g} s on the others; look at that machine's "
                    "clocks, disk and other programs"
                )
        self._warned -= {("slow", rank) for rank in range(self._world.size) if rank not in slow}

    def _full(self, ranks: Sequence[Numbers]) -> Iterator[str]:
        """Yield messages on ranks whose memory is almost full, once for each rank, since the numbers never decrease."""
        fix = "lower batch.tokens_per_rank, or set parallel.activation_checkpointing"
        for rank, own in enumerate(ranks):
            if own.allocation_retries > 0 and self._first_time("retries", rank):
                yield (
                    f"{self._name(rank)} ran out of memory and had to give back and ask again, which is slow "
                    f"({own.allocation_retries:.0f} times so far); {fix}"
                )
            elif own.memory_share > FULL and self._first_time("full", rank):
                yield f"{self._name(rank)} is full: {own.memory_share:.0%} of its device's memory is in use; {fix}"

    def _first_time(self, what: str, rank: int) -> bool:
        new = (what, rank) not in self._warned
        self._warned.add((what, rank))
        return new

    def _name(self, rank: int) -> str:
        return f"rank {rank} (host {self._control.host(rank)})"


def spread(values: Sequence[float | None]) -> list[float | None] | dict[str, float | None]:
    """Return one value for each rank as a list; for many ranks the extremes, their ranks, and the median.

    >>> spread([3, 1, 2])
    [3, 1, 2]
    >>> spread([5, *range(100)])
    {'min': 0, 'min_rank': 1, 'median': 49, 'max': 99, 'max_rank': 100}
    """
    known = [value for value in values if value is not None]
    if len(values) <= LISTED:
        return list(values)
    if not known:
        return dict.fromkeys(("min", "min_rank", "median", "max", "max_rank"))
    least, most = min(known), max(known)
    return {
        "min": least,
        "min_rank": values.index(least),
        "median": median(known),
        "max": most,
        "max_rank": values.index(most),
    }


def _number(value: float) -> float | None:
    """Round to four digits, since there is a number for every rank and step. JSON has no NaN."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _count(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None


def _memory(device: torch.device) -> tuple[float, float, float, float]:
    """Return the last four fields of `Numbers`."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        reserved = stats["reserved_bytes.all.peak"]
        total = torch.cuda.get_device_properties(device).total_memory
        return stats["allocated_bytes.all.peak"], reserved, reserved / total, stats["num_alloc_retries"]
    if sys.platform == "win32":  # Windows has no such call
        return math.nan, math.nan, math.nan, 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024, math.nan, math.nan, 0


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the FLOP/s of this device's data sheet at a precision; None for CPUs and unknown GPUs."""
    if device.type != "cuda":
        return None
    gpu = data_sheet(torch.cuda.get_device_name(device))
    if gpu is None:
        return None
    return gpu.fp32_flops if precision == "fp32" else gpu.half_flops
