"""Crops and windows of records of several chains have a part of every chain."""

import re
from pathlib import Path

import numpy as np
import pytest

from esmshard.data.batching.loader import Example, Examples
from esmshard.errors import InputError
from esmshard.io.store import TokenStore, ingest
from esmshard.io.symbols import Rules, chain_windows
from esmshard.vocab import chain_spans, decode, encode, is_residue

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
LONG = "".join(LETTERS[k % 20] for k in range(50))
OTHER = "".join(LETTERS[7 * k % 20] for k in range(40))
LINKER = 4


class PlaceLabels:
    """The label of a residue is its place in the record."""

    per_residue = True
    labelled_N = None

    def __init__(self, store: TokenStore) -> None:
        self._store = store

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        return {"place": np.arange(self._store.lengths[n])}


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    fasta = tmp_path / "x.fasta"
    fasta.write_text(f">ab\n{LONG}:{OTHER}\n>one\n{LONG}\n>small\nMKT:MKV\n>peptide\n{LONG}:MKT\n")
    return ingest([fasta], tmp_path / "store", Rules(linker=LINKER))


def parts(example: Example) -> list[str]:
    return decode(example.tokens).split(":")


def test_short_chains_stay_whole_and_the_others_share_the_room() -> None:
    for sequence, most, sizes in (
        *((f"{LONG}:{OTHER}", 34, (15, 15)), (f"{LONG}:{OTHER}", 35, (16, 15)), (f"{LONG}:MKT", 34, (27, 3))),
        *((f"MKT:{LONG}:{OTHER}", 50, (3, 20, 19)), (f"{LONG}:{OTHER}", 6, (1, 1))),
    ):
        assert chain_windows(encode(sequence, LINKER)[1:-1], most).sizes == sizes


def test_a_crop_has_a_part_of_each_chain_that_follows_from_seed_epoch_and_id(store: TokenStore) -> None:
    def crops(seed: int) -> list[list[Example]]:
        made = Examples("train", Path("x"), store, PlaceLabels(store), long="crop", max_length=30, seed=seed)
        assert made.tokens.tolist() == [32, 32, 12, 32]
        return [[made.get(n, epoch) for epoch in range(40)] for n in range(len(made))]

    found = crops(0)
    firsts: list[set[int]] = [set(), set()]
    for example in found[0]:
        one, other = parts(example)
        assert (len(one), len(other)) == (13, 13)
        assert one in LONG
        assert other in OTHER
        whole = store.residues(0)
        assert (whole[example.labels["place"]] == example.tokens[1:-1]).all(), "labels are cut with the tokens"
        firsts[0].add(LONG.index(one))
        firsts[1].add(int(example.labels["place"][17]) - 54)
    assert min(map(len, firsts)) > 10
    for seed in (0, 1):
        same = [example.tokens.tolist() for example in crops(seed)[0]]
        assert (same == [example.tokens.tolist() for example in found[0]]) == (seed == 0)
    assert {parts(example)[1] for example in found[3]} == {"MKT"}
    assert {decode(example.tokens) for example in found[2]} == {"MKT:MKV"}


def test_windows_have_every_residue_and_a_part_of_each_chain(store: TokenStore) -> None:
    made = Examples("train", Path("x"), store, PlaceLabels(store), long="window", max_length=30)
    names = [made.id(n) for n in range(len(made))]
    assert names[:4] == ["ab/1-13:1-13", "ab/13-25:10-22", "ab/25-37:19-31", "ab/38-50:28-40"]
    assert names[4:] == ["one/1-30", "one/21-50", "small", "peptide/1-23:1-3", "peptide/14-36:1-3", "peptide/28-50:1-3"]
    seen: dict[str, set[int]] = {}
    for n in range(len(made)):
        example = made.get(n, epoch=0)
        assert example.id == names[n]
        assert len(example.tokens) == made.tokens[n] <= 32
        record = names[n].split("/")[0]
        whole = store.residues(["ab", "one", "small", "peptide"].index(record))
        place = example.labels["place"]
        assert (whole[place] == example.tokens[1:-1]).all()
        assert len(chain_spans(example.tokens)) == (1 if record == "one" else 2)
        seen.setdefault(record, set()).update(place[is_residue(example.tokens)[1:-1]].tolist())
    assert seen["ab"] == {k for k in range(94) if not 50 <= k < 54}
    assert len(seen["peptide"]) == 53


def test_a_linker_that_leaves_no_room_is_refused(store: TokenStore) -> None:
    for long in ("crop", "window"):
        with pytest.raises(InputError, match=r"record 'ab': data\.max_length"):
            Examples("train", Path("x"), store, None, long=long, max_length=5)  # type: ignore[arg-type]
    assert len(Examples("train", Path("x"), store, None, long="full", max_length=5)) == 4


def test_ingest_cuts_chains_in_the_same_way(tmp_path: Path) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_text(f">ab words\n{LONG}:{OTHER}\n")
    made = ingest([fasta], tmp_path / "window", Rules(linker=LINKER, long="window", max_length=30))
    assert made.description(1) == "ab/13-25:10-22 words"
    assert decode(made.residues(1)) == f"{LONG[12:25]}:{OTHER[9:22]}"
    made = ingest([fasta], tmp_path / "crop", Rules(linker=LINKER, long="crop", max_length=30))
    first, last, begin, end = map(int, re.findall(r"\d+", made.description(0)))
    assert decode(made.residues(0)) == f"{LONG[first - 1 : last]}:{OTHER[begin - 1 : end]}"
    with pytest.raises(InputError, match=r"x.fasta:1: record 'ab'"):
        ingest([fasta], tmp_path / "none", Rules(linker=LINKER, long="crop", max_length=5))
