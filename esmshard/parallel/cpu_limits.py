"""The memory and the cores that this process may use. A scheduler or a container may limit them. No torch."""

import os
import re
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def memory(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> tuple[int, int] | None:
    """Return the memory limit of this process's cgroup and the memory in use, in bytes; None without a limit.

    Pages of files that the kernel can release at once do not count as memory in use.

    Args:
        root: the directory where cgroups are mounted. In a container, the container's own cgroup is at the root,
            whatever `membership` says.
        membership: the kernel's file with the cgroups of this process, in version 1 or 2.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    tightest = None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, releasable = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            releasable = "total_inactive_file"
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):  # the limit of a parent may be lower
            folder = base.joinpath(*parts[:depth])
            most, used = _number(folder / limit), _number(folder / usage)
            # Version 1 has the largest number of pages for "no limit".
            if most is None or used is None or most >= 1 << 60:
                continue
            used = max(0, used - _entry(folder / "memory.stat", releasable))
            if tightest is None or most - used < tightest[0] - tightest[1]:
                tightest = most, used
    return tightest


def cores(root: Path = CGROUPS) -> int:
    """Return the number of cores that this process may use: its CPU affinity, or the cgroup's quota if it is lower."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return bound if quota is None else max(1, min(bound, int(quota)))


def cpu_quota(root: Path = CGROUPS) -> float | None:
    """Return the CPU time that the cgroup allows, in cores; None without a limit."""
    try:
        if (root / "cpu.max").is_file():
            quota, period = (root / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _entry(path: Path, name: str) -> int:
    try:
        found = re.search(rf"^{name} (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
