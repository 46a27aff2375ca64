"""What was read once is read again when the file says something else, were its name, size and time the same."""

import os
from pathlib import Path

import pytest

from esmshard.data.splits.variant_records import table_of
from esmshard.io.paths import remembered_sha256, sha256
from esmshard.io.store import cached
from esmshard.recipe.sections import DataSettings


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))


def rewrite(path: Path, text: str) -> None:
    """Another content of the same length, with the old time."""
    before = path.stat()
    assert len(text) == before.st_size
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_table_of_variants(tmp_path: Path) -> None:
    table, protein = tmp_path / "t.csv", tmp_path / "wt.fasta"
    table.write_text("mutant,y\nM1A,1.0\nK2A,2.0\n")
    protein.write_text(">wt\nMKTAYIAKQR\n")
    data = DataSettings(table=str(table), wild_type=str(protein), target=("y",))
    first = table_of(data)
    assert table_of(data) is first  # read once
    rewrite(table, "mutant,y\nM1A,5.0\nK2A,7.0\n")
    assert table_of(data).target_NT[:, 0].tolist() == [5.0, 7.0]
    rewrite(protein, ">wt\nMKTAYIAKQG\n")
    assert table_of(data).wild_type == "MKTAYIAKQG"


def test_a_fasta_file(tmp_path: Path) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_text(">a\nMKTAYIAKQR\n")
    first = cached(fasta)
    assert cached(fasta).path == first.path
    rewrite(fasta, ">b\nMKTAYIAKQG\n")
    assert cached(fasta).id(0) == "b"


def test_a_hash(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("one")
    assert remembered_sha256(path) == sha256(path)
    rewrite(path, "two")
    assert remembered_sha256(path) == sha256(path)
