"""What a process and the launcher that started it know of each other. Starts without torch."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from esmshard.errors import InputError

LAUNCHER = "ESMSHARD_LAUNCHER"
"""Environment variable: process id of our own launcher, in the processes that it started."""
ATTEMPT = "ESMSHARD_ATTEMPT"
"""Environment variable: how often our launchers have started this run again. The same for all processes of an attempt,
on all machines, which torch's own count is not."""
LAUNCH = "ESMSHARD_LAUNCH"
"""Environment variable: what all starts by the launchers that met have in common, and no others."""
SHARED_CORES = "ESMSHARD_SHARED_CORES"
"""Environment variable: the launcher has shared the cores out among the processes, and not the user."""


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
    """How often a launcher has started this run again, 0 the first time."""
    return int(os.environ.get(ATTEMPT) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def restarts_allowed() -> int:
    """How often the launcher may do so."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def follow_launcher() -> None:
    """Be sent SIGTERM when our own launcher is gone, even by kill -9: nobody else would do it. Linux only."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(launcher):  # it was gone before the line above
        os.kill(os.getpid(), signal.SIGTERM)


def tell_launcher(error: InputError) -> None:
    """Leave word of why this process ends, in the file and form of torchelastic, whose launchers print it.

    Ours starts a run again after a crash, but not where the same mistake would be made again.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    words = {"message": str(error), "extraInfo": {"py_callstack": str(error), "timestamp": str(int(time.time()))}}
    traits = {"category": "user_error", "retryability": str(error.transient), "shared": str(error.shared)}
    told = {"message": words, "errorTraits": traits}
    try:
        part = Path(f"{file}.part")  # launchers end a process at any moment, and must not find half a file
        part.write_text(json.dumps(told), encoding="utf-8")
        part.replace(file)
    except OSError:  # it only helps
        pass
