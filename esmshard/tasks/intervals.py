"""Metrics over proteins and how sure they are."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
"""The number of resamples of the records, with replacement."""
LEAST = 10
"""Records, or blocks of them, from which on there is an interval. Resamples of fewer repeat the same few values, and
their percentiles are too narrow (Hesterberg 2015, doi:10.1080/00031305.2015.1089789): of two records they may have no
width at all.
"""
BIASED = frozenset({"ECE", "ECE before scaling"})
"""Metrics that are 0 at best and that noise only raises, so that a sample's is too high and that of its resamples is
higher still (Kumar et al. 2019, arXiv:1909.10155). See `interval`."""
MOST_ROWS = 10_000_000
"""Rows that all resamples have together at most; of many records there are fewer resamples, 200 at least."""

Row = TypeVar("Row")


@dataclass(frozen=True)
class Interval:
    """A metric with its 95% bootstrap interval over records; without one, `low` and `high` are NaN."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return "-" if math.isnan(self.value) else f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def draws(n: int, seed: int = 0) -> Iterator[npt.NDArray[np.int64]]:
    """Yield resamples of n records drawn with replacement, int64 [n] each; none for fewer than LEAST records. They are
    the same for the same n and seed, so that methods scored on the same records are resampled alike and their
    differences are paired.
    """
    if n < LEAST:
        return
    rng = np.random.default_rng(seed)
    for _ in range(min(RESAMPLES, max(200, MOST_ROWS // max(n, 1)))):
        yield rng.integers(0, n, n)


def bootstrap(
    summary: Callable[[Sequence[Row]], Mapping[str, float]],
    rows: Sequence[Row],
    seed: int = 0,
    block_N: npt.NDArray[np.int64] | None = None,
) -> dict[str, list[float]]:
    """Compute each metric of the rows themselves, first, and of each resample of them.

    Args:
        summary: metrics of some rows.
        rows: N of them.
        seed: see `draws`.
        block_N: rows with the same number are drawn together; each alone by default.
    """
    found = [summary(rows), *(summary([rows[n] for n in draw]) for draw in block_draws(len(rows), block_N, seed))]
    return {name: [one.get(name, np.nan) for one in found] for name in found[0]}


def block_draws(n: int, block_N: npt.NDArray[np.int64] | None, seed: int = 0) -> Iterator[npt.NDArray[np.int64]]:
    """Yield resamples as `draws` does, but of whole blocks of records: int64, about n of them."""
    if block_N is None:
        yield from draws(n, seed)
        return
    if count_units(n, block_N) < LEAST:
        return
    order = np.argsort(block_N, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(block_N[order])) + 1)
    for draw in draws(len(members), seed):
        yield np.concatenate([members[k] for k in draw])


def count_units(n: int, block_N: npt.NDArray[np.int64] | None) -> int:
    """Count the independent observations among n records: the records, or their blocks without block -1, which is a
    wild type.
    """
    return n if block_N is None else len(np.unique(block_N[block_N >= 0]))


def interval(values: Sequence[float], metric: str = "") -> Interval:
    """Compute the interval of a metric from the values of `bootstrap`. Resamples without a value are left out.

    The percentile interval. Of a metric in BIASED, and of any whose own value lies outside its percentile interval, the
    basic bootstrap interval: the percentiles reflected at the value, which corrects the bias of the resamples (Davison
    and Hinkley 1997, Bootstrap Methods and their Application, section 5.2). As the value itself is not corrected, that
    interval is widened to it where it would leave it out.

    Args:
        values: of all records, then of each resample.
        metric: its name; one in BIASED is never below 0.
    """
    found = _limits(values, reflected=metric in BIASED)
    return Interval(found.value, max(found.low, 0.0), found.high) if metric in BIASED else found


def difference(ours: Sequence[float], theirs: Sequence[float], metric: str = "") -> Interval:
    """Compute the interval of a paired difference of two results of `bootstrap` over the same records with the same
    seed. There is no interval if one of them has none.
    """
    return _limits([a - b for a, b in zip(ours, theirs, strict=False)], reflected=metric in BIASED)


def _limits(values: Sequence[float], *, reflected: bool) -> Interval:
    value, known = float(values[0]), [v for v in values[1:] if not np.isnan(v)]
    if np.isnan(value) or not known:
        return Interval(value, np.nan, np.nan)
    low, high = map(float, np.percentile(known, [2.5, 97.5]))
    if reflected or not low <= value <= high:
        low, high = min(2 * value - high, value), max(2 * value - low, value)
    return Interval(value, low, high)
