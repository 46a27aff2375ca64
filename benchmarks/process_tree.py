"""Watches a command and its processes from outside: time, first result on disk, peak memory. Linux only."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

POLL_SECONDS = 0.05
"""The seconds between two checks. A check reads a few files of /proc, which takes under 1% of a core."""


@dataclass
class Peak:
    """The peak memory of one process, in bytes."""

    resident: int = 0
    """The kernel's high-water mark, with pages of mapped files."""
    anonymous: int = 0
    """The largest value of a check, without pages of files, which the kernel may drop at any time."""


@dataclass
class Watched:
    """The time and the memory of a command."""

    seconds: float = 0.0
    """The seconds from the start of the process to its end."""
    first_result: float = float("nan")
    """The seconds until the first result was on disk."""
    tree: int = 0
    """The peak resident bytes of all processes together. Shared pages count in each process."""
    main: Peak = field(default_factory=Peak)
    workers: dict[int, Peak] = field(default_factory=dict)
    """The peaks by process id."""

    @property
    def worker(self) -> Peak:
        """The peak of the largest worker; zeros if there was no worker."""
        every = self.workers.values()
        return Peak(max((p.resident for p in every), default=0), max((p.anonymous for p in every), default=0))


def watch(command: Sequence[str], threads: int, result: Callable[[], bool] = lambda: False) -> Watched:
    """Run a command to its end.

    Args:
        command: the command with its arguments.
        threads: the threads of OpenMP, for the command and its processes.
        result: returns whether there is a result on disk; not called again after it has returned True.

    Raises:
        RuntimeError: if the command failed, with the end of its output.
    """
    found, seen = Watched(), False
    with tempfile.TemporaryFile("w+") as said:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": str(threads)}
        )
        try:
            while process.poll() is None:
                _look(process.pid, found)
                if not seen and result():
                    seen, found.first_result = True, time.perf_counter() - began
                time.sleep(POLL_SECONDS)
            found.seconds = time.perf_counter() - began
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            said.seek(0)
            print(said.read()[-4000:], file=sys.stderr)
            raise RuntimeError(f"{' '.join(command)} failed; what it said stands above")
    if not seen and result():  # the process ended between two checks
        found.first_result = found.seconds
    found.tree = max(found.tree, found.main.resident)
    return found


def _look(pid: int, found: Watched) -> None:
    together = 0
    for one in _tree(pid):
        status = _status(one)
        peak = found.main if one == pid else found.workers.setdefault(one, Peak())
        peak.resident = max(peak.resident, status.get("VmHWM", 0))
        peak.anonymous = max(peak.anonymous, status.get("RssAnon", 0))
        together += status.get("VmRSS", 0)
    found.tree = max(found.tree, together)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        threads = Path(f"/proc/{pid}/task").iterdir()
        children = [(thread / "children").read_text(encoding="ascii") for thread in threads]
    except OSError:  # the process has ended
        return
    for child in " ".join(children).split():
        yield from _tree(int(child))


def _status(pid: int) -> dict[str, int]:
    """Return bytes by the names of /proc/PID/status; empty for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
