"""Measures whole `esmshard` commands: the start, the first result, processes against threads.

python benchmarks/embed.py --parts start first scaling
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from measure import say, spread
from peers import protein_lengths
from random_models import CONFIGS, SHORT

from esmshard.model import export, weights
from esmshard.vocab import STANDARD

PARTS = ("start", "first", "scaling")
LENGTH = 286
POLL_SECONDS = 0.05
ESMSHARD = [sys.executable, "-m", "esmshard"]
Part = tuple[list[str], Any]
"""The lines of Markdown, and all measurements."""


@dataclass
class Watched:
    """The time of a command."""

    seconds: float = 0.0
    first_result: float = float("nan")
    """The seconds until the first result was on disk."""


def watch(command: Sequence[object], threads: int, result: Callable[[], bool] = lambda: False) -> Watched:
    """Run a command to its end. `result` returns whether there is a result on disk."""
    run, has_result = Watched(), False
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as output:
        began = time.perf_counter()
        process = subprocess.Popen([*map(str, command)], stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                if not has_result and result():
                    has_result, run.first_result = True, time.perf_counter() - began
                time.sleep(POLL_SECONDS)
            run.seconds = time.perf_counter() - began
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(map(str, command))} failed: {output.read()[-2000:]}")
    if not has_result and result():  # the process ended between two looks
        run.first_result = run.seconds
    return run


def write_fasta(path: Path, lengths: Iterable[int], seed: int = 1) -> Path:
    """Write random proteins with 60 letters on each line."""
    rng = np.random.default_rng(seed)
    letters = np.frombuffer("".join(STANDARD).encode(), np.uint8)
    with open(path, "w", encoding="ascii") as file:
        for k, length in enumerate(lengths):
            text = rng.choice(letters, length).tobytes().decode()
            lines = "\n".join(text[at : at + 60] for at in range(0, length, 60))
            file.write(f">P{k:07d}\n{lines}\n")
    return path


class Bench:
    """The models and scratch files of one run."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.one = write_fasta(folder / "one.fasta", [LENGTH])
        """A file with one sequence. The time that a command takes for this file is its start-up."""

    def model(self, name: str) -> Path:
        """Write random weights of a shape."""
        directory = self.folder / name
        if not directory.exists():
            directory.mkdir()
            made = weights.fresh(CONFIGS[name], 0)
            export.write_transformers(directory, made.config, weights.stored_shapes(made.config), made.__getitem__)
        return directory

    def embed(self, model: Path, fasta: Path, *more: object, threads: int = 1) -> Watched:
        """Run `esmshard embed` once, to a file that replaces the last one."""
        out = self.folder / "e.npy"
        for path in (out, *self.folder.glob("e.*")):
            path.unlink(missing_ok=True)
        parts = self.folder / "e.npy.partial" / "parts"
        command = [*ESMSHARD, "embed", model, fasta, "-o", out, "--overwrite", *more]
        return watch(command, threads, lambda: out.exists() or any(parts.glob("*.safetensors")))


def start(bench: Bench, name: str, records: int) -> Part:
    """Measure the shortest commands, beside an interpreter that does nothing."""
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "esmshard --help": [*ESMSHARD, "--help"],
        "esmshard finetune --help": [*ESMSHARD, "finetune", "--help"],
        "esmshard embed of one sequence": None,
    }
    seconds: dict[str, list[float]] = {each: [] for each in commands}
    for turn in range(bench.rounds + 1):  # the first turn brings files into the cache
        for each, command in commands.items():
            run = watch(command, 1) if command else bench.embed(bench.model(name), bench.one)
            seconds[each] += [run.seconds] if turn else []
    rows = [[each, spread(times)] for each, times in seconds.items()]
    return ["### Start", "", *measure.table(["", "s, median [min, max]"], rows)], seconds


def first(bench: Bench, name: str, records: int) -> Part:
    """Measure how long a large job takes to its first finished rows."""
    fasta = write_fasta(bench.folder / "in.fasta", protein_lengths(records))
    runs = [bench.embed(bench.model(name), fasta, threads=2) for _ in range(bench.rounds)]
    row = [f"{records:,}", spread([run.first_result for run in runs]), spread([run.seconds for run in runs])]
    head = ["sequences", "first finished part, s", "the whole command, s"]
    return ["### First result", "", *measure.table(head, [row])], [asdict(run) for run in runs]


def scaling(bench: Bench, name: str, records: int) -> Part:
    """Compare processes with threads."""
    model, lengths = bench.model(name), protein_lengths(records)
    fasta = write_fasta(bench.folder / "in.fasta", lengths)
    how = {"1 process of 1 thread": (1, 1), "2 processes of 1 thread": (2, 1), "1 process of 2 threads": (1, 2)}
    seconds: dict[str, list[float]] = {each: [] for each in how}
    start_up: dict[str, list[float]] = {each: [] for each in how}
    for turn in range(bench.rounds):
        for each, (processes, threads) in how.items():
            for file, times in ((bench.one, start_up), (fasta, seconds)):
                times[each].append(bench.embed(model, file, "--nproc", processes, threads=threads).seconds)
            say(f"scaling: {each}, turn {turn + 1} of {bench.rounds}: {seconds[each][-1]:.0f} s")
    alone, *_ = how
    without = {each: [a - b for a, b in zip(seconds[each], start_up[each], strict=True)] for each in how}
    rows = []
    for each in how:
        cells = [each, f"{statistics.median(seconds[each]):.1f}", spread(measure.over(seconds[alone], seconds[each]))]
        cells += [f"{statistics.median(start_up[each]):.1f}", spread(measure.over(without[alone], without[each]))]
        rows.append(cells)
    head = ["", "s", "speed / 1 process of 1 thread", "start-up, s", "the same without start-up"]
    title = f"### Processes and threads, {name}, {records:,} sequences of {sum(lengths):,} residues"
    return [title, "", *measure.table(head, rows)], {"seconds": seconds, "start_up": start_up}


def main() -> None:
    """Parse, measure, print, and store."""
    parser = measure.parser(__doc__, rounds=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", choices=SHORT, default="8M")
    parser.add_argument("--records", type=int, default=2000, help="number of sequences of `first` and `scaling`")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the running command ends, and scratch files are removed
    torch.set_num_threads(2)
    lines: list[str] = []
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="esmshard-bench-") as folder:
        bench = Bench(Path(folder), args.rounds)
        for part in args.parts:
            measured = {"start": start, "first": first, "scaling": scaling}[part](
                bench, SHORT[args.model], args.records
            )
            lines += measured[0]
            raw[part] = measured[1]
    measure.store("-".join(["embed", args.model, *args.parts]), lines, raw, args.out)


if __name__ == "__main__":
    main()
