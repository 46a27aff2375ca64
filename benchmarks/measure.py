"""The method of all measurements: variants take turns, and ratios are formed within a turn. See METHOD.md."""

import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from esmshard.planner import data_sheet

CEILING_SECONDS = 1.0
"""The seconds of matrix products before each run. After them a processor has left its short-lived top speed."""

CEILING_WIDTH = {"cpu": 2048, "cuda": 8192}
"""The width of the square matrices, by the type of the device."""

GO_ON = False
"""Whether a variant that fails, perhaps for lack of memory, becomes a note under the table of the others."""

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
    """One workload. The first variant is esmshard's; the ratios are the times of the others over its time."""

    title: str
    residues: int
    gemm_flops: float
    """The exact FLOPs of the linear layers: forward only, or with backward if the title says training."""
    attention_flops: float
    rows: list[Row]
    notes: list[str] = field(default_factory=list)

    def ratios(self, row: Row) -> list[float]:
        """Return the other variant's time over ours, turn by turn."""
        return [theirs / ours for ours, theirs in zip(self.rows[0].seconds, row.seconds, strict=True)]

    def speed(self) -> float:
        """The FLOP/s of the matrix product: the median of all its runs, which are spread over all turns."""
        return statistics.median(c for row in self.rows for c in row.ceiling)

    def share(self, row: Row) -> float:
        """Return the FLOP/s of the model over those of the matrix product."""
        return (self.gemm_flops + self.attention_flops) / statistics.median(row.seconds) / self.speed()


def clock(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


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

    With `together=False` each variant is made, run and deleted before the next one is made.
    """
    outputs: list[Any] = []
    made: list[tuple[Row, Callable[[], Any]]] = []
    table.rows = []
    for name, make in variants.items():
        row, function, reason = Row(name), None, ""
        try:
            function = make()
            output = function()
            print(f"  {table.title}: {name} is warm", file=sys.stderr, flush=True)
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
    table: Table,
    made: list[tuple[Row, Callable[[], Any]]],
    rounds: int,
    device: torch.device,
    dtype: torch.dtype,
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
        print(f"  {table.title}: turn {turn + 1} of {rounds}", file=sys.stderr, flush=True)


def memory_in_own_process(arguments: list[str]) -> int:
    """Return the peak bytes above the loaded model, in a separate process, because the peak of a process only rises."""
    script = Path(__file__).with_name("model.py")
    done = subprocess.run([sys.executable, str(script), *arguments], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def peak_above(prepare: Callable[[], Callable[[], object]]) -> int:
    """Return the peak bytes of a call above the memory before it, on the CPU. `prepare` loads the model and makes a
    small first call.
    """
    function = prepare()
    gc.collect()
    # Linux lets a process reset its peak, so that the loading of a model does not hide the memory of the call.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def facts(device: torch.device) -> dict[str, Any]:
    """Return hardware and versions."""
    packages = ("torch", "esmshard", "fair-esm", "transformers", "numpy", "faesm", "esm-efficient", "flash-attn")
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else _cpu_name(),
    }
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


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


def markdown(tables: list[Table], about: Mapping[str, Any], command: str) -> str:
    """Return the tables as Markdown."""
    lines = [f"`{command}`", "", ", ".join(f"{key} {value}" for key, value in about.items()), ""]
    sheet = half_flops(about)
    for table in tables:
        lines += [f"### {table.title}", ""]
        head = ["", "residues/s", "time / ours, median [min, max]", "share of matrix product", "peak MB above model"]
        head += ["MFU of data sheet"] if sheet else []
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in table.rows:
            ratios, share = table.ratios(row), table.share(row)
            cells = [
                row.name,
                f"{table.residues / statistics.median(row.seconds):,.0f}",
                f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]",
                f"{share:.0%}",
                "" if row.memory_bytes is None else f"{row.memory_bytes / 1e6:,.0f}{_times(table, row)}",
            ]
            if sheet:
                cells.append(f"{share * table.speed() / sheet:.0%}")
            lines.append("| " + " | ".join(cells) + " |")
        attention = table.attention_flops / (table.attention_flops + table.gemm_flops)
        lines += [
            "",
            f"Matrix product: {table.speed() / 1e9:,.0f} GFLOP/s. "
            f"Attention is {attention:.0%} of the FLOPs. {' '.join(table.notes)}".rstrip(),
            "",
        ]
    return "\n".join(lines)


def _times(table: Table, row: Row) -> str:
    ours = table.rows[0].memory_bytes
    return f" ({row.memory_bytes / ours:.2f} x ours)" if ours and row.memory_bytes and row is not table.rows[0] else ""


def store(tables: list[Table], about: Mapping[str, Any], name: str, out: Path) -> None:
    """Print the tables, and write them as dated JSON and Markdown."""
    command = " ".join(["python benchmarks/model.py", *sys.argv[1:]])
    text = markdown(tables, about, command)
    print(text)
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"{about['date']}-{name}"
    stem.with_suffix(".md").write_text(f"# {name}, {about['date']}\n\n{text}\n", encoding="utf-8")
    raw = {"command": command, "about": dict(about), "tables": [asdict(table) for table in tables]}
    stem.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
