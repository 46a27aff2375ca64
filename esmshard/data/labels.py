"""Labels beside a FASTA file, checked against it before anything is computed.

Here: what labels need of a token store, and coordinates. Values of whole proteins are in `protein_labels`, values of
residues in `residue_labels`, the splits that a file gives in `given_splits`.
"""

import re
import zipfile
import zlib
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from esmshard.data.store import TokenStore
from esmshard.errors import InputError
from esmshard.vocab import decode

UNRESOLVED = 65535
"""In `cb_dA`: the residue has no coordinates."""


Policy = Literal["error", "drop"]
"""What happens to a record without a label, and to a label without a record: refused, or left out and counted."""
Surplus = Literal["error", "drop", "ignore"]
"""What happens to a label without a record: `ignore` does not count it, where one file has the labels of all splits."""

_FASTA_ENDING = re.compile(r"(\.(fasta|faa|fa))?(\.(gz|bz2|xz|zst))?$")


def npz_beside(fasta: Path) -> Path:
    """`train.npz` beside `train.fasta`, or beside `train.fa.gz`."""
    return fasta.with_name(_FASTA_ENDING.sub("", fasta.name) + ".npz")


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All arrays of an `.npz` file.

    Raises:
        InputError: it cannot be read, or holds pickled objects.
    """
    try:
        with zipfile.ZipFile(path):  # numpy would take a single array, or a pickle, for an answer too
            file = np.load(path, allow_pickle=False)
        with file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); copy or make it again") from None


class Records(Protocol):
    """What labels need of a `TokenStore`."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Residues of each record, int32 [N]."""

    def residues(self, n: int) -> npt.NDArray[np.uint8]:
        """Residue tokens of record n, uint8 [L]."""

    def id(self, n: int) -> str:
        """First word of its header."""

    def find(self, record_id: str) -> int | None:
        """Number of the record of this id."""

    def description(self, n: int) -> str:
        """The whole header line without `>`."""


class CoordinateLabels:
    """Cb coordinates of the chains of a FASTA file, from the `.npz` of the same name (format: data/README.md).

    Args:
        fasta: the FASTA file; `train.fasta` is labelled by `train.npz` (`train.fasta.gz` too).
        store: its records.

    Raises:
        InputError: naming the record whose chain is missing, of another length or of another sequence.
    """

    per_residue: ClassVar[bool] = True
    labelled_N: ClassVar[None] = None

    def __init__(self, fasta: Path, store: TokenStore) -> None:
        path = npz_beside(fasta)
        if not path.exists():
            raise InputError(f"{path}: no such file; the coordinates of {fasta.name} are expected there")
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
            rows, length = slice(int(offsets[k]), int(offsets[k + 1])), int(store.lengths[n])
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

    def __getitem__(self, n: int) -> dict[str, npt.NDArray[np.float32]]:
        """`cb`: float32 [L, 3] in Angstrom, NaN where unresolved, of record n of the FASTA file."""
        cb_dA_L3 = self._cb_dA[self._rows[n]]
        cb_L3: npt.NDArray[np.float32] = cb_dA_L3.astype(np.float32) / np.float32(10)
        cb_L3[(cb_dA_L3 == UNRESOLVED).any(-1)] = np.nan
        return {"cb": cb_L3}
