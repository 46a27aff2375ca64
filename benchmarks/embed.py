"""Measures the speed and the memory of `esmshard embed`, from FASTA to file. `python benchmarks/embed.py --help`."""

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measure
import model
import numpy as np
import numpy.typing as npt
import torch
from embed_programs import PEER_TOKENS
from measure import Row, Table
from peers import flops, protein_lengths
from process_tree import Watched, watch
from sharding import markdown

from esmshard.embed.parts import EmbeddingStore
from esmshard.io.array_formats import FORMATS
from esmshard.model import export, weights
from esmshard.model.families.esm2 import FAIR_ESM
from esmshard.model.families.family_registry import SIZES
from esmshard.vocab import STANDARD

PARTS = ("peers", "fixed", "scaling", "formats", "memory", "reuse")
NAMES = {**model.SHORT, **{name: name for name in SIZES if not name.startswith("esm")}}
FIXED_LENGTH = 286
SHORT_LENGTHS = (20, 40)
"""The residues of the many sequences for the measurement of memory: 30 on average."""
NEW_SHARE = 10
"""The step from one new sequence to the next in the second run with --reuse: every tenth sequence is new."""

Rows = tuple[list[str], npt.NDArray[np.float32]]
"""The ids, and the embeddings [N, D]."""
Found = tuple[list[str], dict[str, Any]]
"""The lines of Markdown, and all measurements."""


# Input


def texts(lengths: Iterable[int], seed: int) -> Iterator[str]:
    """Return random residues of these lengths."""
    rng = np.random.default_rng(seed)
    letters = np.frombuffer("".join(STANDARD).encode(), np.uint8)
    return (rng.choice(letters, n).tobytes().decode() for n in lengths)


def write_fasta(path: Path, sequences: Iterable[str]) -> Path:
    """Write a FASTA file with 60 letters on each line. The headers are only the ids P0000000 and so on."""
    with open(path, "w", encoding="ascii") as file:
        for k, text in enumerate(sequences):
            lines = "\n".join(text[at : at + 60] for at in range(0, len(text), 60))
            file.write(f">P{k:07d}\n{lines}\n")
    return path


class Bench:
    """The models and scratch files of one run."""

    def __init__(self, folder: Path, rounds: int, threads: int) -> None:
        self.folder, self.rounds, self.threads = folder, rounds, threads
        self.out, self._note = folder / "out", folder / "note.json"
        self.one = write_fasta(folder / "one.fasta", texts([FIXED_LENGTH], 99))
        """A file with one sequence. The time that a command takes for this file is its start-up."""

    def fasta(self, lengths: Iterable[int], seed: int = 1) -> Path:
        """Write sequences of these lengths."""
        return write_fasta(self.folder / "in.fasta", texts(lengths, seed))

    def model(self, name: str) -> tuple[Path, Path]:
        """Write random weights of a shape: a directory of `transformers`, which esmshard reads, and fair-esm's file."""
        directory, stem = self.folder / name, f"esm2_{name}"
        if not directory.exists():
            found = weights.fresh(SIZES[name], 0)
            sizes = weights.stored_shapes(found.config)
            for place in (directory, directory / "fair-esm"):
                place.mkdir()
            export.write_transformers(directory, found.config, sizes, found.__getitem__)
            file = FAIR_ESM.path(directory / "fair-esm", stem, found.config)
            export.write_pickle(file, FAIR_ESM, found.config, sizes, found.__getitem__)
        return directory, FAIR_ESM.path(directory / "fair-esm", stem, SIZES[name])

    def run(
        self, program: str, *arguments: object, threads: int | None = None, result: Callable[[], bool] = lambda: False
    ) -> tuple[Watched, dict[str, float]]:
        """Empty `self.out`, run one whole command that writes there, and return its cost and its note."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        programs = Path(__file__).with_name("embed_programs.py")
        command = [sys.executable, str(programs), str(self._note), program, *map(str, arguments)]
        found = watch(command, threads or self.threads, result)
        return found, json.loads(self._note.read_text(encoding="utf-8"))


def embed_once(bench: Bench, directory: Path, fasta: Path, *more: object, threads: int | None = None) -> Watched:
    """Run `esmshard embed` once, to `e.npy`."""
    out = bench.out / "e.npy"
    return bench.run("esmshard", directory, fasta, "-o", out, *more, threads=threads)[0]


# Beside the peers


@dataclass(frozen=True)
class Program:
    """One of the programs that are compared."""

    arguments: Callable[[Path], list[object]]
    """The command for a FASTA file."""
    result: Callable[[], bool]
    """A function that returns whether there is a first result: a finished part, a `.pt` file, or a row."""
    read: Callable[[], Rows]


def programs(bench: Bench, name: str) -> dict[str, Program]:
    """Return the programs, with esmshard first."""
    directory, fair_esm = bench.model(name)
    out = bench.out
    pt, flat = out / "pt", out / "flat"

    def finished_part() -> bool:
        return (out / "e.npy").exists() or any((out / "e.npy.partial" / "parts").glob("*.safetensors"))

    def read_npy() -> Rows:
        return (out / "e.ids.txt").read_text(encoding="utf-8").split(), np.load(out / "e.npy")

    def read_pt() -> Rows:
        files = sorted(pt.iterdir())
        found = [torch.load(file)["mean_representations"][SIZES[name].n_layers].numpy() for file in files]
        return [file.stem for file in files], np.stack(found)

    def read_flat() -> Rows:
        ids = (flat / "ids.txt").read_text(encoding="utf-8").split()
        return ids, np.fromfile(flat / "rows.f32", np.float32).reshape(len(ids), -1)

    def first_row() -> bool:
        rows = flat / "rows.f32"
        return rows.exists() and rows.stat().st_size > 0

    ours = Program(lambda fasta: ["esmshard", directory, fasta, "-o", out / "e.npy"], finished_part, read_npy)
    theirs = Program(
        lambda fasta: ["fair-esm", fair_esm, fasta, pt],
        lambda: any(file.stat().st_size for file in pt.glob("*.pt")),
        read_pt,
    )

    def transformers(tokens: int) -> Program:
        return Program(lambda fasta: ["transformers", directory, fasta, flat, tokens], first_row, read_flat)

    return {
        "esmshard embed": ours,
        "fair-esm, extract.py": theirs,
        "transformers SDPA, sorted": transformers(PEER_TOKENS),
        "transformers SDPA, file order": transformers(0),
    }


def peers(bench: Bench, name: str, title: str, lengths: list[int], chosen: dict[str, Program]) -> Found:
    """Measure whole commands in turns."""
    fasta, residues = bench.fasta(lengths), sum(lengths)
    device = torch.device("cpu")
    whole = Table(title, residues, *flops(SIZES[name], lengths), rows=[Row(each) for each in chosen])
    work = Table(title, residues, whole.gemm_flops, whole.attention_flops, rows=[Row(each) for each in chosen])
    watched: dict[str, list[dict[str, Any]]] = {each: [] for each in chosen}
    outputs: list[Rows] = []
    for program in chosen.values():  # this run brings the files of libraries into the cache
        bench.run(*program.arguments(bench.one))
    for turn in range(bench.rounds):
        for each, program, all_of_it, without in zip(chosen, chosen.values(), whole.rows, work.rows, strict=True):
            speed = measure.ceiling(device, torch.float32)
            found, note = bench.run(*program.arguments(fasta), result=program.result)
            watched[each].append({**asdict(found), **note, "start_up": found.seconds - note["work"]})
            all_of_it.seconds.append(found.seconds)
            without.seconds.append(note["work"])
            all_of_it.ceiling.append(speed)
            without.ceiling.append(speed)
            if turn == 0:
                outputs.append(program.read())
            say(f"{title}: {each}, turn {turn + 1} of {bench.rounds}: {found.seconds:.0f} s")
    head = ["", "residues/s", "time / ours", "residues/s without start-up", "time / ours", "share of matrix product"]
    head += ["start-up, s", "first result, s", "peak MB", "peak MB above model", "h per million"]
    lines = [head]
    for each, all_of_it, without in zip(chosen, whole.rows, work.rows, strict=True):

        def middle(key: str, each: str = each) -> float:
            return statistics.median(one[key] for one in watched[each])

        seconds = statistics.median(without.seconds)
        lines.append(
            [
                each,
                f"{residues / statistics.median(all_of_it.seconds):,.0f}",
                spread(whole.ratios(all_of_it)),
                f"{residues / seconds:,.0f}",
                spread(work.ratios(without)),
                f"{work.share(without):.0%}",
                f"{middle('start_up'):.1f}",
                f"{middle('first_result'):.1f}",
                f"{max(one['tree'] for one in watched[each]) / 1e6:,.0f}",
                f"{max(one['above_model'] for one in watched[each]) / 1e6:,.0f}",
                f"{hours_per_million(seconds, len(lengths)):.1f}",
            ]
        )
    worst = max(difference(outputs[0], other) for other in outputs[1:])
    note = f"Matrix product: {whole.speed() / 1e9:,.0f} GFLOP/s; its share without start-up. Ratios are medians of "
    note += f"{bench.rounds} turns [min, max]; {bench.threads} threads in one process each. "
    note += f"Largest absolute difference of the means from ours: {worst:.0e}."
    return [markdown(title, lines), note, ""], {"watched": watched, "ceiling": [row.ceiling for row in whole.rows]}


def difference(ours: Rows, theirs: Rows) -> float:
    """Return the largest absolute difference over all embeddings of the same ids."""
    place = {record_id: k for k, record_id in enumerate(theirs[0])}
    if set(place) != set(ours[0]) or len(theirs[0]) != len(ours[0]):
        raise RuntimeError("the programs did not embed the same records")
    return float(np.abs(ours[1] - theirs[1][[place[record_id] for record_id in ours[0]]]).max())


# esmshard alone


def scaling(bench: Bench, name: str, records: int) -> Found:
    """Compare processes with threads."""
    directory, _ = bench.model(name)
    lengths = protein_lengths(records)
    fasta = bench.fasta(lengths)
    how = {"1 process of 1 thread": (1, 1), "2 processes of 1 thread": (2, 1), "1 process of 2 threads": (1, 2)}
    seconds: dict[str, list[float]] = {each: [] for each in how}
    start_up: dict[str, list[float]] = {each: [] for each in how}
    for turn in range(bench.rounds):
        for each, (processes, threads) in how.items():
            more = ("--nproc", processes)
            start_up[each].append(embed_once(bench, directory, bench.one, *more, threads=threads).seconds)
            seconds[each].append(embed_once(bench, directory, fasta, *more, threads=threads).seconds)
            say(f"scaling: {each}, turn {turn + 1} of {bench.rounds}: {seconds[each][-1]:.0f} s")
    first, *_ = how
    without = {each: [a - b for a, b in zip(seconds[each], start_up[each], strict=True)] for each in how}
    table = [["", "s", "speed / 1 process of 1 thread", "start-up, s", "speed without start-up / same"]]
    for each in how:
        cells = [each, f"{statistics.median(seconds[each]):.1f}", spread(over(seconds[first], seconds[each]))]
        cells += [f"{statistics.median(start_up[each]):.1f}", spread(over(without[first], without[each]))]
        table.append(cells)
    title = f"Processes and threads, {name}, {records:,} sequences"
    note = (
        f"{sum(lengths) + 2 * records:,} tokens, of which processes take whole parts, one at a time. Start-up is what "
    )
    note += "one sequence takes, computed alike."
    return [markdown(title, table), note, ""], {"seconds": seconds, "start_up": start_up}


def formats(bench: Bench, name: str, records: int) -> Found:
    """Measure the cost of writing. With one thread, computing and the rest do not overlap."""
    directory, _ = bench.model(name)
    fasta = bench.fasta(protein_lengths(records))
    cases = [(fmt, "mean") for fmt in (*FORMATS, "parts")]
    cases += [(fmt, "residue") for fmt in (*FORMATS, "parts") if fmt == "parts" or "residue" in FORMATS[fmt].pools]
    raw: dict[str, list[dict[str, float]]] = {f"{fmt}, {pool}": [] for fmt, pool in cases}
    for turn in range(bench.rounds):
        for fmt, pool in cases:
            out = bench.out / "e" if fmt == "parts" else bench.out / f"e.{fmt}"
            how = ("-o", out, "--format", fmt, "--pool", pool, "--nproc", 1)
            found, note = bench.run("esmshard", directory, fasta, *how, threads=1)
            one = {**note, "seconds": found.seconds, "start_up": found.seconds - note["work"]}
            one |= {"rest": note["work"] - note["computing"], "bytes": float(size_of(bench.out))}
            raw[f"{fmt}, {pool}"].append(one)
            say(f"formats: {fmt}, {pool}, turn {turn + 1} of {bench.rounds}: {found.seconds:.0f} s")
    head = ["", "s", "computing, s", "start-up, s", "the rest, s", "the rest / the run without start-up"]
    head += ["all but computing / the run", "GB per million sequences", "h per million"]
    table = [head]
    for each, runs in raw.items():
        total, work, rest = ([one[key] for one in runs] for key in ("seconds", "work", "rest"))
        beside = [one["seconds"] - one["computing"] for one in runs]
        keys = ("seconds", "computing", "start_up", "rest")
        table.append(
            [
                each,
                *(f"{statistics.median(one[key] for one in runs):.2f}" for key in keys),
                percent(over(rest, work)),
                percent(over(beside, total)),
                f"{runs[0]['bytes'] / records * 1e6 / 1e9:,.2f}",
                f"{hours_per_million(statistics.median(work), records):.1f}",
            ]
        )
    title = f"Formats, {name}, {records:,} sequences, one process of one thread"
    note = "The rest is reading, planning, writing and syncing parts, and making the file of them."
    return [markdown(title, table), note, ""], raw


def memory(bench: Bench, counts: list[int]) -> Found:
    """Run a tiny model over few and many short sequences: memory must not grow with their number."""
    directory, _ = bench.model("nano")
    raw: dict[str, dict[str, Any]] = {}
    table = [["sequences", "processes", "s", "all MB", "main MB", "of it anonymous", "worker MB", "of it anonymous"]]
    for processes in (1, 2):
        runs: list[Watched] = []
        for count in counts:
            lengths = np.random.default_rng(0).integers(*SHORT_LENGTHS, count, endpoint=True)
            fasta = bench.fasta(lengths.tolist())
            runs.append(embed_once(bench, directory, fasta, "--nproc", processes, threads=1))
            raw[f"{count}, {processes}"] = asdict(runs[-1])
            table.append([f"{count:,}", str(processes), f"{runs[-1].seconds:.0f}", *megabytes(runs[-1])])
            say(f"memory: {count:,} sequences, {processes} processes: {runs[-1].seconds:.0f} s")
        few, many = runs[0], runs[-1]
        pairs = [few.tree, many.tree], [few.main.resident, many.main.resident]
        pairs += [few.main.anonymous, many.main.anonymous], [few.worker.resident, many.worker.resident]
        pairs += ([few.worker.anonymous, many.worker.anonymous],)
        ratios = [f"{b / a:.3f}" if a else "" for a, b in pairs]
        table.append([f"{counts[-1]:,} / {counts[0]:,}", str(processes), f"{many.seconds / few.seconds:.0f}", *ratios])
    title = f"Memory, 2 layers of 32, sequences of {SHORT_LENGTHS[0]} to {SHORT_LENGTHS[1]} residues"
    note = "Peaks of each process: resident with pages of mapped files, and anonymous; of workers the largest."
    return [markdown(title, table), note, ""], raw


def megabytes(run: Watched) -> list[str]:
    """Return the cells of a run; empty for missing workers."""
    main, worker = run.main, run.worker
    found = [run.tree, main.resident, main.anonymous, worker.resident, worker.anonymous]
    return [f"{value / 1e6:,.1f}" if value else "" for value in found]


def reuse(bench: Bench, name: str, records: int) -> Found:
    """Measure a second run, in which nine of ten sequences are also in the first run."""
    directory, _ = bench.model(name)
    lengths = protein_lengths(records)
    old = list(texts(lengths, 1))
    new = [
        fresh if k % NEW_SHARE == 0 else same
        for k, (same, fresh) in enumerate(zip(old, texts(lengths, 2), strict=True))
    ]
    before = write_fasta(bench.folder / "first.fasta", old)
    after = write_fasta(bench.folder / "second.fasta", new)
    earlier = bench.folder / "earlier"
    raw: dict[str, list[float]] = {"first": [], "second": [], "first, work": [], "second, work": []}
    for turn in range(bench.rounds):
        shutil.rmtree(earlier, ignore_errors=True)
        runs = {"first": (before, "-o", earlier), "second": (after, "-o", bench.out / "e", "--reuse", earlier)}
        for each, arguments in runs.items():
            found, note = bench.run("esmshard", directory, *arguments)
            raw[each].append(found.seconds)
            raw[f"{each}, work"].append(note["work"])
        taken = EmbeddingStore(bench.out / "e").manifest["reused"]
        if taken != records - -(-records // NEW_SHARE):
            raise RuntimeError(f"{taken} of {records} sequences were reused, and not nine of ten")
        say(f"reuse: turn {turn + 1} of {bench.rounds}: {raw['first'][-1]:.0f} s and {raw['second'][-1]:.0f} s")
    shutil.rmtree(earlier)
    table = [["", "first, s", "second, s", "second / first"]]
    for what, end in (("whole", ""), ("without start-up", ", work")):
        first, second = raw[f"first{end}"], raw[f"second{end}"]
        middle = (f"{statistics.median(times):.1f}" for times in (first, second))
        table.append([what, *middle, spread(over(second, first))])
    title = f"Reuse, {name}, {records:,} sequences, 90% as before"
    return [markdown(title, table)], raw


# Figures


def over(numerators: list[float], denominators: list[float]) -> list[float]:
    """Format values turn by turn."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def spread(values: list[float]) -> str:
    """Format the median and the extremes."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def percent(values: list[float]) -> str:
    """Return the median."""
    return f"{statistics.median(values):.1%}"


def hours_per_million(seconds: float, records: int) -> float:
    """Format the time of a larger job of similar sequences at this speed."""
    return seconds / records * 1e6 / 3600


def size_of(directory: Path) -> int:
    """Return the bytes of all files in a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def say(text: str) -> None:
    """Print to the terminal at once."""
    print(f"  {text}", file=sys.stderr, flush=True)


def sections(bench: Bench, args: argparse.Namespace) -> Iterator[tuple[str, Found]]:
    """Run the requested measurements, one after the other."""
    models = [NAMES[one] for one in args.models]
    if "peers" in args.parts:
        for short, name in zip(args.models, models, strict=True):
            title = f"FASTA to file, {short}, {args.records:,} sequences"
            yield f"peers, {short}", peers(bench, name, title, protein_lengths(args.records), programs(bench, name))
    if "fixed" in args.parts:
        for short, name in zip(args.models, models, strict=True):
            title = f"FASTA to file, {short}, {args.records:,} x {FIXED_LENGTH}"
            some = programs(bench, name)
            del some["transformers SDPA, file order"]  # no program pads, so the order has no effect
            yield f"fixed, {short}", peers(bench, name, title, [FIXED_LENGTH] * args.records, some)
    if "scaling" in args.parts:
        yield "scaling", scaling(bench, models[0], args.records)
    if "formats" in args.parts:
        yield "formats", formats(bench, models[0], args.records_formats)
    if "memory" in args.parts:
        yield "memory", memory(bench, sorted(args.records_memory))
    if "reuse" in args.parts:
        yield "reuse", reuse(bench, models[0], args.records)


def main() -> None:
    """Parse, measure, print, and store the results after each section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--models",
        nargs="+",
        choices=NAMES,
        default=["8M", "35M"],
        help="models beside the peers; all other sections use the first one",
    )
    parser.add_argument("--records", type=int, default=2000, help="number of sequences for peers, scaling and reuse")
    parser.add_argument("--records-formats", type=int, default=500)
    parser.add_argument("--records-memory", nargs=2, type=int, default=[10_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3, help="number of turns; memory is measured once")
    parser.add_argument("--threads", type=int, default=2, help="threads of each program beside the peers, and of reuse")
    parser.add_argument(
        "--folder", type=Path, default=None, help="directory on the file system to write to; by default a temporary one"
    )
    parser.add_argument("--out", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the running command ends, and scratch files are removed
    torch.set_num_threads(args.threads)
    about = measure.facts(torch.device("cpu"))
    command = " ".join(["python benchmarks/embed.py", *sys.argv[1:]])
    lines = [f"`{command}`", "", ", ".join(f"{key} {value}" for key, value in about.items()), ""]
    raw: dict[str, Any] = {"command": command, "about": about}
    args.out.mkdir(parents=True, exist_ok=True)
    parts = args.parts if set(args.parts) != set(PARTS) else []
    stem = args.out / "-".join([f"{about['date']}-embed", *args.models, *parts])
    with tempfile.TemporaryDirectory(prefix="esmshard-bench-", dir=args.folder) as folder:
        for section, (some, measured) in sections(Bench(Path(folder), args.rounds, args.threads), args):
            lines += some
            raw[section] = measured
            print("\n".join(some))
            text = "\n".join(lines)
            stem.with_suffix(".md").write_text(f"# embed, {about['date']}\n\n{text}\n", encoding="utf-8")
            stem.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
