"""Measures the speed of ingestion, epoch plans and random reads. `python benchmarks/ingest.py --help`."""

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from xopen import xopen

from esmshard.data.batching.packing import StepPlan
from esmshard.io.store import Shard, header_shard, keys, token_shard, write_index
from esmshard.io.symbols import Edits

PEER_RECORDS = 4000
"""The records of the file that the Python peers read. Their speed does not depend on this number."""
ESMSHARD = [sys.executable, "-m", "esmshard", "ingest"]
# The composition of UniProt by the 20 amino acids, in per cent.
COMPOSITION = {"L": 9.7, "A": 8.3, "G": 7.1, "V": 6.9, "E": 6.2, "S": 6.6, "I": 5.9, "K": 5.8, "R": 5.5, "D": 5.5}
COMPOSITION |= {"T": 5.4, "P": 4.7, "N": 4.1, "Q": 3.9, "F": 3.9, "Y": 2.9, "M": 2.4, "H": 2.3, "C": 1.4, "W": 1.1}


def protein_lengths(count: int) -> np.ndarray:
    """Draw lengths, int32 [count]: lognormal, median 270, mean about 330, clipped to 20 to 1,022."""
    rng = np.random.default_rng(0)
    return np.clip(270 * np.exp(0.65 * rng.standard_normal(count, dtype=np.float32)), 20, 1022).astype(np.int32)


def write_fasta(path: Path, count: int) -> int:
    """Write a file like those of UniRef, with 60 letters on each line. Return the number of residues."""
    rng = np.random.default_rng(1)
    letters = np.frombuffer("".join(COMPOSITION).encode(), np.uint8)
    shares = np.array(list(COMPOSITION.values())) / sum(COMPOSITION.values())
    lengths = protein_lengths(count)
    with open(path, "wb") as file:
        for first in range(0, count, 50_000):
            sizes = lengths[first : first + 50_000]
            text = rng.choice(letters, int(sizes.sum()), p=shares).tobytes()
            end = 0
            for k, size in enumerate(sizes.tolist(), first):
                begin, end = end, end + size
                lines = b"\n".join(text[at : min(at + 60, end)] for at in range(begin, end, 60))
                header = b">UniRef50_A0A%09d Uncharacterized protein n=1 Tax=Homo sapiens TaxID=9606 RepID=X_HUMAN"
                file.write(header % k + b"\n" + lines + b"\n")
    return int(lengths.sum())


def head(fasta: Path, out: Path, count: int) -> int:
    """Copy the first records of a file. Return their residues."""
    seen = residues = 0
    with open(fasta, "rb") as source, open(out, "wb") as file:
        for line in source:
            seen += line.startswith(b">")
            if seen > count:
                break
            residues += 0 if line.startswith(b">") else len(line) - 1
            file.write(line)
    return residues


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


# The Python peers parse, tokenize and write the tokens. Imports are not timed.
FAIR_ESM = """
import sys, time, esm, numpy
alphabet = esm.data.Alphabet.from_architecture("ESM-1b")
began = time.perf_counter()
data = esm.data.FastaBatchedDataset.from_file(sys.argv[1])
convert = alphabet.get_batch_converter()
with open(sys.argv[2], "wb") as out:
    for members in data.get_batch_indices(4096, extra_toks_per_seq=1):
        out.write(convert([data[k] for k in members])[2].numpy().astype(numpy.uint8).tobytes())
print(time.perf_counter() - began)
"""
BIOPYTHON = """
import sys, time, numpy
from Bio import SeqIO
from transformers import EsmTokenizer
tokenizer = EsmTokenizer(sys.argv[3])
began = time.perf_counter()
with open(sys.argv[2], "wb") as out:
    for record in SeqIO.parse(sys.argv[1], "fasta"):
        out.write(numpy.array(tokenizer(str(record.seq))["input_ids"], dtype=numpy.uint8).tobytes())
print(time.perf_counter() - began)
"""


def peer(script: str, *arguments: Path) -> float:
    """Return the seconds that a peer reports."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], check=True, capture_output=True, text=True
    )
    return float(done.stdout.split()[-1])


# Each reader parses the file, keeps the ids, refuses symbols that are no residues, translates every sequence to uint8
# tokens, and counts them: what ingestion needs at the least. Imports are not timed.
READERS = {
    "esmshard, read_blocks": """
from esmshard.io.sequences import read_blocks
from esmshard.io.symbols import Edits
def tokens(path):
    return sum(int(block.lengths.sum()) for block in read_blocks(path, Edits()))
""",
    "dnaio and bytes.translate": """
import dnaio
def tokens(path):
    with dnaio.open(path) as records:
        return sum(checked(record.name, record.sequence.encode()) for record in records)
""",
    "needletail and bytes.translate": """
from needletail import parse_fastx_file
def tokens(path):
    return sum(checked(record.id, record.seq.encode()) for record in parse_fastx_file(str(path)))
""",
}
READER = """
import sys, time, pathlib
from esmshard.vocab import RESIDUES, encode
TABLE = bytearray(256)
for letter in RESIDUES:
    TABLE[ord(letter)] = encode(letter)[1]
TABLE, LETTERS, ids = bytes(TABLE), "".join(RESIDUES).encode(), []
def checked(header, sequence):
    ids.append(header.split(None, 1)[0])
    if sequence.translate(None, LETTERS):
        raise ValueError(header)
    return len(sequence.translate(TABLE))
{reader}
path = pathlib.Path(sys.argv[1])
began = time.perf_counter()
count = tokens(path)
print(count, time.perf_counter() - began)
"""


def readers(directory: Path, count: int, rounds: int) -> tuple[list[str], dict[str, list[float]]]:
    """Return a table of readers: the seconds for reading and translating a file, and their ratio to our reader's."""
    fasta = directory / f"{count}.fasta"
    residues = write_fasta(fasta, count)
    files = {"plain": fasta, "gz": fasta.with_suffix(".fasta.gz"), "zst": fasta.with_suffix(".fasta.zst")}
    for kind in ("gz", "zst"):
        with open(fasta, "rb") as source, xopen(files[kind], "wb", threads=0) as file:
            shutil.copyfileobj(source, file, 1 << 20)
    lines = [f"### Readers, {count:,} sequences", "", "| | file | seconds | time / ours |", "|---|---|---|---|"]
    raw: dict[str, list[float]] = {}
    for kind, path in files.items():
        for _ in range(rounds):
            for name, reader in READERS.items():
                if kind == "zst" and name.startswith("needletail"):
                    continue  # it cannot read this
                script = READER.format(reader=reader)
                command = [sys.executable, "-c", script, str(path)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found, seconds = done.stdout.split()
                assert int(found) == residues, f"{name} read {found} residues of {residues}"
                raw.setdefault(f"{name}, {kind}", []).append(float(seconds))
        ours = raw[f"{next(iter(READERS))}, {kind}"]
        for name in READERS:
            if times := raw.get(f"{name}, {kind}"):
                ratios = [theirs / own for theirs, own in zip(times, ours, strict=True)]
                lines.append(f"| {name} | {kind} | {statistics.median(times):.2f} | {statistics.median(ratios):.2f} |")
    for path in files.values():
        path.unlink()
    return [*lines, ""], raw


def ingestion(directory: Path, count: int, rounds: int, peers: bool) -> tuple[list[str], dict[str, list[float]]]:
    """Return a table for one file size: MB/s of FASTA text, residues/s, ratio to esmshard in the turn, peak memory."""
    fasta, packed = directory / f"{count}.fasta", directory / f"{count}.fasta.gz"
    residues = write_fasta(fasta, count)
    with open(fasta, "rb") as source, gzip.open(packed, "wb", compresslevel=6) as file:
        shutil.copyfileobj(source, file, 1 << 20)
    size = fasta.stat().st_size
    store, text = directory / "store", directory / "out.fasta"
    commands = {
        "esmshard ingest, 1 process": [*ESMSHARD, str(fasta), "-o", str(store)],
        "esmshard ingest, 2 processes": [*ESMSHARD, str(fasta), "-o", str(store), "--workers", "2"],
        "seqkit seq": ["seqkit", "seq", str(fasta), "-o", str(text)],
        "esmshard ingest, gz": [*ESMSHARD, str(packed), "-o", str(store)],
        "seqkit seq, gz": ["seqkit", "seq", str(packed), "-o", str(text)],
    }
    if shutil.which("seqkit") is None:
        commands = {name: command for name, command in commands.items() if "seqkit" not in name}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    memory: dict[str, int] = dict.fromkeys(commands, 0)
    for turn in range(rounds + 1):  # the first run brings the file into the cache
        for name, command in commands.items():
            shutil.rmtree(store, ignore_errors=True)
            text.unlink(missing_ok=True)
            took, peak = timed(command)
            memory[name] = max(memory[name], peak)
            if turn:
                seconds[name].append(took)
    ours = seconds["esmshard ingest, 1 process"]
    lines = [
        f"### {count:,} sequences, {residues / 1e6:,.0f} M residues, {size / 1e6:,.0f} MB of FASTA",
        "",
        "| | MB/s | M residues/s | time / ours (1 process), median [min, max] | peak MB |",
        "|---|---|---|---|---|",
    ]
    for name, times in seconds.items():
        ratios = [theirs / own for theirs, own in zip(times, ours, strict=True)]
        middle = statistics.median(times)
        lines.append(
            f"| {name} | {size / middle / 1e6:,.0f} | {residues / middle / 1e6:,.0f} | {statistics.median(ratios):.2f} "
            f"[{min(ratios):.2f}, {max(ratios):.2f}] | {memory[name] / 1e6:,.0f} |"
        )
    if peers:
        few, scratch, vocabulary = directory / "few.fasta", directory / "tokens", directory / "vocab.txt"
        some = head(fasta, few, PEER_RECORDS)
        from esmshard.vocab import TOKENS

        vocabulary.write_text("\n".join(TOKENS), encoding="utf-8")
        speed = residues / statistics.median(ours)
        python = {
            "fair-esm, FastaBatchedDataset + BatchConverter": FAIR_ESM,
            "Biopython SeqIO + EsmTokenizer": BIOPYTHON,
        }
        for name, script in python.items():
            times = [peer(script, few, scratch, vocabulary) for _ in range(min(rounds, 3))]
            seconds[name] = times
            theirs = some / statistics.median(times)
            lines.append(
                f"| {name}, first {PEER_RECORDS:,} | {theirs * size / residues / 1e6:,.2f} | {theirs / 1e6:,.2f} | "
                f"{speed / theirs:,.0f} | |"
            )
    for path in (fasta, packed, text):
        path.unlink(missing_ok=True)
    shutil.rmtree(store, ignore_errors=True)
    return [*lines, ""], seconds


def plan(count: int, global_tokens: int) -> dict[str, float]:
    """Plan one epoch in this process. Return the seconds, and the peak memory above the lengths."""
    lengths = protein_lengths(count) + np.int32(2)
    result: dict[str, float] = {"records": count, "global_tokens": global_tokens}

    def walk() -> None:
        began = time.perf_counter()
        steps = StepPlan(lengths, global_tokens, seed=0)
        steps.step(0)
        result["first step, s"] = time.perf_counter() - began
        began = time.perf_counter()
        steps.step(steps.steps_per_epoch // 2)
        result["a step in the middle, s"] = time.perf_counter() - began
        began = time.perf_counter()
        StepPlan(lengths, global_tokens, seed=0).step(7 * steps.steps_per_epoch + 5)
        result["first step after resuming in epoch 7, s"] = time.perf_counter() - began
        began = time.perf_counter()
        tokens = [int(lengths[steps.step(k)[1]].sum()) for k in range(steps.steps_per_epoch)]
        result["every step of an epoch, s"] = time.perf_counter() - began
        result["steps"] = len(tokens)
        result["fill"] = statistics.fmean(tokens) / global_tokens
        result["least full step"], result["fullest step"] = min(tokens) / global_tokens, max(tokens) / global_tokens
        assert sum(tokens) == int(lengths.sum(dtype=np.int64))

    result["peak MB above the lengths"] = measure.peak_above(lambda: walk) / 1e6
    return result


def reads(directory: Path, count: int) -> dict[str, float]:
    """Open a store with this number of records, and read some at random. The index is real. The shards are empty, and
    their hashes are not compared.
    """
    path = directory / "large"
    path.mkdir()
    lengths = protein_lengths(count)
    names = [b"UniRef50_A0A%09d" % k for k in range(count)] if count <= 2_000_000 else []
    header = len(b"UniRef50_A0A%09d" % 0)
    shards, columns = [], []
    for first in range(0, count, 250_000):
        some = lengths[first : first + 250_000]
        ids = names[first : first + 250_000] or [b"UniRef50_A0A%09d" % k for k in range(first, first + len(some))]
        shard = Shard(len(some), int(some.sum()) + len(some), (header + 1) * len(some), ["", ""])
        with open(path / token_shard(len(shards)), "wb") as file:
            file.truncate(shard.tokens)
        with open(path / header_shard(len(shards)), "wb") as file:
            file.write(b"\n".join([*ids, b""]))
        shards.append(shard)
        columns.append((some, np.full(len(some), header, np.int32), keys(ids)))
    joined = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    write_index(path, shards, joined, {"sources": [], "rules": {}, "on_duplicate": "error"}, Edits())
    del columns, joined, names
    script = (
        "import sys, time, json, random\n"
        "from pathlib import Path; from esmshard.io.store import TokenStore\n"
        "status = lambda: Path('/proc/self/status').read_text()\n"
        "peak = lambda: int(status().split('VmHWM:')[1].split()[0]) / 1e3\n"
        "path = Path(sys.argv[1]); shards = frozenset(file.name for file in path.glob('*-*'))\n"
        "before = peak(); began = time.perf_counter(); store = TokenStore(path, checked=shards)\n"
        "out = {'records': len(store), 'open, s': time.perf_counter() - began, 'peak MB of opening': peak() - before}\n"
        "draw = random.Random(0); chosen = [draw.randrange(len(store)) for _ in range(20000)]\n"
        "for what, read in (('residues', store.residues), ('ids', store.id),\n"
        "                   ('look-ups by id', lambda n: store.find('UniRef50_A0A%09d' % n))):\n"
        "    began = time.perf_counter(); [read(n) for n in chosen]\n"
        "    out[what + ' at random, per s'] = len(chosen) / (time.perf_counter() - began)\n"
        "out['peak MB of all this'] = peak() - before\n"
        "print(json.dumps(out))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=True, capture_output=True, text=True)
    shutil.rmtree(path)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def figures(title: str, found: dict[str, float]) -> list[str]:
    """Return a table of two columns."""
    cells = [
        f"| {name} | {value:,.4g} |" if value < 1e4 else f"| {name} | {value:,.0f} |" for name, value in found.items()
    ]
    return [f"### {title}", "", "| | |", "|---|---|", *cells, ""]


def main() -> None:
    """Parse, measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--counts", nargs="*", type=int, default=[200_000, 2_000_000], help="numbers of sequences of the FASTA files"
    )
    parser.add_argument(
        "--records", type=int, default=60_000_000, help="records of the epoch plan, and of the store that is opened"
    )
    parser.add_argument("--global-tokens", type=int, default=1 << 20, help="ranks of the epoch plan")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only-readers", action="store_true", help="measure the readers of FASTA files alone")
    parser.add_argument("--out", type=Path, default=measure.RESULTS)
    parser.add_argument("--only-plan", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only_plan:
        print(json.dumps(plan(args.records, args.global_tokens)))
        return
    about = {**measure.facts(torch.device("cpu")), "cores": len(os.sched_getaffinity(0))}
    if shutil.which("seqkit"):
        about["seqkit"] = subprocess.run(
            ["seqkit", "version"], capture_output=True, text=True, check=True
        ).stdout.split()[-1]
    command = " ".join(["python benchmarks/ingest.py", *sys.argv[1:]])
    lines = [f"`{command}`", "", ", ".join(f"{key} {value}" for key, value in about.items()), ""]
    raw: dict[str, Any] = {"command": command, "about": about}
    with tempfile.TemporaryDirectory(prefix="esmshard-bench-") as name:
        directory = Path(name)
        for count in args.counts:
            table, raw[f"readers, {count} sequences"] = readers(directory, count, args.rounds)
            lines += table
        for place, count in enumerate([] if args.only_readers else args.counts):
            table, raw[f"seconds, {count} sequences"] = ingestion(directory, count, args.rounds, peers=place == 0)
            lines += table
            print("\n".join(lines[-12:]), file=sys.stderr)
        if args.records and not args.only_readers:
            own = [sys.executable, __file__, "--only-plan", "--records", str(args.records)]
            done = subprocess.run(
                [*own, "--global-tokens", str(args.global_tokens)], check=True, capture_output=True, text=True
            )
            raw["epoch plan"], raw["store"] = json.loads(done.stdout), reads(directory, args.records)
            lines += figures("Epoch plan", raw["epoch plan"])
            lines += figures("Opening and reading a store", raw["store"])
    text = "\n".join(lines)
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"{about['date']}-{'readers' if args.only_readers else 'ingest'}"
    stem.with_suffix(".md").write_text(f"# ingest, {about['date']}\n\n{text}\n", encoding="utf-8")
    stem.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
