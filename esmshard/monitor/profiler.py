"""The profile of some steps: a trace of every rank, and one table of the times.

The trace is torch.profiler's, for Perfetto or chrome://tracing. The table is computed from the trace, so each number
can be checked in its picture.
"""

import gzip
import json
import math
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from esmshard.errors import UsageError
from esmshard.parallel.process_group import World

WARM_UP = 2
"""Steps before the first recorded step. They contain the start of the profiler and of the allocator."""

_READING = "esmshard: data"

Kind = Literal["step", "compute", "communication", "data"]
_KINDS: tuple[Kind, ...] = ("compute", "communication", "data")
_ALONE: dict[Kind | None, str] = {"compute": "compute", "communication": "exposed", "data": "data", None: "other"}
"""The field of `Shares` to which time counts, by the first of _KINDS that is running."""

Interval = tuple[Kind, float, float]
"""The kind of activity, its beginning and its end."""


def reading() -> AbstractContextManager[Any]:
    """Mark the time in which the main thread waits for data. Without a trace this takes microseconds."""
    return record_function(_READING)


@dataclass(frozen=True)
class Shares:
    """Seconds of a step. All fields but `communication` add up to the whole step."""

    step: float
    compute: float
    communication: float
    exposed: float
    """Communication without computing at the same time. A faster network, or more overlap, can save at most this time.
    """
    data: float
    """Waiting for data without computing or communicating."""
    other: float
    """The remaining time: Python between two operations, or a GPU that waits for its host."""


def shares(intervals: Iterable[Interval]) -> Shares:
    """Divide steps into compute, communication, data and the rest.

    In this example each of two steps takes 10 s: 6 s of computation; 4 s of communication, 2 s of it during
    computation; 3 s of data, 1 s of it during communication:

    >>> shares([("step", 0, 10), ("compute", 0, 6), ("communication", 4, 8), ("data", 7, 10),
    ...         ("step", 10, 20), ("compute", 10, 16), ("communication", 14, 18), ("data", 17, 20)])
    Shares(step=10.0, compute=6.0, communication=4.0, exposed=2.0, data=2.0, other=0.0)
    """
    edges = [edge for kind, start, end in intervals for edge in ((start, 1, kind), (end, -1, kind))]
    count = sum(kind == "step" and change == 1 for _, change, kind in edges)
    running: Counter[Kind] = Counter()
    seconds = dict.fromkeys(("step", "compute", "communication", "exposed", "data", "other"), 0.0)
    before = 0.0
    for time, change, kind in sorted(edges):
        if running["step"]:
            first = next((name for name in _KINDS if running[name]), None)
            names = {"step", _ALONE[first]} | ({"communication"} if running["communication"] else set())
            for name in names:
                seconds[name] += (time - before) / count
        running[kind] += change
        before = time
    return Shares(**seconds)


def intervals_of(trace: Mapping[str, Any]) -> list[Interval]:
    """Return the intervals of a rank in a trace, in seconds.

    On a GPU these are its kernels; NCCL's kernels are communication. On the CPU these are operators of the thread that
    takes the steps. Communication is gloo's work in threads of its own, for which the caller waits. Operators in the
    loader are no computation.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    kinds = [_kind(event, on_gpu) for event in events]
    stepping = {event["tid"] for event, kind in zip(events, kinds, strict=True) if kind == "step"}
    found = [
        (kind, event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event, kind in zip(events, kinds, strict=True)
        if kind is not None and (on_gpu or kind != "compute" or event["tid"] in stepping)
    ]
    if on_gpu:
        return found
    reads = sorted((start, end) for kind, start, end in found if kind == "data")

    def is_read(time: float) -> bool:
        k = bisect_right(reads, (time, math.inf))
        return k > 0 and time < reads[k - 1][1]

    return [one for one in found if one[0] != "compute" or not is_read(one[1])]


def _kind(event: Mapping[str, Any], on_gpu: bool) -> Kind | None:
    category, name = event.get("cat"), event["name"]
    if category == "user_annotation" and (name == _READING or name.startswith("ProfilerStep#")):
        return "data" if name == _READING else "step"
    if on_gpu:
        if category == "kernel" and "nccl" in name.lower():
            return "communication"
        return "compute" if category in ("kernel", "gpu_memcpy", "gpu_memset") else None
    if name.startswith(("c10d::", "gloo:")):
        return "communication"
    # Nodes of the backward pass have no namespace of their own and enclose hooks, collectives included.
    return "compute" if category == "cpu_op" and "::" in name and "autograd::" not in name else None


def table(ranks: list[Shares], steps: int) -> str:
    """Format the table with a line for each rank."""
    columns = ("step", "compute", "communication", "exposed", "data", "other")
    lines = [f"seconds a step over {steps} steps", "rank" + "".join(f"{name:>15}" for name in columns)]
    lines += [
        f"{rank:>4}" + "".join(f"{getattr(own, name):>15.4g}" for name in columns) for rank, own in enumerate(ranks)
    ]
    return "\n".join(lines)


class Profile:
    """The recorder of some steps, from the third step on. Use it as a context around the loop; `step_done` ends each
    step.

    Args:
        world: all ranks.
        steps: the number of steps to record; 0 records nothing.
        left: the number of steps that the run will take.
        directory: the directory for `rank_R.json.gz`.

    Raises:
        UsageError: if `steps` is more than the run has.
    """

    def __init__(self, world: World, steps: int, left: int, directory: Path) -> None:
        if steps and steps + WARM_UP > left:
            raise UsageError(
                f"--profile {steps} needs {steps + WARM_UP} steps, the first {WARM_UP} to warm up, and {left} are "
                "left; profile fewer, or raise train.steps"
            )
        self._world, self._steps, self._done = world, steps, 0
        self._path = directory / f"rank_{world.rank}.json.gz"
        self._profiler: profile | None = None

    def __enter__(self) -> "Profile":
        if self._steps:
            # otherwise it prints lines of its own when it starts and stops
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            activities = [ProfilerActivity.CPU]
            if self._world.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(
                activities=activities, schedule=schedule(wait=0, warmup=WARM_UP, active=self._steps, repeat=1)
            )
            self._profiler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def step_done(self) -> str | None:
        """End a step. After the last recorded step, write the trace and return the table on every rank."""
        if self._profiler is None:
            return None
        self._done += 1
        if self._done < self._steps + WARM_UP:
            self._profiler.step()
            return None
        # `stop` is called and not `step`, because a step would open one more `ProfilerStep#`.
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        self._profiler = None
        with gzip.open(self._path, "rt", encoding="utf-8") as file:
            own = shares(intervals_of(json.load(file)))
        return table(self._world.gather(own), self._steps)
