"""What the NVIDIA driver says of this machine's GPUs: `nvidia-smi` is asked, and its answers are read. No torch."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from esmshard.cluster.findings import Answer, Finding, Unanswered, ask, gib
from esmshard.parallel.machines import GPU, GPUS

CHECK = "gpus"

FIELDS = (
    *("index", "uuid", "name", "driver_version", "compute_cap", "memory.total", "memory.free"),
    *("ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "mig.mode.current", "compute_mode"),
    *("persistence_mode", "temperature.gpu", "clocks_throttle_reasons.active"),
)
"""Of `nvidia-smi --query-gpu`. A driver that does not know one names it, and is asked again without."""

THROTTLE = {
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Bits of clocks_throttle_reasons.active (nvml.h) that mean trouble; idle and the usual power cap do not."""

MODULE = Path("/proc/driver/nvidia/version")
MIB = 2**20


@dataclass(frozen=True)
class Card:
    """One GPU as the driver shows it; None for what it does not say."""

    index: int
    uuid: str
    name: str
    driver: str
    capability: tuple[int, int] | None
    memory_total: int | None
    """Bytes."""
    memory_free: int | None
    ecc: str | None
    ecc_errors: int | None
    """Uncorrected, since the driver was loaded."""
    mig: str | None
    compute_mode: str | None
    persistence: str | None
    temperature: int | None
    """Degrees Celsius."""
    throttle: int | None
    """Bits; see THROTTLE."""


def parse_cards(text: str, fields: Sequence[str] = FIELDS) -> list[Card]:
    """Lines of `nvidia-smi --query-gpu=FIELDS --format=csv,noheader,nounits`; MIG instances come as one GPU.

    Other lines are passed over; `lost` reads them.
    """
    cards = []
    for line in text.splitlines():
        if line.count(", ") != len(fields) - 1:
            continue
        values: dict[str, str | None] = {}
        for field, value in zip(fields, map(str.strip, line.split(", ")), strict=True):
            values[field] = None if re.fullmatch(r"\[.*\]|N/A|", value) else value
        capability = re.fullmatch(r"(\d+)\.(\d+)", values.get("compute_cap") or "")
        total, free = (_number(values.get(f"memory.{kind}")) for kind in ("total", "free"))
        cards.append(
            Card(
                index=_number(values.get("index")) or 0,
                uuid=values.get("uuid") or "",
                name=values.get("name") or "GPU",
                driver=values.get("driver_version") or "",
                capability=(int(capability[1]), int(capability[2])) if capability else None,
                memory_total=None if total is None else total * MIB,
                memory_free=None if free is None else free * MIB,
                ecc=values.get("ecc.mode.current"),
                ecc_errors=_number(values.get("ecc.errors.uncorrected.volatile.total")),
                mig=values.get("mig.mode.current"),
                compute_mode=values.get("compute_mode"),
                persistence=values.get("persistence_mode"),
                temperature=_number(values.get("temperature.gpu")),
                throttle=_number(values.get("clocks_throttle_reasons.active")),
            )
        )
    return cards


def lost(text: str, fields: Sequence[str] = FIELDS) -> Iterator[Finding]:
    """GPUs that the driver cannot reach any more; nvidia-smi says so among the lines of the others."""
    said = [line.strip() for line in text.splitlines() if line.strip() and line.count(", ") != len(fields) - 1]
    if said:
        mend = "drain the node and reboot it; `dmesg | grep -i xid` tells what happened to the GPU"
        yield Finding(CHECK, "lost", "error", f"nvidia-smi: {'; '.join(said)}", mend, {"said": said})


def visible(cards: Sequence[Card], chosen: str | None) -> list[Card]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order: numbers or beginnings of UUIDs, up to the first wrong one.

    Args:
        cards: of the machine.
        chosen: value of the variable; None if it is not set. Of instances (MIG-...) nothing is known: all are left.
    """
    if chosen is None or "MIG" in chosen:
        return list(cards)
    left = []
    for one in map(str.strip, chosen.split(",")):
        fitting = [
            card for card in cards if (one == str(card.index) or (one[:4] == "GPU-" and card.uuid.startswith(one)))
        ]
        if not fitting:
            break
        left.append(fitting[0])
    return left


def _number(text: str | None) -> int | None:
    """A number, decimal or as 0x0000000000000004; None for anything else."""
    try:
        return None if text is None else int(text, 16 if text.startswith("0x") else 10)
    except ValueError:
        return None


def parse_processes(text: str) -> dict[str, list[str]]:
    """UUID of a GPU to what runs on it, from `--query-compute-apps=gpu_uuid,pid,process_name,used_memory`."""
    found: dict[str, list[str]] = {}
    for line in filter(str.strip, text.splitlines()):
        parts = [part.strip() for part in line.split(", ")]
        if len(parts) >= 4:
            found.setdefault(parts[0], []).append(f"{Path(parts[2]).name} (pid {parts[1]}, {parts[3]} MiB)")
    return found


def module_version(text: str) -> str | None:
    """The driver's version in /proc/driver/nvidia/version; None if it is not there.

    >>> module_version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (b@c)")
    '580.65.06'
    """
    found = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+){1,2})\s", text)
    return found[1] if found else None


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Pairs of GPUs to how they are joined (NV12, PIX, PXB, PHB, NODE, SYS), from `nvidia-smi topo -m`."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]  # the heading is underlined
    columns: list[str] = []
    pairs = {}
    for line in lines:
        words = line.split()
        if not words or not words[0].startswith("GPU"):
            continue
        if not columns:
            columns = [word for word in words if re.fullmatch(r"GPU\d+|NIC\d+|mlx\w+", word)]
            continue
        row = words[0]
        if not re.fullmatch(r"GPU\d+", row):
            continue
        for column, value in zip(columns, words[1:], strict=False):
            if column.startswith("GPU") and value != "X":
                pairs[int(row[3:]), int(column[3:])] = value
    return pairs


def trouble(answer: Answer) -> Finding | None:
    """What nvidia-smi itself complains about; None if it answered."""
    if answer.code == 0:
        return None
    said = next((line.strip() for line in (answer.out + answer.err).splitlines() if line.strip()), "nothing")
    if "No devices were found" in said:
        return Finding(
            CHECK,
            "nvidia-smi",
            "error",
            "there is an NVIDIA driver, but no GPU is visible",
            "look at `dmesg | grep -i nvrm`, and whether the job or container was given a GPU",
            {"said": said},
        )
    mend = "load the driver (modprobe nvidia), and see `dmesg | grep -i nvrm`"
    if "version mismatch" in said:
        mend = "the driver was updated under a running kernel module: reboot, or reload the nvidia modules"
    return Finding(CHECK, "nvidia-smi", "error", f"nvidia-smi failed: {said}", mend, {"said": said})


def known(name: str, memory: int | None) -> GPU | None:
    """The GPU of the planner's table that a name of the driver means, the nearest in memory; None if it has none.

    >>> known("NVIDIA A100-SXM4-80GB", 81920 * 2**20).name, known("Tesla V100-SXM2-16GB", 16384 * 2**20).name
    ('A100-80GB', 'V100-16GB')
    >>> known("NVIDIA GeForce RTX 4090", None).name, known("NVIDIA A10G", None).name, known("Quadro P400", None)
    ('RTX4090-24GB', 'A10-24GB', None)
    """
    words = set(re.findall(r"[A-Z]+\d+[A-Z]*", name.upper().replace("RTX ", "RTX").replace("RTXA6000", "A6000")))
    words |= {"A10"} if "A10G" in words else set()
    fitting = [gpu for gpu in GPUS.values() if gpu.name.split("-")[0].upper() in words]
    return min(fitting, key=lambda gpu: abs(gpu.memory_bytes - (memory or gpu.memory_bytes)), default=None)


def judge(cards: Sequence[Card], processes: dict[str, list[str]]) -> Iterator[Finding]:
    """What stands in the way of a run on these GPUs."""
    for card in cards:
        yield Finding(
            CHECK,
            f"gpu {card.index}",
            "ok",
            f"{card.name}"
            + ("" if card.memory_free is None else f", {gib(card.memory_free)} of {gib(card.memory_total or 0)} free")
            + (f", {card.temperature} C" if card.temperature is not None else ""),
            values={**card.__dict__, "capability": list(card.capability or ())},
        )
    for card in cards:
        yield from _judge_card(card, processes.get(card.uuid, []))
    kinds = {(card.name, card.memory_total) for card in cards}
    if len(kinds) > 1:
        yield Finding(
            CHECK,
            "equal",
            "warning",
            f"the GPUs are unequal: {', '.join(sorted(name for name, _ in kinds))}",
            "choose equal ones with CUDA_VISIBLE_DEVICES: each step waits for the slowest, and has to fit the smallest",
        )
    if cards and all(card.persistence == "Disabled" for card in cards):
        yield Finding(
            CHECK,
            "persistence",
            "note",
            "persistence mode is off: the driver is loaded anew, seconds long, whenever nobody uses a GPU",
            "nvidia-smi -pm 1, as root",
        )


def _judge_card(card: Card, running: list[str]) -> Iterator[Finding]:
    name = f"gpu {card.index}"
    if card.memory_free is not None and card.memory_total is not None:
        used = card.memory_total - card.memory_free
        if running or used > 0.1 * card.memory_total:
            yield Finding(
                CHECK,
                f"{name} free",
                "warning",
                f"GPU {card.index} is in use: {gib(used)} of {gib(card.memory_total)}"
                + (f", by {', '.join(running)}" if running else ""),
                "wait for them or end them, or choose other GPUs with CUDA_VISIBLE_DEVICES",
                {"used": used, "processes": running},
            )
    if card.ecc_errors:
        yield Finding(
            CHECK,
            f"{name} ecc",
            "error",
            f"GPU {card.index} has had {card.ecc_errors} uncorrected memory errors",
            "drain the node and reset or replace the GPU; leave it out with CUDA_VISIBLE_DEVICES until then",
            {"errors": card.ecc_errors},
        )
    if card.mig == "Enabled":
        yield Finding(
            CHECK,
            f"{name} mig",
            "warning",
            f"GPU {card.index} is divided (MIG): a process sees one instance, and NCCL joins none of them",
            "run one process an instance with --nproc 1, or end it as root: nvidia-smi -mig 0",
        )
    if card.compute_mode == "Prohibited":
        yield Finding(
            CHECK,
            f"{name} mode",
            "error",
            f"GPU {card.index} takes no programs (compute mode Prohibited)",
            "nvidia-smi -c DEFAULT, as root",
        )
    reasons = [reason for bit, reason in THROTTLE.items() if (card.throttle or 0) & bit]
    if reasons:
        yield Finding(
            CHECK,
            f"{name} clocks",
            "warning",
            f"GPU {card.index} is slowed down: {', '.join(reasons)}"
            + (f", at {card.temperature} C" if card.temperature is not None else ""),
            "look at its cooling and power supply: nvidia-smi -q -d PERFORMANCE says more",
            {"bits": card.throttle},
        )


def joined(cards: Sequence[Card], pairs: dict[tuple[int, int], str]) -> Iterator[Finding]:
    """How these GPUs are connected, beside what the planner takes for granted."""
    here = {card.index for card in cards}
    between = {pair: kind for pair, kind in pairs.items() if pair[0] < pair[1] and here.issuperset(pair)}
    if not between:
        return
    kinds = sorted(set(between.values()))
    values = {"pairs": [[a, b, kind] for (a, b), kind in sorted(between.items())]}
    sheet = known(cards[0].name, cards[0].memory_total)
    without = [pair for pair, kind in between.items() if not kind.startswith("NV")]
    if not without:
        yield Finding(CHECK, "topology", "ok", f"NVLink between all pairs ({', '.join(kinds)})", values=values)
    elif sheet is not None and sheet.link > 100e9:
        a, b = without[0]
        yield Finding(
            CHECK,
            "topology",
            "warning",
            f"{len(without)} of {len(between)} pairs have no NVLink (GPU {a} and {b}: {between[a, b]}), though the "
            f"planner takes {sheet.link / 1e9:.0f} GB/s for granted with {sheet.name}",
            "if these have NVLink, see nvidia-smi nvlink --status; if they are PCIe cards, believe the bandwidth below "
            "and not `esmshard plan`",
            values,
        )
    else:
        across = " (SYS goes through both processors)" if "SYS" in kinds else ""
        yield Finding(CHECK, "topology", "note", f"PCIe between GPUs: {', '.join(kinds)}{across}", values=values)


@dataclass(frozen=True)
class Seen:
    """What there is of NVIDIA's on this machine."""

    driver: str | None
    cards: list[Card]
    findings: list[Finding]


def look() -> Seen:
    """Ask the driver. Never fails: what cannot be asked becomes a finding."""
    driver = module_version(MODULE.read_text(encoding="utf-8")) if MODULE.is_file() else None
    fields = list(FIELDS)
    try:
        answer = _query(fields)
        while (unknown := re.search(r'Field "([^"]+)" is not a valid field', answer.out)) and unknown[1] in fields:
            fields.remove(unknown[1])
            answer = _query(fields)
    except Unanswered as error:
        if driver is None and "not answer" not in str(error):
            return Seen(None, [], [Finding(CHECK, "nvidia-smi", "ok", "no NVIDIA driver on this machine")])
        hangs = "not answer" in str(error)
        found = Finding(
            CHECK,
            "nvidia-smi",
            "error" if hangs else "note",
            f"{error}, so nothing is known of the GPUs' state",
            "a GPU hangs: see `dmesg | grep -i xid`, and drain the node" if hangs else "",
        )
        return Seen(driver, [], [found])
    failed = trouble(answer)
    if failed is not None:
        return Seen(driver, [], [failed])
    cards = parse_cards(answer.out, fields)
    driver = cards[0].driver if cards and cards[0].driver else driver
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    all_of_them, cards = len(cards), visible(cards, chosen)
    findings = [*lost(answer.out, fields), *judge(cards, _processes())]
    if len(cards) < all_of_them:
        told = f"CUDA_VISIBLE_DEVICES={chosen} leaves {len(cards)} of {all_of_them} GPUs"
        findings.append(Finding(CHECK, "visible", "note", told, values={"visible": [card.index for card in cards]}))
    if len(cards) > 1:
        topology = ask(["nvidia-smi", "topo", "-m"])
        findings += joined(cards, parse_topology(topology.out)) if topology.code == 0 else []
    return Seen(driver, cards, findings)


def _query(fields: Sequence[str]) -> Answer:
    return ask(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])


def _processes() -> dict[str, list[str]]:
    answer = ask(
        ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    )
    return parse_processes(answer.out) if answer.code == 0 else {}
