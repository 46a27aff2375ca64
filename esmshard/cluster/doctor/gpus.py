"""The state of this machine's GPUs, from the CSV output and the exit codes of `nvidia-smi`. No torch."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from esmshard.cluster.doctor.findings import Finding
from esmshard.files import memory_text

ANSWER = 15.0
"""Seconds to wait for nvidia-smi, which takes two or three without persistence mode."""

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
    """Read the answer to `--query-gpu=FIELDS,REASONS`: the GPUs, of which a divided one (MIG) counts as one, and the
    lines that are no rows of the table.
    """
    cards, others = [], []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [_value(cell.strip()) for cell in line.split(", ")]
        if len(cells) != len(FIELDS) + 1:
            others.append(line)
            continue
        index, uuid, name, driver, capability, total, free, *more = cells
        major, _, minor = (capability or "").partition(".")
        pair = (int(major), int(minor)) if minor else None
        cards.append(Card(index, uuid, name, driver, pair, total and total << 20, free and free << 20, *more))
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
        yield from _judge_card(card, processes.get(card.uuid, []))
    kinds = sorted({(card.name, card.memory_total or 0) for card in cards})
    if len(kinds) > 1:
        found = f"the GPUs are unequal: {', '.join(name for name, _ in kinds)}"
        fix = "choose equal ones with CUDA_VISIBLE_DEVICES: each step waits for the slowest, and must fit the smallest"
        yield Finding("equal", "warning", found, fix)
    if cards and all(card.persistence == "Disabled" for card in cards):
        found = "persistence mode is off: the driver is loaded again, for seconds, whenever no program uses a GPU"
        yield Finding("persistence", "note", found, "nvidia-smi -pm 1, as root")


def _judge_card(card: Card, running: list[str]) -> Iterator[Finding]:
    gpu, total = f"gpu {card.index}", card.memory_total or 0
    heat = "" if card.temperature is None else f"{card.temperature} C"
    free = "" if card.memory_free is None else f", {memory_text(card.memory_free)} of {memory_text(total)} free"
    values = asdict(card) | {"capability": list(card.capability or ())}
    yield Finding(gpu, "ok", f"{card.name}{free}{heat and f', {heat}'}", values=values)
    used = 0 if card.memory_free is None else total - card.memory_free
    if running or used > 0.1 * total:
        found = f"GPU {card.index} is in use: {memory_text(used)} of {memory_text(total)}"
        found += f", by {', '.join(running)}" if running else ""
        fix = "wait for these programs or end them, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        yield Finding(f"{gpu} free", "warning", found, fix, {"used": used, "processes": running})
    if card.ecc_errors:
        found = f"GPU {card.index} has had {card.ecc_errors} uncorrected memory errors"
        fix = "drain the node and reset or replace the GPU; until then leave it out with CUDA_VISIBLE_DEVICES"
        yield Finding(f"{gpu} ecc", "error", found, fix, {"errors": card.ecc_errors})
    if card.mig == "Enabled":
        found = f"GPU {card.index} is divided (MIG): a process sees one instance, and NCCL connects none"
        fix = "run one process on each instance with --nproc 1, or switch MIG off as root: nvidia-smi -mig 0"
        yield Finding(f"{gpu} mig", "warning", found, fix)
    if card.compute_mode == "Prohibited":
        found = f"GPU {card.index} takes no programs (compute mode Prohibited)"
        yield Finding(f"{gpu} mode", "error", found, "nvidia-smi -c DEFAULT, as root")
    if reasons := [reason for bit, reason in THROTTLE.items() if (card.throttle or 0) & bit]:
        found = f"GPU {card.index} is slowed down: {', '.join(reasons)}{heat and f', at {heat}'}"
        fix = "check its cooling and power supply: nvidia-smi -q -d PERFORMANCE shows more"
        yield Finding(f"{gpu} clocks", "warning", found, fix, {"bits": card.throttle})


def driver() -> str | None:
    """Return the version of the loaded NVIDIA driver; None without one. Containers without nvidia-smi have it, too."""
    return MODULE.read_text(encoding="utf-8").strip() if MODULE.is_file() else None


def check(cards: list[Card]) -> Iterator[Finding]:
    """Call nvidia-smi, append the visible GPUs to `cards`, and yield findings; missing answers are findings, too."""
    unknown = "so the state of the GPUs is not known"
    try:
        for reasons in REASONS:
            answer = nvidia_smi(f"--query-gpu={','.join((*FIELDS, reasons))}")
            if answer.returncode != INVALID:
                break
        running = nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    except subprocess.TimeoutExpired:
        found = f"nvidia-smi did not answer within {ANSWER:g} s, {unknown}"
        yield Finding("nvidia-smi", "error", found, f"a GPU hangs: {LOST}")
        return
    except OSError as error:
        found = f"nvidia-smi cannot be run ({(error.strerror or str(error)).lower()}), {unknown}"
        none = Finding("nvidia-smi", "ok", "no NVIDIA driver on this machine")
        yield Finding("nvidia-smi", "note", found) if driver() else none
        return
    every, others = parse_cards(answer.stdout)
    if answer.returncode or others:
        message = "; ".join([*others, *answer.stderr.split("\n")]).strip("; ") or "no message"
        found = f"nvidia-smi (exit code {answer.returncode}): {message}"
        fix = EXIT_CODES.get(answer.returncode, LOST)
        yield Finding("nvidia-smi", "error", found, fix, {"code": answer.returncode, "said": others})
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards += visible(every, chosen)
    yield from judge(cards, {} if running.returncode else parse_processes(running.stdout))
    if len(cards) < len(every):
        found = f"CUDA_VISIBLE_DEVICES={chosen} leaves {len(cards)} of {len(every)} GPUs"
        yield Finding("visible", "note", found, values={"visible": [card.index for card in cards]})


def nvidia_smi(query: str, form: str = "csv,noheader,nounits", *more: str) -> "subprocess.CompletedProcess[str]":
    """Run nvidia-smi. `OSError` if it cannot be run, `subprocess.TimeoutExpired` if it does not answer."""
    command = ["nvidia-smi", query, f"--format={form}", *more]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ANSWER, check=False)  # noqa: S603
