"""Checks whether a process that has recorded its id still runs. No torch."""

import os
import socket
from pathlib import Path


def process_lives(pid: int, start: str | None) -> bool | None:
    """Return whether a process of this machine still runs; None if the system does not provide this.

    Args:
        pid: the id of the process. The system may have given it to another process since.
        start: the `process_start` of the process.
    """
    if os.name != "posix":  # signal 0 would end the process on Windows
        return None
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # the process belongs to another user
        pass
    now = process_start(pid)
    return None if start is None or now is None else now == start


def process_start(pid: int) -> str | None:
    """Return the start of a process, in ticks since the machine's start; `ended` for a zombie; None without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "ended" if fields[0] in ("Z", "X") else fields[19]
    except (OSError, IndexError):
        return None


def machine() -> str:
    """Return an identifier of one boot of a kernel and of one namespace of process ids. Each container has its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()
