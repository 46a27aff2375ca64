"""Means over proteins and how sure they are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """Mean over proteins with its 95% percentile bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int
    """Proteins that have a value."""

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """Mean and 95% interval; proteins are drawn with replacement, NaN (no value) left out and counted.

    The same seed draws the same proteins, so that two methods scored on the same proteins are resampled alike.
    """
    x: npt.NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    x = x[~np.isnan(x)]
    if not len(x):
        return Interval(np.nan, np.nan, np.nan, 0)
    draws = np.random.default_rng(seed).integers(0, len(x), (RESAMPLES, len(x)))
    low, high = np.percentile(x[draws].mean(1), [2.5, 97.5])
    return Interval(float(x.mean()), float(low), float(high), len(x))


def mean(values: Sequence[float]) -> float:
    """Mean of the values that are not NaN; NaN if there is none."""
    known = [v for v in values if not np.isnan(v)]
    return float(np.mean(known)) if known else float("nan")
