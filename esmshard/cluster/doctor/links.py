"""The transport that NCCL uses between GPUs, from its own log, and obstacles to InfiniBand. No torch."""

import ctypes
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from esmshard.cluster.doctor.findings import Finding
from esmshard.files import memory_text

SYS = Path("/sys/class/infiniband")
DEVICES = Path("/dev/infiniband")
MEMLOCK = 1 << 30
"""Bytes that a process must be allowed to lock, because NCCL registers its buffers with the card."""


@dataclass(frozen=True)
class Port:
    """One port of a card for InfiniBand or RoCE."""

    device: str
    number: str
    active: bool
    kind: str
    """The kind of link: InfiniBand, or Ethernet for RoCE."""
    rate: str
    """The speed, such as 200 Gb/sec (4X HDR)."""

    def __str__(self) -> str:
        return f"{self.device}:{self.number} {self.kind} {self.rate}"


def ports(root: Path = SYS) -> list[Port]:
    """Return the ports that the kernel lists in /sys/class/infiniband."""
    found = []
    for folder in sorted(root.glob("*/ports/*")):
        state, kind, rate = ((folder / name).read_text("utf-8").strip() for name in ("state", "link_layer", "rate"))
        found.append(Port(folder.parent.parent.name, folder.name, state.endswith(": ACTIVE"), kind, rate))
    return found


def causes(there: Sequence[Port], environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield reasons why NCCL would not use active ports in this process, each with its fix, the most usual first."""
    if not there:
        return
    import resource  # Windows has no such module, and no ports

    disabled, cards = environment.get("NCCL_IB_DISABLE", "0"), environment.get("NCCL_IB_HCA", "")
    if disabled not in ("", "0"):
        yield f"NCCL_IB_DISABLE={disabled} is set", "unset NCCL_IB_DISABLE"
    if environment.get("NCCL_NET", "").lower() == "socket":
        yield "NCCL_NET=Socket is set", "unset NCCL_NET"
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        fix = "install libibverbs1, ibverbs-providers and librdmacm1"
        yield "libibverbs is not installed in this system or container", fix
    devices = sorted(DEVICES.glob("uverbs*"))
    if not devices:
        fix = "docker run --device=/dev/infiniband; in Kubernetes an rdma resource (`resources` of the site profile)"
        yield f"{DEVICES} has no uverbs devices: the container was not given them", fix
    if closed := [path.name for path in devices if not os.access(path, os.R_OK | os.W_OK)]:
        yield f"{', '.join(closed)} may not be opened", "give the user the rights of the rdma group"
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if 0 <= memlock < MEMLOCK:  # -1 means unlimited
        fix = "ulimit -l unlimited: docker run --ulimit memlock=-1, PropagateResourceLimitsExcept=MEMLOCK in Slurm"
        yield f"only {memory_text(memlock)} of memory may be locked (ulimit -l)", fix
    active = [port.device for port in there if port.active]
    if active and not names(",".join(name.split(":")[0] for name in cards.split(",")), active):
        found = f"NCCL_IB_HCA={cards} names none of the active ports ({', '.join(active)})"
        yield found, f"set NCCL_IB_HCA={active[0]}, or unset it"


def names(wanted: str, present: Sequence[str], prefixes: bool = True) -> bool:
    """Whether a list of NCCL, such as `ib,eth0`, names one that is present. `=` means whole names, `^` excludes."""
    if not wanted or wanted.startswith("^"):
        return True
    exact = wanted.startswith("=") or not prefixes
    names = wanted.lstrip("=").split(",")
    return any(one == name or (not exact and one.startswith(name)) for one in present for name in names)


def infiniband(there: Sequence[Port], why: Sequence[tuple[str, str]], gpus: int) -> Iterator[Finding]:
    """Yield findings on the ports of a machine with so many GPUs, and on obstacles for NCCL (`causes`)."""
    values = {"ports": [asdict(port) for port in there], "causes": [cause for cause, _ in why]}
    active, down = [port for port in there if port.active], [port for port in there if not port.active]
    if down:
        found = f"{len(down)} of {len(there)} ports are not active: {', '.join(map(str, down))}"
        yield Finding("ports", "note", found, "check the cable and the subnet manager: ibstat", values)
    if down and not active:
        return
    if active and why:
        found = f"NCCL would not use {len(active)} active ports: {'; '.join(cause for cause, _ in why)}"
        # Only NCCL uses these ports, and without GPUs there is no NCCL: gloo always uses TCP.
        yield Finding("infiniband", "warning" if gpus else "note", found, "; ".join(fix for _, fix in why), values)
    else:
        found = f"{len(active)} active: {', '.join(map(str, active))}" if there else "no InfiniBand or RoCE ports"
        yield Finding("infiniband", "ok", found, values=values)


def nccl_lines(log: str) -> str:
    """Return the lines that `transport` reads from a log with NCCL_DEBUG=INFO, which has thousands of others."""
    return "\n".join(re.findall(r"NCCL (?:INFO Channel|INFO Using network|WARN) .+", log))


def transport(
    log: str, there: Sequence[Port], why: Sequence[tuple[str, str]], nodes: int, peers: bool | None
) -> Iterator[Finding]:
    """Yield the transport that NCCL used in a collective, and whether a better one was available.

    `log` has the `nccl_lines` of all processes of one machine, of `nodes`; `there` are its ports, `why` their `causes`.
    `peers` says whether its GPUs can read each other's memory; it is None if this is unknown. NCCL (2.18 to 2.30) has
    no other interface that names its transports: P2P, SHM, NET/IB, NET/Socket, or NET/ and the name of a plugin.
    GDRDMA (GPUDirect RDMA) goes from GPU to network card without the machine's memory.
    """
    vias = re.findall(r"NCCL INFO Channel .*\bvia (.+)", log)
    channels = Counter("/".join(via.split("/")[: 1 + via.startswith("NET/")]) for via in vias)
    networks = sorted(set(re.findall(r"NCCL INFO Using network (.*\S)", log)))
    warnings, direct = sorted(set(re.findall(r"NCCL WARN (.*\S)", log))), "GDRDMA" in " ".join(vias)
    values = {"channels": dict(channels), "networks": networks, "gpudirect": direct, "warnings": warnings}
    used = ", ".join(f"{kind} ({count} channels)" for kind, count in channels.most_common()) or "no channels"
    found = f"NCCL uses {used}; network {' and '.join(networks) or 'not named'}"
    sockets = "NET/Socket" in channels or "Socket" in networks
    active = [port for port in there if port.active]
    finding = partial(Finding, "transport", values=values)
    if active and sockets:
        is_error = nodes > 1 or any(port.kind == "InfiniBand" for port in active)
        which = f"{len(active)} {active[0].kind.upper()} PORTS ARE ACTIVE ({active[0]})"
        blame = "; ".join(cause for cause, _ in why) or "none of the usual causes was found"
        fixes = "; ".join(fix for _, fix in why) or "run with NCCL_DEBUG=INFO and read its lines about NET/IB"
        yield finding("error" if is_error else "warning", f"SOCKETS, THOUGH {which}: {blame}; {found}", fixes)
    elif nodes > 1 and sockets:
        yield finding("note", f"{found}: TCP between machines, because there is nothing faster")
    elif nodes > 1 and not direct and "NET/IB" in channels:
        fix = "load the module nvidia_peermem, or use a driver with DMA-BUF, for twice the speed"
        yield finding("note", f"{found}, through the machine's memory (no GPUDirect RDMA)", fix)
    else:
        yield finding("ok", found + ", GPUDirect RDMA" * direct)
    if "SHM" in channels and "P2P" not in channels and peers:
        found = "GPUs of this machine exchange through its memory (SHM), though they can read each other's memory"
        fix = "unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL; else switch off ACS in the BIOS, or the IOMMU"
        yield Finding("peers", "warning", found, fix, values)
    if warnings:
        fix = "search for the call that failed in NCCL's troubleshooting guide"
        yield Finding("nccl warnings", "warning", f"NCCL warns: {'; '.join(warnings[:3])}", fix, values)
