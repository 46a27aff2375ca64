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
from model_files import TINY, fair_esm, write_fair_esm

from esmshard.embed.compute.outputs import Long
from esmshard.embed.job import embed_output, embed_time
from esmshard.embed.job.embed_job import embed
from esmshard.embed.job.embed_output import merge
from esmshard.embed.job.embed_plan import Forecast, dry_run, forecast
from esmshard.embed.job.embed_probe import costs, spread
from esmshard.embed.job.embed_request import EmbedRequest, request
from esmshard.embed.job.embed_time import _fit
from esmshard.embed.store import part_plan
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
    assert size(given.out / "x.h5") == pytest.approx(found.formats["h5"], rel=0.02)
    # Sequences as tokens, which are gone by then, are counted: they are there while parts are computed.
    assert 0.98 * at_the_end[0] < found.peak < 1.02 * at_the_end[0] + SUM + 20_000

    embed(given.ask("parts", "residue"), given.fasta)
    assert size(given.out / "parts") == pytest.approx(found.parts_bytes, rel=0.02)
    assert set(found.formats) == {"h5", "parquet", "safetensors", "fair-esm-pt"}  # npy and h5ad hold vectors
    for fmt, nbytes in found.formats.items():
        merge(EmbeddingStore(given.out / "parts"), given.out / fmt, fmt)
        assert size(given.out / fmt) == pytest.approx(nbytes, rel=0.02), fmt


def test_says_it_to_people(given: Given) -> None:
    text = dry_run(given.ask("x.npy"), given.fasta, nproc=None, tokens=None, reuse=None, seconds=0.5)
    lines = [line.split(None, 1) for line in text.splitlines()]
    said = dict(lines)
    assert said[f"{given.fasta}:"] == "18 records, 5,561 residues, longest 1,100"
    assert said["duplicates"] == "3 records whose sequence came before"
    assert said["sequences"] == "15: 15 are computed, 0 reused"
    assert said["long"] == "3 records over 1,022 residues: taken whole, none is cut"
    assert re.match(r"\d+\.\d\d hours \(", said["time"])
    assert " on cpu, 1 process of 1 thread: " in said["time"]
    assert "packs timed in" in said["probe"]
    assert said["npy"].endswith("bytes")
    assert said["at"].startswith("most ")
    assert said["at"].endswith(f"free at {given.out}")


def test_all_packs_timed_is_said_and_long_proteins_are_counted(given: Given) -> None:
    short = given.fasta.with_name("short.fasta")
    sequences = random_sequences([90, 60, 101])
    write(short, sequences)
    how: dict[str, Any] = {"nproc": None, "tokens": 100, "reuse": None, "seconds": 0.5}
    asked = given.ask("x.npy", long=Long("truncate", 80, 20))
    found = forecast(asked, short, tokens=100, seconds=1e6)  # until all are timed
    assert (found.time.packs, found.time.all_packs) == (3, True)
    text = str(found)
    assert "2 records over 80 residues: 2 are cut to their first 80" in text
    assert "3 packs timed in" in text
    assert "; they are all that there are" in text
    asked = given.ask("x.npy", long=Long("window", 80, 20))
    assert "2 records over 80 residues: seen in windows that share 20, none is cut" in dry_run(asked, short, **how)


def test_reused_sequences_are_counted_and_not_timed(given: Given) -> None:
    half = write(given.fasta.with_name("half.fasta"), random_sequences(LENGTHS)[:10])
    embed(given.ask("earlier"), half)
    before = sorted(given.out.rglob("*"))
    found = given.look("x.npy", reuse=given.out / "earlier")
    assert (found.unique, found.reused) == (ROWS, 10)
    assert sorted(given.out.rglob("*")) == before
    everything = forecast(given.ask("x.npy"), half, reuse=given.out / "earlier", seconds=0.5)
    assert (everything.reused, everything.time.packs) == (10, 0)
    assert "nothing to compute" in str(everything)
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
    monkeypatch.setattr(embed_time.subprocess, "Popen", None)  # nothing is timed before
    with pytest.raises(InputError) as error:
        given.look("deep/x.h5", "residue")
    text = str(error.value)
    assert text.startswith(f"{given.out}: ")
    assert "would be written before it is finished, and " in text
    assert mend in text
    assert "\n" not in text
    assert list(given.out.iterdir()) == []


def test_an_interrupted_probe_leaves_nothing(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def interrupted(process: "subprocess.Popen[bytes]", directory: Path) -> Any:
        started.append(process)
        assert directory.parent == given.out
        assert (directory / "plan.json").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(embed_time, "_heard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        given.look("x.npy")
    assert started[0].poll() is not None
    assert list(given.out.iterdir()) == []


def test_what_a_probe_says_is_wrong_is_said(given: Given) -> None:
    model = write_fair_esm(given.fasta.with_name("esm2_tiny.pt"), fair_esm(TINY))
    asked = request(str(model), given.out / "x.npy")
    write_fair_esm(model, fair_esm(TINY, seed=1))
    with pytest.raises(InputError, match="its weights were changed since"):
        forecast(asked, given.fasta, seconds=0.5)
    assert list(given.out.iterdir()) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_time_is_that_of_all_sequences_at_the_pace_of_the_probe(
    given: Given, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """The probe is real, but each pack took as long as its operations say. `benchmarks/embed.py` has real times."""
    monkeypatch.setattr(part_plan, "PART", 8192)
    lengths = np.clip(np.random.default_rng(3).lognormal(5.6, 0.6, 100), 20, 1022).astype(int)
    fasta = write(given.fasta.with_name("more.fasta"), random_sequences(lengths.tolist()))
    asked, probe = given.ask("x.npy"), embed_time._probe
    dim, layers = asked.found.config.dim, asked.found.config.n_layers
    per = np.array([24.0 * layers * dim**2, 4.0 * layers * dim, 0.0]) / 1e6  # seconds a token, a pair, a sequence

    def paced(*arguments: Any) -> tuple[list[dict[str, Any]], float]:
        heard, seconds = probe(*arguments)
        for one in heard:
            one["packs"] = [[*pack[:3], float(np.array(pack[:3]) @ per)] for pack in one["packs"]]
            one["lanes"], one["busy"] = 1, 1.0
        return heard, seconds

    monkeypatch.setattr(embed_time, "_probe", paced)
    found = forecast(asked, fasta, nproc=processes, seconds=1.5)
    assert found.parts > 2
    assert f"cpu, {processes} process" in str(found)
    seconds_N = costs(lengths, Long()) @ per
    one_part = seconds_N.sum() / found.parts * 2  # processes take whole parts, so that the last one may work alone
    assert seconds_N.sum() / processes * 0.99 < found.time.compute
    assert found.time.compute < seconds_N.sum() / processes * 1.01 + (processes - 1) * one_part


def test_costs_count_windows() -> None:
    lengths = np.array([8, 10, 11, 18, 19])
    assert costs(lengths, Long())[:, 0].tolist() == [10, 12, 13, 20, 21]
    assert costs(lengths, Long())[:, 1].tolist() == [100, 144, 169, 400, 441]
    assert costs(lengths, Long("truncate", 10, 2))[:, 0].tolist() == [10, 12, 12, 12, 12]
    windows = costs(lengths, Long("window", 10, 2))  # of 10, each 8 after the one before: 18 are two, 19 are three
    assert windows.tolist() == [[10, 100, 1], [12, 144, 1], [24, 288, 2], [24, 288, 2], [36, 432, 3]]


def test_every_beginning_of_the_order_is_spread() -> None:
    order = spread(1000, 7)
    assert sorted(order) == list(range(1000))
    assert order != spread(1000, 8)
    for first in (10, 50, 200):
        gaps = np.diff([0, *sorted(order[:first]), 1000])
        assert gaps.max() < 4 * 1000 / first


def test_the_fit_finds_what_a_pack_costs() -> None:
    rng = np.random.default_rng(0)
    lengths = [np.full(2048 // n, n) for n in rng.integers(20, 1000, 40)]
    cost = np.array([costs(one, Long()).sum(0) for one in lengths])
    per = np.array([3e-5, 2e-8, 4e-4])
    assert _fit(np.column_stack([cost, cost @ per]), 192, 6) == pytest.approx(per, rel=1e-6)
    few = np.column_stack([cost, cost @ per])[:3]  # by operations, and right in the sum
    fitted = _fit(few, 192, 6)
    assert fitted[2] == 0
    assert fitted[0] / fitted[1] == pytest.approx(6 * 192)
    assert (few[:, :3] @ fitted).sum() == pytest.approx(few[:, 3].sum())


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
