"""Measured values on the scale on which they are learned, and back in their unit."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

KNOTS = 200
"""The number of pairs of value and normal score that a rank scale keeps. It interpolates between them."""


@dataclass(frozen=True)
class Scale:
    """A scale of mean 0 and deviation 1 over the training values themselves (`none`), their logarithms (`log`), or the
    normal scores of their ranks (`rank`).
    """

    kind: str
    mean: float
    deviation: float
    values: tuple[float, ...] = ()
    """For `rank`, some training values in ascending order."""
    scores: tuple[float, ...] = ()
    """The normal scores of these values."""

    def to(self, value: float) -> float:
        """Convert from the unit of the table; NaN stays NaN."""
        if self.kind == "rank":
            return _interpolate(value, self.values, self.scores, 1 / self.deviation)
        return (float(np.log(value) if self.kind == "log" else value) - self.mean) / self.deviation

    def back(self, score: float) -> float:
        """Convert into the unit of the table. Beyond the training values a rank scale continues as a straight line, so
        that the best of a list do not all get the same value.
        """
        if self.kind == "rank":
            return _interpolate(score, self.scores, self.values, self.deviation)
        value = float(score) * self.deviation + self.mean
        return float(np.exp(value)) if self.kind == "log" else value

    def as_json(self) -> dict[str, Any]:
        """Return the arguments of `Scale(**...)`."""
        return asdict(self)


def fit_scale(values: npt.NDArray[np.float64], kind: str) -> Scale:
    """Fit a scale to training values, which are all known and at least two of which differ.

    >>> fit_scale(np.array([1.0, 3.0]), "none").to(5.0)
    3.0
    """
    if kind != "rank":
        x = np.log(values) if kind == "log" else values
        return Scale(kind, float(x.mean()), float(x.std()))
    from scipy.special import ndtri  # not from scipy.stats, whose import takes ten times as long

    distinct, counts = np.unique(values, return_counts=True)
    middle = (np.cumsum(counts) - counts / 2) / len(values)
    at = np.unique(np.linspace(0, len(distinct) - 1, KNOTS).round().astype(np.int64))
    scores = ndtri(middle)
    kept = (tuple(distinct[at].tolist()), tuple(scores[at].tolist()))
    return Scale(kind, float(values.mean()), float(values.std()), *kept)


def _interpolate(x: float, xs: tuple[float, ...], ys: tuple[float, ...], slope: float) -> float:
    """Interpolate linearly between the points, and continue with that slope beyond them."""
    inside = float(np.interp(x, xs, ys))
    return inside + slope * (min(x - xs[0], 0.0) + max(x - xs[-1], 0.0))
