r"""Cells of CSV and TSV files. A text that a spreadsheet would run as a formula gets an apostrophe. No torch.

Excel, LibreOffice and Google Sheets run what begins with `=`, `+`, `-` or `@`, and an id or a label may come from
anywhere. OWASP advises an apostrophe before such a text; for a spreadsheet it marks the cell as text. `writer` and
`tab_line` write all tables, and `plain` reads their cells, so a text is the same after writing and reading. Other
programs should remove one apostrophe if `'*[=+\-@]` follows it. Numbers stay numbers.
"""

import csv
import re
from collections.abc import Iterable, Iterator
from typing import IO, Any

_FORMULA = re.compile(
    "'*[=+\\-@\t\r\n\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}"
    "\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}]"
)
"""The beginning of a formula. Apostrophes before it are part of it, so that `plain` removes only the added one."""
_HARMLESS = re.compile(r"-|[+-]?[\d.,]+([eE][+-]?\d+)?%?", re.ASCII)
"""A number, or a dash, which means a missing value, a gap or a class."""


def safe(text: str) -> str:
    r"""Return the cell for a text.

    >>> safe("=HYPERLINK(1)"), safe("-0.25"), safe("-"), safe("sp|P1"), safe("'=1")
    ("'=HYPERLINK(1)", '-0.25', '-', 'sp|P1', "''=1")
    """
    return f"'{text}" if _FORMULA.match(text) and not _HARMLESS.fullmatch(text) else text


def plain(text: str) -> str:
    """Return the text of a cell; the inverse of `safe`.

    >>> plain("'=HYPERLINK(1)"), plain("-0.25"), plain("'quoted'"), plain("''=1")
    ('=HYPERLINK(1)', '-0.25', "'quoted'", "'=1")
    """
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


class writer:  # its use is that of csv.writer
    """A `csv.writer` whose cells are safe and whose lines end in a line feed."""

    def __init__(self, file: IO[str]) -> None:
        self._csv = csv.writer(file, lineterminator="\n")
        self._quoting = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)

    def writerow(self, row: Iterable[object]) -> None:
        """Write a line."""
        texts = [safe(str(cell)) for cell in row]
        # If lines end in a line feed, the csv module does not quote a carriage return, and readers end the line there.
        (self._quoting if any("\r" in text for text in texts) else self._csv).writerow(texts)

    def writerows(self, rows: Iterable[Iterable[object]]) -> None:
        """Write lines."""
        for row in rows:
            self.writerow(row)


def reader(lines: Iterable[str], **options: Any) -> Iterator[list[str]]:
    """Return the rows of a CSV file with plain cells.

    Args:
        lines: the lines of the file, or the open file.
        options: options for `csv.reader`.
    """
    return ([plain(cell) for cell in row] for row in csv.reader(lines, **options))


def named_rows(lines: Iterable[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV file by the names in its first line. A row that is too short lacks the last names."""
    rows = reader(lines)
    names = next(rows, [])
    return [dict(zip(names, row, strict=False)) for row in rows if row]


def tab_line(row: Iterable[object]) -> str:
    r"""Return a line of a TSV file with its line feed.

    >>> tab_line(["@id", "train", -1])
    "'@id\ttrain\t-1\n"
    """
    return "\t".join(safe(str(cell)) for cell in row) + "\n"
