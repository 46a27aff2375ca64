"""Labels beside a FASTA file, checked against the file before anything is computed.

This module has what labels need of a token store, and the labels that are coordinates. Labels of whole proteins are in
`protein_labels`, labels of residues in `residue_labels`, and the splits that a file gives in `given_splits`.
"""

import re
import zipfile
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from esmshard.data.store.token_store import TokenStore
from esmshard.errors import InputError
from esmshard.vocab import decode, is_residue

UNRESOLVED = 65535
"""The value in `cb_dA` of a residue without coordinates."""

_FASTA_ENDING = re.compile(r"(\.(fasta|faa|fa))?(\.(gz|bz2|xz|zst))?$")


def npz_beside(fasta: Path) -> Path:
    """Return the path of `train.npz` beside `train.fasta` or `train.fa.gz`."""
    return fasta.with_name(_FASTA_ENDING.sub("", fasta.name) + ".npz")


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read all arrays of an `.npz` file.

    Raises:
        InputError: the file cannot be read, or holds pickled objects.
    """
    try:
        with zipfile.ZipFile(path):  # numpy alone would also accept a single array or a pickle
            file = np.load(path, allow_pickle=False)
        with file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); copy or make it again") from None


class CoordinateLabels:
    """Cb coordinates of the records of a FASTA file, read from the `.npz` of the same name (format: data/README.md).

    A record of several chains, `A:B`, has the rows of A followed by those of B. Linkers have no coordinates.

    Args:
        fasta: the FASTA file. The labels of `train.fasta` (or `train.fasta.gz`) are in `train.npz`.
        store: the records of the FASTA file.

    Raises:
        InputError: the chain of a record is missing, or has another length or sequence; the message names the record.
    """

    per_residue: ClassVar[bool] = True
    labelled_N: ClassVar[None] = None

    def __init__(self, fasta: Path, store: TokenStore) -> None:
        path = npz_beside(fasta)
        if not path.exists():
            raise InputError(
                f"{path}: no such file; the coordinates of {fasta.name} are expected there; "
                "structures (PDB, mmCIF) in place of the FASTA file have their own"
            )
        arrays = read_arrays(path)
        try:
            names, seqs, offsets = arrays["names"], arrays["seqs"], arrays["offsets"]
            self._cb_dA: npt.NDArray[np.uint16] = arrays["cb_dA"]
        except KeyError as error:
            raise InputError(f"{path}: has no array {error}; names, seqs, offsets and cb_dA are expected") from None
        if self._cb_dA.dtype != np.uint16 or self._cb_dA.ndim != 2 or self._cb_dA.shape[1] != 3:
            raise InputError(
                f"{path}: cb_dA is {self._cb_dA.dtype} {list(self._cb_dA.shape)}, not uint16 [residues, 3]"
            )
        flat = all(array.ndim == 1 for array in (names, seqs, offsets))
        if not flat or len(offsets) != len(names) + 1 or len(seqs) != len(names) or offsets[-1] != len(self._cb_dA):
            raise InputError(f"{path}: names, seqs, offsets and cb_dA do not fit each other; make the file again")

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
                    f"residues in {fasta}; align the labels to the full sequence, {UNRESOLVED} where unresolved"
                )
            if str(seqs[k]) != decode(store.residues(n)):
                raise InputError(
                    f"{path}: the sequence of record '{record_id}' is not the one in {fasta}; make it again"
                )
            self._rows.append(rows)
        self._store = store

    def __getitem__(self, n: int) -> dict[str, npt.NDArray[np.float32]]:
        """Return `cb` of record n: float32 [L, 3] in Angstrom, NaN where unresolved and in linkers."""
        residue_L = is_residue(self._store.residues(n))
        cb_dA_L3 = np.full((len(residue_L), 3), UNRESOLVED, np.uint16)
        cb_dA_L3[residue_L] = self._cb_dA[self._rows[n]]
        cb_L3: npt.NDArray[np.float32] = cb_dA_L3.astype(np.float32) / np.float32(10)
        cb_L3[(cb_dA_L3 == UNRESOLVED).any(-1)] = np.nan
        return {"cb": cb_L3}
