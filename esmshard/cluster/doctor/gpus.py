"""The state of this machine's GPUs, from the CSV output and the exit codes of `nvidia-smi`. No torch."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esmshard.cluster.doctor.findings import Answer, Finding, Level, Unanswered, ask, gib
from esmshard.planner.machines import data_sheet

GROUP = "gpus"

FIELDS = (
    *("index", "uuid", "name", "driver_version", "compute_cap", "memory.total", "memory.free"),
    *("ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "mig.mode.current", "compute_mode"),
    *("persistence_mode", "temperature.gpu"),
)
"""The fields of `nvidia-smi --query-gpu`, which drivers have from version 510 on."""
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""One more field, under its names from driver 535 on and before."""
INVALID = 2
"""The exit code of nvidia-smi for an unknown argument."""

THROTTLE = {0x08: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
"""The bits of REASONS (nvml.h) that show a problem. Idle clocks and the usual power limit show none."""

EXIT_CODES = {  # "RETURN VALUE" in nvidia-smi(1), and nvmlReturn_t
    INVALID: "update the driver: nvidia-smi does not know what drivers since 510 know",
    6: "check that the job or container was given a GPU (--gres=gpu, docker run --gpus all); else see dmesg",
    9: "load the driver (modprobe nvidia); `dmesg | grep -i nvrm` shows why it was not loaded",
    12: "start the container with the driver's libraries: docker run --gpus all, apptainer --nv",
    18: "the driver was updated under a running kernel module: reboot, or reload the nvidia modules",
}
LOST = "drain the node and reboot it; `dmesg | grep -i xid` shows what happened to the GPU"
"""The fix for any other exit code, such as 15 for a GPU that has fallen off the bus."""

MODULE = Path("/proc/driver/nvidia/version")
MIB = 2**20


@dataclass(frozen=True)
class Card:
    """One GPU as the driver reports it. Values that the driver leaves out are None."""

    index: int
    uuid: str
    name: str
    driver: str
    capability: tuple[int, int] | None
    memory_total: int | None
    """The memory in bytes."""
    memory_free: int | None
    ecc: str | None
    ecc_errors: int | None
    """The number of uncorrected errors since the driver was loaded."""
    mig: str | None
    compute_mode: str | None
    persistence: str | None
    temperature: int | None
    """The temperature in degrees Celsius."""
    throttle: int | None
    """The reasons for lower clocks, as bits; see THROTTLE."""


def parse_cards(text: str) -> tuple[list[Card], list[str]]:
    """Read the output of `nvidia-smi --query-gpu=FIELDS,REASONS --format=csv,noheader,nounits`.

    Returns:
        The GPUs, where a divided one (MIG) counts as one; and the lines that are no rows of the table.
    """
    cards, others = [], []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [None if re.fullmatch(r"\[.*\]|N/A|", cell) else cell for cell in map(str.strip, line.split(", "))]
        if len(cells) != len(FIELDS) + 1:
            others.append(line)
            continue
        index, uuid, name, driver, capability, total, free, ecc, errors, mig, mode, persistence, heat, bits = cells
        major, _, minor = (capability or "").partition(".")
        cards.append(
            Card(
                index=_number(index) or 0,
                uuid=uuid or "",
                name=name or "GPU",
                driver=driver or "",
                capability=(int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None,
                memory_total=_number(total, MIB),
                memory_free=_number(free, MIB),
                ecc=ecc,
                ecc_errors=_number(errors),
                mig=mig,
                compute_mode=mode,
                persistence=persistence,
                temperature=_number(heat),
                throttle=_number(bits),
            )
        )
    return cards, others


def _number(text: str | None, unit: int = 1) -> int | None:
    """Read a number, decimal or as 0x0000000000000004; None for anything else."""
    try:
        return None if text is None else unit * int(text, 16 if text.startswith("0x") else 10)
    except ValueError:
        return None


def visible(cards: Sequence[Card], chosen: str | None) -> list[Card]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, in its order: numbers or beginnings of UUIDs, up to the first wrong one.

    Args:
        cards: the GPUs of the machine.
        chosen: the value of the variable; None if it is not set. nvidia-smi does not list instances (MIG-...) here, so
            for these all GPUs are returned.
    """
    if chosen is None or "MIG" in chosen:
        return list(cards)
    left = []
    for one in map(str.strip, chosen.split(",")):
        fitting = [
            card for card in cards if one == str(card.index) or (one[:4] == "GPU-" and card.uuid.startswith(one))
        ]
        if not fitting:
            break
        left.append(fitting[0])
    return left


def parse_processes(text: str) -> dict[str, list[str]]:
    """Read the programs on each GPU, by its UUID, from `--query-compute-apps=gpu_uuid,pid,process_name,used_memory`."""
    found: dict[str, list[str]] = {}
    for parts in (line.strip().split(", ") for line in text.splitlines()):
        if len(parts) >= 4:
            found.setdefault(parts[0], []).append(f"{Path(parts[2]).name} (pid {parts[1]}, {parts[3]} MiB)")
    return found


def module_version(text: str) -> str | None:
    """Return the driver's version in the text of /proc/driver/nvidia/version; None if there is none.

    >>> module_version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (b@c)")
    '580.65.06'
    """
    found = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+){1,2})\s", text)
    return found[1] if found else None


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Read how pairs of GPUs are connected (NV12, PIX, PXB, PHB, NODE, SYS), from `nvidia-smi topo -m`."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]  # the heading is underlined
    table = [words for words in lines if words and re.fullmatch(r"GPU\d+", words[0])]
    if not table:
        return {}
    columns = [word for word in table[0] if re.fullmatch(r"GPU\d+", word)]  # these columns come first
    return {
        (int(words[0][3:]), int(column[3:])): kind
        for words in table[1:]
        for column, kind in zip(columns, words[1:], strict=False)
        if kind != "X"
    }


def judge(cards: Sequence[Card], processes: dict[str, list[str]]) -> Iterator[Finding]:
    """Yield the problems of these GPUs."""
    for card in cards:
        free = "" if card.memory_free is None else f", {gib(card.memory_free)} of {gib(card.memory_total or 0)} free"
        heat = "" if card.temperature is None else f", {card.temperature} C"
        values = {**card.__dict__, "capability": list(card.capability or ())}
        yield Finding(GROUP, f"gpu {card.index}", "ok", f"{card.name}{free}{heat}", values=values)
    for card in cards:
        for name, level, found, fix, values in _troubles(card, processes.get(card.uuid, [])):
            yield Finding(GROUP, f"gpu {card.index} {name}", level, f"GPU {card.index} {found}", fix, values)
    kinds = {(card.name, card.memory_total) for card in cards}
    if len(kinds) > 1:
        found = f"the GPUs are unequal: {', '.join(sorted(name for name, _ in kinds))}"
        fix = (
            "choose equal ones with CUDA_VISIBLE_DEVICES: each step waits for the slowest, and has to fit the smallest"
        )
        yield Finding(GROUP, "equal", "warning", found, fix)
    if cards and all(card.persistence == "Disabled" for card in cards):
        found = "persistence mode is off: the driver is loaded again, for seconds, whenever no program uses a GPU"
        yield Finding(GROUP, "persistence", "note", found, "nvidia-smi -pm 1, as root")


def _troubles(card: Card, running: list[str]) -> Iterator[tuple[str, Level, str, str, dict[str, Any]]]:
    """Yield name, level, sentence, fix and values of each problem of a GPU."""
    total, free = card.memory_total or 0, card.memory_free
    used = 0 if free is None else total - free
    if running or used > 0.1 * total:
        by = f", by {', '.join(running)}" if running else ""
        fix = "wait for these programs or end them, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        values = {"used": used, "processes": running}
        yield "free", "warning", f"is in use: {gib(used)} of {gib(total)}{by}", fix, values
    if card.ecc_errors:
        fix = "drain the node and reset or replace the GPU; until then leave it out with CUDA_VISIBLE_DEVICES"
        yield "ecc", "error", f"has had {card.ecc_errors} uncorrected memory errors", fix, {"errors": card.ecc_errors}
    if card.mig == "Enabled":
        fix = "run one process on each instance with --nproc 1, or switch MIG off as root: nvidia-smi -mig 0"
        yield "mig", "warning", "is divided (MIG): a process sees one instance, and NCCL connects none", fix, {}
    if card.compute_mode == "Prohibited":
        yield "mode", "error", "takes no programs (compute mode Prohibited)", "nvidia-smi -c DEFAULT, as root", {}
    reasons = [reason for bit, reason in THROTTLE.items() if (card.throttle or 0) & bit]
    if reasons:
        heat = "" if card.temperature is None else f", at {card.temperature} C"
        fix = "check its cooling and power supply: nvidia-smi -q -d PERFORMANCE shows more"
        yield "clocks", "warning", f"is slowed down: {', '.join(reasons)}{heat}", fix, {"bits": card.throttle}


def connections(cards: Sequence[Card], pairs: dict[tuple[int, int], str]) -> Iterator[Finding]:
    """Compare the connections of these GPUs with the planner's assumption."""
    present = {card.index for card in cards}
    between = {pair: kind for pair, kind in pairs.items() if pair[0] < pair[1] and present.issuperset(pair)}
    if not between:
        return
    kinds = ", ".join(sorted(set(between.values())))
    values = {"pairs": [[a, b, kind] for (a, b), kind in sorted(between.items())]}
    sheet = data_sheet(cards[0].name, cards[0].memory_total)
    without = [pair for pair, kind in between.items() if not kind.startswith("NV")]
    if not without:
        yield Finding(GROUP, "topology", "ok", f"NVLink between all pairs ({kinds})", values=values)
    elif sheet is not None and sheet.link > 100e9:
        (a, b), speed = without[0], sheet.link / 1e9
        found = f"{len(without)} of {len(between)} pairs have no NVLink (GPU {a} and {b}: {between[a, b]}), but the "
        found += f"planner assumes {speed:.0f} GB/s for {sheet.name}"
        fix = "if these GPUs have NVLink, see nvidia-smi nvlink --status; if they are PCIe cards, trust the bandwidth "
        yield Finding(GROUP, "topology", "warning", found, f"{fix}below and not `esmshard plan`", values)
    else:
        across = " (SYS goes through both processors)" if "SYS" in kinds else ""
        yield Finding(GROUP, "topology", "note", f"PCIe between GPUs: {kinds}{across}", values=values)


@dataclass(frozen=True)
class Seen:
    """The NVIDIA driver and GPUs of this machine."""

    driver: str | None
    cards: list[Card]
    findings: list[Finding]


def query() -> Seen:
    """Call nvidia-smi. Missing answers become findings."""
    driver = module_version(MODULE.read_text(encoding="utf-8")) if MODULE.is_file() else None
    try:
        for reasons in REASONS:
            answer = _smi(f"--query-gpu={','.join((*FIELDS, reasons))}")
            if answer.code != INVALID:
                break
    except Unanswered as error:
        name, found = "nvidia-smi", f"{error}, so the state of the GPUs is not known"
        if error.hangs:
            return Seen(driver, [], [Finding(GROUP, name, "error", found, f"a GPU hangs: {LOST}")])
        if driver is None:
            return Seen(None, [], [Finding(GROUP, name, "ok", "no NVIDIA driver on this machine")])
        return Seen(driver, [], [Finding(GROUP, name, "note", found)])
    every, others = parse_cards(answer.out)
    findings = []
    if answer.code or others:
        message = "; ".join([*others, *answer.err.split("\n")]).strip("; ") or "no message"
        found = f"nvidia-smi (exit code {answer.code}): {message}"
        fix = EXIT_CODES.get(answer.code, LOST)
        findings.append(Finding(GROUP, "nvidia-smi", "error", found, fix, {"code": answer.code, "said": others}))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = visible(every, chosen)
    running = _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory") if cards else Answer(0, "", "")
    findings += judge(cards, parse_processes(running.out) if running.code == 0 else {})
    if len(cards) < len(every):
        found = f"CUDA_VISIBLE_DEVICES={chosen} leaves {len(cards)} of {len(every)} GPUs"
        findings.append(Finding(GROUP, "visible", "note", found, values={"visible": [card.index for card in cards]}))
    if len(cards) > 1:
        topology = ask(["nvidia-smi", "topo", "-m"])
        findings += connections(cards, parse_topology(topology.out)) if topology.code == 0 else []
    return Seen(every[0].driver if every else driver, cards, findings)


def _smi(question: str) -> Answer:
    return ask(["nvidia-smi", question, "--format=csv,noheader,nounits"])
