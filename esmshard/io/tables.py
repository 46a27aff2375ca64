"""Reads tables: text files with commas, tabs or semicolons, Parquet files and Excel workbooks. Writes CSV tables.

Every cell stays text until `Table.numbers` converts its column. Blank lines, rows of empty cells, and columns without
name and values are left out without a message. The csv module reads text files, since pandas does not give the line of
a row.
"""

import csv
import difflib
import io
import itertools
import lzma
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt
from xopen import xopen

from esmshard.errors import InputError

MISSING = frozenset(
    {"", "-", "na", "n/a", "n.a.", "#n/a", "#na", "<na>", "nan", "null", "none", "nd", "n.d.", "n.d", "n/d"}
)
"""Lower-case texts that mean a missing value in a cell. docs/labels.md has the same list."""

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)  # The function float() also accepts 1_000.
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}", re.ASCII)
_SEPARATORS = {"\t": "tabs", ";": "semicolons", ",": "commas"}
_FOREIGN = (
    (b"PK\x03\x04", "an Excel workbook or another zip archive, not a text table; save it as CSV, or as .xlsx"),
    (b"\xd0\xcf\x11\xe0", "an old Excel workbook, not a text table; save it as CSV"),
    (b"PAR1", "a Parquet file; rename it so that its name ends in .parquet"),
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Table:
    """A table of N rows of text cells."""

    path: Path
    columns: Mapping[str, list[str]]
    """The cells of each column by name, in file order, without white space at their ends. An empty cell is ''."""
    lines: list[int]
    """The line number of each row, from 1; the row number in a Parquet file or a workbook."""
    ids: str | None = None
    """The name of the id column if the table has sequences; otherwise None."""

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, row: int) -> str:
        """Return the file and line of the row with the index `row`, such as `labels.csv:17`."""
        return f"{self.path}:{self.lines[row]}"

    def at(self, row: int) -> str:
        """Return the line of a row, such as `line 17`; `row 17` for a Parquet file or a workbook."""
        return f"{'row' if self.path.suffix.lower() in (PARQUET, WORKBOOK) else 'line'} {self.lines[row]:,}"

    def column(self, name: str, fix: str | None = None) -> list[str]:
        """Return the N cells of a column. If the column is missing, raise an `InputError` that ends with `fix`."""
        if name in self.columns:
            return self.columns[name]
        lower = {other.lower(): other for other in self.columns}
        close = difflib.get_close_matches(name.lower(), lower, n=1)
        meant = f"; did you mean {shown(lower[close[0]])}?" if close else ";"
        raise InputError(
            f"{self.path}: has no column {shown(name)}{meant} {listed(self.columns)}{f'; {fix}' if fix else ''}"
        )

    def only_column(self, names: Sequence[str], fix: str) -> str | None:
        """Return the column whose name is in `names`, in upper or lower case; None if no column matches.

        If several columns match, raise an `InputError` that ends with `fix`.
        """
        lower = {name.lower() for name in names}
        matches = [column for column in self.columns if column.lower() in lower]
        if len(matches) > 1:
            raise InputError(f"{self.path}: columns {' and '.join(map(shown, matches[:3]))} may both be meant; {fix}")
        return matches[0] if matches else None

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        """Return a column as numbers, float64 [N]. A cell with a text of `MISSING` becomes NaN.

        Commas are decimal commas (`1,5`) if no cell has a point and at least one comma cannot separate thousands. Raise
        `InputError` with line and cell if a cell is not a finite number, or if the column is missing.
        """
        written = self.column(name)
        cells = ["" if cell.lower() in MISSING else cell.replace("\N{MINUS SIGN}", "-") for cell in written]
        commas = [cell for cell in cells if "," in cell]
        if not any("." in cell for cell in cells) and not all(map(_THOUSANDS.fullmatch, commas)):
            cells = [cell.replace(",", ".") for cell in cells]
        values_N = np.full(len(cells), np.nan)
        for row, cell in enumerate(cells):
            if not cell:
                continue
            if not NUMBER.fullmatch(cell) or not math.isfinite(value := float(cell)):
                raise InputError(
                    f"{self.where(row)}: column {shown(name)} has {shown(written[row])}, which is not a finite number; "
                    "write numbers such as 1.5, or leave the cell empty"
                )
            values_N[row] = value
        return values_N


def shown(text: str, most: int = 40) -> str:
    r"""Format a cell or a name for a message: in quotes, on one line, with at most `most` characters.

    >>> print(shown("two\nlines"), shown("A" * 100))
    'two\nlines' 'AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA...'
    """
    return repr(text if len(text) <= most else text[:most] + "...")


def counted(number: int, what: str) -> str:
    """Format a number and a noun, which gets an `s` unless the number is 1.

    >>> print(counted(1, "row"), counted(2000, "row"))
    1 row 2,000 rows
    """
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def first_three(items: Sequence[_T], name: Callable[[_T], str]) -> str:
    """Format the names of the first three items, and `...` if there are more.

    >>> first_three([1, 2, 3, 4], str)
    '1, 2, 3, ...'
    """
    return ", ".join(map(name, items[:3])) + (", ..." if len(items) > 3 else "")


def listed(names: Sequence[str] | Mapping[str, object]) -> str:
    """Return a clause for messages with the names of up to twenty columns.

    >>> listed(["mutant", "score"])
    "its columns are 'mutant', 'score'"
    >>> listed(["mutant|score"])
    "its only column is 'mutant|score' (commas, tabs or semicolons divide columns)"
    """
    columns = ", ".join(shown(name) for name in itertools.islice(names, 20))
    if len(names) == 1:
        return f"its only column is {columns} (commas, tabs or semicolons divide columns)"
    return f"its columns are {columns}{f' and {len(names) - 20:,} more' if len(names) > 20 else ''}"


PARQUET, WORKBOOK = ".parquet", ".xlsx"


def read_table(path: Path) -> Table:
    """Read a table from a text file (plain, gz, bz2, xz or zst), or from a file that ends in `.parquet` or `.xlsx`.

    The first line has the column names. The separator is the tab, semicolon or comma that gives the largest number of
    cells in the first 20 rows. In a tie, the file extension decides. Quoted cells may have separators and line breaks.
    A column without a name gets a name such as `column 3`, unless all its cells are empty.

    Raise `InputError` if the file cannot be read, has no rows, or has a row with too many or too few cells.
    """
    suffix, divided = path.suffix.lower(), ""
    if suffix in (PARQUET, WORKBOOK):
        with readable(path, "a table"):
            rows = _parquet_rows(path) if suffix == PARQUET else _sheet_rows(path)
    else:
        text = read_text(path, "a table")
        separator = _separator(path, text)
        rows, divided = _records(path, text, separator), f" ({_SEPARATORS[separator]} separate cells)"
    header, first = next(rows, ([], 0))
    if not header:
        raise InputError(f"{path}: is empty; the first line of a table has the column names")
    if header[0].startswith(">"):
        raise InputError(f"{path}: is a FASTA file, but a table is expected; give a CSV, TSV, Parquet or Excel file")
    named = max(place for place, name in enumerate(header, 1) if name)
    cells: list[list[str]] = []
    lines: list[int] = []
    for row, line in rows:
        while len(row) > len(header) and not row[-1]:
            row.pop()
        if not named <= len(row) <= len(header):
            raise InputError(
                f"{path}:{line}: has {counted(len(row), 'cell')}, but the header in line {first} has {len(header):,}"
                f"{divided}; fix the line, or quote cells that contain a separator"
            )
        cells.append(row + [""] * (len(header) - len(row)))
        lines.append(line)
    if not cells:
        raise InputError(f"{path}: has a header, but no rows; add rows below the header, or give another table")
    columns: dict[str, list[str]] = {}
    for place, (name, column) in enumerate(zip(header, zip(*cells, strict=True), strict=True), 1):
        if name or any(column):
            key = name or f"column {place}"
            if key in columns:
                raise InputError(f"{path}: has two columns {shown(key)}; rename one of them")
            columns[key] = list(column)
    return Table(path, columns, lines)


def _cells(values: Sequence[Any]) -> list[str]:
    """Convert the values of a row to text. `str` writes all digits of a float."""
    return ["" if value is None else str(value).strip() for value in values]


def _parquet_rows(path: Path) -> Iterator[tuple[list[str], int]]:
    """Yield the column names with the number 0, then the cells of each row with its number, from 1."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: reading Parquet needs pyarrow; pip install 'esmshard[tables]'") from None
    with open(path, "rb") as file:
        try:
            table = parquet.ParquetFile(file).read()
            columns = [_cells(column.to_pylist()) for column in table]
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{path}: cannot be read as Parquet ({reason}); copy or make it again") from None
    rows = ([*row] for row in zip(*columns, strict=True))
    return zip([_cells(table.column_names), *rows], itertools.count(), strict=False)


def _sheet_rows(path: Path) -> Iterator[tuple[list[str], int]]:
    """Yield the cells and the number of each row in the only sheet with cells. For a formula, read the saved value."""
    try:
        import openpyxl
    except ImportError:
        raise InputError(
            f"{path}: reading an Excel workbook needs openpyxl; pip install openpyxl, or save the sheet as 'CSV UTF-8'"
        ) from None
    sheets: dict[str, list[tuple[list[str], int]]] = {}
    with open(path, "rb") as file:
        try:
            for sheet in openpyxl.load_workbook(file, read_only=True, data_only=True).worksheets:
                sheet.reset_dimensions()  # Otherwise cells are lost if the file has a wrong sheet size.
                rows = enumerate(map(_cells, sheet.iter_rows(values_only=True)), 1)
                if cells := [(row, number) for number, row in rows if any(row)]:
                    sheets[sheet.title] = cells
        except Exception as error:  # openpyxl also raises errors of zip archives and XML.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"{path}: cannot be read as an Excel workbook ({reason}); save it again") from None
    if len(sheets) > 1:
        raise InputError(
            f"{path}: has {len(sheets)} sheets with cells ({first_three([*sheets], repr)}); save the sheet with the "
            "table as 'CSV UTF-8', or remove the other sheets"
        )
    return iter(next(iter(sheets.values()), []))


@contextmanager
def readable(path: Path, expected: str) -> Iterator[None]:
    """Turn an error in a `with` block that reads `path` into an `InputError` with a one-sentence message.

    `expected` is the kind of file for the message, such as `a table`.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; {expected} is expected") from None
    except PermissionError:
        raise InputError(f"{path}: you have no permission to read it; change its permissions") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8 text; {expected} is expected") from None
    except Exception as error:  # The library of ZstdError depends on the version of Python.
        damaged = isinstance(error, (EOFError, zlib.error, lzma.LZMAError, OSError))
        if not damaged and type(error).__name__ not in ("ZstdError", "IsalError"):
            raise
        raise InputError(f"{path}: cannot be read to its end ({error}); copy or download it again") from None


def read_whole(path: Path, expected: str) -> bytes:
    """Return the uncompressed content of a file (plain, gz, bz2, xz or zst). For the errors see `readable`."""
    with readable(path, expected), xopen(path, "rb", threads=0) as handle:
        data: bytes = handle.read()
    return data


def read_text(path: Path, expected: str) -> str:
    """Return the text of a plain or compressed file without a byte-order mark.

    Raise `InputError` if the file cannot be read, or is not UTF-8 text.
    """
    data = read_whole(path, expected)
    for signature, what in _FOREIGN:
        if data.startswith(signature):
            raise InputError(f"{path}: is {what}")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in data[:2]:
        raise InputError(
            f"{path}: is UTF-16 text or not text; save the file with the encoding UTF-8 (in Excel: file type "
            "'CSV UTF-8')"
        )
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = len((data[: error.start] + b".").splitlines())
        raise InputError(
            f"{path}:{line}: is not UTF-8; save the file with the encoding UTF-8 (in Excel: file type 'CSV UTF-8')"
        ) from None
    if "\0" in text:
        line = len(data[: data.index(b"\0") + 1].splitlines())
        raise InputError(f"{path}:{line}: has a NUL byte, so the file is damaged or not text; make it again")
    return text


def _separator(path: Path, text: str) -> str:
    usual = "," if ".csv" in path.name.lower() else "\t"

    def cells(separator: str) -> int:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
        widths = []
        with suppress(csv.Error):  # `_records` reports the error with its line.
            for row in itertools.islice((row for row in rows if len(row) > 1 or "".join(row).strip()), 20):
                widths.append(len(row))
        return min(widths, default=0)

    return max(_SEPARATORS, key=lambda separator: (cells(separator), separator == usual))


def _records(path: Path, text: str, separator: str) -> Iterator[tuple[list[str], int]]:
    """Yield the stripped cells of each row, and the line number where the row begins. Leave out empty rows."""
    # With newline="" the csv module accepts all line ends and does not change line breaks inside quotes.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    line = 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InputError(
                f"{path}:{line}: cannot be read ({error}); look for a quotation mark that is not closed or not doubled"
            ) from None
        if row is None:
            return
        row = [cell.strip() for cell in row]
        if any(row):
            yield row, line
        line = reader.line_num + 1


def write_rows(file: IO[str], rows: Sequence[Sequence[str]]) -> None:
    """Write `rows` as a CSV table. The first row has the column names. Each line ends with a line feed."""
    # Before Python 3.13 the csv module does not quote carriage returns, where readers would end the line.
    quoted = any("\r" in cell for row in rows for cell in row)
    csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL).writerows(rows)
