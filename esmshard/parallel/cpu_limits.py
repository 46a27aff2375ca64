"""Reads how much memory and how many CPU cores this process may use. This module does not import torch."""

import os
import re
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_V1, _V2 = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("memory.max", "memory.current", "inactive_file"),
)
"""Three names for each version of Linux cgroups: the file with the memory limit, the file with the memory in use, and
the key in the file `memory.stat` for memory that the kernel can release."""


def memory(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> tuple[int, int] | None:
    """Return the memory limit of this process's cgroup and the memory in use, in bytes, or None without a limit.

    Cached file pages that the kernel can release at once do not count as memory in use. `root` is the directory
    of all cgroups. Inside a container, `root` is the directory of the container's own cgroup. The kernel lists this
    process's cgroups in the file `membership`.
    """
    limits = []
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, (limit, usage, releasable) = (root / "memory", _V1) if controllers else (root, _V2)
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):  # the limit of a parent cgroup may be lower
            folder = base.joinpath(*parts[:depth])
            limit_bytes, used = _number(folder / limit), _number(folder / usage)
            if limit_bytes < 1 << 60:  # without a limit, cgroups version 1 report a very large number
                limits.append((limit_bytes, max(0, used - _number(folder / "memory.stat", rf"^{releasable} (\d+)$"))))
    return min(limits, key=lambda pair: pair[0] - pair[1], default=None)


def cores(root: Path = CGROUPS) -> int:
    """Return how many CPU cores this process may use, by its CPU affinity and its cgroup's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # without a quota, the first value in the file is `max` or -1
        if (root / "cpu.max").is_file():
            quota, period = map(int, (root / "cpu.max").read_text(encoding="utf-8").split())
        else:
            quota, period = (int((root / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return max(1, min(allowed, quota // period)) if quota > 0 else allowed
    return allowed


def _number(path: Path, pattern: str = r"^(\d+)$") -> int:
    """Return the number that `pattern` finds in a file. If there is none: 0 for `memory.stat`, 2^60 for other files."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    match = re.search(pattern, text, re.MULTILINE)
    return int(match[1]) if match else 0 if path.name == "memory.stat" else 1 << 60
