"""Tables of predictions, and the base of all writers. Each file gets its name only when it is complete.

A writer takes the records one by one, in input order. It is a context manager: leaving it without an error renames the
finished file; leaving it with an error removes the file, and an older file stays.
"""

import csv
import os
import re
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError, UsageError
from esmshard.files import lives, replacing
from esmshard.joined_chains import BETWEEN

GROUP_ROWS, GROUP_NUMBERS = 65_536, 4_194_304
"""The most rows, and most numbers, of a row group of a Parquet file."""


class Writer(ABC):
    """A writer of records into a temporary file beside `out`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.work = out.with_name(f".tmp-{socket.gethostname()}-{os.getpid()}-{out.name}")
        out.parent.mkdir(parents=True, exist_ok=True)
        left = re.compile(re.escape(f".tmp-{socket.gethostname()}-") + r"(\d+)" + re.escape(f"-{out.name}"))
        for path in out.parent.iterdir():  # These may be files of a process that was killed.
            if (maker := left.match(path.name)) and not lives(int(maker[1])):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def open(self) -> None:  # noqa: B027  # some writers are open from the beginning
        """Create the temporary file, on entering the block."""

    def finish(self) -> None:  # noqa: B027  # most writers have nothing to do here
        """Write the remaining data after the last record."""

    @abstractmethod
    def close(self) -> None:
        """Close the temporary file, whether complete or not."""

    def commit(self) -> None:
        """Give the finished file its name."""
        self.work.replace(self.out)

    def discard(self) -> None:
        """Remove what is left under temporary names."""
        self.work.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            try:
                if kind is None:
                    self.finish()
            finally:
                self.close()
            if kind is None:
                self.commit()
        except OSError:
            if kind is None:  # Otherwise the earlier error is raised.
                raise
        finally:
            self.discard()


class TableWriter(Writer):
    """A writer of one line for each protein, or one line for each residue with its place in its chain, counted from 1,
    and its letter.

    Args:
        out: file to write.
        names: names of the numbers of each line.
        per_residue: whether a record's array has a row for each residue.
        choose: whether the numbers are probabilities of exclusive classes; the most likely class is named in
            `prediction`.
        chains: whether a record has several chains, so that the lines of residues need the number of the chain.
        pairs: whether a record is two chains, whose lengths are written.
    """

    def __init__(
        self,
        out: Path,
        names: Sequence[str],
        *,
        per_residue: bool,
        choose: bool,
        chains: bool = False,
        pairs: bool = False,
    ) -> None:
        super().__init__(out)
        self._names, self._per_residue, self._choose = names, per_residue, choose
        self._chains, self._pairs = chains, pairs
        self._columns = columns(names, per_residue=per_residue, choose=choose, chains=chains, pairs=pairs)

    @abstractmethod
    def add(self, record_id: str, values: npt.NDArray[np.float32], residues: str = "") -> None:
        """Write one record. `values` is [C], or [L, C] for the L letters of `residues`, with `:` between chains."""


def columns(
    names: Sequence[str], *, per_residue: bool, choose: bool, chains: bool = False, pairs: bool = False
) -> tuple[list[str], list[str]]:
    """Return the columns of a table of predictions: those that identify a line, and those of the numbers.

    A target with the name of one of the first columns becomes `NAME (predicted)`.

    >>> columns(["H", "id"], per_residue=True, choose=False)
    (['id', 'position', 'residue'], ['H', 'id (predicted)'])
    """
    place = ["position", "residue"] if per_residue else ["length_a", "length_b"] if pairs else []
    place = ["chain", *place] if chains else place
    first = ["id", *place, *(["prediction"] if choose else [])]
    return first, [f"{name} (predicted)" if name in first else name for name in names]


def places(residues: str) -> Iterator[tuple[int, int, str]]:
    """Yield chain, position in the chain, both counted from 1, and letter of each residue.

    >>> list(places("MK:T"))
    [(1, 1, 'M'), (1, 2, 'K'), (2, 1, 'T')]
    """
    for chain, letters in enumerate(residues.split(BETWEEN), 1):
        for position, letter in enumerate(letters, 1):
            yield chain, position, letter


class CsvWriter(TableWriter):
    """A writer of `x.csv`, with numbers of six digits; see `TableWriter`."""

    def __init__(self, out: Path, names: Sequence[str], **how: bool) -> None:
        super().__init__(out, names, **how)
        self._file = open(self.work, "w", newline="", encoding="utf-8")  # noqa: SIM115  # `close` closes the file
        # See `data.tables.write_rows`; a class of the user may have a carriage return in its name.
        returns = any("\r" in name for name in names)
        self._rows = csv.writer(
            self._file, lineterminator="\n", quoting=csv.QUOTE_ALL if returns else csv.QUOTE_MINIMAL
        )
        first, numbers = self._columns
        self._rows.writerow([*first, *numbers])

    def add(self, record_id: str, values: npt.NDArray[np.float32], residues: str = "") -> None:
        """Write one record; see `TableWriter.add`."""
        rows = values.reshape(-1, len(self._names))
        other: tuple[int, ...] = tuple(lengths(residues)) if self._pairs else ()
        of_rows = places(residues) if self._per_residue else [other] * len(rows)
        for found, row in zip(of_rows, rows, strict=True):
            place = found[1:] if self._per_residue and not self._chains else found
            chosen = [self._names[int(row.argmax())]] if self._choose else []
            self._rows.writerow([record_id, *place, *chosen, *(f"{v:.6g}" for v in row.tolist())])

    def close(self) -> None:
        """Flush the file to disk."""
        self._file.close()


class ParquetWriter(TableWriter):
    """A writer of `x.parquet`: the columns of `CsvWriter`, with numbers as float32. Needs pyarrow (extra `tables`).

    Rows wait in memory until they make a row group: 65,536 rows, or 16 MiB of numbers if there are many columns.

    Args:
        out: file to write.
        names: see `TableWriter`.
        about: metadata of the file, names to texts.
        how: see `TableWriter`.
    """

    def __init__(self, out: Path, names: Sequence[str], *, about: Mapping[str, str], **how: bool) -> None:
        self._pa, parquet = pyarrow(out)
        super().__init__(out, names, **how)
        self._most = max(1, min(GROUP_ROWS, GROUP_NUMBERS // len(names)))
        self._rows = 0
        self._waiting: list[tuple[str, str, npt.NDArray[np.float32]]] = []
        types = dict.fromkeys(("chain", "position", "length_a", "length_b"), self._pa.int32())
        first, numbers = self._columns
        fields = [self._pa.field(name, types.get(name, self._pa.string()), nullable=False) for name in first]
        fields += [self._pa.field(name, self._pa.float32(), nullable=False) for name in numbers]
        self._schema = self._pa.schema(fields, metadata=dict(about))
        self._file = parquet.ParquetWriter(self.work, self._schema, compression="zstd")

    def add(self, record_id: str, values: npt.NDArray[np.float32], residues: str = "") -> None:
        """Write one record; see `TableWriter.add`."""
        rows = values.reshape(-1, len(self._names))
        self._waiting.append((record_id, residues, rows))
        self._rows += len(rows)
        if self._rows >= self._most:
            self._write()

    def close(self) -> None:
        """Write the last rows and the file's directory."""
        try:
            if self._rows:
                self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        ids, residues, values = zip(*self._waiting, strict=True)
        self._rows, self._waiting = 0, []
        counts = [len(rows) for rows in values]
        values_RC = np.concatenate(values)
        arrays: list[Any] = [np.repeat(np.array(ids, dtype=object), counts)]
        if self._per_residue:
            chains = [(k, len(chain)) for one in residues for k, chain in enumerate(one.split(BETWEEN), 1)]
            if self._chains:
                arrays.append(np.concatenate([np.full(n, k, dtype=np.int32) for k, n in chains]))
            arrays.append(np.concatenate([np.arange(1, n + 1, dtype=np.int32) for _, n in chains]))
            arrays.append(list("".join(residues).replace(BETWEEN, "")))
        elif self._pairs:
            arrays.extend(np.array([lengths(one) for one in residues], dtype=np.int32).T)
        if self._choose:
            arrays.append(np.array(self._names, dtype=object)[values_RC.argmax(1)])
        arrays += [np.ascontiguousarray(x_R) for x_R in values_RC.T]
        table = self._pa.table(
            [self._pa.array(array, field.type) for array, field in zip(arrays, self._schema, strict=True)],
            schema=self._schema,
        )
        self._file.write_table(table, row_group_size=self._most)


def chains_file(out: Path) -> Path:
    """Return the path of the list of an output's records with several chains.

    >>> chains_file(Path("maps/x.npz")).as_posix()
    'maps/x.npz.chains.tsv'
    """
    return out.with_name(f"{out.name}.chains.tsv")


def failures_file(out: Path) -> Path:
    """Return the path of the list of an output's failures.

    >>> failures_file(Path("maps/x.npz")).as_posix()
    'maps/x.npz.failed.tsv'
    """
    return out.with_name(f"{out.name}.failed.tsv")


def facts_file(out: Path) -> Path:
    """Return the path of the facts about an output, as `embed` names it.

    >>> facts_file(Path("maps/x.npz")).as_posix()
    'maps/x.npz.json'
    """
    return out.with_name(f"{out.name}.json")


def write_chains(out: Path, lengths: Mapping[str, Sequence[int]], join: str) -> None:
    """Write `OUT.chains.tsv`: how many residues each chain has of the records with several, whose rows follow each
    other in the output, and how the chains were joined. Without such a record, remove the file of an earlier run.
    """
    path = chains_file(out)
    if not lengths:
        path.unlink(missing_ok=True)
        return
    rows = [(record_id, ",".join(map(str, each)), join) for record_id, each in lengths.items()]
    with replacing(path) as file:
        file.writelines("\t".join(row) + "\n" for row in [("id", "residues", "join"), *rows])


def lengths(record: str) -> list[int]:
    """Return the residues of each chain of a record.

    >>> lengths("MK:T")
    [2, 1]
    """
    return [len(chain) for chain in record.split(BETWEEN)]


def pyarrow(out: Path) -> tuple[Any, Any]:
    """Import pyarrow, and return the library and its part for Parquet.

    Raises:
        UsageError: pyarrow is not installed.
    """
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError(f"{out}: writing Parquet needs pyarrow; pip install 'esmshard[tables]'") from None
    return arrow, parquet


def check(*paths: Path, overwrite: bool) -> None:
    """Refuse to replace files unless `overwrite` is set."""
    for path in paths:
        if path.is_dir():
            raise InputError(f"{path}: is a directory; name a file")
        if path.exists() and not overwrite:
            raise UsageError(f"{path}: exists already; choose another name or pass --overwrite")


def ids_file(out: Path) -> Path:
    """Return the path of the ids of the rows of a `.npy` file."""
    return out.with_suffix(".ids.txt")
