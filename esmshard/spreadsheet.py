r"""Cells of CSV and TSV files: a text that a spreadsheet would take for a formula gets an apostrophe. No torch.

Excel, LibreOffice and Google Sheets run what begins with `=`, `+`, `-` or `@`, and an id or a label may come from
anywhere. OWASP advises an apostrophe before it, which spreadsheets take for "this is text". Every table that is
written goes through `writer` or `tab_line`, and every one that is read through `plain`, so that what comes back is what
went in. Other programs take one apostrophe away where `'*[=+\-@]` follows it. Numbers stay numbers.
"""

import csv
import re
from collections.abc import Iterable, Iterator
from typing import IO, Any

_FORMULA = re.compile(
    "'*[=+\\-@\t\r\n\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}"
    "\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}]"
)
"""The beginning of a formula. Apostrophes before it count as part of it: one that was there can so be told apart."""
_HARMLESS = re.compile(r"-|[+-]?[\d.,]+([eE][+-]?\d+)?%?", re.ASCII)
"""A number, or the dash that stands for a missing value, a gap or a class."""


def safe(text: str) -> str:
    r"""A cell as it is written.

    >>> safe("=HYPERLINK(1)"), safe("-0.25"), safe("-"), safe("sp|P1"), safe("'=1")
    ("'=HYPERLINK(1)", '-0.25', '-', 'sp|P1', "''=1")
    """
    return f"'{text}" if _FORMULA.match(text) and not _HARMLESS.fullmatch(text) else text


def plain(text: str) -> str:
    """What was written as a cell; the inverse of `safe`.

    >>> plain("'=HYPERLINK(1)"), plain("-0.25"), plain("'quoted'"), plain("''=1")
    ('=HYPERLINK(1)', '-0.25', "'quoted'", "'=1")
    """
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


class writer:  # in the place of csv.writer
    """A `csv.writer` whose cells are safe and whose lines end in a line feed."""

    def __init__(self, file: IO[str]) -> None:
        self._csv = csv.writer(file, lineterminator="\n")
        self._quoting = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)

    def writerow(self, row: Iterable[object]) -> None:
        """Write a line."""
        texts = [safe(str(cell)) for cell in row]
        # The csv module leaves a carriage return unquoted where lines end in a line feed, and readers end a line there.
        (self._quoting if any("\r" in text for text in texts) else self._csv).writerow(texts)

    def writerows(self, rows: Iterable[Iterable[object]]) -> None:
        """Write lines."""
        for row in rows:
            self.writerow(row)


def reader(lines: Iterable[str], **options: Any) -> Iterator[list[str]]:
    """Rows of plain cells of a CSV file.

    Args:
        lines: of the file, or the file.
        options: of `csv.reader`.
    """
    return ([plain(cell) for cell in row] for row in csv.reader(lines, **options))


def named_rows(lines: Iterable[str]) -> list[dict[str, str]]:
    """Rows of a CSV file by the names of its first line. One that is cut short lacks the last names."""
    rows = reader(lines)
    names = next(rows, [])
    return [dict(zip(names, row, strict=False)) for row in rows if row]


def tab_line(row: Iterable[object]) -> str:
    r"""A line of a TSV file, with its end.

    >>> tab_line(["@id", "train", -1])
    "'@id\ttrain\t-1\n"
    """
    return "\t".join(safe(str(cell)) for cell in row) + "\n"
