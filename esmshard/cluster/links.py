"""How NCCL gets from GPU to GPU: read from its own log, held against the InfiniBand ports of the machine. No torch."""

import ctypes
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from esmshard.cluster.findings import Finding, gib

CHECK = "links"
SYS = Path("/sys/class/infiniband")
DEVICES = Path("/dev/infiniband")
MEMLOCK = 1 << 30
"""Bytes that a process has to be allowed to lock: NCCL registers its buffers with the card. `unlimited` is usual."""


@dataclass(frozen=True)
class NcclLog:
    """What NCCL_DEBUG=INFO tells of one process."""

    version: str = ""
    network: str = ""
    """What NCCL chose between machines: IB, Socket, or the name of a plugin, such as AWS Libfabric."""
    devices: tuple[str, ...] = ()
    """InfiniBand or RoCE ports that it took, as mlx5_0:1/IB."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces for sockets, as eth0:10.0.0.1."""
    bootstrap: str = ""
    """Interface over which the processes met."""
    channels: Mapping[str, int] | None = None
    """How often each transport was chosen: P2P, SHM, NET/IB, NET/Socket."""
    direct: bool = False
    """Some channel goes from GPU to network card without the machine's memory (GPUDirect RDMA)."""
    warnings: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    """Variables that it says were set, as NCCL_IB_DISABLE=1."""


def parse_log(text: str) -> NcclLog:
    """Read a log of NCCL 2.18 to 2.30; lines look like `node1:714:812 [0] NCCL INFO Using network IB`."""
    channels: Counter[str] = Counter()
    found: dict[str, str] = {}
    devices: dict[str, None] = {}
    interfaces: dict[str, None] = {}
    warnings: dict[str, None] = {}
    environment: dict[str, None] = {}
    direct = False
    for line in text.splitlines():
        if match := re.search(r"NCCL version (\d[\w.+]*)", line):
            found.setdefault("version", match[1])
        if match := re.search(r"NCCL WARN (.+)", line):
            warnings[match[1].strip()] = None
            continue
        info = line.partition("NCCL INFO ")[2].strip()
        if match := re.match(r"Channel \d+(?:/\d+)? : .*\bvia (.+)", info):
            parts = match[1].split("/")
            channels["/".join(parts[:2]) if parts[0] == "NET" else parts[0]] += 1
            direct |= "GDRDMA" in parts
        elif match := re.match(r"Using network (.+)", info):
            found["network"] = match[1].strip()
        elif match := re.match(r"Bootstrap ?: Using (\S+?)(?:<\d+>)?$", info):
            found["bootstrap"] = match[1]
        elif info.startswith("NET/IB : Using"):
            devices |= dict.fromkeys(re.findall(r"\[\d+\](\S+?)(?:\s|;|$)", info.partition(";")[0]))
        elif info.startswith("NET/Socket : Using"):
            interfaces |= dict.fromkeys(re.findall(r"\[\d+\](\S+?)<\d+>", info))
        elif match := re.match(r"(NCCL_\w+) set (?:by environment )?to (.+)", info):
            environment[f"{match[1]}={match[2].rstrip('.').strip()}"] = None
    return NcclLog(
        version=found.get("version", ""),
        network=found.get("network", ""),
        devices=tuple(devices),
        interfaces=tuple(interfaces),
        bootstrap=found.get("bootstrap", ""),
        channels=dict(channels),
        direct=direct,
        warnings=tuple(warnings),
        environment=tuple(environment),
    )


@dataclass(frozen=True)
class Port:
    """One port of a card that speaks InfiniBand verbs."""

    device: str
    number: str
    active: bool
    kind: str
    """InfiniBand, or Ethernet for RoCE."""
    rate: str
    """As 200 Gb/sec (4X HDR)."""

    def __str__(self) -> str:
        return f"{self.device}:{self.number} {self.kind} {self.rate}"


def ports(root: Path = SYS) -> list[Port]:
    """Ports of /sys/class/infiniband."""
    found = []
    for folder in sorted(root.glob("*/ports/*")):
        state, kind, rate = (_line(folder / name) for name in ("state", "link_layer", "rate"))
        active = state.partition(":")[2].strip() == "ACTIVE"
        found.append(Port(folder.parent.parent.name, folder.name, active, kind or "InfiniBand", rate))
    return found


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Verbs:
    """What NCCL needs to use InfiniBand from this process."""

    library: bool
    """libibverbs can be loaded."""
    devices: tuple[str, ...]
    """uverbs devices in /dev/infiniband."""
    closed: tuple[str, ...]
    """Those of them that this user may not open."""
    memlock: int
    """Bytes that may be locked; -1 for unlimited."""
    interfaces: tuple[str, ...]
    """Network interfaces of this machine."""


def verbs() -> Verbs:
    """Look at this process."""
    import resource  # Windows has none

    try:
        ctypes.CDLL("libibverbs.so.1")
        library = True
    except OSError:
        library = False
    devices = sorted(DEVICES.glob("uverbs*"))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Verbs(
        library,
        tuple(path.name for path in devices),
        tuple(path.name for path in devices if not os.access(path, os.R_OK | os.W_OK)),
        -1 if soft == resource.RLIM_INFINITY else soft,
        tuple(name for _, name in socket.if_nameindex()),
    )


def causes(here: Verbs, there: Sequence[Port], environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Why NCCL would not use active ports: what is wrong, and the mend, most usual first."""
    found = []
    if environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        found.append((f"NCCL_IB_DISABLE={environment['NCCL_IB_DISABLE']} is set", "unset NCCL_IB_DISABLE"))
    if environment.get("NCCL_NET", "").lower() == "socket":
        found.append(("NCCL_NET=Socket is set", "unset NCCL_NET"))
    if not here.library:
        found.append(
            (
                "libibverbs is not installed in this system or container",
                "install libibverbs1, ibverbs-providers and librdmacm1",
            )
        )
    if not here.devices:
        found.append(
            (
                "/dev/infiniband has no uverbs devices: the container was not given them",
                "docker run --device=/dev/infiniband; in Kubernetes an rdma resource (`resources` of the site profile)",
            )
        )
    elif here.closed:
        found.append((f"{', '.join(here.closed)} may not be opened", "give the user the rights of the rdma group"))
    if 0 <= here.memlock < MEMLOCK:
        found.append(
            (
                f"only {gib(here.memlock)} of memory may be locked (ulimit -l)",
                "ulimit -l unlimited: docker run --ulimit memlock=-1, PropagateResourceLimitsExcept=MEMLOCK in Slurm",
            )
        )
    wanted = environment.get("NCCL_IB_HCA", "")
    if wanted and not wanted.startswith("^"):
        names = [name.split(":")[0] for name in wanted.lstrip("=").split(",")]
        exact = wanted.startswith("=")
        active = [port.device for port in there if port.active]
        if not any(device == name or (not exact and device.startswith(name)) for device in active for name in names):
            found.append(
                (
                    f"NCCL_IB_HCA={wanted} names none of the active ports ({', '.join(active)})",
                    f"NCCL_IB_HCA={active[0] if active else ''}, or unset it",
                )
            )
    found += interface_trouble(here.interfaces, environment)
    return found


def interface_trouble(interfaces: Sequence[str], environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Interfaces that the environment names and the machine has not."""
    found = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = environment.get(variable, "")
        if not wanted or wanted.startswith("^"):
            continue
        exact = wanted.startswith("=") or variable.startswith("GLOO")
        names = wanted.lstrip("=").split(",")
        if not any(one == name or (not exact and one.startswith(name)) for one in interfaces for name in names):
            found.append(
                (f"{variable}={wanted}, and there is {', '.join(interfaces)} only", f"set {variable} to one of these")
            )
    return found


def infiniband(there: Sequence[Port], why: Sequence[tuple[str, str]], gpus: int) -> Iterator[Finding]:
    """Ports, and what would keep NCCL from them."""
    values = {"ports": [port.__dict__ for port in there], "causes": [cause for cause, _ in why]}
    active, down = [port for port in there if port.active], [port for port in there if not port.active]
    if not there:
        yield Finding(CHECK, "infiniband", "ok", "no InfiniBand or RoCE ports", values=values)
        return
    if down:
        told = f"{len(down)} of {len(there)} ports are not active: {', '.join(map(str, down))}"
        yield Finding(CHECK, "ports", "note", told, "look at the cable and the subnet manager: ibstat", values=values)
    if active and why:
        # Without GPUs nothing but NCCL would use them, and gloo speaks TCP in any case.
        yield Finding(
            CHECK,
            "infiniband",
            "warning" if gpus else "note",
            f"{len(active)} active ports, which NCCL would not use: {'; '.join(cause for cause, _ in why)}",
            "; ".join(mend for _, mend in why),
            values,
        )
    elif active:
        yield Finding(CHECK, "infiniband", "ok", f"{len(active)} active: {', '.join(map(str, active))}", values=values)


def transport(
    logs: Sequence[NcclLog], there: Sequence[Port], why: Sequence[tuple[str, str]], nodes: int, peers: bool | None
) -> Iterator[Finding]:
    """What NCCL chose in a real collective, and whether something better was there.

    Args:
        logs: one of each process.
        there: ports of this machine.
        why: `causes`.
        nodes: machines that took part.
        peers: whether GPUs of this machine can read each other's memory; None if that is not known.
    """
    channels: Counter[str] = Counter()
    for log in logs:
        channels.update(log.channels or {})
    networks = sorted({log.network for log in logs if log.network})
    values = {
        "channels": dict(channels),
        "networks": networks,
        "devices": sorted({device for log in logs for device in log.devices}),
        "interfaces": sorted({one for log in logs for one in log.interfaces}),
        "gpudirect": any(log.direct for log in logs),
        "environment": sorted({one for log in logs for one in log.environment}),
        "warnings": sorted({one for log in logs for one in log.warnings}),
        "version": next((log.version for log in logs if log.version), ""),
    }
    used = ", ".join(f"{kind} ({count} channels)" for kind, count in channels.most_common()) or "no channel was named"
    told = f"NCCL {values['version']}: {used}; network {' and '.join(networks) or 'not named'}"
    sockets = "NET/Socket" in channels or "Socket" in networks
    active = [port for port in there if port.active]
    if active and sockets:
        is_infiniband = any(port.kind == "InfiniBand" for port in active)
        causes_ = "; ".join(cause for cause, _ in why) or "none of the usual causes was found"
        mends = "; ".join(mend for _, mend in why) or "run with NCCL_DEBUG=INFO and look for NET/IB"
        yield Finding(
            CHECK,
            "transport",
            "error" if is_infiniband or nodes > 1 else "warning",
            f"SOCKETS, THOUGH {len(active)} {active[0].kind.upper()} PORTS ARE ACTIVE ({active[0]}): {causes_}; {told}",
            mends,
            values,
        )
    elif nodes > 1 and sockets:
        yield Finding(
            CHECK, "transport", "note", f"{told}: TCP between machines, for want of anything faster", values=values
        )
    elif nodes > 1 and not values["gpudirect"] and "NET/IB" in channels:
        yield Finding(
            CHECK,
            "transport",
            "note",
            f"{told}, through the machine's memory (no GPUDirect RDMA)",
            "load the module nvidia_peermem, or use a driver with DMA-BUF, for twice the speed",
            values,
        )
    else:
        yield Finding(CHECK, "transport", "ok", told + (", GPUDirect RDMA" * bool(values["gpudirect"])), values=values)
    if "SHM" in channels and "P2P" not in channels and peers:
        yield Finding(
            CHECK,
            "peers",
            "warning",
            "GPUs of this machine exchange through its memory (SHM), though they could reach each other",
            "unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL; else switch off ACS in the BIOS, or the IOMMU",
            values,
        )
    if values["warnings"]:
        said = "; ".join(values["warnings"][:3])  # type: ignore[index]
        yield Finding(
            CHECK, "nccl warnings", "warning", f"NCCL warns: {said}", "its words name the call that failed", values
        )
