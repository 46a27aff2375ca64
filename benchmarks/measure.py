"""What all measurements share: turns, clocks, memory, ranks, and files of results. METHOD.md describes the method."""

import argparse
import gc
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from esmshard.planner import data_sheet

CPU = torch.device("cpu")
CEILING_SECONDS = 1.0
"""How many seconds matrix products run before each turn. A processor then has left its short-lived top speed."""
CEILING_WIDTH = {"cpu": 2048, "cuda": 8192}
"""The width of the square matrices, by the type of the device."""
GO_ON = False
"""Whether a variant that fails becomes a note under the table of the other variants."""
CPU_SECONDS = False
"""Whether the clock counts the seconds of the processor, which other programs on the machine do not change."""
RESULTS = Path(__file__).parent / "results"


@dataclass
class Row:
    """One variant of one workload."""

    name: str
    seconds: list[float] = field(default_factory=list)
    ceiling: list[float] = field(default_factory=list)
    """The FLOP/s of a large matrix product, measured right before each run."""
    memory_bytes: int | None = None
    """The peak memory above the memory before the run, in bytes."""


@dataclass
class Table:
    """One workload. The first variant is esmshard's; the ratios are the times of the other variants over its time."""

    title: str
    residues: int
    gemm_flops: float
    """The exact FLOPs of the linear layers: forward only, or with backward if the title says training."""
    attention_flops: float
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def ratios(self, row: Row) -> list[float]:
        """Return the time of a variant over the time of esmshard, turn by turn."""
        return over(row.seconds, self.rows[0].seconds)

    def speed(self) -> float:
        """Return the FLOP/s of the matrix product: the median of all its runs, which are spread over all turns."""
        return statistics.median(c for row in self.rows for c in row.ceiling)

    def share(self, row: Row) -> float:
        """Return the FLOP/s of the model over the FLOP/s of the matrix product."""
        return (self.gemm_flops + self.attention_flops) / statistics.median(row.seconds) / self.speed()


def clock(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    now = time.process_time if CPU_SECONDS else time.perf_counter
    began = now()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return now() - began


def ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a product of two square matrices, which are CEILING_WIDTH wide."""
    n = CEILING_WIDTH[device.type]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    times: list[float] = []
    while len(times) < 5 or sum(times) < CEILING_SECONDS:
        times.append(clock(lambda: a @ b, device))
    return 2 * n**3 / statistics.median(times)


def take_turns(
    table: Table,
    variants: Mapping[str, Callable[[], Callable[[], Any]]],
    rounds: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    together: bool = True,
) -> list[Any]:
    """Make every variant, run it once to warm up, then `rounds` times in turns. Return the results of the warm-up runs.

    With `together=False` each variant is made, run and deleted before the next variant is made.
    """
    outputs: list[Any] = []
    made: list[tuple[Row, Callable[[], Any]]] = []
    for name, make in variants.items():
        row, function, reason = Row(name), None, ""
        try:
            function = make()
            output = function()
            say(f"{table.title}: {name} is warm")
            if not together:
                _turns(table, [(row, function)], rounds, device, dtype)
        except Exception as error:
            if not GO_ON or not table.rows:  # the first variant is esmshard's; without it there is no comparison
                raise
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if reason:
            table.notes.append(f"{name} could not be measured ({reason}).")
        else:
            outputs.append(output)
            table.rows.append(row)
        if together and not reason:
            made.append((row, function))
        function = None
        if not together or reason:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    _turns(table, made, rounds if together else 0, device, dtype)
    return outputs


def _turns(
    table: Table, made: list[tuple[Row, Callable[[], Any]]], rounds: int, device: torch.device, dtype: torch.dtype
) -> None:
    for turn in range(rounds):
        for row, function in made:
            gc.collect()
            row.ceiling.append(ceiling(device, dtype))
            if device.type != "cuda":
                row.seconds.append(clock(function, device))
                continue
            # The allocator of a GPU can reset its peak, so no separate process is needed.
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            row.seconds.append(clock(function, device))
            row.memory_bytes = max(row.memory_bytes or 0, torch.cuda.max_memory_allocated() - before)
        say(f"{table.title}: turn {turn + 1} of {rounds}")


# Memory of this process, on Linux


def resident(key: str = "VmRSS") -> int:
    """Return the resident bytes of this process; with `VmHWM`, their highest value since `reset_peak`."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def reset_peak() -> None:
    """Set the high-water mark of this process to its present memory."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_above(prepare: Callable[[], Callable[[], object]]) -> int:
    """Return the peak bytes of a call above the memory before it. `prepare` loads the model."""
    function = prepare()
    gc.collect()
    reset_peak()
    before = resident()
    function()
    return resident("VmHWM") - before


def timed(command: list[str]) -> tuple[float, int]:
    """Return seconds and peak resident bytes of a whole command with its start-up. The largest process counts."""
    # A small process starts the command, because the peak of a command includes the memory of its starter.
    script = (
        "import sys, time, subprocess, resource\n"
        "began = time.perf_counter(); subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script, *command], check=True, capture_output=True, text=True)
    seconds, kilobytes = done.stdout.split()
    return float(seconds), int(kilobytes) * 1024


# Ranks on this machine


def ranks_of(script: str, work: Any, size: int, threads: int = 1, **environment: str) -> list[Any]:
    """Run `python SCRIPT --rank WORK` as the ranks of one process group. Return the JSON that each rank prints last."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {**os.environ, "OMP_NUM_THREADS": str(threads), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), **environment}
    command = [sys.executable, script, "--rank", json.dumps(work)]
    ranks = [
        subprocess.Popen(
            command, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True
        )
        for r in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=3600)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"{script}, {work}: a rank failed; its error stands above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


# Results


def over(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Return the ratios, turn by turn."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Return the median and the extremes as a text."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"  {text}", file=sys.stderr, flush=True)


def facts(device: torch.device) -> dict[str, Any]:
    """Return hardware and versions."""
    known: dict[str, Any] = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else _cpu_name(),
    }
    for name in ("torch", "esmshard", "fair-esm", "transformers", "numpy", "faesm", "flash-attn"):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            continue
    return known


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def half_flops(about: Mapping[str, Any]) -> float | None:
    """Return the dense bf16 FLOP/s in the data sheet of the device of `facts`; None for an unknown device."""
    gpu = data_sheet(str(about["device"]))
    return gpu.half_flops if gpu else None


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty line."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def speeds(of: Table, sheet: float | None = None) -> list[str]:
    """Return a workload as Markdown, under its title. `sheet` are the FLOP/s of the data sheet of a GPU."""
    head = ["", "residues/s", "time / ours, median [min, max]", "share of matrix product", "peak MB above model"]
    head += ["MFU of data sheet"] if sheet else []
    rows = []
    for row in of.rows:
        share, memory, ours = of.share(row), row.memory_bytes, of.rows[0].memory_bytes
        cells = [row.name, f"{of.residues / statistics.median(row.seconds):,.0f}", spread(of.ratios(row))]
        cells += [f"{share:.0%}", "" if memory is None else f"{memory / 1e6:,.0f}"]
        if memory and ours and row is not of.rows[0]:
            cells[-1] += f" ({memory / ours:.2f} x ours)"
        rows.append([*cells, *([f"{share * of.speed() / sheet:.0%}"] if sheet else [])])
    attention = of.attention_flops / (of.attention_flops + of.gemm_flops)
    notes = f"Matrix product: {of.speed() / 1e9:,.0f} GFLOP/s. Attention is {attention:.0%} of the FLOPs. "
    return [f"### {of.title}", "", *table(head, rows), (notes + " ".join(of.notes)).rstrip(), ""]


def parser(description: str | None, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--rounds", type=int, default=rounds, help="number of turns of each variant")
    made.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
    made.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    return made


def store(name: str, lines: Sequence[str], raw: Any, out: Path, device: torch.device = CPU, **more: str) -> None:
    """Print the results, and write them as dated JSON and Markdown with command, hardware and versions."""
    about = facts(device) | more
    command = " ".join([f"python benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    text = "\n".join([f"`{command}`", "", ", ".join(f"{key} {value}" for key, value in about.items()), "", *lines])
    print(text)
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"{about['date']}-{name}"
    stem.with_suffix(".md").write_text(f"# {name}, {about['date']}\n\n{text.rstrip()}\n", encoding="utf-8")
    content = {"command": command, "about": about, "measured": raw}
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1, default=asdict) + "\n", encoding="utf-8")
