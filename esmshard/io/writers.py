"""Defines the base class `Writer` of all writers of results, and `TableWriter` for tables.

A writer is a context manager. Its method `add` writes records in input order to temporary files. If the `with` block
ends without an error, the new files replace older files. Otherwise the new files are removed.
"""

import csv
import importlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError, UsageError
from esmshard.io.paths import replacing, scratch_directory

GROUP_ROWS, GROUP_NUMBERS = 65_536, 4_194_304
"""The maximum number of rows, and of numbers, in a row group of a Parquet file."""


class Writer(ABC):
    """Writes the file or directory `out`. Until it is complete, it is in a scratch directory beside `out`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.files = ExitStack()  # The end of the `with` block closes these files.

    @abstractmethod
    def open(self) -> None:
        """Create the file or directory `self.work` in the scratch directory, under the file name of `out`."""

    def finish(self) -> None:  # noqa: B027  # Some writers have no remaining data.
        """Write the remaining data after the last record."""

    def __enter__(self) -> Self:
        with ExitStack() as scratch:
            self.work = scratch.enter_context(scratch_directory(self.out)) / self.out.name
            self.open()
            self._scratch = scratch.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._scratch:
            try:
                with self.files:
                    if kind is None:
                        self.finish()
            except OSError:
                if kind is None:  # Otherwise the earlier error is raised.
                    raise
            if kind is None:
                # `facts_file` is removed first and replaced last, so that it never describes another result.
                for older in (facts_file(self.out), failures_file(self.out), chains_file(self.out)):
                    older.unlink(missing_ok=True)
                if self.work.is_dir() and self.out.is_dir():
                    shutil.rmtree(self.out)
                order = {self.work: 1, facts_file(self.work): 2}
                for path in sorted(self.work.parent.iterdir(), key=lambda path: order.get(path, 0)):
                    path.replace(self.out.with_name(path.name))


class TableWriter(Writer):
    """Writes `x.csv` with six significant digits for each float, or `x.parquet` (needs the pip extra `tables`).

    NaN becomes an empty cell. Rows are written when GROUP_ROWS rows or GROUP_NUMBERS numbers are in memory.

    Args:
        out: the file to write.
        columns: the type of each column by name: `string`, `int32`, `int64`, `float32` or `float64`.
        about: the metadata of a Parquet file.
        quoted: whether to quote all cells of a CSV file. Cells with a carriage return need quotes (see `write_rows`).
    """

    def __init__(
        self, out: Path, columns: Mapping[str, str], about: Mapping[str, str] | None = None, *, quoted: bool = False
    ) -> None:
        super().__init__(out)
        self._arrow = library("pyarrow", "tables", out) if out.suffix == ".parquet" else None
        self._columns, self._about, self._quoted = dict(columns), dict(about or {}), quoted
        self._most = max(1, min(GROUP_ROWS, GROUP_NUMBERS // len(columns)))

    def open(self) -> None:
        """Create the file, and write the column names."""
        self._waiting: dict[str, list[Any]] = {name: [] for name in self._columns}
        if self._arrow is not None:
            from pyarrow import parquet

            fields = [(name, getattr(self._arrow, kind)()) for name, kind in self._columns.items()]
            schema = self._arrow.schema(fields, metadata=self._about)
            self._file = self.files.enter_context(parquet.ParquetWriter(self.work, schema, compression="zstd"))
            return
        file = self.files.enter_context(open(self.work, "w", newline="", encoding="utf-8"))
        self._rows = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL if self._quoted else csv.QUOTE_MINIMAL)
        self._rows.writerow(self._columns)

    def add(self, columns: Mapping[str, Sequence[Any] | npt.NDArray[Any]]) -> None:
        """Add rows. `columns` has the new cells of each column by name."""
        for name, cells in self._waiting.items():
            cells.extend(columns[name])
        if len(cells) >= self._most:
            self._write()

    def _write(self) -> None:
        if self._arrow is None:
            cells = [
                [text(cell) for cell in cells] if self._columns[name].startswith("float") else cells
                for name, cells in self._waiting.items()
            ]
            self._rows.writerows(zip(*cells, strict=True))
        else:
            arrays = [
                self._arrow.array(
                    cells if self._columns[field.name] == "string" else np.array(cells, self._columns[field.name]),
                    field.type,
                    from_pandas=True,  # NaN becomes an empty cell
                )
                for cells, field in zip(self._waiting.values(), self._file.schema, strict=True)
            ]
            table = self._arrow.table(arrays, schema=self._file.schema)
            self._file.write_table(table, row_group_size=self._most)
        for waiting in self._waiting.values():
            waiting.clear()

    def finish(self) -> None:
        """Write the rows that are still in memory."""
        if next(iter(self._waiting.values())):
            self._write()


def text(value: float) -> str:
    """Format a number with six significant digits. NaN becomes an empty string.

    >>> text(0.123456789), text(float("nan"))
    ('0.123457', '')
    """
    return "" if value != value else f"{value:.6g}"  # noqa: PLR0124  # NaN differs from itself


def chains_file(out: Path) -> Path:
    """Return the path of the list of records with several chains: `maps/x.npz.chains.tsv` for `maps/x.npz`."""
    return out.with_name(f"{out.name}.chains.tsv")


def failures_file(out: Path) -> Path:
    """Return the path of the list of failed records: `maps/x.npz.failed.tsv` for `maps/x.npz`."""
    return out.with_name(f"{out.name}.failed.tsv")


def facts_file(out: Path) -> Path:
    """Return the path of the JSON file that describes an output: `maps/x.npz.json` for `maps/x.npz`."""
    return out.with_name(f"{out.name}.json")


def write_chains(out: Path, lengths: Mapping[str, Sequence[int]], join: str) -> None:
    """Write `OUT.chains.tsv`, the list of records with several chains. If `lengths` is empty, write no file.

    Each line has the id of a record, the number of residues in each chain (from `lengths`), and `join`, such as
    `linker:25`. The chains of a record have this order in `out`.
    """
    rows = [(record_id, ",".join(map(str, residues)), join) for record_id, residues in lengths.items()]
    if rows:
        with replacing(chains_file(out)) as file:
            file.writelines("\t".join(row) + "\n" for row in [("id", "residues", "join"), *rows])


def write_failures(path: Path, failures: Sequence[tuple[str, int, str]]) -> None:
    """Write the id, number of residues and reason of each failed record. If no record failed, remove the file."""
    path.unlink(missing_ok=True)
    if not failures:
        return
    # A reason may be a message of a library, with tabs or line breaks.
    rows = ((record_id, str(length), " ".join(reason.split())) for record_id, length, reason in failures)
    with replacing(path) as file:
        file.writelines("\t".join(row) + "\n" for row in [("id", "length", "reason"), *rows])


def library(module: str, extra: str, out: Path) -> Any:
    """Import the library that writes `out`. Raise `UsageError` with the install command if the library is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(f"{out}: writing it needs {module}; pip install 'esmshard[{extra}]'") from None


def check(*paths: Path, overwrite: bool) -> None:
    """Raise `InputError` if a path is a directory, and `UsageError` if a file exists and `overwrite` is false."""
    for path in paths:
        if path.is_dir():
            raise InputError(f"{path}: is a directory; name a file")
        if path.exists() and not overwrite:
            raise UsageError(f"{path}: exists already; choose another name or pass --overwrite")
