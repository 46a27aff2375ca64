"""The profile of some steps by torch.profiler: a trace of every rank, and the table of the operations of the first."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
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


@contextmanager
def profiled(world: World, steps: int, left: int, directory: Path) -> Iterator[Callable[[], str | None]]:
    """Record some steps, from the third step on, as `rank_R.json.gz` in a directory. A run that ends before the last of
    them writes none.

    Yields a function to call at the end of each step. After the last recorded step it returns the table of this rank's
    operations, else None.

    Args:
        world: all ranks.
        steps: the number of steps to record; 0 records nothing.
        left: the number of steps that the run will take.
        directory: the directory for the traces.

    Raises:
        UsageError: if `steps` is more than the run has.
    """
    if not steps:
        yield lambda: None
        return
    if steps + WARM_UP > left:
        raise UsageError(
            f"--profile {steps} needs {steps + WARM_UP} steps, the first {WARM_UP} to warm up, and {left} are "
            "left; profile fewer, or raise train.steps"
        )
    on_gpu, tables = world.device.type == "cuda", []

    def write(recorded: profile) -> None:
        if recorded.step_num < WARM_UP + steps:  # an error or a request to stop ends the recording, and is raised next
            return
        directory.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(directory / f"rank_{world.rank}.json.gz"))
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        tables.append(str(recorded.key_averages().table(sort_by=order, row_limit=LISTED)))

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it prints lines of its own when it starts and stops
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    plan = schedule(wait=0, warmup=WARM_UP, active=steps, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write) as recorder:

        def step_done() -> str | None:
            recorder.step()
            return tables.pop() if tables else None

        yield step_done
