"""What a process and the launcher that started it know of each other. Starts without torch."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LAUNCHER = "ESMSHARD_LAUNCHER"
"""Environment variable: process id of our own launcher, in the processes that it started."""
LAUNCH = "ESMSHARD_LAUNCH"
"""Environment variable: what all starts by one call of our launcher have in common, and no others."""
SHARED_CORES = "ESMSHARD_SHARED_CORES"
"""Environment variable: the launcher has divided the cores among the processes, and not the user."""

CRASHED = 70
"""Exit code of a process that ends in a traceback (EX_SOFTWARE): an error of ours, or of a library, and no mistake of
the user's. The run may go well if it is started again."""

FIRST_LEAVES = 10.0
"""Seconds in which rank 0 comes to a mistake that another rank has seen before it."""


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the length of a `with` block: of this process, and of those that it starts there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def attempt() -> int:
    """How often the launcher, ours or torchrun, has started this run again; 0 the first time."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def restarts_allowed() -> int:
    """How often torchrun may do so."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def under_torchrun() -> bool:
    """Whether torchrun (or `accelerate launch`, which calls it) started this process. Its own exit code is 0 or 1."""
    return "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER not in os.environ


def on_several_machines_of_torchrun() -> bool:
    """Whether torchrun started this process, and processes of the same run on other machines."""
    return under_torchrun() and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


def follow_launcher() -> None:
    """Have the kernel send SIGTERM when our own launcher is gone, even by kill -9: nobody else would. Linux only."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(launcher):  # it was gone before the line above
        os.kill(os.getpid(), signal.SIGTERM)


def wait_for_first(code: int) -> None:
    """Wait until the launcher ends this process, which then leaves with `code`; at most `FIRST_LEAVES` seconds.

    A wrong recipe is wrong on every rank, and rank 0 says so. srun, mpirun and torchrun end the other ranks as soon as
    one has failed, so it has to be the first one. Our own launcher waits for all of them.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))
    time.sleep(FIRST_LEAVES)
