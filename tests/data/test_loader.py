"""Examples and their crops. The label of a residue is its number, so a label shows where a crop was taken."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from esmshard.data.batching.loader import Example, Examples, Long
from esmshard.errors import InputError
from esmshard.io.store import TokenStore, ingest
from esmshard.io.symbols import Rules, chain_windows
from esmshard.vocab import chain_spans, decode, encode, encode_residues, is_residue

SIZES = [5, 30, 12, 13, 100, 31, 30, 100]
MAXIMUM = 30


class Numbers:
    per_residue = True
    labelled_N = None

    def __init__(self, store: TokenStore) -> None:
        self.lengths = store.lengths

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        number_L = np.arange(self.lengths[n])
        return {"number": number_L, "ten": np.repeat(number_L[:, None] * 10, 3, axis=1)}


@pytest.fixture
def sequences() -> dict[str, str]:
    letters = random.Random(0)
    return {f"r{k}": "".join(letters.choices("ACDEFGHIKLMNPQRSTVWY", k=size)) for k, size in enumerate(SIZES)}


@pytest.fixture
def store(tmp_path: Path, sequences: dict[str, str]) -> TokenStore:
    fasta = tmp_path / "x.fasta"
    fasta.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    return ingest([fasta], tmp_path / "store")


def examples(store: TokenStore, long: Long = "crop", max_length: int | None = MAXIMUM, seed: int = 0) -> Examples:
    return Examples("train", Path("x.fasta"), store, Numbers(store), long=long, max_length=max_length, seed=seed)


def starts(split: Examples, epoch: int) -> list[int]:
    return [int(split.get(n, epoch).labels["number"][0]) for n in range(len(split))]


def test_a_crop_is_a_window_and_its_labels_are_cut_alike(store: TokenStore, sequences: dict[str, str]) -> None:
    split = examples(store)
    assert split.tokens.tolist() == [min(size, MAXIMUM) + 2 for size in SIZES]
    assert Examples("predict", Path("x.fasta"), store, None).get(4, 0).labels == {}
    cropped = 0
    for epoch in range(5):
        for n, (name, sequence) in enumerate(sequences.items()):
            example = split.get(n, epoch)
            size = min(len(sequence), MAXIMUM)
            first = int(example.labels["number"][0])
            assert example.id == name
            assert example.tokens.tolist() == [0, *encode_residues(sequence[first : first + size]), 2]
            assert example.labels["number"].tolist() == list(range(first, first + size))
            np.testing.assert_array_equal(example.labels["ten"], 10 * example.labels["number"][:, None].repeat(3, 1))
            cropped += len(sequence) > MAXIMUM
    assert cropped == 15


def test_crops_follow_from_seed_epoch_and_id_alone(
    store: TokenStore, sequences: dict[str, str], tmp_path: Path
) -> None:
    fasta = tmp_path / "y.fasta"
    fasta.write_text(f">r7\n{sequences['r7']}\n>r4\n{sequences['r4']}\n")
    other, split, again = examples(ingest([fasta], tmp_path / "other")), examples(store), examples(store)
    first = {epoch: starts(split, epoch) for epoch in range(5)}
    for epoch in reversed(first):
        assert [again.get(n, epoch).labels["number"][0] for n in reversed(range(len(again)))] == first[epoch][::-1]
        assert [first[epoch][7], first[epoch][4]] == starts(other, epoch)


def test_crops_change_with_epoch_seed_and_id_and_every_window_comes_up(store: TokenStore) -> None:
    split = examples(store)
    assert len({starts(examples(store, seed=seed), 0)[4] for seed in range(10)}) > 3
    assert any(first[4] != first[7] for first in (starts(split, epoch) for epoch in range(10)))  # of one length
    split = examples(store, max_length=10)
    firsts = [starts(split, epoch) for epoch in range(60)]
    assert [{first[n] for first in firsts} for n in (2, 3)] == [{0, 1, 2}, {0, 1, 2, 3}]


def test_nothing_is_cropped_where_nothing_need_be(store: TokenStore, sequences: dict[str, str]) -> None:
    for long, max_length, epoch in (
        *(("full", MAXIMUM, 3), ("full", None, 3), ("crop", None, 3), ("crop", MAXIMUM, None)),
        *((long, 100, 3) for long in ("crop", "window", "full", "skip", "error")),
    ):
        split = examples(store, long, max_length)  # type: ignore[arg-type]
        assert split.notices == []
        for n, (name, sequence) in enumerate(sequences.items()):
            example = split.get(n, epoch)
            assert example.id == name
            assert example.tokens.tolist() == [0, *encode_residues(sequence), 2]
            assert example.labels["number"].tolist() == list(range(len(sequence)))
            assert len(example.labels["ten"]) == len(sequence)
            assert epoch is None or split.tokens[n] == len(sequence) + 2


def test_windows_cover_a_record_evenly_and_carry_their_labels(store: TokenStore, sequences: dict[str, str]) -> None:
    split = examples(store, "window")
    ids = ["r0", "r1", "r2", "r3", "r4/1-30", "r4/24-53", "r4/47-76", "r4/71-100", "r5/1-30", "r5/2-31", "r6"]
    ids += ["r7/1-30", "r7/24-53", "r7/47-76", "r7/71-100"]
    assert [split.get(n).id for n in range(len(split))] == ids
    assert split.tokens.tolist() == [7, 32, 14, 15, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32]
    assert split.notices == ["3 records over 30 residues cut into 10 windows (r4, ...)"]
    for epoch in (None, 0, 3):
        example = split.get(5, epoch)
        assert bytes(example.tokens[1:-1]) == encode_residues(sequences["r4"][23:53])
        assert example.labels["number"].tolist() == list(range(23, 53))


def test_long_records_are_skipped_by_name(store: TokenStore, sequences: dict[str, str]) -> None:
    split = examples(store, "skip")
    assert [split.get(n).id for n in range(len(split))] == ["r0", "r1", "r2", "r3", "r6"]
    assert split.tokens.tolist() == [7, 32, 14, 15, 32]
    assert split.notices == ["3 records over 30 residues left out (r4, ...)"]
    with pytest.raises(InputError, match=r"^x\.fasta: every record is longer"):
        examples(store, "skip", 4)
    with pytest.raises(InputError, match="record 'r4' has 100 residues"):
        examples(store, "error", MAXIMUM)


def test_values_of_a_whole_protein_are_not_cut(store: TokenStore) -> None:
    class Value(Numbers):
        per_residue = False

    for long in ("crop", "window"):
        split = Examples("train", Path("x.fasta"), store, Value(store), long=long, max_length=MAXIMUM)  # type: ignore[arg-type]
        last = split.get(len(split) - 1, 0)
        assert (len(last.tokens), len(last.labels["number"])) == (MAXIMUM + 2, 100)


def test_records_without_a_label_are_left_out(store: TokenStore) -> None:
    class Some(Numbers):
        labelled_N = np.array([True, False, True, True, True, False, True, True])

    def ids(long: Long) -> list[str]:
        split = Examples("train", Path("x.fasta"), store, Some(store), long=long, max_length=60)
        assert [split.get(n, 0).id for n in range(len(split))] == [split.id(n) for n in range(len(split))]
        assert [len(split.get(n, 0).tokens) for n in range(len(split))] == split.tokens.tolist()
        return [split.id(n) for n in range(len(split))]

    assert ids("crop") == ids("full") == ["r0", "r2", "r3", "r4", "r6", "r7"]
    assert ids("skip") == ["r0", "r2", "r3", "r6"]
    assert ids("window") == ["r0", "r2", "r3", "r4/1-60", "r4/41-100", "r6", "r7/1-60", "r7/41-100"]


# Records of several chains: each crop or window has a part of every chain.

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
LONG = "".join(LETTERS[k % 20] for k in range(50))
OTHER = "".join(LETTERS[7 * k % 20] for k in range(40))
LINKER = 4


@pytest.fixture
def complexes(tmp_path: Path) -> TokenStore:
    fasta = tmp_path / "x.fasta"
    fasta.write_text(f">ab\n{LONG}:{OTHER}\n>one\n{LONG}\n>small\nMKT:MKV\n>peptide\n{LONG}:MKT\n")
    return ingest([fasta], tmp_path / "store", Rules(linker=LINKER))


def test_long_chains_share_the_room_that_short_chains_leave() -> None:
    for sequence, most, sizes in (
        *((f"{LONG}:{OTHER}", 34, (15, 15)), (f"{LONG}:{OTHER}", 35, (16, 15)), (f"{LONG}:MKT", 34, (27, 3))),
        *((f"MKT:{LONG}:{OTHER}", 50, (3, 20, 19)), (f"{LONG}:{OTHER}", 6, (1, 1))),
    ):
        assert chain_windows(encode(sequence, LINKER)[1:-1], most).sizes == sizes


def test_a_crop_has_a_part_of_each_chain_that_follows_from_seed_epoch_and_id(complexes: TokenStore) -> None:
    def crops(seed: int) -> list[list[Example]]:
        made = Examples("train", Path("x"), complexes, Numbers(complexes), long="crop", max_length=30, seed=seed)
        assert made.tokens.tolist() == [32, 32, 12, 32]
        return [[made.get(n, epoch) for epoch in range(40)] for n in range(len(made))]

    found = crops(0)
    firsts = set()
    for example in found[0]:
        one, other = decode(example.tokens).split(":")
        assert (len(one), len(other)) == (13, 13)
        number_L = example.labels["number"]
        assert (complexes.residues(0)[number_L] == example.tokens[1:-1]).all(), "labels are cut with the tokens"
        firsts |= {("one", LONG.index(one)), ("other", int(number_L[17]) - 54)}
    assert len(firsts) > 30
    for seed in (0, 1):
        same = [example.tokens.tolist() for example in crops(seed)[0]]
        assert (same == [example.tokens.tolist() for example in found[0]]) == (seed == 0)
    assert {decode(example.tokens)[-4:] for example in found[3]} == {":MKT"}
    assert {decode(example.tokens) for example in found[2]} == {"MKT:MKV"}


def test_windows_have_every_residue_and_a_part_of_each_chain(complexes: TokenStore) -> None:
    made = Examples("train", Path("x"), complexes, Numbers(complexes), long="window", max_length=30)
    names = [made.id(n) for n in range(len(made))]
    assert names[:4] == ["ab/1-13:1-13", "ab/13-25:10-22", "ab/25-37:19-31", "ab/38-50:28-40"]
    assert names[4:] == ["one/1-30", "one/21-50", "small", "peptide/1-23:1-3", "peptide/14-36:1-3", "peptide/28-50:1-3"]
    seen: dict[str, set[int]] = {}
    for n in range(len(made)):
        example = made.get(n, epoch=0)
        assert example.id == names[n]
        assert len(example.tokens) == made.tokens[n] <= 32
        record = names[n].split("/")[0]
        whole = complexes.residues(["ab", "one", "small", "peptide"].index(record))
        place = example.labels["number"]
        assert (whole[place] == example.tokens[1:-1]).all()
        assert len(chain_spans(example.tokens)) == (1 if record == "one" else 2)
        seen.setdefault(record, set()).update(place[is_residue(example.tokens)[1:-1]].tolist())
    assert seen["ab"] == {k for k in range(94) if not 50 <= k < 54}
    assert len(seen["peptide"]) == 53


def test_a_linker_that_leaves_no_room_is_refused(complexes: TokenStore) -> None:
    for long in ("crop", "window"):
        with pytest.raises(InputError, match=r"record 'ab': data\.max_length"):
            Examples("train", Path("x"), complexes, None, long=long, max_length=5)  # type: ignore[arg-type]
    assert len(Examples("train", Path("x"), complexes, None, long="full", max_length=5)) == 4


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
