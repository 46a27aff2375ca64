"""What `embed --dry-run` says, beside what the run then does; and that it leaves nothing."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from esmshard.embed.compute.outputs import Long
from esmshard.embed.job import embed_output, embed_plan
from esmshard.embed.job.embed_job import embed
from esmshard.embed.job.embed_output import merge
from esmshard.embed.job.embed_plan import Forecast, forecast
from esmshard.embed.job.embed_request import EmbedRequest, request
from esmshard.embed.store.embedding_store import EmbeddingStore
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
    text = str(given.look("x.npy"))
    lines = [line.split(None, 1) for line in text.splitlines()]
    said = dict(lines)
    assert said[f"{given.fasta}:"] == "18 records, 5,561 residues, longest 1,100"
    assert said["duplicates"] == "3 records whose sequence came before"
    assert said["sequences"] == "15: 15 are computed, 0 reused"
    assert said["long"] == "3 records over 1,022 residues: taken whole, none is cut"
    assert re.match(r"\d+\.\d\d hours \(.*\) to compute on cpu$", said["time"])
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
    assert everything.seconds == 0
    with pytest.raises(UsageError, match=r"--reuse .*earlier: holds mean_6, and no residue_6"):
        given.look("x.h5", "residue", reuse=given.out / "earlier")


def free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - nbytes, nbytes))  # type: ignore[attr-defined]


@pytest.mark.parametrize("million", [7.6, 3.3, 0.01])
def test_what_cannot_fit_is_refused(given: Given, monkeypatch: pytest.MonkeyPatch, million: float) -> None:
    free(monkeypatch, int(million * 1e6))
    monkeypatch.setattr(embed_plan, "make_embedder", None)  # nothing is timed before
    with pytest.raises(InputError) as error:
        given.look("deep/x.h5", "residue")
    text = str(error.value)
    assert text.startswith(f"{given.out}: ")
    assert "would be written before it is finished, and " in text
    assert "\n" not in text
    assert list(given.out.iterdir()) == []


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
    expected = sum(n * 24 * layers * dim**2 + n * n * 4 * layers * dim for row in tokens for n in row)
    assert embed_plan._operations(asked, np.array(lengths)).sum() == expected


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
