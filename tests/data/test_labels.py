"""Coordinates beside a FASTA file, and what is said where the two do not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esmshard.data.labels.coordinates import UNRESOLVED, CoordinateLabels
from esmshard.errors import InputError
from esmshard.io.remote import data_file
from esmshard.io.store import TokenStore, cached

GOOD: dict[str, Any] = {  # not in the order of the FASTA file
    "names": np.array(["c", "a", "b"]),
    "seqs": np.array(["MM", "MKT", "TT"]),
    "offsets": np.array([0, 2, 5, 7], dtype=np.int32),
    "cb_dA": np.arange(21, dtype=np.uint16).reshape(7, 3),
}


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "x.fasta"
    path.write_text(">a\nMKT\n>b\nTT\n>c\nMM\n")
    return path


def write(fasta: Path, **changed: Any) -> Path:
    path = fasta.with_suffix(".npz")
    np.savez_compressed(path, **{name: array for name, array in (GOOD | changed).items() if array is not None})
    return path


def refusal(fasta: Path) -> str:
    with pytest.raises(InputError) as error:
        CoordinateLabels(fasta, cached(fasta))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("split", "chains"), [("train", 776), ("valid", 99), ("test", 100)])
def test_every_record_of_the_shipped_sample_has_labels_of_its_length(split: str, chains: int) -> None:
    fasta = data_file(f"sample:contact/{split}")
    store = cached(fasta)
    labels = CoordinateLabels(fasta, store)
    cb = [labels[n]["cb"] for n in range(len(store))]
    assert len(cb) == chains
    assert [c.shape for c in cb] == [(length, 3) for length in store.lengths]
    assert all(np.isfinite(c).any() and np.nanmin(c) >= 0 for c in cb)
    bonds = np.concatenate([np.linalg.norm(np.diff(c, axis=0), axis=1) for c in cb])  # Cb to the next Cb
    assert 5 < np.nanmedian(bonds) < 6


def test_coordinates_are_found_by_id_and_given_in_angstrom(fasta: Path) -> None:
    write(fasta)
    labels = CoordinateLabels(fasta, cached(fasta))
    assert labels[0].keys() == {"cb"}
    assert labels[0]["cb"].dtype == np.float32
    expected = [[[0.6, 0.7, 0.8], [0.9, 1.0, 1.1], [1.2, 1.3, 1.4]], [[1.5, 1.6, 1.7], [1.8, 1.9, 2.0]]]
    for n, rows in enumerate([*expected, [[0.0, 0.1, 0.2], [0.3, 0.4, 0.5]]]):
        np.testing.assert_allclose(labels[n]["cb"], rows, atol=1e-6)


def test_an_unresolved_residue_has_no_coordinate_at_all(fasta: Path) -> None:
    cb_dA = GOOD["cb_dA"].copy()
    cb_dA[2] = UNRESOLVED
    cb_dA[4, 1] = UNRESOLVED
    cb_dA[3] = UNRESOLVED - 1
    write(fasta, cb_dA=cb_dA)
    labels = CoordinateLabels(fasta, cached(fasta))
    assert UNRESOLVED == 65535
    assert np.isnan(labels[0]["cb"]).tolist() == [[True] * 3, [False] * 3, [True] * 3]
    assert labels[0]["cb"][1, 0] == pytest.approx(6553.4)
    assert not np.isnan([*labels[1]["cb"], *labels[2]["cb"]]).any()


def test_chains_of_a_record_have_rows_one_after_the_other_and_linkers_none(tmp_path: Path) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_text(">a\nMKT:TT\n>c\nMM\n")
    write(fasta, names=np.array(["c", "a"]), seqs=np.array(["MM", "MKT:TT"]), offsets=np.array([0, 2, 7]))
    store = cached(fasta)
    labels = CoordinateLabels(fasta, store)
    assert [len(labels[n]["cb"]) for n in (0, 1)] == store.lengths.tolist()
    cb_L3 = labels[0]["cb"]
    linker = len(cb_L3) - 5
    assert linker > 0
    assert np.isnan(cb_L3[3 : 3 + linker]).all()
    np.testing.assert_allclose(
        np.concatenate([cb_L3[:3], cb_L3[3 + linker :]])[:, 0], [0.6, 0.9, 1.2, 1.5, 1.8], atol=1e-6
    )
    write(fasta, names=np.array(["c", "a"]), seqs=np.array(["MM", "MKTTT"]), offsets=np.array([0, 2, 7]))
    assert "the sequence of record 'a' is not the one in" in refusal(fasta)
    write(fasta, names=np.array(["c", "a"]), seqs=np.array(["MM", "MKT:TT"]), offsets=np.array([0, 1, 7]))
    assert "record 'a' has labels for 6 residues, but 5 residues in" in refusal(fasta)


@pytest.mark.parametrize("name", ["x.fasta", "x.fa", "x.fasta.gz", "kinase.family.fasta", "x.fab.fasta"])
def test_the_coordinates_lie_beside_the_fasta_file_under_its_name(tmp_path: Path, fasta: Path, name: str) -> None:
    store = cached(fasta)
    stem = name.removesuffix(".gz").removesuffix(".fasta").removesuffix(".fa")
    write(fasta).rename(tmp_path / f"{stem}.npz")
    assert CoordinateLabels(tmp_path / name, store)[2]["cb"].shape == (2, 3)


def test_a_missing_file_is_named(fasta: Path) -> None:
    assert refusal(fasta).startswith(f"{fasta.with_suffix('.npz')}: no such file")


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_array_is_named(fasta: Path, name: str) -> None:
    path = write(fasta, **{name: None})
    message = refusal(fasta)
    assert message.startswith(f"{path}: has no array ")
    assert name in message.removeprefix(str(path)).split(";")[0]


@pytest.mark.parametrize(
    "cb_dA",
    [
        GOOD["cb_dA"].astype(np.float32),
        GOOD["cb_dA"].astype(np.int16),
        GOOD["cb_dA"].ravel(),
        GOOD["cb_dA"][:, :2],
    ],
)
def test_coordinates_of_another_type_are_refused(fasta: Path, cb_dA: np.ndarray) -> None:
    path = write(fasta, cb_dA=cb_dA)
    assert refusal(fasta).startswith(f"{path}: cb_dA is {cb_dA.dtype} {list(cb_dA.shape)}, not uint16")


@pytest.mark.parametrize(
    "changed",
    [
        {"offsets": GOOD["offsets"][:-1]},
        {"offsets": GOOD["offsets"][[0, 1, 3]]},
        {"offsets": GOOD["offsets"] + 1},
        {"seqs": GOOD["seqs"][:-1]},
        {"names": GOOD["names"][:-1]},
        {"cb_dA": GOOD["cb_dA"][:-1]},
    ],
)
def test_arrays_that_do_not_fit_each_other_are_refused(fasta: Path, changed: dict[str, np.ndarray]) -> None:
    path = write(fasta, **changed)
    assert refusal(fasta).startswith(f"{path}: names, seqs, offsets and cb_dA do not fit each other")


def test_a_missing_chain_is_named(fasta: Path) -> None:
    path = write(fasta, names=np.array(["c", "a", "d"]))
    assert refusal(fasta).startswith(f"{path}: has no chain 'b', which {fasta} has")


def test_another_length_is_refused_with_the_record_and_both_lengths(fasta: Path) -> None:
    path = write(fasta, offsets=np.array([0, 2, 4, 7], dtype=np.int32))
    message = refusal(fasta)
    assert message.startswith(f"{path}: record 'a' has labels for 2 residues, but 3 residues in {fasta}")


def test_another_sequence_is_refused_with_the_record(fasta: Path) -> None:
    path = write(fasta, seqs=np.array(["MM", "MKT", "TS"]))
    assert refusal(fasta).startswith(f"{path}: the sequence of record 'b' is not the one in {fasta}")


def test_rare_residues_are_compared_as_they_were_read(fasta: Path) -> None:
    fasta.write_text(">a\nmJo\n>b\nTT\n>c\nM-M\n")
    write(fasta, seqs=np.array(["MM", "MXO", "TT"]))
    assert CoordinateLabels(fasta, cached(fasta))[0]["cb"].shape == (3, 3)


def test_a_file_that_ends_early_is_refused(fasta: Path) -> None:
    path = write(fasta)
    whole = path.read_bytes()
    sizes = range(0, len(whole), 37)
    assert len(sizes) > 10
    for size in sizes:
        path.write_bytes(whole[:size])
        assert refusal(fasta).startswith(f"{path}: cannot be read (")


def test_damage_inside_the_file_is_refused(fasta: Path) -> None:
    path = write(fasta)
    whole = path.read_bytes()
    at = whole.index(b"cb_dA.npy") + len("cb_dA.npy") + 20  # the first bytes of compressed data
    for pattern in (b"\xff" * 20, b"\x00" * 20, bytes(range(20))):
        path.write_bytes(whole[:at] + pattern + whole[at + 20 :])
        assert refusal(fasta).startswith(f"{path}: cannot be read (")


def test_a_file_of_another_kind_is_refused(fasta: Path) -> None:
    path = fasta.with_suffix(".npz")
    for array in (np.arange(3), np.array([{}], dtype=object)):
        with open(path, "wb") as file:
            np.save(file, array)
        assert refusal(fasta).startswith(f"{path}: ")
    path.write_text("names,seqs\n")
    assert refusal(fasta).startswith(f"{path}: cannot be read (")


def test_only_the_records_of_the_fasta_file_need_labels(tmp_path: Path) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_text(">b\nTT\n")
    write(fasta)
    store: TokenStore = cached(fasta)
    np.testing.assert_allclose(CoordinateLabels(fasta, store)[0]["cb"][0], [1.5, 1.6, 1.7], atol=1e-6)


def test_arrays_without_a_length_are_refused(fasta: Path) -> None:
    write(fasta, names=np.array("a"))
    assert "do not fit each other" in refusal(fasta)
