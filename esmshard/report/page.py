"""What a page is made of, and how its numbers are written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from esmshard.tasks.intervals import Interval


@dataclass(frozen=True)
class Figure:
    """A chart or a picture, and what it shows."""

    caption: str
    svg: str = ""
    png: str = ""
    """As a data URI."""
    wide: bool = False
    """As wide as the page."""


@dataclass(frozen=True)
class Table:
    """Rows of cells; the first cell of a row is its head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """One part of the page. With nothing to show, `missing` says why."""

    id: str
    title: str
    texts: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    code: str = ""
    missing: str = ""


def value_text(value: float, sign: str = "") -> str:
    """Three decimals of small numbers, four digits of large ones, a dash for none.

    >>> value_text(0.0941), value_text(0.0941, "+"), value_text(1234.56), value_text(float("nan"))
    ('0.094', '+0.094', '1235', '-')
    """
    return "-" if not math.isfinite(value) else f"{value:{sign}.3f}" if abs(value) < 100 else f"{value:{sign}.4g}"


def unit_text(value: float) -> str:
    """A value in a unit of its own, which may be a millionth or a million.

    >>> unit_text(0.25), unit_text(2.5e-7), unit_text(float("nan"))
    ('0.25', '2.5e-07', '-')
    """
    return f"{value:.4g}" if math.isfinite(value) else "-"


def range_text(found: Interval) -> str:
    """An interval without its value.

    >>> range_text(Interval(0.1, 0.08, 0.125))
    '[0.080, 0.125]'
    """
    if not math.isfinite(found.low) or not math.isfinite(found.high):
        return "no interval"
    return f"[{value_text(found.low)}, {value_text(found.high)}]"


def cell(found: Interval | None) -> str:
    """A value with its interval under it."""
    if found is None or not math.isfinite(found.value):
        return "-"
    return f"{value_text(found.value)}\n{range_text(found)}"


def difference_cell(found: Interval | None) -> str:
    r"""The same of a difference, with its sign, and a star if 0 is not in the interval.

    >>> difference_cell(Interval(0.056, 0.046, 0.067))
    '+0.056*\n[0.046, 0.067]'
    """
    if found is None or not math.isfinite(found.value):
        return "-"
    star = "*" if found.low > 0 or found.high < 0 else ""
    return f"{value_text(found.value, '+')}{star}\n{range_text(found)}"


def bytes_text(count: float) -> str:
    """In the unit that people use.

    >>> bytes_text(3 * 2**29), bytes_text(3 * 2**20)
    ('1.50 GiB', '3 MiB')
    """
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def count_text(count: int, what: str) -> str:
    """A number of things.

    >>> count_text(1, "attempt"), count_text(1200, "step")
    ('1 attempt', '1,200 steps')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"
