"""The transport that NCCL uses between GPUs, from its own log, and obstacles to InfiniBand. No torch."""

import ctypes
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from esmshard.cluster.doctor.findings import Case, Finding, Level, first_case, gib

GROUP = "links"
SYS = Path("/sys/class/infiniband")
DEVICES = Path("/dev/infiniband")
MEMLOCK = 1 << 30
"""Bytes that a process must be allowed to lock, because NCCL registers its buffers with the card. `unlimited` is usual.
"""


@dataclass(frozen=True)
class NcclLog:
    """The log of one process with NCCL_DEBUG=INFO. NCCL has no other interface that names its transports."""

    network: str = ""
    """The network between machines: IB, Socket, or the name of a plugin, such as AWS Libfabric."""
    channels: Mapping[str, int] = field(default_factory=dict)
    """The number of channels of each transport: P2P, SHM, NET/IB, NET/Socket."""
    direct: bool = False
    """Whether a channel goes from GPU to network card without the machine's memory (GPUDirect RDMA)."""
    warnings: tuple[str, ...] = ()


def parse_log(text: str) -> NcclLog:
    """Read a log of NCCL 2.18 to 2.30. Its lines look like `node1:714:812 [0] NCCL INFO Using network IB`."""
    vias = [via.split("/") for via in re.findall(r"NCCL INFO Channel \d+(?:/\d+)? : .*\bvia (.+)", text)]
    networks = re.findall(r"NCCL INFO Using network (.+)", text)
    return NcclLog(
        network=networks[-1].strip() if networks else "",
        channels=dict(Counter("/".join(via[:2]) if via[0] == "NET" else via[0] for via in vias)),
        direct=any("GDRDMA" in via for via in vias),
        warnings=tuple(dict.fromkeys(warning.strip() for warning in re.findall(r"NCCL WARN (.+)", text))),
    )


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

    def read(path: Path) -> str:
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""

    return [
        Port(
            folder.parent.parent.name,
            folder.name,
            read(folder / "state").endswith(": ACTIVE"),
            read(folder / "link_layer") or "InfiniBand",
            read(folder / "rate"),
        )
        for folder in sorted(root.glob("*/ports/*"))
    ]


@dataclass(frozen=True)
class Verbs:
    """The requirements of NCCL for InfiniBand, as seen by this process."""

    library: bool
    """Whether libibverbs can be loaded."""
    devices: tuple[str, ...]
    """The uverbs devices in /dev/infiniband."""
    closed: tuple[str, ...]
    """The devices that this user may not open."""
    memlock: int
    """Bytes that may be locked; -1 means unlimited."""


def verbs() -> Verbs:
    """Return the state for this process."""
    import resource  # Windows has no such module

    try:
        library = bool(ctypes.CDLL("libibverbs.so.1"))
    except OSError:
        library = False
    devices = sorted(DEVICES.glob("uverbs*"))
    closed = tuple(path.name for path in devices if not os.access(path, os.R_OK | os.W_OK))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = -1 if soft == resource.RLIM_INFINITY else soft
    return Verbs(library, tuple(path.name for path in devices), closed, memlock)


def causes(here: Verbs, there: Sequence[Port], environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return reasons why NCCL would not use active ports, each with its fix, the most usual first."""
    active = [port.device for port in there if port.active]
    disabled, cards = environment.get("NCCL_IB_DISABLE", "0"), environment.get("NCCL_IB_HCA", "")
    wanted = ",".join(name.split(":")[0] for name in cards.split(","))
    table = (
        (disabled not in ("", "0"), f"NCCL_IB_DISABLE={disabled} is set", "unset NCCL_IB_DISABLE"),
        (environment.get("NCCL_NET", "").lower() == "socket", "NCCL_NET=Socket is set", "unset NCCL_NET"),
        (
            not here.library,
            "libibverbs is not installed in this system or container",
            "install libibverbs1, ibverbs-providers and librdmacm1",
        ),
        (
            not here.devices,
            "/dev/infiniband has no uverbs devices: the container was not given them",
            "docker run --device=/dev/infiniband; in Kubernetes an rdma resource (`resources` of the site profile)",
        ),
        (
            bool(here.closed),
            f"{', '.join(here.closed)} may not be opened",
            "give the user the rights of the rdma group",
        ),
        (
            0 <= here.memlock < MEMLOCK,
            f"only {gib(here.memlock)} of memory may be locked (ulimit -l)",
            "ulimit -l unlimited: docker run --ulimit memlock=-1, PropagateResourceLimitsExcept=MEMLOCK in Slurm",
        ),
        (
            bool(active) and not names(wanted, active),
            f"NCCL_IB_HCA={cards} names none of the active ports ({', '.join(active)})",
            f"set NCCL_IB_HCA={''.join(active[:1])}, or unset it",
        ),
    )
    return [(cause, fix) for applies, cause, fix in table if applies]


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
        yield Finding(GROUP, "ports", "note", found, "check the cable and the subnet manager: ibstat", values)
    if down and not active:
        return
    found = f"{len(active)} active: {', '.join(map(str, active))}" if there else "no InfiniBand or RoCE ports"
    unused = f"NCCL would not use {len(active)} active ports: {'; '.join(cause for cause, _ in why)}"
    # Only NCCL uses these ports, and without GPUs there is no NCCL: gloo always uses TCP.
    case: Case = (active and why, "warning" if gpus else "note", unused, "; ".join(fix for _, fix in why))
    yield first_case(GROUP, "infiniband", found, values, case)


def transport(
    logs: Sequence[NcclLog], there: Sequence[Port], why: Sequence[tuple[str, str]], nodes: int, peers: bool | None
) -> Iterator[Finding]:
    """Yield the transport that NCCL used in a collective, and whether a better one was available.

    The logs are those of the processes of one machine, of `nodes`; `there` are its ports, `why` their `causes`. `peers`
    says whether its GPUs can read each other's memory; it is None if this is unknown.
    """
    channels = sum((Counter(log.channels) for log in logs), Counter[str]())
    networks = sorted({log.network for log in logs if log.network})
    direct, warnings = any(log.direct for log in logs), sorted({one for log in logs for one in log.warnings})
    values = {"channels": dict(channels), "networks": networks, "gpudirect": direct, "warnings": warnings}
    used = ", ".join(f"{kind} ({count} channels)" for kind, count in channels.most_common()) or "no channels"
    found = f"NCCL uses {used}; network {' and '.join(networks) or 'not named'}"
    sockets = "NET/Socket" in channels or "Socket" in networks
    active = [port for port in there if port.active]
    blame = "; ".join(cause for cause, _ in why) or "none of the usual causes was found"
    fixes = "; ".join(fix for _, fix in why) or "run with NCCL_DEBUG=INFO and read its lines about NET/IB"
    which = f"{len(active)} {active[0].kind.upper()} PORTS ARE ACTIVE ({active[0]})" if active else ""
    level: Level = "error" if nodes > 1 or any(port.kind == "InfiniBand" for port in active) else "warning"
    yield first_case(
        GROUP,
        "transport",
        found + ", GPUDirect RDMA" * direct,
        values,
        (active and sockets, level, f"SOCKETS, THOUGH {which}: {blame}; {found}", fixes),
        (nodes > 1 and sockets, "note", f"{found}: TCP between machines, because there is nothing faster", ""),
        (
            nodes > 1 and not direct and "NET/IB" in channels,
            "note",
            f"{found}, through the machine's memory (no GPUDirect RDMA)",
            "load the module nvidia_peermem, or use a driver with DMA-BUF, for twice the speed",
        ),
    )
    if "SHM" in channels and "P2P" not in channels and peers:
        found = "GPUs of this machine exchange through its memory (SHM), though they can read each other's memory"
        fix = "unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL; else switch off ACS in the BIOS, or the IOMMU"
        yield Finding(GROUP, "peers", "warning", found, fix, values)
    if warnings:
        fix = "search for the call that failed in NCCL's troubleshooting guide"
        yield Finding(GROUP, "nccl warnings", "warning", f"NCCL warns: {'; '.join(warnings[:3])}", fix, values)
