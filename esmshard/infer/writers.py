"""Files of embeddings and predictions. Each appears under its name only when it is whole.

A writer takes one array a record, in input order, and is a context manager: leaving it without an error puts the file
in place, leaving it with one removes what was written.
"""

import csv
import io
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError, UsageError

Pool = Literal["mean", "residue"]


class Writer(ABC):
    """Collects records into a temporary file beside `out`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.work = out.with_name(f".tmp-{os.getpid()}-{out.name}")
        out.parent.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def add(self, record_id: str, values: npt.NDArray[np.float32]) -> None:
        """Write one record."""

    @abstractmethod
    def close(self) -> None:
        """Finish the temporary file."""

    def commit(self) -> None:
        """Give the finished file its name."""
        self.work.replace(self.out)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
            if kind is None:
                self.commit()
        finally:
            self.work.unlink(missing_ok=True)


class NpyWriter(Writer):
    """`x.npy` float32 [N, D], mean embeddings in input order, and `x.ids.txt`, one id a line."""

    def __init__(self, out: Path, n_records: int, dim: int, attributes: dict[str, Any]) -> None:
        super().__init__(out)
        del attributes  # a .npy file has no place for them
        self._array = np.lib.format.open_memmap(self.work, mode="w+", dtype=np.float32, shape=(n_records, dim))
        self._ids: list[str] = []

    def add(self, record_id: str, values: npt.NDArray[np.float32]) -> None:
        """`values` is [D]."""
        self._array[len(self._ids)] = values
        self._ids.append(record_id)

    def close(self) -> None:
        """Flush to disk."""
        self._array.flush()

    def commit(self) -> None:
        """Ids first: a matrix never lies there without them."""
        ids = ids_file(self.out)
        temporary = ids.with_name(f".tmp-{ids.name}")
        temporary.write_text("".join(f"{i}\n" for i in self._ids), encoding="utf-8")
        temporary.replace(ids)
        super().commit()


class Hdf5Writer(Writer):
    """`x.h5`: a data set a record, in input order; key = id with `/` as `_`, attribute `original_id`.

    Two ids that become the same key are told apart by a number. File attributes say what was computed.
    """

    def __init__(self, out: Path, n_records: int, dim: int, attributes: dict[str, Any]) -> None:
        try:
            import h5py
        except ImportError:
            raise UsageError(f"{out}: writing HDF5 needs h5py; pip install 'esmshard[h5]'") from None
        super().__init__(out)
        self._file = h5py.File(self.work, "w", track_order=True)
        self._file.attrs.update(attributes | {"records": n_records, "dim": dim})

    def add(self, record_id: str, values: npt.NDArray[np.float32]) -> None:
        """`values` is [D] or [L, D]."""
        key = base = record_id.replace("/", "_") if record_id.strip("./") else f"id_{len(self._file)}"
        number = 1
        while key in self._file:
            number += 1
            key = f"{base}_{number}"
        self._file.create_dataset(key, data=values).attrs["original_id"] = record_id

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class NpzWriter(Writer):
    """`x.npz`: an array a record under its id, written one by one, readable by `numpy.load`."""

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self._zip = zipfile.ZipFile(self.work, "w", zipfile.ZIP_DEFLATED, allowZip64=True)

    def add(self, record_id: str, values: npt.NDArray[np.float32]) -> None:
        """Any shape."""
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.ascontiguousarray(values), allow_pickle=False)
        self._zip.writestr(f"{record_id}.npy", buffer.getbuffer())

    def close(self) -> None:
        """Write the directory of the archive."""
        self._zip.close()


class CsvWriter(Writer):
    """`x.csv`: a line a protein, or a line a residue with its place counted from 1 and its letter.

    Args:
        out: file to write.
        names: of the numbers of each line.
        per_residue: whether a record's array has a row for each residue.
        choose: whether the numbers are probabilities of classes of which one is right; it is named in `prediction`.
    """

    def __init__(self, out: Path, names: Sequence[str], *, per_residue: bool, choose: bool) -> None:
        super().__init__(out)
        self._names, self._per_residue, self._choose = names, per_residue, choose
        self._file = open(self.work, "w", newline="", encoding="utf-8")  # noqa: SIM115  # closed in `close`
        self._csv = csv.writer(self._file, lineterminator="\n")
        place = ["position", "residue"] if per_residue else []
        self._csv.writerow(["id", *place, *(["prediction"] if choose else []), *names])

    def add(self, record_id: str, values: npt.NDArray[np.float32], residues: str = "") -> None:
        """`values` is [C], or [L, C] for the L letters of `residues`."""
        rows = values.reshape(-1, len(self._names))
        for n, row in enumerate(rows):
            place = [n + 1, residues[n]] if self._per_residue else []
            chosen = [self._names[int(row.argmax())]] if self._choose else []
            self._csv.writerow([record_id, *place, *chosen, *(f"{v:.6g}" for v in row.tolist())])

    def close(self) -> None:
        """Flush to disk."""
        self._file.close()


WRITERS: dict[str, type[NpyWriter] | type[Hdf5Writer]] = {
    "npy": NpyWriter,
    "h5": Hdf5Writer,
}
"""Embedding formats, by the name of `--format` and the ending of the output file."""

DEFAULT_POOL: dict[str, Pool] = {"npy": "mean", "h5": "residue"}


def check(*paths: Path, overwrite: bool) -> None:
    """Refuse to replace files unless told to."""
    for path in paths:
        if path.is_dir():
            raise InputError(f"{path}: is a directory; name a file")
        if path.exists() and not overwrite:
            raise UsageError(f"{path}: exists already; choose another name or pass --overwrite")


def ids_file(out: Path) -> Path:
    """Where the ids of the rows of a `.npy` file go."""
    return out.with_suffix(".ids.txt")
