"""What `embed --dry-run` says, beside what the run then does; and that it leaves nothing."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from model_files import TINY, fair_esm, write_fair_esm

from esmshard.embed.compute.outputs import Long
from esmshard.embed.job import embed_output, embed_time
from esmshard.embed.job.embed_job import embed
from esmshard.embed.job.embed_output import merge
from esmshard.embed.job.embed_plan import Forecast, dry_run, forecast
from esmshard.embed.job.embed_request import EmbedRequest, request
from esmshard.embed.store import part_plan
from esmshard.embed.store.embedding_store import EmbeddingStore
from esmshard.embed.store.part_plan import PlanRequest
from esmshard.embed.store.row_index import RowIndex
from esmshard.errors import InputError, UsageError
from esmshard.vocab import RESIDUES

LENGTHS = [1100, 200, 31, 1023, 1, 150, 400, 90, 260, 77, 512, 64, 330, 121, 40]
"""Two are over 1,022 residues."""
AGAIN = [2, 0, 2]
"""Records whose sequence comes again at the end: 18 records of 15 sequences."""
RECORDS, ROWS, SUM = 18, 15, 4399 + 31 + 1100 + 31


class Given(NamedTuple):
    fasta: Path
    out: Path
    """An empty directory."""

    def ask(self, name: str = "x", *pools: str, **how: Any) -> EmbedRequest:
        return request("starter", self.out / name, pools=pools, **how)

    def look(self, name: str = "x", *pools: str, reuse: Path | None = None, **how: Any) -> Forecast:
        return forecast(self.ask(name, *pools, **how), self.fasta, reuse=reuse, seconds=0.5)


def write(path: Path, sequences: Sequence[str]) -> Path:
    path.write_text("".join(f">record_{n}\n{text}\n" for n, text in enumerate(sequences)))
    return path


def random_sequences(lengths: Sequence[int], seed: int = 5) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(RESIDUES[:20]), n)) for n in lengths]


@pytest.fixture
def given(tmp_path: Path) -> Given:
    sequences = random_sequences(LENGTHS)
    fasta = write(tmp_path / "in.fasta", [*sequences, *(sequences[n] for n in AGAIN)])
    (tmp_path / "out").mkdir()
    return Given(fasta, tmp_path / "out")


@pytest.fixture(autouse=True)
def _starts_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process whose start is timed imports nothing, which would take seconds, but in the test of the command."""

    def run(command: list[str], check: bool) -> None:
        *interpreter, imports = command
        assert imports == "import esmshard.embed.job.embed_job"
        subprocess.run([*interpreter, "pass"], check=check)

    monkeypatch.setattr(embed_time, "subprocess", SimpleNamespace(run=run))


def size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def test_counts_and_sizes_are_those_of_the_run(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    found = given.look("x.h5", "residue")
    assert (found.records, found.residues, found.longest) == (RECORDS, SUM, 1100)
    assert (found.unique, found.reused, found.over, found.parts) == (ROWS, 0, 3, 1)
    assert list(given.out.iterdir()) == []

    at_the_end = []

    def watched(product: EmbeddingStore, out: Path, fmt: str) -> None:
        merge(product, out, fmt)
        at_the_end.append(size(given.out))

    monkeypatch.setattr(embed_output, "merge", watched)
    report = embed(given.ask("x.h5", "residue"), given.fasta)
    assert (report.records, report.computed, report.duplicates) == (RECORDS, ROWS, RECORDS - ROWS)
    dim, ids = 192, sum(len(f"record_{n}\n") for n in range(RECORDS))
    assert found.file_bytes == SUM * dim * 4 + ids
    # Sequences as tokens, which are gone by then, are counted: they are there while parts are computed.
    assert 0.98 * at_the_end[0] < found.peak < 1.02 * at_the_end[0] + SUM + 20_000

    embed(given.ask("parts", "residue"), given.fasta)
    assert size(given.out / "parts") == pytest.approx(found.parts_bytes, rel=0.02)
    for fmt in ("h5", "parquet", "safetensors", "fair-esm-pt"):  # npy and h5ad hold vectors
        merge(EmbeddingStore(given.out / "parts"), given.out / fmt, fmt)
        assert found.file_bytes < size(given.out / fmt) < 1.02 * found.file_bytes, fmt


@pytest.mark.parametrize("heads", [[], [0, 5]])
def test_sizes_of_attention_maps_are_those_of_the_run(given: Given, heads: list[int]) -> None:
    found = given.look("x.h5", "attentions", heads=heads, layers=[1, 6])
    ids, pairs = sum(len(f"record_{n}\n") for n in range(RECORDS)), 2 * len(heads or range(12))
    squares = [n * n for n in LENGTHS]
    assert found.file_bytes == (sum(squares) + sum(squares[n] for n in AGAIN)) * pairs * 4 + ids
    embed(given.ask("x.h5", "attentions", heads=heads, layers=[1, 6]), given.fasta)
    assert found.file_bytes < size(given.out / "x.h5") < 1.02 * found.file_bytes
    embed(given.ask("parts", "attentions", heads=heads, layers=[1, 6]), given.fasta)
    assert size(given.out / "parts") == pytest.approx(found.parts_bytes, rel=0.001)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_sizes_of_csv_are_bounds(given: Given, dtype: str) -> None:
    found = given.look("x.csv", dtype=dtype)
    assert re.search(r"\ncsv +at most \d[\d,]* bytes of numbers and ids", str(found))
    embed(given.ask("x.csv", dtype=dtype), given.fasta)
    head = sum(len(f",{n}") for n in range(192)) + 1
    assert 0.7 * found.file_bytes < size(given.out / "x.csv") - head <= found.file_bytes


def test_biotrainer_stores_a_sequence_once(given: Given) -> None:
    found = given.look("x.h5", "residue", fmt="biotrainer-h5")
    ids = sum(len(f"record_{n}\n") for n in range(RECORDS))
    assert found.file_bytes == sum(LENGTHS) * 192 * 4 + ids + 64 * ROWS
    assert "\nbiotrainer-h5 at most 3.4 MB" in str(found)
    embed(given.ask("x.h5", "residue", fmt="biotrainer-h5"), given.fasta)
    assert found.file_bytes < size(given.out / "x.h5") < 1.02 * found.file_bytes


def test_says_it_to_people(given: Given) -> None:
    text = dry_run(given.ask("x.npy"), given.fasta, nproc=None, tokens=None, reuse=None)
    lines = [line.split(None, 1) for line in text.splitlines()]
    said = dict(lines)
    assert said[f"{given.fasta}:"] == "18 records, 5,561 residues, longest 1,100"
    assert said["duplicates"] == "3 records whose sequence came before"
    assert said["sequences"] == "15: 15 are computed, 0 reused"
    assert said["long"] == "3 records over 1,022 residues: taken whole, none is cut"
    assert re.match(r"\d+\.\d\d hours \(", said["time"])
    assert " on cpu, 1 process of 1 thread: " in said["time"]
    assert re.match(r"1 of 1 parts computed in \d+s$", said["probe"])
    assert said["parts"].startswith("1, ")
    assert said["npy"].startswith("13,994 bytes of numbers and ids")  # 18 vectors of 192 numbers, and ids
    assert said["at"].startswith("most ")
    assert said["at"].endswith(f"free at {given.out}")


def test_long_proteins_are_counted(given: Given) -> None:
    short = write(given.fasta.with_name("short.fasta"), random_sequences([90, 60, 101]))
    for long, treated in (
        (Long("truncate", 80, 20), "2 are cut to their first 80"),
        (Long("window", 80, 20), "seen in windows that share 20, none is cut"),
    ):
        text = str(forecast(given.ask("x.npy", long=long), short, tokens=100, seconds=0.0))
        assert f"2 records over 80 residues: {treated}" in text


def test_reused_sequences_are_counted_and_copied(given: Given) -> None:
    half = write(given.fasta.with_name("half.fasta"), random_sequences(LENGTHS)[:10])
    embed(given.ask("earlier"), half)
    before = sorted(given.out.rglob("*"))
    found = given.look("x.npy", reuse=given.out / "earlier")
    assert (found.unique, found.reused) == (ROWS, 10)
    assert sorted(given.out.rglob("*")) == before
    everything = forecast(given.ask("x.npy"), half, reuse=given.out / "earlier", seconds=0.5)
    assert everything.reused == 10
    assert everything.time.compute > 0
    assert everything.time.write > 0
    with pytest.raises(UsageError, match=r"--reuse .*earlier: holds mean_6, and no residue_6"):
        given.look("x.h5", "residue", reuse=given.out / "earlier")


def free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - nbytes, nbytes))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("million", "mend"),
    [
        (7.6, "--format parts would fit with 3.4 MB"),  # 4,399 residues of 192 numbers; with the file, 5,561 more
        (3.5, "--format parts would fit with 3.4 MB"),
        (3.3, "--format parts --dtype fp16 would fit with 1.7 MB"),
        (0.6, "--pool mean would fit with "),
        (0.01, "nothing smaller fits"),
    ],
)
def test_what_cannot_fit_is_refused(given: Given, monkeypatch: pytest.MonkeyPatch, million: float, mend: str) -> None:
    free(monkeypatch, int(million * 1e6))
    monkeypatch.setattr(embed_time, "make_embedder", None)  # nothing is timed before
    with pytest.raises(InputError) as error:
        given.look("deep/x.h5", "residue")
    text = str(error.value)
    assert text.startswith(f"{given.out}: ")
    assert "would be written before it is finished, and " in text
    assert mend in text
    assert "\n" not in text
    assert list(given.out.iterdir()) == []


def test_an_interrupted_probe_leaves_nothing(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(directory: Path, *others: Any) -> None:
        assert directory.parent == given.out
        assert (directory / "plan.json").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(embed_time, "compute_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        given.look("x.npy")
    assert list(given.out.iterdir()) == []


def test_what_a_probe_says_is_wrong_is_said(given: Given) -> None:
    model = write_fair_esm(given.fasta.with_name("esm2_tiny.pt"), fair_esm(TINY))
    asked = request(str(model), given.out / "x.npy")
    write_fair_esm(model, fair_esm(TINY, seed=1))
    with pytest.raises(InputError, match="its weights were changed since"):
        forecast(asked, given.fasta, seconds=0.5)
    assert list(given.out.iterdir()) == []


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("seconds", [0.0, 1e6])
def test_time_is_that_of_all_parts_at_the_pace_of_some(
    given: Given, monkeypatch: pytest.MonkeyPatch, processes: int, seconds: float
) -> None:
    """Parts are computed, but each counts with the seconds of its operations. `benchmarks/embed.py` has real times."""
    monkeypatch.setattr(part_plan, "SMALLEST_PART", 1024)
    monkeypatch.setattr(part_plan, "PART", 2048)
    lengths = np.clip(np.random.default_rng(3).lognormal(5.0, 0.6, 100), 20, 1022).astype(int)
    fasta = write(given.fasta.with_name("more.fasta"), random_sequences(lengths.tolist()))
    asked, timed_parts = given.ask("x.npy"), embed_time._timed_parts
    dim, layers = asked.found.config.dim, asked.found.config.n_layers
    tokens_N = lengths + 2.0
    second_N = tokens_N * layers * dim * (24 * dim + 4 * tokens_N) / 1e9

    def paced(directory: Path, *others: Any) -> dict[int, float]:
        index = RowIndex(directory / "index")
        parts = timed_parts(directory, *others)
        return {k: float(second_N[index.bounds[k] : index.bounds[k + 1]].sum()) for k in parts}

    monkeypatch.setattr(embed_time, "_timed_parts", paced)
    found = forecast(asked, fasta, nproc=processes, seconds=seconds)
    assert found.parts > 6
    assert found.time.parts == (found.parts if seconds else processes)
    assert f"cpu, {processes} process" in str(found)
    alone = second_N.sum() / processes
    assert alone * 0.999 < found.time.compute
    # Processes take whole parts, so that at the end some wait for the last part.
    assert found.time.compute < alone * 1.001 + (processes - 1) * 2 * second_N.sum() / found.parts


@pytest.mark.parametrize(
    ("long", "tokens"),
    [
        (Long(), [[10], [12], [13], [20], [21]]),
        (Long("truncate", 10, 2), [[10], [12], [12], [12], [12]]),
        # Windows of 10, each 8 after the one before: of 18 residues there are two, of 19 three.
        (Long("window", 10, 2), [[10], [12], [12] * 2, [12] * 2, [12] * 3]),
    ],
    ids=lambda value: value.mode if isinstance(value, Long) else "",
)
def test_operations_count_what_the_model_sees(given: Given, long: Long, tokens: list[list[int]]) -> None:
    asked = given.ask("x.npy", long=long)
    config, lengths = asked.found.config, [8, 10, 11, 18, 19]
    layers, dim = config.n_layers, config.dim
    fasta = write(given.fasta.with_name("some.fasta"), random_sequences(lengths))
    part_plan.begin(given.out / "plan", PlanRequest(fasta, asked.spec, asked.facts, None, "cpu"))
    index, none = RowIndex(given.out / "plan" / "index"), np.zeros(5, np.bool_)
    expected = sum(n * 24 * layers * dim**2 + n * n * 4 * layers * dim for row in tokens for n in row)
    assert embed_time._operations(asked, index, 0, none) == expected
    assert embed_time._operations(asked, index, 0, ~none) == pytest.approx(expected / part_plan.COPIED)


def test_every_beginning_of_the_order_is_spread() -> None:
    order = embed_time._spread(1000)
    assert sorted(order) == list(range(1000))
    for first in (10, 50, 200):
        gaps = np.diff([0, *sorted(order[:first]), 1000])
        assert gaps.max() < 4 * 1000 / first


def test_the_command_reads_the_standard_input(given: Given) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "esmshard", "embed", "starter", "-", "-o", str(given.out / "x.npy"), "--dry-run"],
        input=given.fasta.read_text(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("-: 18 records, 5,561 residues, longest 1,100\n")
    assert list(given.out.iterdir()) == []
