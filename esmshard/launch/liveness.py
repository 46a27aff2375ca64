"""Whether a process that left its name somewhere still runs. No torch."""

import os
import socket
from pathlib import Path


def process_lives(pid: int, start: str | None) -> bool | None:
    """Whether the process of this machine that began at `start` still runs; None where the system does not tell.

    Args:
        pid: its id, which may be another process's by now.
        start: `process_start` of that process.
    """
    if os.name != "posix":  # there, asking with signal 0 would end it
        return None
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    now = process_start(pid)
    return None if start is None or now is None else now == start


def process_start(pid: int) -> str | None:
    """When a process began, in ticks since the machine did; `ended` for a zombie; None where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "ended" if fields[0] in ("Z", "X") else fields[19]
    except (OSError, IndexError):
        return None


def machine() -> str:
    """One boot of one kernel, and one space of process ids in it: containers have their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()
