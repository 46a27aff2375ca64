"""Metrics over proteins and how sure they are."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from esmshard.data.splits.variant_records import site_blocks
from esmshard.data.variants.substitutions import Mutation, name_of
from esmshard.tasks import metrics

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


def variant_units(variants: Sequence[tuple[Mutation, ...]]) -> tuple[npt.NDArray[np.int64], str]:
    """Decide what intervals over variants resample: blocks of variants that change the same sites, or single variants.

    Variants of the same sites are not independent, so that they are resampled together. This needs LEAST blocks, of
    which none has more than half of the variants. A library of few sites has not, and its variants are resampled.

    Returns:
        The unit of each variant, int64 [N], and the noun for a unit: `position`, `site combination` or `variant`. The
        rows of a variant with replicates are one unit.
    """
    block_N = site_blocks(variants)
    if count_units(len(variants), block_N) >= LEAST and np.bincount(block_N + 1).max() <= len(variants) / 2:
        return block_N, "position" if all(len(one) < 2 for one in variants) else "site combination"
    names = [name_of(one) for one in variants]
    return np.unique(names, return_inverse=True)[1].astype(np.int64), "variant"


def variant_spearman(
    predicted_N: npt.NDArray[np.float64],
    measured_N: npt.NDArray[np.float64],
    variants: Sequence[tuple[Mutation, ...]],
    fold_N: npt.NDArray[np.int64] | None = None,
) -> tuple[Interval, str]:
    """Compute Spearman's correlation within folds (`metrics.spearman_within`) with its interval, and the noun for what
    was resampled.

    Args:
        predicted_N: predictions.
        measured_N: measured values.
        variants: the mutations of each row.
        fold_N: the fold of each row; by default all rows are of one.
    """
    fold_N = np.zeros(len(variants), dtype=np.int64) if fold_N is None else fold_N
    block_N, unit = variant_units(variants)
    values = [metrics.spearman_within(predicted_N, measured_N, fold_N)]
    for draw in block_draws(len(variants), block_N):
        values.append(metrics.spearman_within(predicted_N[draw], measured_N[draw], fold_N[draw]))
    return interval(values), unit
