"""The machine around the GPUs: cores, memory, limits, and the name that other machines reach it by. No torch."""

import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from esmshard.cluster.findings import Finding, gib
from esmshard.cluster.links import interface_trouble
from esmshard.parallel import address, allowed

CHECK = "machine"
SHM = Path("/dev/shm")  # noqa: S108
SHM_ENOUGH = 1 << 30
"""Bytes of /dev/shm. Processes of one machine exchange tensors there; a container begins with 64 MiB."""
OPEN_FILES = 1024
RESOLVE = 3.0
"""Seconds that the resolver has."""


def processors(usable: int, machine: int, processes: int) -> Iterator[Finding]:
    """Cores for so many processes of this machine."""
    values = {"usable": usable, "machine": machine, "processes": processes}
    told = f"{usable} of {machine} cores" if usable < machine else f"{usable} cores"
    if usable < processes:
        yield Finding(
            CHECK,
            "cores",
            "warning",
            f"{told} for {processes} processes",
            "give the job more: --cpus-per-task in Slurm, --cpus of the container, or start fewer processes",
            values,
        )
    else:
        yield Finding(CHECK, "cores", "ok", told, values=values)


def memory(meminfo: str, limit: tuple[int, int] | None) -> Iterator[Finding]:
    """What the machine has free, and what this job may have of it.

    Args:
        meminfo: text of /proc/meminfo.
        limit: `allowed.memory`.
    """
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.MULTILINE)}
    total, free = kib.get("MemTotal", 0) << 10, kib.get("MemAvailable", 0) << 10
    values = {"total": total, "available": free, "limit": limit[0] if limit else None, "used": limit and limit[1]}
    told = f"{gib(free)} of {gib(total)} available"
    if limit is not None and limit[0] < total:
        left = limit[0] - limit[1]
        told += f"; this job may have {gib(limit[0])}, of which {gib(left)} are left"
        if left < 0.1 * limit[0]:
            yield Finding(
                CHECK, "memory", "warning", told, "give the job more: --mem in Slurm, --memory of the container", values
            )
            return
    if total and free < 0.1 * total:
        yield Finding(CHECK, "memory", "warning", told, "see who uses it: ps aux --sort=-rss | head", values)
    else:
        yield Finding(CHECK, "memory", "ok", told, values=values)


def shared_memory(total: int, free: int) -> Iterator[Finding]:
    """Bytes of /dev/shm."""
    values = {"total": total, "free": free}
    if min(total, free) < SHM_ENOUGH:
        yield Finding(
            CHECK,
            "shm",
            "warning",
            f"{SHM} has {gib(free)} free of {gib(total)}, through which processes of this machine exchange tensors",
            "docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"
            if total < SHM_ENOUGH
            else "remove what ended jobs left in /dev/shm",
            values,
        )
    else:
        yield Finding(CHECK, "shm", "ok", f"{SHM}: {gib(free)} of {gib(total)} free", values=values)


def limits(files: int, most_files: int, memlock: int, needs_lock: bool) -> Iterator[Finding]:
    """The limits -n and -l of ulimit for this process.

    Args:
        files: that may be open at once; -1 for any number. `most_files` is how far the user may raise it.
        most_files: see `files`.
        memlock: bytes that may be locked; -1 for any number.
        needs_lock: there are active InfiniBand ports.
    """
    values = {"open_files": files, "open_files_hard": most_files, "memlock": memlock}
    locked = "unlimited" if memlock < 0 else gib(memlock)
    told = f"open files {'unlimited' if files < 0 else files}, locked memory {locked}"
    if 0 <= files < OPEN_FILES:
        may = "" if most_files < 0 or most_files >= OPEN_FILES else "; root has to raise the hard limit first"
        yield Finding(CHECK, "limits", "warning", told, f"ulimit -n 65536 before the run{may}", values)
    elif 0 <= memlock < 1 << 30 and needs_lock:
        yield Finding(CHECK, "limits", "warning", told, "ulimit -l unlimited, for InfiniBand", values)
    else:
        yield Finding(CHECK, "limits", "ok", told, values=values)


def resolved(name: str, timeout: float = RESOLVE) -> list[str] | None:
    """Addresses of a host; none if nobody knows it, None if the resolver takes too long, which it may for minutes."""
    found: list[str] = []

    def ask() -> None:
        try:
            found.extend(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        except OSError:
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return None if thread.is_alive() else list(dict.fromkeys(found))


def network(
    name: str,
    found: list[str] | None,
    interfaces: Mapping[str, str],
    environment: Mapping[str, str],
    nodes: int,
) -> Iterator[Finding]:
    """Where this machine's name leads to, and which interface gloo and NCCL would take for it.

    Gloo takes the address that the host's own name resolves to; NCCL the first interface whose name begins with `ib`,
    else the first one but loopback and docker's (user guide, NCCL_SOCKET_IFNAME).

    Args:
        name: of the host.
        found: `resolved`.
        interfaces: `address.interfaces`.
        environment: with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.
        nodes: that the run is meant for.
    """
    others = {one: address for one, address in interfaces.items() if one != "lo"}
    usable = [one for one in others if not one.startswith("docker")] or list(others)
    nccl = next((one for one in usable if one.startswith("ib")), usable[0] if usable else "lo")
    nccl = environment.get("NCCL_SOCKET_IFNAME") or nccl
    gloo = environment.get("GLOO_SOCKET_IFNAME") or next(
        (one for one, address in interfaces.items() if found and address in found), "lo"
    )
    values = {"name": name, "addresses": found, "interfaces": dict(interfaces), "gloo": gloo, "nccl": nccl}
    told = f"{name} is {', '.join(found) if found else 'unknown to the resolver'}; gloo takes {gloo}, NCCL {nccl}"
    mend = (
        f"write `{others[usable[0]] if usable else 'ADDRESS'} {name}` into /etc/hosts, or set GLOO_SOCKET_IFNAME="
        f"{usable[0] if usable else 'INTERFACE'}"
    )
    level = "warning" if nodes > 1 else "note"
    for cause, remedy in interface_trouble(list(interfaces), environment):
        yield Finding(CHECK, "interface", "error", cause, remedy, values)
    if found is None:  # many libraries ask for it, and all of them wait
        told = f"the resolver did not say within {RESOLVE:g} s what {name} is"
        yield Finding(CHECK, "network", "warning", told, "look at the name servers in /etc/resolv.conf", values)
    elif others.get(environment.get("GLOO_SOCKET_IFNAME", "")):  # then the name does not matter
        yield Finding(CHECK, "network", "ok", told, values=values)
    elif not found or all(address.startswith("127.") or address == "::1" for address in found):
        reach = "; other machines cannot reach that" if found else ""
        yield Finding(CHECK, "network", level, told + reach, mend if nodes > 1 or others else "", values)  # type: ignore[arg-type]
    elif not set(found) & set(interfaces.values()) and not any(":" in address for address in found):
        yield Finding(CHECK, "network", level, f"{told}; no interface here has that address", mend, values)  # type: ignore[arg-type]
    else:
        yield Finding(CHECK, "network", "ok", told, values=values)


def look(processes: int, nodes: int, needs_lock: bool) -> Iterator[Finding]:
    """All of it on this machine.

    Args:
        processes: that are to run on it.
        nodes: that the run is meant for.
        needs_lock: see `limits`.
    """
    yield from processors(allowed.cores(), os.cpu_count() or 1, processes)
    if Path("/proc/meminfo").is_file():
        yield from memory(Path("/proc/meminfo").read_text(encoding="utf-8"), allowed.memory())
    if SHM.is_dir():
        known = os.statvfs(SHM)
        yield from shared_memory(known.f_blocks * known.f_frsize, known.f_bavail * known.f_frsize)
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard, lock = (
        -1 if value == resource.RLIM_INFINITY else value
        for value in (*resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    )
    yield from limits(soft, hard, lock, needs_lock)
    if hasattr(socket, "if_nameindex") and Path("/proc/net").exists():
        name = socket.gethostname()
        yield from network(name, resolved(name), address.interfaces(), os.environ, nodes)
