"""The parts of a page, and the format of its numbers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from esmshard.tasks.metrics import Interval


@dataclass(frozen=True)
class Figure:
    """A chart or a picture, and its caption."""

    caption: str
    svg: str = ""
    png: str = ""
    """The picture as a data URI."""
    wide: bool = False
    """Whether the figure is as wide as the page."""


@dataclass(frozen=True)
class PageTable:
    """Rows of cells. The first cell of a row is its heading."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """One part of the page. If it is empty, `missing` gives the reason."""

    id: str
    title: str
    texts: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[PageTable] = ()
    code: str = ""
    missing: str = ""


def value_text(value: float, sign: str = "") -> str:
    """Format with three decimals for small numbers, and four digits for large numbers.

    >>> value_text(0.0941), value_text(0.0941, "+"), value_text(1234.56), value_text(float("nan"))
    ('0.094', '+0.094', '1235', 'undefined')
    """
    if not math.isfinite(value):
        return "undefined"
    return f"{value:{sign}.3f}" if abs(value) < 100 else f"{value:{sign}.4g}"


def unit_text(value: float) -> str:
    """Format a value of any unit, which may be a millionth or a million.

    >>> unit_text(0.25), unit_text(2.5e-7), unit_text(float("nan"))
    ('0.25', '2.5e-07', '-')
    """
    return f"{value:.4g}" if math.isfinite(value) else "-"


def range_text(found: Interval) -> str:
    """Format an interval without its value.

    >>> range_text(Interval(0.1, 0.08, 0.125))
    '[0.080, 0.125]'
    """
    if not math.isfinite(found.low) or not math.isfinite(found.high):
        return "no interval"
    return f"[{value_text(found.low)}, {value_text(found.high)}]"


def if_intervals(found: Iterable[Interval], text: str) -> str:
    """Return a text about intervals if there are any; else nothing.

    >>> if_intervals([Interval(0.1, math.nan, math.nan)], ", with 95% intervals")
    ''
    """
    return text if any(math.isfinite(one.low) for one in found) else ""


def cell(found: Interval | None, sign: str = "") -> str:
    r"""Format a value with its interval below. A difference has the sign `+`, and a star if its interval is without 0.

    >>> cell(Interval(0.056, 0.046, 0.067)), cell(Interval(0.056, 0.046, 0.067), "+"), cell(None)
    ('0.056\n[0.046, 0.067]', '+0.056*\n[0.046, 0.067]', '-')
    """
    if found is None:
        return "-"
    if not math.isfinite(found.value):
        return value_text(found.value)
    star = "*" if sign and (found.low > 0 or found.high < 0) else ""
    return f"{value_text(found.value, sign)}{star}\n{range_text(found)}"
