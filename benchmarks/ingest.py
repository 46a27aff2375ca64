"""Measures the speed of ingestion, and of epoch plans. `python benchmarks/ingest.py --help`."""

import gzip
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measure
import numpy as np
from measure import spread

from esmshard.data.batching.packing import StepPlan
from esmshard.vocab import TOKENS

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


# The Python peers parse, tokenize and write the tokens. Imports are not timed.
PEERS = {
    "fair-esm, FastaBatchedDataset + BatchConverter": """
import sys, time, esm, numpy
alphabet = esm.data.Alphabet.from_architecture("ESM-1b")
began = time.perf_counter()
data = esm.data.FastaBatchedDataset.from_file(sys.argv[1])
convert = alphabet.get_batch_converter()
with open(sys.argv[2], "wb") as out:
    for members in data.get_batch_indices(4096, extra_toks_per_seq=1):
        out.write(convert([data[k] for k in members])[2].numpy().astype(numpy.uint8).tobytes())
print(time.perf_counter() - began)
""",
    "Biopython SeqIO + EsmTokenizer": """
import sys, time, numpy
from Bio import SeqIO
from transformers import EsmTokenizer
tokenizer = EsmTokenizer(sys.argv[3])
began = time.perf_counter()
with open(sys.argv[2], "wb") as out:
    for record in SeqIO.parse(sys.argv[1], "fasta"):
        out.write(numpy.array(tokenizer(str(record.seq))["input_ids"], dtype=numpy.uint8).tobytes())
print(time.perf_counter() - began)
""",
}


def ingestion(directory: Path, count: int, rounds: int) -> tuple[list[str], dict[str, list[float]]]:
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
            took, peak = measure.timed(command)
            memory[name] = max(memory[name], peak)
            seconds[name] += [took] if turn else []
    ours, rows = seconds["esmshard ingest, 1 process"], []
    for name, times in seconds.items():
        middle = statistics.median(times)
        cells = [name, f"{size / middle / 1e6:,.0f}", f"{residues / middle / 1e6:,.2f}"]
        rows.append([*cells, spread(measure.over(times, ours)), f"{memory[name] / 1e6:,.0f}"])
    few, vocabulary = directory / "few.fasta", directory / "vocab.txt"
    few_residues = write_fasta(few, PEER_RECORDS)
    vocabulary.write_text("\n".join(TOKENS), encoding="utf-8")
    for name, script in PEERS.items():
        command = [sys.executable, "-c", script, str(few), str(directory / "tokens"), str(vocabulary)]
        runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(min(rounds, 3))]
        seconds[name] = [float(done.stdout.split()[-1]) for done in runs]
        speed = few_residues / statistics.median(seconds[name])
        ratio = residues / statistics.median(ours) / speed
        cells = [f"{name}, {PEER_RECORDS:,} sequences", f"{speed * size / residues / 1e6:,.2f}", f"{speed / 1e6:,.2f}"]
        rows.append([*cells, f"{ratio:,.0f}", ""])
    title = f"### {count:,} sequences, {residues / 1e6:,.0f} M residues, {size / 1e6:,.0f} MB of FASTA"
    words = ["", "MB/s", "M residues/s", "time / ours (1 process), median [min, max]", "peak MB"]
    for path in (fasta, packed, text):
        path.unlink(missing_ok=True)
    return [title, "", *measure.table(words, rows)], seconds


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


def main() -> None:
    """Parse, measure, print, and store."""
    parser = measure.parser(__doc__)
    parser.add_argument("--counts", nargs="*", type=int, default=[200_000, 2_000_000], help="sequences of the files")
    parser.add_argument("--records", type=int, default=60_000_000, help="records of the epoch plan; 0: no plan")
    parser.add_argument("--global-tokens", type=int, default=1 << 20)
    args = parser.parse_args()
    if args.rank:  # the process of the epoch plan
        print(json.dumps(plan(*args.rank)))
        return
    lines: list[str] = []
    raw: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="esmshard-bench-") as folder:
        for count in args.counts:
            table, raw[f"seconds, {count} sequences"] = ingestion(Path(folder), count, args.rounds)
            lines += table
    if args.records:
        (planned,) = measure.ranks_of(__file__, [args.records, args.global_tokens], 1)
        raw["epoch plan"] = planned
        rows = [[name, f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"] for name, value in planned.items()]
        lines += ["### Epoch plan", "", *measure.table(["", ""], rows)]
    measure.store("ingest", lines, raw, args.out)


if __name__ == "__main__":
    main()
