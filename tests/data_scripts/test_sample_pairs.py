"""The pairs of chains that are shipped, and how `data/pairs/pair_chains.py` makes them."""

import runpy
import sys
from pathlib import Path

import pytest

from esmshard.io.paths import shipped

PAIRS, CONTACT = shipped("data") / "pairs", shipped("data") / "contact"


def test_the_script_makes_the_shipped_files_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pair_chains.py", str(tmp_path)])
    runpy.run_path(str(PAIRS / "pair_chains.py"), run_name="__main__")
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == ["labels.csv", "test.fasta", "train.fasta", "valid.fasta"]
    for name in made:
        assert (tmp_path / name).read_bytes() == (PAIRS / name).read_bytes()


def test_pairs_are_of_the_chains_of_their_split() -> None:
    pairs: list[str] = []
    for split, count in (("train", 336), ("valid", 60), ("test", 74)):
        chains = dict(zip(*[iter((CONTACT / f"{split}.fasta").read_text().split())] * 2, strict=True))
        records = dict(zip(*[iter((PAIRS / f"{split}.fasta").read_text().split())] * 2, strict=True))
        assert len(records) == count
        for name, sequence in records.items():
            one, other = name[1:].split("-")
            assert sequence == f"{chains[f'>{one}']}:{chains[f'>{other}']}"
        pairs += records
    assert len({frozenset(name[1:].split("-")) for name in pairs}) == 470
