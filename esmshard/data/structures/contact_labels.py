"""Contacts, computed from coordinates."""

import numpy as np
import numpy.typing as npt

CONTACT_DISTANCE = 8.0
"""Angstrom between Cb atoms (Ca for glycine). A contact is strictly closer."""
MIN_SEPARATION = 6
"""Pairs nearer than this along a chain are neither trained on nor scored. All pairs of two chains are."""
UNDEFINED, LINKER = -1, -2


def contact_labels(cb_L3: npt.NDArray[np.float32]) -> npt.NDArray[np.int8]:
    """Compute the contacts of one record, int8 [L, L]: 1 for a contact, 0 for none, -1 where undefined.

    Args:
        cb_L3: Cb coordinates in Angstrom; a residue without coordinates is NaN, and all its pairs are undefined.

    The diagonal shows which residues are resolved: 1 with coordinates, -1 without. Loss and metrics leave out pairs
    nearer than `MIN_SEPARATION` in one chain.

    >>> contact_labels(np.array([[0, 0, 0], [7.9, 0, 0], [8, 0, 0], [np.nan, 0, 0]], dtype=np.float32))[0].tolist()
    [1, 1, 0, -1]
    """
    # Coordinates have three decimals, their squares six. Rounding to these takes binary noise away, which would
    # otherwise decide at exactly 8 A, differently in each place of space.
    exact_L3 = np.round(cb_L3.astype(np.float64), 3)
    square_LL = np.round(((exact_L3[:, None, :] - exact_L3[None, :, :]) ** 2).sum(-1), 6)
    labels_LL: npt.NDArray[np.int8] = (square_LL < CONTACT_DISTANCE**2).astype(np.int8)
    labels_LL[np.isnan(square_LL)] = UNDEFINED
    return labels_LL


def mark_linkers(labels_LL: npt.NDArray[np.int8], linker_L: npt.NDArray[np.bool_]) -> npt.NDArray[np.int8]:
    """Return labels with -2 on the diagonal for the residues of linkers between chains, bool [L]. All pairs of such a
    residue are undefined.
    """
    marked_LL = labels_LL.copy()
    marked_LL[linker_L] = marked_LL[:, linker_L] = UNDEFINED
    marked_LL[linker_L, linker_L] = LINKER
    return marked_LL


def chain_numbers(labels_LL: npt.NDArray[np.int8]) -> npt.NDArray[np.intp]:
    """Return a number for each residue that is another one for residues of other chains, int [L].

    >>> linker_L = np.array([False, False, True, True, False])
    >>> chain_numbers(mark_linkers(np.zeros((5, 5), np.int8), linker_L)).tolist()
    [0, 0, 1, 2, 2]
    """
    return np.cumsum(labels_LL.diagonal() == LINKER)
