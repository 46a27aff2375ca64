"""Contacts from coordinates."""

import math

import numpy as np
import pytest

from esmshard.data.labels.coordinates import contact_labels


def chain(*positions: tuple[float, float, float]) -> np.ndarray:
    return np.array(positions, dtype=np.float32)


@pytest.mark.parametrize(
    ("position", "contact"),
    [
        ((7.999, 0, 0), 1),
        ((8, 0, 0), 0),
        ((8.001, 0, 0), 0),
        ((0, -7.999, 0), 1),
        ((0, 0, -8), 0),
        ((4.6, 4.6, 4.6), 1),  # 7.97
        ((4.7, 4.7, 4.7), 0),  # 8.14
        ((0, 0, 0), 1),
    ],
)
def test_a_contact_is_strictly_under_eight(position: tuple[float, float, float], contact: int) -> None:
    assert contact_labels(chain((0, 0, 0), position)).tolist() == [[1, contact], [contact, 1]]


def test_a_chain_by_hand() -> None:
    labels_LL = contact_labels(chain((0, 0, 0), (5, 0, 0), (10, 0, 0), (10, 6, 0)))
    assert labels_LL.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]  # 5, 6: sqrt(61) = 7.8
    assert labels_LL.dtype == np.int8


def test_all_pairs_agree_with_a_loop_and_are_symmetric() -> None:
    cb_L3 = np.random.default_rng(0).uniform(0, 20, (40, 3)).astype(np.float32)
    labels_LL = contact_labels(cb_L3)
    expected = [[int(math.dist(a, b) < 8) for b in cb_L3.tolist()] for a in cb_L3.tolist()]
    assert labels_LL.tolist() == expected == labels_LL.T.tolist()
    assert 40 < labels_LL.sum() < 1500


def test_a_residue_without_coordinates_has_no_defined_pair() -> None:
    labels_LL = contact_labels(chain((0, 0, 0), (np.nan, np.nan, np.nan), (1, 0, 0), (2, np.nan, 0), (20, 0, 0)))
    assert labels_LL.tolist() == [
        [1, -1, 1, -1, 0],
        [-1, -1, -1, -1, -1],
        [1, -1, 1, -1, 0],
        [-1, -1, -1, -1, -1],
        [0, -1, 0, -1, 1],
    ]


def test_the_diagonal_tells_which_residues_are_resolved() -> None:
    cb_L3 = np.random.default_rng(0).uniform(0, 99, (30, 3)).astype(np.float32)
    cb_L3[[0, 7, 29]] = np.nan
    assert np.flatnonzero(contact_labels(cb_L3).diagonal() < 0).tolist() == [0, 7, 29]
    assert set(contact_labels(cb_L3).diagonal().tolist()) == {1, -1}


def test_a_chain_far_from_the_origin_keeps_its_contacts() -> None:
    far = chain((4096, 4096, 4096), (4096, 4096, 4096 + 7.9921875), (4096, 4104, 4096))
    assert contact_labels(far)[0].tolist() == [1, 1, 0]


def test_eight_angstrom_between_stored_coordinates_is_no_contact_wherever_the_chain_lies() -> None:
    steps = [(80, 0, 0), (0, 80, 0), (48, 64, 0), (0, 64, 48)]
    for start in range(300):
        places = np.array([(start, start, start), *(np.array(s) + start for s in steps)], dtype=np.uint16)
        labels_LL = contact_labels(places.astype(np.float32) / np.float32(10))  # as CoordinateLabels reads them
        assert labels_LL[0].tolist() == [1, 0, 0, 0, 0], start
