"""Facts that a launcher and its processes exchange by environment variables and exit codes. No torch."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LAUNCHER = "ESMSHARD_LAUNCHER"
"""The environment variable with the process id of esmshard's own launcher, in the processes that it started."""
LAUNCH = "ESMSHARD_LAUNCH"
"""The environment variable with a random name of one call of esmshard's own launcher. Restarts keep this name."""

TRIAL = "ESMSHARD_TRIAL"
"""The environment variable of a trial of a sweep, which ends with its last validation, without a model and a test."""

CRASHED = 70
"""The exit code of a process that ends with a traceback (EX_SOFTWARE). The error is one of esmshard or of a library,
not a mistake of the user. The run may succeed if it is started again."""

FIRST_LEAVES = 10.0
"""The seconds within which rank 0 finds a mistake that another rank has already found."""


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process, and of the processes that it starts, within a `with` block."""
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
    """Return how often esmshard's launcher or torchrun has started this run again; 0 for the first start."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def restarts_allowed() -> int:
    """Return how often torchrun may start this run again."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def under_torchrun() -> bool:
    """Return whether torchrun started this process, also by `accelerate launch`. torchrun's exit code is 0 or 1."""
    return "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER not in os.environ


def follow_launcher() -> None:
    """Let the kernel send SIGTERM to this process when esmshard's launcher has ended, even by kill -9. Linux only."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(launcher):  # the launcher had ended before the line above
        os.kill(os.getpid(), signal.SIGTERM)


def wait_for_first(code: int) -> None:
    """Wait at most `FIRST_LEAVES` seconds for the launcher to end this process, which then leaves with `code`.

    A wrong recipe is wrong on every rank, and rank 0 prints the message. srun and torchrun end all ranks as
    soon as one of them has failed, so rank 0 must be the first to leave. esmshard's own launcher waits for all ranks.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))
    time.sleep(FIRST_LEAVES)
