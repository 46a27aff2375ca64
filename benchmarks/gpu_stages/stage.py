"""The stages of the GPU benchmarks: their parts, the run of a part, and the record of results.

A stage is a list of parts. A part is one measurement with its own result.
"""

import json
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import gpu_device
import measure
import torch
from measure import table
from random_models import SHORT

from esmshard.model.families.esm2 import TransformerLayer

REHEARSED = "nano"
"""The model that is used for all models in a rehearsal."""
GIB = 2**30


class FailedError(Exception):
    """A part was measured, and its result is wrong. `found` is kept beside the reason."""

    def __init__(self, reason: str, found: "Found") -> None:
        super().__init__(reason)
        self.found = found


class NotRunError(Exception):
    """A part cannot be run on this machine. The message is one sentence with the reason."""


@dataclass(frozen=True)
class Figure:
    """One number of the summary."""

    value: float
    unit: str = ""
    """The unit: `%` shows a share as per cent; any other unit is printed after the number."""
    least: float | None = None
    """The target that the value should not be below."""
    most: float | None = None
    """The target that the value should not be above."""

    def __str__(self) -> str:
        return _number(self.value, self.unit)

    def target(self) -> str:
        """Return the target in words, and whether it is reached; empty without a target."""
        words = []
        if self.least is not None:
            words.append(f"at least {_number(self.least, self.unit)}: {'yes' if self.value >= self.least else 'no'}")
        if self.most is not None:
            words.append(f"at most {_number(self.most, self.unit)}: {'yes' if self.value <= self.most else 'no'}")
        return ", ".join(words)


def _number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.1%}"
    return f"{value:,.0f} {unit}".strip() if abs(value) >= 100 else f"{value:.3g} {unit}".strip()


@dataclass(frozen=True)
class Found:
    """The result of a part."""

    text: str
    """The Markdown text: tables and sentences, without a heading."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """The numbers for the summary, by their names."""
    data: Any = None
    """All measurements, in a form for JSON."""


@dataclass(frozen=True)
class Context:
    """The environment in which a part runs."""

    device: torch.device
    rehearsal: bool
    """Whether this is the CPU rehearsal, with tiny models and little data."""
    out: Path
    """The directory of the results, for additional files."""
    scratch: Path
    """A directory that is removed when the part ends."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the arithmetic: bf16 on a GPU; fp32 on the CPU, because bf16 is slow there."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def precision(self) -> Literal["bf16", "fp32"]:
        """The precision of the arithmetic, by its name in recipes."""
        return "bf16" if self.device.type == "cuda" else "fp32"

    def model(self, short: str) -> str:
        """Return the key of SIZES for a short name such as 650M."""
        return REHEARSED if self.rehearsal else SHORT[short]

    def amount(self, real: int, rehearsed: int) -> int:
        """Return the size for a real run, or the size for a rehearsal."""
        return rehearsed if self.rehearsal else real


@dataclass(frozen=True)
class Part:
    """One measurement."""

    name: str
    seconds: float
    """The expected seconds on an H200. The part is not begun if less time is left."""
    run: Callable[[Context], Found]
    memory: float = 0.0
    """How many bytes of the GPU must be free."""
    disk: float = 0.0
    """How many bytes must be free in the scratch directory."""
    when: Literal["always", "gpu", "rehearsal"] = "always"
    """`gpu` is for a part that a rehearsal leaves out, because another part of the rehearsal runs the same code."""


@dataclass(frozen=True)
class Stage:
    """A group of measurements, the most valuable first."""

    name: str
    about: str
    """A description in one sentence."""
    parts: tuple[Part, ...]

    def chosen(self, *, rehearsal: bool) -> list[Part]:
        """Return the parts that run on a GPU, or in a rehearsal."""
        return [part for part in self.parts if part.when in ("always", "rehearsal" if rehearsal else "gpu")]


class Record:
    """The JSON and Markdown files of one stage. Files of an earlier run are read again."""

    def __init__(self, out: Path, stage: str, *, rehearsal: bool) -> None:
        kind = "gpu-rehearsal" if rehearsal else "gpu"
        earlier = sorted(out.glob(f"????-??-??-{kind}-{stage}.json"))
        self.path = earlier[-1] if earlier else out / f"{time.strftime('%Y-%m-%d')}-{kind}-{stage}.json"
        self.content: dict[str, Any] = {"stage": stage, "rehearsal": rehearsal, "about": {}, "command": "", "parts": {}}
        if earlier:
            self.content = json.loads(self.path.read_text(encoding="utf-8"))

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """The recorded facts of each part so far, by name."""
        parts: dict[str, dict[str, Any]] = self.content["parts"]
        return parts

    def note(self, part: str, entry: dict[str, Any]) -> dict[str, Any]:
        """Add the entry of a part, and write both files, each as a whole."""
        self.parts[part] = entry | {"time": time.strftime("%Y-%m-%d %H:%M:%S")}
        for path, text in (
            (self.path, json.dumps(self.content, indent=1) + "\n"),
            (self.path.with_suffix(".md"), markdown(self.content)),
        ):
            work = path.with_name(f".{path.name}.new")
            work.write_text(text, encoding="utf-8")
            work.replace(path)
        return self.parts[part]


def markdown(content: Mapping[str, Any]) -> str:
    """Return the Markdown file of a stage."""
    date = min((entry["time"][:10] for entry in content["parts"].values()), default="")
    title = "Rehearsal on the CPU" if content["rehearsal"] else "GPU"
    lines = [f"# {title}, stage {content['stage']}, {date}".rstrip(", "), "", f"`{content['command']}`", ""]
    lines += [", ".join(f"{key} {value}" for key, value in content["about"].items()), ""]
    for name, entry in content["parts"].items():
        lines += [f"## {name}", ""]
        if entry["state"] != "done":
            lines += [f"**{entry['state']}**" + (f": {entry['reason']}" if entry.get("reason") else ""), ""]
        if entry.get("text"):
            lines += [entry["text"].rstrip(), ""]
        if entry.get("figures"):
            rows = [(what, Figure(**figure)) for what, figure in entry["figures"].items()]
            lines += table(["", "value", "target"], [[what, str(f), f.target()] for what, f in rows])
        if "seconds" in entry:
            clocks = f"; clocks before and after: {entry['clocks']}" if entry.get("clocks") else ""
            lines += [f"Took {entry['seconds']:.0f} s{clocks}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def run_part(part: Part, context: Context) -> tuple[dict[str, str], dict[str, Any]]:
    """Run one part in this process. Return the facts of the machine, and the entry of the part for its record."""
    about = {**measure.facts(context.device), **gpu_device.about(context.device)}
    began, before = time.time(), gpu_device.clocks(context.device)
    found = None
    entry: dict[str, Any] = {"state": "done"}
    try:
        _check_room(part, context)
        found = part.run(context)
    except NotRunError as reason:
        entry = {"state": "not run", "reason": str(reason)}
    except FailedError as failed:
        entry, found = {"state": "failed", "reason": str(failed)}, failed.found
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        entry = {"state": "failed", "reason": reason}
    clocks = [c for c in (before, gpu_device.clocks(context.device)) if c]
    entry |= {"seconds": round(time.time() - began, 1), "clocks": "; ".join(clocks)}
    if found is not None:
        figures = {what: asdict(figure) for what, figure in found.figures.items()}
        entry |= {"text": found.text, "data": found.data, "figures": figures}
    return about, entry


def _check_room(part: Part, context: Context) -> None:
    """Raise `NotRunError` if the memory of the GPU or the disk is too small for a part."""
    if context.device.type == "cuda" and part.memory > (free := torch.cuda.mem_get_info()[0]):
        raise NotRunError(f"it needs {part.memory / GIB:.0f} GiB of the GPU, and {free / GIB:.0f} GiB are free")
    room = shutil.disk_usage(context.scratch).free
    if not context.rehearsal and part.disk > room:
        where = f"{context.scratch.parent}; set TMPDIR to a larger disk"
        raise NotRunError(f"it needs {part.disk / GIB:.0f} GiB of disk, and {room / GIB:.0f} GiB are free in {where}")


def context_of(device: torch.device, out: Path, scratch: Path, *, rehearsal: bool) -> Context:
    """Make the context of a part's process, and set the environment for benchmarks."""
    if rehearsal:
        measure.CEILING_SECONDS = 0.02
        measure.CEILING_WIDTH = {"cpu": 256}  # a wide product takes longer than all other work of a rehearsal
        compile_layer = TransformerLayer.compile

        def without_code_generation(layer: TransformerLayer, **options: Any) -> None:
            compile_layer(layer, **{**options, "backend": "eager"})

        # torch captures the same graphs; to differentiate them and to generate C++ from them would take a minute.
        TransformerLayer.compile = without_code_generation  # type: ignore[method-assign, assignment]
    else:
        measure.GO_ON = True
        measure.CEILING_SECONDS = 0.4  # the matrix product of a GPU takes 1.4 ms, so short runs are enough
    return Context(device, rehearsal, out, scratch)
