"""Examples and their crops. The label of a residue is its number, so a label tells where a crop was taken."""

import random
from pathlib import Path

import numpy as np
import pytest

from esmshard.data.loader import Examples, Long
from esmshard.data.store import TokenStore, ingest
from esmshard.errors import InputError
from esmshard.vocab import encode_residues

SIZES = [5, 30, 12, 13, 100, 31, 30, 100]
MAXIMUM = 30


class Numbers:
    """Residue numbers as labels: one array [L], one [L, 3] of ten times the number."""

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


def test_crops_follow_from_seed_epoch_and_id_alone(store: TokenStore) -> None:
    split = examples(store)
    first = {(n, epoch): split.get(n, epoch).tokens.tolist() for epoch in range(3) for n in range(len(split))}
    again = examples(store)
    for n, epoch in sorted(first, reverse=True):
        assert again.get(n, epoch).tokens.tolist() == first[n, epoch]


def test_a_record_is_cropped_alike_wherever_it_stands(
    store: TokenStore, sequences: dict[str, str], tmp_path: Path
) -> None:
    fasta = tmp_path / "y.fasta"
    fasta.write_text(f">r7\n{sequences['r7']}\n>r4\n{sequences['r4']}\n")
    other, split = examples(ingest([fasta], tmp_path / "other")), examples(store)
    for epoch in range(5):
        assert [starts(split, epoch)[7], starts(split, epoch)[4]] == starts(other, epoch)


def test_crops_change_with_epoch_seed_and_id(store: TokenStore) -> None:
    split = examples(store)
    assert len({starts(split, epoch)[4] for epoch in range(10)}) > 3
    assert len({starts(examples(store, seed=seed), 0)[4] for seed in range(10)}) > 3
    assert any(first[4] != first[7] for first in (starts(split, epoch) for epoch in range(10)))  # of one length


def test_every_window_comes_up(store: TokenStore) -> None:
    split = examples(store, max_length=10)
    assert {starts(split, epoch)[2] for epoch in range(100)} == {0, 1, 2}
    assert {starts(split, epoch)[3] for epoch in range(100)} == {0, 1, 2, 3}


@pytest.mark.parametrize(("long", "max_length"), [("full", MAXIMUM), ("full", None), ("crop", None), ("crop", 100)])
def test_nothing_is_cropped_where_nothing_need_be(
    store: TokenStore, sequences: dict[str, str], long: Long, max_length: int | None
) -> None:
    split = examples(store, long, max_length)
    assert split.tokens.tolist() == [size + 2 for size in SIZES]
    for n, sequence in enumerate(sequences.values()):
        assert split.get(n, 3).tokens.tolist() == [0, *encode_residues(sequence), 2]
        assert len(split.get(n, 3).labels["ten"]) == len(sequence)


@pytest.mark.parametrize("max_length", [8, 12, 30, 99, 100])
def test_token_counts_are_those_of_the_examples(store: TokenStore, max_length: int) -> None:
    split = examples(store, max_length=max_length)
    assert split.tokens.dtype == np.int64
    assert split.tokens.tolist() == [min(size, max_length) + 2 for size in SIZES]
    assert [len(split.get(n, 1).tokens) for n in range(len(split))] == split.tokens.tolist()
    assert len(split) == len(SIZES)


def test_a_record_over_the_limit_is_refused_where_the_recipe_says_so(store: TokenStore) -> None:
    with pytest.raises(InputError) as error:
        examples(store, "error", MAXIMUM)
    assert str(error.value).startswith("x.fasta: record 'r4' has 100 residues, data.max_length is 30")
    assert examples(store, "error", 100).tokens.tolist() == [size + 2 for size in SIZES]


def test_a_split_without_labels_has_none(store: TokenStore) -> None:
    split = Examples("predict", Path("x.fasta"), store, None, long="crop", max_length=MAXIMUM)
    assert split.get(4, 0).labels == {}
    assert len(split.get(4, 0).tokens) == MAXIMUM + 2


def test_a_record_is_whole_outside_of_an_epoch(store: TokenStore, sequences: dict[str, str]) -> None:
    split = examples(store)
    for n, sequence in enumerate(sequences.values()):
        assert split.get(n).tokens.tolist() == [0, *encode_residues(sequence), 2]
        assert split.get(n).labels["number"].tolist() == list(range(len(sequence)))
