"""The pairs of chains that are shipped, and how `data/pairs/pair_chains.py` makes them."""

import csv
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest

from esmshard.io.paths import shipped

PAIRS, CONTACT = shipped("data") / "pairs", shipped("data") / "contact"


def records(file: Path) -> dict[str, str]:
    words = file.read_text(encoding="utf-8").split()
    return {name[1:]: sequence for name, sequence in zip(words[::2], words[1::2], strict=True)}


def rows(file: Path) -> dict[str, dict[str, str]]:
    with open(file, newline="", encoding="utf-8") as lines:
        return {row["id"]: row for row in csv.DictReader(lines)}


def test_the_script_makes_the_shipped_files_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pair_chains.py", str(tmp_path)])
    runpy.run_path(str(PAIRS / "pair_chains.py"), run_name="__main__")
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == ["labels.csv", "test.fasta", "train.fasta", "valid.fasta"]
    for name in made:
        assert (tmp_path / name).read_bytes() == (PAIRS / name).read_bytes()


def test_pairs_are_of_the_chains_of_their_split_and_labels_are_of_both_chains() -> None:
    labels, of = rows(PAIRS / "labels.csv"), rows(CONTACT / "labels.csv")
    names = []
    for split, count in (("train", 336), ("valid", 60), ("test", 74)):
        chains, pairs = records(CONTACT / f"{split}.fasta"), records(PAIRS / f"{split}.fasta")
        assert len(pairs) == count
        names += pairs
        for name, sequence in pairs.items():
            one, other = name.split("-")
            assert one != other
            assert sequence == f"{chains[one]}:{chains[other]}"
            helix = abs(float(of[one]["helix"]) - float(of[other]["helix"]))
            assert abs(float(labels[name]["helix_difference"]) - helix) < 1e-4
            assert labels[name]["fold"] == ("same" if of[one]["fold"] == of[other]["fold"] else "different")
        assert set(Counter(chain for name in pairs for chain in name.split("-")).values()) == {4}
    assert names == list(labels)
    every = [frozenset(name.split("-")) for name in names]
    assert len(set(every)) == len(every) == 470
