"""The methods of splitting, and the options that each method reads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esmshard.data.splits.assignment import RATIOS, SETS
from esmshard.errors import UsageError

OF_SEQUENCES = ("cluster", "ratio", "given")
OF_VARIANTS = ("position", "contiguous", "modulo", "mutations", "low-to-high", "ratio", "given")
"""Names of the methods. The first of each list is the default."""

_READS = {
    "cluster": ("clusters", "ratios", "folds", "seed"),
    "ratio": ("ratios", "folds", "seed"),
    "given": (),
    "position": ("ratios", "folds", "seed"),
    "contiguous": ("folds",),
    "modulo": ("folds",),
    "mutations": ("ratios", "seed", "train_max"),
    "low-to-high": ("ratios", "seed", "train_max", "target"),
}


@dataclass(frozen=True)
class Method:
    """A method to divide a data set, with its options. `esmshard.data.splits.assignment` describes the methods."""

    by: str
    ratios: Sequence[float] = RATIOS
    folds: int | None = None
    seed: int = 0
    clusters: Sequence[Path] = ()
    """Files of `representative<TAB>member`; records that share a cluster in any of them stay together."""
    train_max: str | None = None
    """Most mutations, or highest value, to train on. `50%` is a share of the values."""
    target: str | None = None
    """Column of the values that `low-to-high` divides."""


def chosen(known: Sequence[str], by: str | None = None, **options: Any) -> Method:
    """Return the method that options of `Method` mean. An option that is None or empty has its default.

    Raises:
        UsageError: an option is set that this method does not read, or an option is missing that it needs.

    >>> chosen(OF_VARIANTS, folds=5)
    Method(by='position', ratios=(0.8, 0.1, 0.1), folds=5, seed=0, clusters=(), train_max=None, target=None)
    """
    by = by or known[0]
    if by not in known:
        of = "variants (--wild-type)" if known is OF_VARIANTS else "sequences (no --wild-type)"
        raise UsageError(f"--by {by}: {of} are split by {', '.join(known)}")
    given = {name: value for name, value in options.items() if value is not None and value != []}
    for name in given:
        if name not in _READS[by]:
            raise UsageError(f"--{name.replace('_', '-')} is not read by --by {by}; leave it out")
    if "folds" in given and "ratios" in given:
        raise UsageError("--ratios: folds are of equal size; leave out --ratios or --folds")
    if by in ("contiguous", "modulo") and "folds" not in given:
        raise UsageError(f"--by {by} makes folds; pass --folds 5 to have those of ProteinGym")
    return Method(by, **given)


def parse_ratios(text: str) -> list[float]:
    """Parse three numbers for train, valid and test; they need not add up to one.

    >>> parse_ratios("8,1,1")
    [8.0, 1.0, 1.0]
    """
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        ratios = []
    if len(ratios) != len(SETS) or not all(0 < ratio < math.inf for ratio in ratios):
        raise UsageError(f"--ratios {text}: three numbers above zero are expected, for train, valid and test")
    return ratios
