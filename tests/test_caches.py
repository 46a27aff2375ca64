"""An edited file is read again, even if its name, size and time are the same. `test_ingestion` has the token stores."""

import os
from pathlib import Path

import pytest

from esmshard.data.splits.variant_records import table_of
from esmshard.io.paths import remembered_sha256, sha256
from esmshard.recipe.sections import DataSettings


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


def test_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "x"
    path.write_text("one")
    assert remembered_sha256(path) == sha256(path)
    rewrite(path, "two")
    assert remembered_sha256(path) == sha256(path)
