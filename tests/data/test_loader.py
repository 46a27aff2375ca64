"""Examples and their crops. The label of a residue is its number, so a label shows where a crop was taken."""

import random
from pathlib import Path

import numpy as np
import pytest

from esmshard.data.batching.loader import Examples, Long
from esmshard.errors import InputError
from esmshard.io.store import TokenStore, ingest
from esmshard.vocab import encode_residues

SIZES = [5, 30, 12, 13, 100, 31, 30, 100]
MAXIMUM = 30


class Numbers:
    """Residue numbers as labels: one array [L], one [L, 3] of ten times the number."""

    per_residue = True
    labelled_N = None

    def __init__(self, store: TokenStore) -> None:
        self.lengths = store.lengths

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        number_L = np.arange(self.lengths[n], dtype=np.float32)
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
    assert split.tokens.dtype == np.int32
    assert split.tokens.tolist() == [min(size, MAXIMUM) + 2 for size in SIZES]
    assert Examples("predict", Path("x.fasta"), store, None).get(4, 0).labels == {}
    cropped = 0
    for epoch in range(5):
        for n, (name, sequence) in enumerate(sequences.items()):
            example = split.get(n, epoch)
            size = min(len(sequence), MAXIMUM)
            first = int(example.labels["number"][0])
            assert example.id == name
            assert example.tokens.dtype == np.uint8
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
    class Value:
        per_residue = False
        labelled_N = None

        def __getitem__(self, n: int) -> dict[str, np.ndarray]:
            return {"stability": np.full(3, n, dtype=np.float32)}

    for long in ("crop", "window"):
        split = Examples("train", Path("x.fasta"), store, Value(), long=long, max_length=MAXIMUM)  # type: ignore[arg-type]
        last = split.get(len(split) - 1, 0)
        assert len(last.tokens) == MAXIMUM + 2
        assert last.labels["stability"].tolist() == [7, 7, 7]


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
