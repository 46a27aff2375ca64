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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError, UsageError
from esmshard.io.paths import lives, replacing

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
    """A writer of `x.csv`, with numbers of six digits, or of `x.parquet` (extra `tables`), by the ending of the name.

    Rows wait in memory until they make a block: 65,536 rows, or 4 million numbers if there are many columns. NaN
    becomes an empty cell.

    Args:
        out: file to write.
        columns: the type of each column: `string`, `int32`, `int64`, `float32` or `float64`.
        about: metadata of a Parquet file, names to texts.
        quoted: whether all cells of a CSV are quoted. A cell with a carriage return needs this: before Python 3.13 the
            csv module does not quote it, and readers would end the line there.
    """

    def __init__(
        self, out: Path, columns: Mapping[str, str], about: Mapping[str, str] | None = None, *, quoted: bool = False
    ) -> None:
        self._quoted = quoted
        self._parquet = out.suffix == ".parquet"
        if self._parquet:
            pyarrow(out)
        super().__init__(out)
        self._columns, self._about = dict(columns), dict(about or {})
        self._most = max(1, min(GROUP_ROWS, GROUP_NUMBERS // len(columns)))

    def open(self) -> None:
        """Create the file with the names of the columns."""
        self._waiting: dict[str, list[Any]] = {name: [] for name in self._columns}
        if self._parquet:
            arrow, parquet = pyarrow(self.out)
            fields = [(name, getattr(arrow, kind)()) for name, kind in self._columns.items()]
            self._schema = arrow.schema(fields, metadata=self._about)
            self._file = parquet.ParquetWriter(self.work, self._schema, compression="zstd")
            return
        self._file = open(self.work, "w", newline="", encoding="utf-8")  # noqa: SIM115  # `close` closes the file
        quoting: Literal[0, 1] = csv.QUOTE_ALL if self._quoted else csv.QUOTE_MINIMAL
        self._rows = csv.writer(self._file, lineterminator="\n", quoting=quoting)
        self._rows.writerow(self._columns)

    def add(self, columns: Mapping[str, Sequence[Any] | npt.NDArray[Any]]) -> None:
        """Add rows: of each column as many cells."""
        for name, cells in self._waiting.items():
            cells.extend(columns[name])
        if len(cells) >= self._most:
            self._write()

    def _write(self) -> None:
        if self._parquet:
            arrow, _ = pyarrow(self.out)
            arrays = [
                arrow.array(
                    np.array(cells, None if field.type == arrow.string() else field.type.to_pandas_dtype()),
                    field.type,
                    from_pandas=True,
                )
                for cells, field in zip(self._waiting.values(), self._schema, strict=True)
            ]
            self._file.write_table(arrow.table(arrays, schema=self._schema), row_group_size=self._most)
        else:
            cells = [
                [text(cell) for cell in cells] if self._columns[name].startswith("float") else cells
                for name, cells in self._waiting.items()
            ]
            self._rows.writerows(zip(*cells, strict=True))
        for waiting in self._waiting.values():
            waiting.clear()

    def finish(self) -> None:
        """Write the last rows."""
        if next(iter(self._waiting.values())):
            self._write()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def text(value: float) -> str:
    """Format a number with six digits; NaN becomes an empty text.

    >>> text(0.123456789), text(float("nan"))
    ('0.123457', '')
    """
    return "" if value != value else f"{value:.6g}"  # noqa: PLR0124  # NaN differs from itself


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
