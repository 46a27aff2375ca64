"""Metrics over proteins and how sure they are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
"""Of the records, with replacement."""
MOST_ROWS = 10_000_000
"""Rows that all resamples have together at most; of many records there are fewer resamples, 200 at least."""

Row = TypeVar("Row")


@dataclass(frozen=True)
class Interval:
    """A metric with its 95% percentile bootstrap interval over records."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def draws(n: int, seed: int = 0) -> Iterator[npt.NDArray[np.int64]]:
    """Numbers of n records drawn with replacement, int64 [n], resample by resample. The same for the same n and seed,
    so that methods which were scored on the same records are resampled alike, and their differences are paired.
    """
    rng = np.random.default_rng(seed)
    for _ in range(min(RESAMPLES, max(200, MOST_ROWS // max(n, 1)))):
        yield rng.integers(0, n, n)


def bootstrap(
    summary: Callable[[Sequence[Row]], Mapping[str, float]],
    rows: Sequence[Row],
    seed: int = 0,
    block_N: npt.NDArray[np.int64] | None = None,
) -> dict[str, list[float]]:
    """Each metric of the rows themselves, first, and of each resample of them.

    Args:
        summary: metrics of some rows.
        rows: N of them.
        seed: see `draws`.
        block_N: rows with the same number are drawn together; each alone by default.
    """
    found = [summary(rows), *(summary([rows[n] for n in draw]) for draw in block_draws(len(rows), block_N, seed))]
    return {name: [one.get(name, np.nan) for one in found] for name in found[0]}


def block_draws(n: int, block_N: npt.NDArray[np.int64] | None, seed: int = 0) -> Iterator[npt.NDArray[np.int64]]:
    """The same as `draws`, of whole blocks of records: int64, about n of them, resample by resample."""
    if block_N is None:
        yield from draws(n, seed)
        return
    order = np.argsort(block_N, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(block_N[order])) + 1)
    for draw in draws(len(members), seed):
        yield np.concatenate([members[k] for k in draw])


def interval(values: Sequence[float]) -> Interval:
    """Of what `bootstrap` found for a metric, or of the differences of two. Resamples without a value are left out."""
    known = [v for v in values[1:] if not np.isnan(v)]
    if np.isnan(values[0]) or not known:
        return Interval(float(values[0]), np.nan, np.nan)
    low, high = np.percentile(known, [2.5, 97.5])
    return Interval(float(values[0]), float(low), float(high))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Paired: both from `bootstrap` over the same records with the same seed."""
    return interval([a - b for a, b in zip(ours, theirs, strict=True)])
