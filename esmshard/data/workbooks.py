"""Excel workbooks (.xlsx) with one sheet, as rows of text cells. Their library, openpyxl, is no dependency."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from esmshard.errors import InputError

SUFFIX = ".xlsx"


def sheet_rows(path: Path) -> Iterator[tuple[list[str], int]]:
    """Yield the stripped cells of each row that has any, and the number of the row in the sheet, counted from 1.

    Of formulas, the values that were saved with the workbook are read.

    Raises:
        InputError: openpyxl is not installed, the file is no workbook, or several of its sheets have cells.
    """
    try:
        import openpyxl
    except ImportError:
        raise InputError(
            f"{path}: reading an Excel workbook needs openpyxl; pip install openpyxl, or save the sheet as 'CSV UTF-8'"
        ) from None
    with open(path, "rb") as file:  # A missing file is called so by whoever called.
        try:
            book = openpyxl.load_workbook(file, read_only=True, data_only=True)
            sheets = {sheet.title: list(_rows(sheet)) for sheet in book.worksheets}
        except Exception as error:  # openpyxl lets errors of zip archives, XML and its own pass.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"{path}: cannot be read as an Excel workbook ({reason}); save it again") from None
    filled = [title for title, rows in sheets.items() if rows]
    if len(filled) > 1:
        named = ", ".join(map(repr, filled[:5]))
        raise InputError(
            f"{path}: has {len(filled)} sheets with cells ({named}); save the one with the table as 'CSV UTF-8', or "
            "remove the others"
        )
    for title in filled:
        yield from sheets[title]


def _rows(sheet: Any) -> Iterator[tuple[list[str], int]]:
    sheet.reset_dimensions()  # Some programs write a wrong size of the sheet, and cells outside would be lost.
    for number, row in enumerate(sheet.iter_rows(values_only=True), 1):
        # str() of a float is its repr, which has all digits that are needed to get the same number again.
        cells = ["" if cell is None else str(cell).strip() for cell in row]
        if any(cells):
            yield cells, number
