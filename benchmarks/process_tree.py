"""A command and the processes it starts, watched from outside: time, first result on disk, peak memory. Linux only."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

POLL_SECONDS = 0.05
"""Between two looks. A look reads a few files of /proc: under 1% of a core."""


@dataclass
class Peak:
    """Of one process, bytes."""

    resident: int = 0
    """The kernel's high-water mark, pages of mapped files included."""
    anonymous: int = 0
    """Seen at a look: without pages of files, which the kernel may drop at any time."""


@dataclass
class Watched:
    """What a command cost."""

    seconds: float = 0.0
    """From the start of the process to its end."""
    first_result: float = float("nan")
    """Seconds until the first result was on disk."""
    tree: int = 0
    """Peak resident bytes of all its processes together; pages that they share count in each."""
    main: Peak = field(default_factory=Peak)
    workers: dict[int, Peak] = field(default_factory=dict)
    """By process id."""

    @property
    def worker(self) -> Peak:
        """Of the largest worker; zeros if there was none."""
        every = self.workers.values()
        return Peak(max((p.resident for p in every), default=0), max((p.anonymous for p in every), default=0))


def watch(command: Sequence[str], threads: int, result: Callable[[], bool] = lambda: False) -> Watched:
    """Run a command to its end.

    Args:
        command: and its arguments.
        threads: of OpenMP, for it and its processes.
        result: whether there is a result on disk; not asked again after it was.

    Raises:
        RuntimeError: it failed; with the end of what it said.
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
    if not seen and result():  # between two looks
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
    except OSError:  # it has ended
        return
    for child in " ".join(children).split():
        yield from _tree(int(child))


def _status(pid: int) -> dict[str, int]:
    """Bytes by the names of /proc/PID/status; empty for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
