"""Reads Cb coordinates from the `.npz` file that belongs to a FASTA file, and computes contacts of residues."""

import re
import zipfile
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError
from esmshard.io.store import TokenStore
from esmshard.vocab import decode, is_residue

UNRESOLVED = 65535
"""The value in `cb_dA` for a residue without coordinates."""

_FASTA_ENDING = re.compile(r"(\.(fasta|faa|fa))?(\.(gz|bz2|xz|zst))?$")


def npz_beside(fasta: Path) -> Path:
    """Return the `.npz` path that belongs to a FASTA file: `train.npz` in the folder of `train.fasta`."""
    return fasta.with_name(_FASTA_ENDING.sub("", fasta.name) + ".npz")


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return all arrays of an `.npz` file by name. Raises `InputError` if the file cannot be read."""
    try:
        with zipfile.ZipFile(path):  # np.load would also accept a file with a single array.
            file = np.load(path, allow_pickle=False)
        with file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    # zipfile raises NotImplementedError for an unknown compression.
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); copy or make it again") from None


class CoordinateLabels:
    """Cb coordinates from the `.npz` file with the same name as a FASTA file (see data/README.md).

    For a record of several chains, `A:B`, the rows of A come before the rows of B. Linkers have no rows. Raises
    `InputError` if the file is missing or damaged, or a record is not in the file or has another sequence there.
    """

    per_residue: ClassVar[bool] = True
    labelled_N: ClassVar[None] = None

    def __init__(self, fasta: Path, store: TokenStore) -> None:
        path = npz_beside(fasta)
        if not path.exists():
            raise InputError(f"{path}: no such file of coordinates for {fasta.name}; add it, or give structure files")
        arrays = read_arrays(path)
        try:
            names, seqs, offsets = arrays["names"], arrays["seqs"], arrays["offsets"]
            self._cb_dA: npt.NDArray[np.uint16] = arrays["cb_dA"]
        except KeyError as error:
            raise InputError(f"{path}: has no array {error}; names, seqs, offsets and cb_dA are expected") from None
        if self._cb_dA.dtype != np.uint16 or self._cb_dA.ndim != 2 or self._cb_dA.shape[1] != 3:
            kind = f"{self._cb_dA.dtype} {list(self._cb_dA.shape)}"
            raise InputError(f"{path}: cb_dA is {kind}, not uint16 [residues, 3]; make the file again")
        flat = all(array.ndim == 1 for array in (names, seqs, offsets))
        if not flat or len(offsets) != len(names) + 1 or len(seqs) != len(names) or offsets[-1] != len(self._cb_dA):
            raise InputError(
                f"{path}: the sizes of names, seqs, offsets and cb_dA do not fit each other; make the file again"
            )

        row = {str(name): k for k, name in enumerate(names)}
        self._rows: list[slice] = []
        for n in range(len(store)):
            record_id = store.id(n)
            if record_id not in row:
                raise InputError(f"{path}: has no chain '{record_id}', which {fasta} has; add it or remove the record")
            k = row[record_id]
            rows, length = slice(int(offsets[k]), int(offsets[k + 1])), int(is_residue(store.residues(n)).sum())
            if rows.stop - rows.start != length:
                raise InputError(
                    f"{path}: record '{record_id}' has labels for {rows.stop - rows.start} residues, but {length} "
                    f"residues in {fasta}; give each residue a label, {UNRESOLVED} if unresolved"
                )
            if str(seqs[k]) != decode(store.residues(n)):
                raise InputError(
                    f"{path}: record '{record_id}' has another sequence in {fasta}; make {path.name} again"
                )
            self._rows.append(rows)
        self._store = store

    def __getitem__(self, n: int) -> dict[str, npt.NDArray[np.float32]]:
        """Return the Cb coordinates of record n as `cb`, float32 [L, 3], in Angstrom; NaN if unresolved or a linker."""
        residue_L = is_residue(self._store.residues(n))
        cb_dA_L3 = np.full((len(residue_L), 3), UNRESOLVED, np.uint16)
        cb_dA_L3[residue_L] = self._cb_dA[self._rows[n]]
        cb_L3: npt.NDArray[np.float32] = cb_dA_L3.astype(np.float32) / np.float32(10)
        cb_L3[(cb_dA_L3 == UNRESOLVED).any(-1)] = np.nan
        return {"cb": cb_L3}


CONTACT_DISTANCE = 8.0
"""Two residues are in contact if the distance of their Cb atoms is below this number, in Angstrom."""
MIN_SEPARATION = 6
"""In training and scoring, residues i < j of the same chain count as a pair only if j - i is at least this number.
Residues of two chains need no minimum.
"""
UNDEFINED, LINKER = -1, -2


def contact_labels(cb_L3: npt.NDArray[np.float32]) -> npt.NDArray[np.int8]:
    """Return the contact of each pair of residues, int8 [L, L]: 1 for a contact, 0 for no contact, -1 for unknown.

    `cb_L3` has Cb coordinates in Angstrom. All pairs of a residue with NaN get -1. All other residues are in contact
    with themselves.

    >>> contact_labels(np.array([[0, 0, 0], [7.9, 0, 0], [8, 0, 0], [np.nan, 0, 0]], dtype=np.float32))[0].tolist()
    [1, 1, 0, -1]
    """
    # Coordinates have three decimals, so their squares have six. Without rounding to these decimals, floating-point
    # errors would decide whether a pair at exactly 8 A is a contact.
    exact_L3 = np.round(cb_L3.astype(np.float64), 3)
    square_LL = np.round(((exact_L3[:, None, :] - exact_L3[None, :, :]) ** 2).sum(-1), 6)
    labels_LL: npt.NDArray[np.int8] = (square_LL < CONTACT_DISTANCE**2).astype(np.int8)
    labels_LL[np.isnan(square_LL)] = UNDEFINED
    return labels_LL


def mark_linkers(labels_LL: npt.NDArray[np.int8], linker_L: npt.NDArray[np.bool_]) -> npt.NDArray[np.int8]:
    """Return a copy of contact labels: -1 for each pair with a linker token, but -2 for a linker token with itself."""
    marked_LL = labels_LL.copy()
    marked_LL[linker_L] = marked_LL[:, linker_L] = UNDEFINED
    marked_LL[linker_L, linker_L] = LINKER
    return marked_LL


def chain_numbers(labels_LL: npt.NDArray[np.int8]) -> npt.NDArray[np.intp]:
    """Return a number for each token, int [L]: equal for residues of the same chain, different for different chains.
    `labels_LL` is the result of `mark_linkers`.

    >>> linker_L = np.array([False, False, True, True, False])
    >>> chain_numbers(mark_linkers(np.zeros((5, 5), np.int8), linker_L)).tolist()
    [0, 0, 1, 2, 2]
    """
    return np.cumsum(labels_LL.diagonal() == LINKER)
