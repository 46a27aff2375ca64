"""The profile of some steps by torch.profiler: a trace of every rank, and the table of the operations of the first."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from esmshard.errors import UsageError
from esmshard.parallel.process_group import World

WARM_UP = 2
"""Steps before the first recorded step. They contain the start of the profiler and of the allocator."""

LISTED = 15
"""The number of operations in the table."""


def reading() -> AbstractContextManager[Any]:
    """Mark the time in which the main thread waits for data. Without a trace this takes microseconds."""
    return record_function("esmshard: data")


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
        self._steps, self._done = steps, 0
        self._path = directory / f"rank_{world.rank}.json.gz"
        self._on_gpu = world.device.type == "cuda"
        self._profiler: profile | None = None

    def __enter__(self) -> "Profile":
        if self._steps:
            # otherwise it prints lines of its own when it starts and stops
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
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
        """End a step. After the last recorded step, write the trace and return the table of this rank's operations."""
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
        order = "self_cuda_time_total" if self._on_gpu else "self_cpu_time_total"
        table = str(self._profiler.key_averages().table(sort_by=order, row_limit=LISTED))
        self._profiler = None
        return table
