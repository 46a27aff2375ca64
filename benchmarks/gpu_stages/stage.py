"""The stages of the GPU benchmarks: their parts, the run of the parts one after the other, and the record of results.

A stage is a list of parts. A part is one measurement with its own result. After each part the stage's JSON and Markdown
are written again, so that no result is lost if the process ends. A second run over the same directory continues with
the parts that have no result yet.
"""

import gc
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import gpu_device
import measure
import torch
from random_models import SHORT

from esmshard.model.families.esm2 import TransformerLayer

REHEARSED = "nano"
"""The model that is used for all models in a rehearsal."""
GIB = 2**30

State = Literal["running", "done", "failed", "not run"]

LOST = 3
"""The exit code of a stage whose CUDA context is lost. The stage is started again and continues with the next part."""


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
    """The environment in which parts of a stage run."""

    device: torch.device
    rehearsal: bool
    """Whether this is the CPU rehearsal, with tiny models and little data."""
    out: Path
    """The directory of the results, for additional files."""
    scratch: Path
    """A directory that is removed when the stage ends."""
    deadline: float
    """The time at which the stage must end, in seconds since 1970."""
    starter_data: Path | None = None
    """The directory that `data/starter/build.py` has written."""

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

    def seconds_left(self) -> float:
        """Return the seconds until the stage must end."""
        return self.deadline - time.time()


@dataclass(frozen=True)
class Part:
    """One measurement."""

    name: str
    seconds: float
    """The expected seconds on an H200. The part is not begun if less time is left, and is ended after three times
    as long."""
    run: Callable[[Context], Found]
    memory: float = 0.0
    """The bytes of the GPU that must be free."""
    disk: float = 0.0
    """The bytes that must be free in the scratch directory."""
    when: Literal["always", "gpu", "rehearsal"] = "always"
    """`gpu` is for a part that a rehearsal leaves out, since a part with `rehearsal` runs the same code."""


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

    @property
    def seconds(self) -> float:
        """The expected seconds of all parts on an H200."""
        return sum(part.seconds for part in self.chosen(rehearsal=False))


class Record:
    """The JSON and Markdown files of one stage. Files of an earlier run are read again."""

    def __init__(self, out: Path, stage: str, *, rehearsal: bool) -> None:
        kind = "gpu-rehearsal" if rehearsal else "gpu"
        earlier = sorted(out.glob(f"????-??-??-{kind}-{stage}.json"))
        self.path = earlier[-1] if earlier else out / f"{time.strftime('%Y-%m-%d')}-{kind}-{stage}.json"
        self.content: dict[str, Any] = {"stage": stage, "rehearsal": rehearsal, "about": {}, "command": "", "parts": {}}
        self.reload()

    def reload(self) -> None:
        """Read the file that the process of the stage has written. Without a file, nothing changes."""
        if self.path.is_file():
            self.content = json.loads(self.path.read_text(encoding="utf-8"))

    def forget_running(self) -> None:
        """Remove the state of the part that was running when an earlier command was killed."""
        if (part := self.running()) is not None:
            del self.parts[part]
            self.write()

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """The recorded facts of each part so far, by name."""
        parts: dict[str, dict[str, Any]] = self.content["parts"]
        return parts

    def state(self, part: str) -> State | None:
        """Return the state of a part; None if it has no record."""
        return self.parts[part]["state"] if part in self.parts else None

    def running(self) -> str | None:
        """Return the part that was begun and has not ended."""
        return next((name for name, entry in self.parts.items() if entry["state"] == "running"), None)

    def note(self, part: str, state: State, **more: Any) -> None:
        """Write the state of a part at once."""
        self.parts[part] = {"state": state, "time": time.strftime("%Y-%m-%d %H:%M:%S"), **more}
        self.write()

    def write(self) -> None:
        """Write both files, and replace each as a whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for path, text in (
            (self.path, json.dumps(self.content, indent=1) + "\n"),
            (self.path.with_suffix(".md"), markdown(self.content)),
        ):
            work = path.with_name(f".{path.name}.new")
            work.write_text(text, encoding="utf-8")
            work.replace(path)


def markdown(content: Mapping[str, Any]) -> str:
    """The Markdown file of a stage."""
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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty line."""
    found = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*found, *("| " + " | ".join(row) + " |" for row in rows), ""]


def run_stage(stage: Stage, context: Context, record: Record, command: str) -> int:
    """Run the parts of a stage that have no result yet. Return the exit code for this process.

    Args:
        stage: the stage to run.
        context: see `Context`.
        record: the record of this stage; it is written after each part.
        command: the command that is recorded with the results.

    Returns:
        0 if each part was run, failed or was left out; LOST if the CUDA context is lost.
    """
    record.content["about"] = {**measure.facts(context.device), **gpu_device.about(context.device)}
    record.content["command"] = command
    for part in stage.chosen(rehearsal=context.rehearsal):
        if record.state(part.name) in ("done", "failed"):
            continue
        if reason := _why_not(part, context):
            record.note(part.name, "not run", reason=reason)
            print(f"{stage.name}: {part.name}: not run: {reason}", file=sys.stderr, flush=True)
            continue
        print(f"{stage.name}: {part.name} (about {part.seconds:.0f} s)", file=sys.stderr, flush=True)
        record.note(part.name, "running", since=time.time())
        if not _run_part(stage, part, context, record):
            return LOST
        _free(context.device)
    return 0


def _why_not(part: Part, context: Context) -> str:
    """Return why a part cannot begin, in one sentence; empty if it can."""
    left = context.seconds_left()
    if not context.rehearsal and part.seconds > left:
        return f"it needs about {part.seconds:.0f} s, and {max(0.0, left):.0f} s are left; run this stage again"
    if context.device.type == "cuda" and part.memory > (free := torch.cuda.mem_get_info()[0]):
        return f"it needs {part.memory / GIB:.0f} GiB of the GPU's memory, and {free / GIB:.0f} GiB are free"
    room = shutil.disk_usage(context.scratch).free
    if not context.rehearsal and part.disk > room:
        where = f"{context.scratch.parent}; set TMPDIR to a larger disk"
        return f"it needs {part.disk / GIB:.0f} GiB of disk, and {room / GIB:.0f} GiB are free in {where}"
    return ""


def _run_part(stage: Stage, part: Part, context: Context, record: Record) -> bool:
    """Run one part and record its state. Return whether the process can continue."""
    began, before = time.time(), gpu_device.clocks(context.device)
    found, reason, lost = None, "", False
    state: State = "done"
    try:
        found = part.run(context)
    except NotRunError as left_out:
        state, reason = "not run", str(left_out)
    except FailedError as failed:
        state, reason, found = "failed", str(failed), failed.found
    except Exception as error:
        traceback.print_exc()
        state, reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        lost = _context_is_lost(context.device)
    seconds = time.time() - began
    clocks = [c for c in (before, gpu_device.clocks(context.device)) if c]
    more: dict[str, Any] = {"seconds": round(seconds, 1), "clocks": "; ".join(clocks)}
    if reason:
        more["reason"] = reason
    if found is not None:
        more |= {"text": found.text, "data": found.data}
        more["figures"] = {what: asdict(figure) for what, figure in found.figures.items()}
    record.note(part.name, state, **more)
    print(f"{stage.name}: {part.name}: {state} after {seconds:.0f} s {reason}".rstrip(), file=sys.stderr, flush=True)
    return not lost


def _context_is_lost(device: torch.device) -> bool:
    """Return whether this process cannot compute any more: after an illegal access each call fails."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(2, device=device).sum().item() != 2)
    except Exception:
        return True


def _free(device: torch.device) -> None:
    """Empty the caches that a part has filled, so that the next part has the whole device."""
    gc.collect()
    torch._dynamo.reset()  # compiled code keeps its model in memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def context_of(
    device: torch.device, out: Path, scratch: Path, deadline: float, *, rehearsal: bool, starter_data: Path | None
) -> Context:
    """Make the context of a stage's process, and set the environment for benchmarks."""
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
    return Context(device, rehearsal, out, scratch, deadline, starter_data)
