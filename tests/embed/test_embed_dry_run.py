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

from esmshard.embed import dry_run, parts
from esmshard.embed.dry_run import forecast
from esmshard.embed.engines import embed
from esmshard.embed.parts import begin
from esmshard.embed.spec import EmbedRequest, Long, request
from esmshard.errors import InputError, UsageError
from esmshard.vocab import RESIDUES

LENGTHS = [1100, 200, 31, 1023, 1, 150, 400, 90, 260, 77, 512, 64, 330, 121, 40]
"""Two are over 1,022 residues."""
AGAIN = [2, 0, 2]
"""Records whose sequence comes again at the end: 18 records of 15 sequences."""


class Given(NamedTuple):
    fasta: Path
    out: Path
    """An empty directory."""

    def ask(self, name: str = "x", *pools: str, **how: Any) -> EmbedRequest:
        return request("starter", self.out / name, pools=pools, **how)

    def look(self, name: str = "x", *pools: str, reuse: Path | None = None, **how: Any) -> dict[str, str]:
        """The lines by their first word."""
        text = forecast(self.ask(name, *pools, **how), self.fasta, reuse=reuse)
        words = [line.split(None, 1) for line in text.splitlines()]
        return {first: rest for first, rest in words}  # noqa: C416


def write(path: Path, sequences: Sequence[str]) -> Path:
    path.write_text("".join(f">record_{n}\n{text}\n" for n, text in enumerate(sequences)))
    return path


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    rng = np.random.default_rng(5)
    sequences = ["".join(rng.choice(list(RESIDUES[:20]), n)) for n in LENGTHS]
    fasta = write(tmp_path / "in.fasta", [*sequences, *(sequences[n] for n in AGAIN)])
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(dry_run, "SECONDS", 0.2)
    return Given(fasta, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "pools", "how"),
    [
        ("x.h5", ["residue"], {}),
        ("x.npz", ["residue"], {"dtype": "fp16"}),
        ("x.csv", [], {}),
        ("x.h5", ["attentions"], {"heads": [0, 5], "layers": [1, 6]}),
        ("x.h5", ["residue"], {"fmt": "biotrainer-h5"}),
        ("parts", ["residue", "mean"], {}),
    ],
)
def test_the_size_is_about_that_of_the_output(given: Given, name: str, pools: list[str], how: dict[str, Any]) -> None:
    lines = given.look(name, *pools, **how)
    assert list(given.out.iterdir()) == []
    embed(given.ask(name, *pools, **how), given.fasta)
    out = given.out / name
    size = out.stat().st_size if out.is_file() else sum(path.stat().st_size for path in (out / "parts").iterdir())
    number, unit = lines[how.get("fmt") or name.removeprefix("x.")].removeprefix("about ").split(", ")[-1].split()
    expected = float(number) * {"MB": 1e6, "GB": 1e9}[unit]
    assert 0.65 * expected < size < 1.03 * expected + 10_000


def test_counts_are_those_of_the_input(given: Given) -> None:
    lines = given.look("x.npy")
    assert lines[f"{given.fasta}:"] == "18 records, 5,561 residues, longest 1,100"
    assert lines["duplicates"] == "3 records whose sequence came before"
    assert lines["sequences"] == "15: 15 are computed, 0 reused"
    assert lines["long"] == "3 records over 1,022 residues: taken whole, none is cut"
    assert re.match(r"\d+\.\d\d hours \(.*\) to compute on cpu$", lines["time"])
    assert lines["at"].endswith(f"free at {given.out}")
    for long, treated in (
        (Long("truncate", 80, 20), "11 are cut to their first 80"),
        (Long("window", 80, 20), "seen in windows that share 20, none is cut"),
    ):
        assert given.look("x.npy", long=long)["long"] == f"11 records over 80 residues: {treated}"


def test_reused_sequences_are_counted(given: Given) -> None:
    half = given.fasta.with_name("half.fasta")
    half.write_text(given.fasta.read_text().partition(">record_10")[0])
    embed(given.ask("earlier"), half)
    assert given.look("x.npy", reuse=given.out / "earlier")["sequences"] == "15: 5 are computed, 10 reused"
    with pytest.raises(UsageError, match=r"--reuse .*earlier: holds mean_6, and no residue_6"):
        given.look("x.h5", "residue", reuse=given.out / "earlier")


@pytest.mark.parametrize("million", [7.6, 3.3, 0.01])
def test_what_cannot_fit_is_refused(given: Given, monkeypatch: pytest.MonkeyPatch, million: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(million * 1e6)))
    monkeypatch.setattr(dry_run, "opened", None)  # nothing is timed before
    with pytest.raises(
        InputError, match=f"^{re.escape(str(given.out))}: .* will be written and .* are free; make room"
    ):
        given.look("deep/x.h5", "residue")
    assert list(given.out.iterdir()) == []


def test_parts_grow_and_are_bounded_by_tokens_and_by_bytes(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    fasta = write(given.fasta.with_name("many.fasta"), ["".join(rng.choice(list("ADEG"), 98)) for _ in range(600)])
    bounds = begin(given.out / "grow", fasta, given.ask("x"))["bounds"]
    assert np.diff(bounds).tolist() == [41, 82, 164, 164, 149], "tokens: 4,096, twice, four times, and no more"
    monkeypatch.setattr(parts, "PART_BYTES", 98 * 192 * 4 * 30)
    bounds = begin(given.out / "bytes", fasta, given.ask("y", "residue"))["bounds"]
    assert max(np.diff(bounds)) == 30


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
