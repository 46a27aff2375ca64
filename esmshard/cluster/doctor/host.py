"""The machine apart from its GPUs: cores, memory, limits and network interfaces. No torch."""

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from esmshard.cluster.doctor.findings import Finding, Level, gib
from esmshard.cluster.doctor.links import names
from esmshard.launch import cpu_limits

GROUP = "machine"
SHM = Path("/dev/shm")  # noqa: S108
SHM_ENOUGH = 1 << 30
"""Bytes of /dev/shm that are enough. Processes of one machine exchange tensors there; a container has 64 MiB by
default.
"""
OPEN_FILES = 1024


def processors(usable: int, machine: int, processes: int) -> Finding:
    """Check whether each process of this machine has a core."""
    values = {"usable": usable, "machine": machine, "processes": processes}
    found = f"{usable} of {machine} cores" if usable < machine else f"{usable} cores"
    if usable >= processes:
        return Finding(GROUP, "cores", "ok", found, values=values)
    fix = "give the job more: --cpus-per-task in Slurm, --cpus of the container; or start fewer processes"
    return Finding(GROUP, "cores", "warning", f"{found} for {processes} processes", fix, values)


def memory(meminfo: str, limit: tuple[int, int] | None) -> Finding:
    """Check the free memory of the machine, and the limit of this job.

    Args:
        meminfo: the text of /proc/meminfo.
        limit: `cpu_limits.memory`.
    """
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.MULTILINE)}
    total, free = kib.get("MemTotal", 0) << 10, kib.get("MemAvailable", 0) << 10
    values = {"total": total, "available": free, "limit": limit[0] if limit else None, "used": limit and limit[1]}
    found = f"{gib(free)} of {gib(total)} available"
    level: Level = "ok"
    fix = ""
    if total and free < 0.1 * total:
        level, fix = "warning", "see which programs use it: ps aux --sort=-rss | head"
    if limit is not None and limit[0] < total:
        left = limit[0] - limit[1]
        found += f"; this job may have {gib(limit[0])}, of which {gib(left)} are left"
        if left < 0.1 * limit[0]:
            level, fix = "warning", "give the job more: --mem in Slurm, --memory of the container"
    return Finding(GROUP, "memory", level, found, fix, values)


def shared_memory(total: int, free: int) -> Finding:
    """Check whether /dev/shm is large enough. Both numbers are bytes."""
    values = {"total": total, "free": free}
    if min(total, free) >= SHM_ENOUGH:
        return Finding(GROUP, "shm", "ok", f"{SHM}: {gib(free)} of {gib(total)} free", values=values)
    found = f"{SHM} has {gib(free)} free of {gib(total)}; processes of this machine exchange tensors there"
    fix = "remove what ended jobs left in /dev/shm"
    if total < SHM_ENOUGH:
        fix = "docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    return Finding(GROUP, "shm", "warning", found, fix, values)


def limits(files: int, most_files: int, memlock: int) -> Finding:
    """Check the limits -n and -l of ulimit for this process. -1 means unlimited.

    Args:
        files: the number of files that may be open at once.
        most_files: the number to which the user may raise this limit.
        memlock: bytes that may be locked. `links.causes` reports where these are too few.
    """
    values = {"open_files": files, "open_files_hard": most_files, "memlock": memlock}
    locked = "unlimited" if memlock < 0 else gib(memlock)
    found = f"open files {'unlimited' if files < 0 else files}, locked memory {locked}"
    if not 0 <= files < OPEN_FILES:
        return Finding(GROUP, "limits", "ok", found, values=values)
    first = "" if most_files < 0 or most_files >= OPEN_FILES else "; root has to raise the hard limit first"
    return Finding(GROUP, "limits", "warning", found, f"ulimit -n 65536 before the run{first}", values)


def missing_interfaces(present: Sequence[str], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield network interfaces that the environment names and the machine does not have."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        if not names(value, present, prefixes=variable.startswith("NCCL")):
            found = f"{variable}={value}, but this machine has only {', '.join(present)}"
            yield Finding(GROUP, "interface", "error", found, f"set {variable} to one of these")


def check(processes: int) -> Iterator[Finding]:
    """Run all these checks for this machine, on which `processes` processes will run."""
    yield processors(cpu_limits.cores(), os.cpu_count() or 1, processes)
    if Path("/proc/meminfo").is_file():
        yield memory(Path("/proc/meminfo").read_text(encoding="utf-8"), cpu_limits.memory())
    if SHM.is_dir():
        known = os.statvfs(SHM)
        yield shared_memory(known.f_blocks * known.f_frsize, known.f_bavail * known.f_frsize)
    try:
        import resource
    except ImportError:  # Windows has no such module
        return
    numbers = (*resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield limits(*(-1 if number == resource.RLIM_INFINITY else number for number in numbers))
    yield from missing_interfaces([name for _, name in socket.if_nameindex()], os.environ)
