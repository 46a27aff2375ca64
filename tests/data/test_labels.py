"""Coordinates of a FASTA file, files that do not fit, and contacts."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esmshard.data.labels.coordinates import CoordinateLabels, contact_labels, npz_beside
from esmshard.errors import InputError
from esmshard.io.store import cached

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
    return str(error.value)


def test_coordinates_are_found_by_id_and_given_in_angstrom(fasta: Path) -> None:
    write(fasta)
    labels = CoordinateLabels(fasta, cached(fasta))
    expected = [[[0.6, 0.7, 0.8], [0.9, 1.0, 1.1], [1.2, 1.3, 1.4]], [[1.5, 1.6, 1.7], [1.8, 1.9, 2.0]]]
    for n, rows in enumerate([*expected, [[0.0, 0.1, 0.2], [0.3, 0.4, 0.5]]]):
        np.testing.assert_allclose(labels[n]["cb"], rows, atol=1e-6)
    cb_dA = GOOD["cb_dA"].copy()
    cb_dA[2] = cb_dA[4, 1] = 65535
    cb_dA[3] = 65534
    write(fasta, cb_dA=cb_dA)
    labels = CoordinateLabels(fasta, cached(fasta))
    assert np.isnan(labels[0]["cb"]).tolist() == [[True] * 3, [False] * 3, [True] * 3]
    assert labels[0]["cb"][1, 0] == pytest.approx(6553.4)


def test_chains_of_a_record_have_rows_one_after_the_other_and_linkers_none(tmp_path: Path) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_text(">a\nMKT:TT\n>c\nMM\n")
    write(fasta, names=np.array(["c", "a"]), seqs=np.array(["MM", "MKT:TT"]), offsets=np.array([0, 2, 7]))
    store = cached(fasta)
    labels = CoordinateLabels(fasta, store)
    assert [len(labels[n]["cb"]) for n in (0, 1)] == store.lengths.tolist()
    cb_L3 = labels[0]["cb"]
    assert np.isnan(cb_L3[3:-2]).all()
    np.testing.assert_allclose([*cb_L3[:3, 0], *cb_L3[-2:, 0]], [0.6, 0.9, 1.2, 1.5, 1.8], atol=1e-6)
    write(fasta, names=np.array(["c", "a"]), seqs=np.array(["MM", "MKTTT"]), offsets=np.array([0, 2, 7]))
    assert "record 'a' has another sequence" in refusal(fasta)


def test_the_coordinates_lie_beside_the_fasta_file_under_its_name() -> None:
    for name in ("x.fasta", "x.fa", "x.fasta.gz", "kinase.family.fasta", "x.fab.fasta"):
        stem = name.removesuffix(".gz").removesuffix(".fasta").removesuffix(".fa")
        assert npz_beside(Path("d") / name) == Path("d") / f"{stem}.npz"


def test_what_does_not_fit_is_refused(fasta: Path) -> None:
    for changed, token in (
        ({"seqs": None}, "has no array 'seqs'"),
        ({"cb_dA": GOOD["cb_dA"].astype(np.float32)}, "cb_dA is float32 [7, 3]"),
        ({"cb_dA": GOOD["cb_dA"][:, :2]}, "cb_dA is uint16 [7, 2]"),
        ({"offsets": GOOD["offsets"][:-1]}, "do not fit each other"),
        ({"offsets": GOOD["offsets"] + 1}, "do not fit each other"),
        ({"names": GOOD["names"][:-1]}, "do not fit each other"),
        ({"names": np.array("a")}, "do not fit each other"),
        ({"cb_dA": GOOD["cb_dA"][:-1]}, "do not fit each other"),
        ({"names": np.array(["c", "a", "d"])}, "has no chain 'b'"),
        ({"offsets": np.array([0, 2, 4, 7])}, "record 'a' has labels for 2 residues, but 3"),
        ({"seqs": np.array(["MM", "MKT", "TS"])}, "record 'b' has another sequence"),
    ):
        path = write(fasta, **changed)
        message = refusal(fasta)
        assert message.startswith(f"{path}: ")
        assert token in message


def test_what_is_no_npz_is_refused(fasta: Path) -> None:
    path = fasta.with_suffix(".npz")
    assert refusal(fasta).startswith(f"{path}: no such file")
    whole = write(fasta).read_bytes()
    at = whole.index(b"cb_dA.npy") + len("cb_dA.npy") + 20  # the first bytes of compressed data
    for data in (whole[:-40], whole[:at] + b"\xff" * 20 + whole[at + 20 :], b"names,seqs\n"):
        path.write_bytes(data)
        assert refusal(fasta).startswith(f"{path}: cannot be read (")
    with open(path, "wb") as file:
        np.save(file, np.array([{}], dtype=object))
    assert refusal(fasta).startswith(f"{path}: ")


def test_all_pairs_agree_with_a_loop_and_are_symmetric() -> None:
    cb_L3 = np.random.default_rng(0).uniform(0, 20, (40, 3)).astype(np.float32)
    cb_L3[7], cb_L3[9, 1] = np.nan, np.nan
    labels_LL = contact_labels(cb_L3)
    expected = np.array([[int(math.dist(a, b) < 8) for b in cb_L3.tolist()] for a in cb_L3.tolist()])
    expected[[7, 9]] = expected[:, [7, 9]] = -1
    assert labels_LL.tolist() == expected.tolist() == labels_LL.T.tolist()
    assert 40 < (labels_LL == 1).sum() < 1500


def test_eight_angstrom_between_stored_coordinates_is_no_contact_wherever_the_chain_lies() -> None:
    steps = [(80, 0, 0), (0, 80, 0), (48, 64, 0), (0, 64, 48)]
    for start in range(0, 300, 3):
        places = np.array([(start, start, start), *(np.array(s) + start for s in steps)], dtype=np.uint16)
        labels_LL = contact_labels(places.astype(np.float32) / np.float32(10))  # as CoordinateLabels reads them
        assert labels_LL[0].tolist() == [1, 0, 0, 0, 0], start
