"""The machine apart from its GPUs: cores, memory, limits and network interfaces. No torch."""

import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from esmshard.cluster.doctor.findings import Finding
from esmshard.cluster.doctor.links import names
from esmshard.files import memory_text
from esmshard.launch import cpu_limits

SHM = Path("/dev/shm")  # noqa: S108
SHM_ENOUGH = 1 << 30
"""Bytes of /dev/shm that are enough for the processes of a machine. A container has 64 MiB by default."""
OPEN_FILES = 1024


def processors(usable: int, machine: int, processes: int) -> Finding:
    """Check whether each process of this machine has a core."""
    found = f"{usable} of {machine} cores" if usable < machine else f"{usable} cores"
    values = {"usable": usable, "machine": machine, "processes": processes}
    if usable < processes:
        fix = "give the job more: --cpus-per-task in Slurm, --cpus of the container; or start fewer processes"
        return Finding("cores", "warning", f"{found} for {processes} processes", fix, values)
    return Finding("cores", "ok", found, values=values)


def memory(meminfo: str, limit: tuple[int, int] | None) -> Finding:
    """Check the free memory of the machine, from the text of /proc/meminfo, and of this job (`cpu_limits.memory`)."""
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.MULTILINE)}
    total, free = kib["MemTotal"] << 10, kib["MemAvailable"] << 10
    most, used = limit or (total, 0)
    found = f"{memory_text(free)} of {memory_text(total)} available"
    if most < total:
        found += f"; this job may have {memory_text(most)}, of which {memory_text(most - used)} are left"
    values = {"total": total, "available": free, "limit": limit and most, "used": limit and used}
    if most < total and most - used < 0.1 * most:
        fix = "give the job more: --mem in Slurm, --memory of the container"
        return Finding("memory", "warning", found, fix, values)
    if free < 0.1 * total:
        return Finding("memory", "warning", found, "see which programs use it: ps aux --sort=-rss | head", values)
    return Finding("memory", "ok", found, values=values)


def shared_memory(total: int, free: int) -> Finding:
    """Check whether /dev/shm is large enough. Both numbers are bytes."""
    room = f"{memory_text(free)} free of {memory_text(total)}"
    values = {"total": total, "free": free}
    if free >= SHM_ENOUGH:
        return Finding("shm", "ok", f"{SHM}: {room}", values=values)
    fix = "remove what ended jobs left in /dev/shm"
    if total < SHM_ENOUGH:
        fix = "docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    found = f"{SHM} has {room}; processes of this machine exchange tensors there"
    return Finding("shm", "warning", found, fix, values)


def limits(files: int, most_files: int, memlock: int) -> Finding:
    """Check the limits -n (with the number to which the user may raise it) and -l of ulimit. -1 means unlimited.

    Too few bytes of locked memory are reported by `links.causes`, where they matter.
    """
    locked = "unlimited" if memlock < 0 else memory_text(memlock)
    found = f"open files {'unlimited' if files < 0 else files}, locked memory {locked}"
    values = {"open_files": files, "open_files_hard": most_files, "memlock": memlock}
    if 0 <= files < OPEN_FILES:
        root = "; root has to raise the hard limit first" if 0 <= most_files < OPEN_FILES else ""
        return Finding("limits", "warning", found, f"ulimit -n 65536 before the run{root}", values)
    return Finding("limits", "ok", found, values=values)


def missing_interfaces(present: Sequence[str], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield network interfaces that the environment names and the machine does not have."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        if not names(value, present, prefixes=variable.startswith("NCCL")):
            found = f"{variable}={value}, but this machine has only {', '.join(present)}"
            yield Finding("interface", "error", found, f"set {variable} to one of these")


def check(processes: int) -> Iterator[Finding]:
    """Run all these checks for this machine, on which `processes` processes will run."""
    yield processors(cpu_limits.cores(), os.cpu_count() or 1, processes)
    if Path("/proc/meminfo").is_file():
        yield memory(Path("/proc/meminfo").read_text(encoding="utf-8"), cpu_limits.memory())
    if SHM.is_dir():
        room = shutil.disk_usage(SHM)
        yield shared_memory(room.total, room.free)
    try:
        import resource
    except ImportError:  # Windows has no such module
        return
    numbers = (*resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield limits(*(-1 if number == resource.RLIM_INFINITY else number for number in numbers))
    yield from missing_interfaces([name for _, name in socket.if_nameindex()], os.environ)
