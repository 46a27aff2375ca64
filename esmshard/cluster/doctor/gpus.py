"""The state of this machine's GPUs, from the CSV output and the exit codes of `nvidia-smi`. No torch."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from esmshard.cluster.doctor.findings import Answer, Finding, Hangs, Level, Unanswered, ask, first_case, gib

GROUP = "gpus"

REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The last field of `nvidia-smi --query-gpu`, under its names from driver 535 on and before."""
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

MODULE = Path("/sys/module/nvidia/version")
"""The version of the loaded driver, for containers without nvidia-smi."""


FIELDS = (
    *("index", "uuid", "name", "driver_version", "compute_cap", "memory.total", "memory.free"),
    *("ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "mig.mode.current", "compute_mode"),
    *("persistence_mode", "temperature.gpu"),
)
"""The fields of `nvidia-smi --query-gpu` for `Card`, in its order. Drivers have them from version 510 on."""


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
        cells = [_value(cell.strip()) for cell in line.split(", ")]
        if len(cells) != len(FIELDS) + 1:
            others.append(line)
            continue
        row = dict(zip((one.name for one in fields(Card)), cells, strict=True))
        major, _, minor = (row["capability"] or "").partition(".")
        row["capability"] = (int(major), int(minor)) if minor else None
        for name in ("memory_total", "memory_free"):
            row[name] = None if row[name] is None else row[name] << 20
        cards.append(Card(**row))
    return cards, others


def _value(text: str) -> Any:
    """Read a cell: a number, decimal or as 0x0000000000000004; None for [N/A] or [Unknown Error]; else its text."""
    if re.fullmatch(r"\[.*\]|N/A|", text):
        return None
    return int(text, 0) if re.fullmatch(r"0x[0-9a-fA-F]+|0|[1-9]\d*", text) else text


def visible(cards: Sequence[Card], chosen: str | None) -> list[Card]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, in its order: numbers or beginnings of UUIDs, up to the first wrong one.

    nvidia-smi does not list instances (MIG-...) here, so all GPUs are returned for these, as for an unset variable.
    """
    if chosen is None or "MIG" in chosen:
        return list(cards)
    found: list[Card] = []
    for one in map(str.strip, chosen.split(",")):
        fitting = [c for c in cards if one == str(c.index) or (one.startswith("GPU-") and c.uuid.startswith(one))]
        if not fitting:
            break
        found += fitting[:1]
    return found


def parse_processes(text: str) -> dict[str, list[str]]:
    """Read the programs on each GPU, by its UUID, from `--query-compute-apps=gpu_uuid,pid,process_name,used_memory`."""
    found: dict[str, list[str]] = {}
    for parts in (line.strip().split(", ") for line in text.splitlines()):
        if len(parts) >= 4:
            found.setdefault(parts[0], []).append(f"{Path(parts[2]).name} (pid {parts[1]}, {parts[3]} MiB)")
    return found


def judge(cards: Sequence[Card], processes: dict[str, list[str]]) -> Iterator[Finding]:
    """Yield the problems of these GPUs. `processes` has the programs that run on each, by its UUID."""
    for card in cards:
        heat = "" if card.temperature is None else f", {card.temperature} C"
        free = "" if card.memory_free is None else f", {gib(card.memory_free)} of {gib(card.memory_total or 0)} free"
        values = asdict(card) | {"capability": list(card.capability or ())}
        yield Finding(GROUP, f"gpu {card.index}", "ok", f"{card.name}{free}{heat}", values=values)
    for card in cards:
        for name, level, found, fix, values in _troubles(card, processes.get(card.uuid, [])):
            yield Finding(GROUP, f"gpu {card.index} {name}", level, f"GPU {card.index} {found}", fix, values)
    kinds = sorted({(card.name, card.memory_total or 0) for card in cards})
    if len(kinds) > 1:
        found = f"the GPUs are unequal: {', '.join(name for name, _ in kinds)}"
        fix = "choose equal ones with CUDA_VISIBLE_DEVICES: each step waits for the slowest, and must fit the smallest"
        yield Finding(GROUP, "equal", "warning", found, fix)
    if cards and all(card.persistence == "Disabled" for card in cards):
        found = "persistence mode is off: the driver is loaded again, for seconds, whenever no program uses a GPU"
        yield Finding(GROUP, "persistence", "note", found, "nvidia-smi -pm 1, as root")


def _troubles(card: Card, running: list[str]) -> Iterator[tuple[str, Level, str, str, dict[str, Any]]]:
    """Yield name, level, sentence, fix and values of each problem of a GPU."""
    total = card.memory_total or 0
    used = 0 if card.memory_free is None else total - card.memory_free
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
    if reasons := [reason for bit, reason in THROTTLE.items() if (card.throttle or 0) & bit]:
        heat = "" if card.temperature is None else f", at {card.temperature} C"
        fix = "check its cooling and power supply: nvidia-smi -q -d PERFORMANCE shows more"
        yield "clocks", "warning", f"is slowed down: {', '.join(reasons)}{heat}", fix, {"bits": card.throttle}


@dataclass
class Seen:
    """The NVIDIA driver and the visible GPUs of this machine, as `check` finds them."""

    driver: str | None = None
    cards: list[Card] = field(default_factory=list)


def check(seen: Seen) -> Iterator[Finding]:
    """Call nvidia-smi, fill `seen`, and yield findings; missing answers are findings, too."""
    seen.driver = MODULE.read_text(encoding="utf-8").strip() if MODULE.is_file() else None
    try:
        for reasons in REASONS:
            answer = _smi(f"--query-gpu={','.join((*FIELDS, reasons))}")
            if answer.code != INVALID:
                break
    except Unanswered as error:
        found = f"{error}, so the state of the GPUs is not known"
        yield first_case(
            GROUP,
            "nvidia-smi",
            "no NVIDIA driver on this machine",
            {},
            (isinstance(error, Hangs), "error", found, f"a GPU hangs: {LOST}"),
            (seen.driver, "note", found, ""),
        )
        return
    every, others = parse_cards(answer.out)
    if answer.code or others:
        message = "; ".join([*others, *answer.err.split("\n")]).strip("; ") or "no message"
        found, fix = f"nvidia-smi (exit code {answer.code}): {message}", EXIT_CODES.get(answer.code, LOST)
        yield Finding(GROUP, "nvidia-smi", "error", found, fix, {"code": answer.code, "said": others})
    if not every:
        return
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen.driver, seen.cards = every[0].driver, visible(every, chosen)
    running = _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    yield from judge(seen.cards, {} if running.code else parse_processes(running.out))
    if len(seen.cards) < len(every):
        found = f"CUDA_VISIBLE_DEVICES={chosen} leaves {len(seen.cards)} of {len(every)} GPUs"
        yield Finding(GROUP, "visible", "note", found, values={"visible": [card.index for card in seen.cards]})


def _smi(question: str) -> Answer:
    return ask(["nvidia-smi", question, "--format=csv,noheader,nounits"])
