"""Computes metrics that several tasks share, and their bootstrap intervals. An undefined metric is NaN, never 0.

A bootstrap computes metrics thousands of times, and scikit-learn and scipy are too slow for this. Metrics are therefore
computed from counts in the rows of the records (confusion matrices, calibration bins), and from ranks (see `ranked`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from esmshard.data.mutations import Mutation, name_of
from esmshard.data.splits.variant_records import site_blocks

Row = Mapping[str, float | npt.NDArray[Any]]
"""The values of one record by name, from which metrics are computed. Numbers (NaN if undefined) become columns of the
file `per_protein.csv`. Only the method `Task.summary` uses arrays, such as counts of classes."""

R = TypeVar("R")

CALIBRATION_BINS = 15  # bins of equal width for the calibration error, as in Guo et al. 2017 (arXiv:1706.04599)
THRESHOLDS = np.arange(101) / 100  # the probability thresholds of Fmax
BEST_SHARE = 0.01  # the share of a fold's measured variants that count as the best variants of the fold
RESAMPLES = 2000  # the number of bootstrap resamples; fewer for very many records (see MOST_ROWS)
LEAST = 10
"""The minimum number of records, or blocks of records, for a bootstrap interval. With fewer records, percentile
intervals are too narrow (Hesterberg 2015, doi:10.1080/00031305.2015.1089789)."""
BIASED = frozenset({"ECE", "ECE before scaling"})
"""Metrics whose best value is 0. Noise makes them higher: the value of a sample is too high, and the values of its
resamples are even higher (Kumar et al. 2019, arXiv:1909.10155). The function `interval` corrects for this bias."""
MOST_ROWS = 10_000_000
"""The maximum number of rows in all resamples together. It reduces the number of resamples, but not below 200."""


def means(rows: Sequence[Row], columns: Sequence[str]) -> dict[str, float]:
    """Compute the mean of each column over the rows that have a value in this column; NaN if there are none."""
    x_NC = np.array([[row.get(column, np.nan) for column in columns] for row in rows], dtype=np.float64)
    known_NC = ~np.isnan(x_NC)
    with np.errstate(invalid="ignore"):
        mean_C = np.where(known_NC, x_NC, 0).sum(0) / known_NC.sum(0)
    return dict(zip(columns, mean_C.tolist(), strict=True))


def records_with(rows: Sequence[Row], column: str) -> npt.NDArray[np.bool_]:
    """Return from which of N records the metric `column` of the final table is computed, bool [N].

    These are the records whose row has a number for this metric. If no row has one, they are the records whose row has
    a number for the metric's target. If no row has that either, they are all records.
    """
    keys = (column, column.removesuffix(" per protein"), f"target{column.removeprefix('Spearman')}", "target")
    key = next((key for key in keys if any(isinstance(row.get(key), float) for row in rows)), None)
    if key is None:
        return np.ones(len(rows), dtype=bool)
    return ~np.isnan(np.array([row.get(key, np.nan) for row in rows], dtype=np.float64))


def mean(values: npt.NDArray[np.float64]) -> float:
    """Compute the mean of the values that are not NaN; NaN if all values are NaN."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else np.nan


def total(rows: Sequence[Row], key: str) -> npt.NDArray[np.float64]:
    """Return the sum of the arrays that all rows have under `key`."""
    values = np.concatenate([np.asarray(row[key]) for row in rows])  # three times as fast as stacking
    return np.asarray(values.reshape(len(rows), *np.shape(rows[0][key])).sum(0, dtype=np.float64))


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Copy the rows. In arrays whose key begins with `ranked `, replace each value by its place, int32.

    The place is the number of distinct smaller values under this key in all rows. Metrics of ranks are the same for
    places, and resamples need no sorting. If a value under a key is NaN, the arrays of this key stay unchanged.
    """
    copies = [dict(row) for row in rows]
    for key in (key for key in rows[0] if key.startswith("ranked ")):
        values = joined(rows, key)
        if not np.isnan(values).any():
            ends = np.cumsum([np.size(row[key]) for row in rows])[:-1]
            places = np.split(np.unique(values, return_inverse=True)[1].astype(np.int32), ends)
            for row, part in zip(copies, places, strict=True):
                row[key] = part
    return list(copies)


def joined(rows: Sequence[Row], key: str) -> npt.NDArray[Any]:
    """Concatenate the flattened arrays that all rows have under `key`."""
    return np.concatenate([np.ravel(row[key]) for row in rows])


def _places(x_N: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the place of each value among the distinct values. Places from `ranked` (int32) are returned unchanged."""
    return x_N if x_N.dtype == np.int32 else np.unique(x_N, return_inverse=True)[1]


# Numbers


def pearson(a_N: npt.NDArray[np.float64], b_N: npt.NDArray[np.float64]) -> float:
    """Compute Pearson's correlation. NaN for fewer than two pairs, or if all values of `a_N` or of `b_N` are equal."""
    if len(a_N) < 2 or a_N.min() == a_N.max() or b_N.min() == b_N.max():
        return np.nan
    a_N, b_N = a_N - a_N.mean(), b_N - b_N.mean()
    norm = np.sqrt((a_N @ a_N) * (b_N @ b_N))
    return float(a_N @ b_N / norm) if norm > 0 else np.nan


def spearman(a_N: npt.NDArray[Any], b_N: npt.NDArray[Any]) -> float:
    """Compute Spearman's correlation. Equal values get the mean of their ranks. The result is NaN if a value
    is NaN, and in the cases that `pearson` names. If the values are places (see `ranked`), the time is linear.
    """
    return np.nan if np.isnan(a_N).any() or np.isnan(b_N).any() else pearson(_mean_ranks(a_N), _mean_ranks(b_N))


def _mean_ranks(x_N: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    place_N = _places(x_N)
    counts = np.bincount(place_N)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[place_N])


def spearman_within(
    predicted_N: npt.NDArray[np.float64], measured_N: npt.NDArray[np.float64], fold_N: npt.NDArray[np.int64]
) -> float:
    """Compute Spearman's correlation in each fold, and average over folds, weighted by the number of measured values.

    Each fold has a separate model, and the predictions of two models may differ by an offset. A correlation over all
    folds would also compare these offsets. Variants whose measured value is NaN are left out, and so are folds with an
    undefined correlation.
    """
    rho, weight = 0.0, 0
    for fold in np.unique(fold_N):
        members_N = (fold_N == fold) & ~np.isnan(measured_N)
        of_fold = spearman(predicted_N[members_N], measured_N[members_N])
        if not np.isnan(of_fold):
            rho, weight = rho + of_fold * int(members_N.sum()), weight + int(members_N.sum())
    return rho / weight if weight else np.nan


def best_count(measured_N: npt.NDArray[np.float64]) -> int:
    """Return how many measured variants of a fold count as the best: the share BEST_SHARE, but at least one."""
    known = int((~np.isnan(measured_N)).sum())
    return min(known, max(1, round(BEST_SHARE * known)))


def top_of_list(
    predicted_N: npt.NDArray[np.float64], measured_N: npt.NDArray[np.float64], fold_N: npt.NDArray[np.int64]
) -> tuple[float, float]:
    """Choose the `best_count` variants with the highest predictions in each fold, and score them.

    Higher is better, for predictions and measured values. Variants without a measured value (NaN) are not chosen. If
    several variants tie for the last places, each counts with the probability that it is chosen.

    Returns:
        The recall: the share of the chosen variants that are among the best measured variants of their fold.
        The mean measured value of the chosen variants. Both numbers are NaN if no variant is measured, or if the
            prediction of a measured variant is NaN.
    """
    hits, total, chosen = 0.0, 0.0, 0
    for fold in np.unique(fold_N):
        members_N = (fold_N == fold) & ~np.isnan(measured_N)
        x_M, y_M = predicted_N[members_N], measured_N[members_N]
        if np.isnan(x_M).any():
            return np.nan, np.nan
        if k := best_count(y_M):
            limit = np.partition(x_M, -k)[-k]
            above_M, tied_M = x_M > limit, x_M == limit
            chance_M = above_M + tied_M * ((k - above_M.sum()) / tied_M.sum())
            hits += float(chance_M[y_M >= np.partition(y_M, -k)[-k]].sum())
            total, chosen = total + float(chance_M @ y_M), chosen + k
    return (hits / chosen, total / chosen) if chosen else (np.nan, np.nan)


def of_numbers(predicted_N: npt.NDArray[np.float64], target_N: npt.NDArray[np.float64]) -> dict[str, float]:
    """Compute Spearman, Pearson, RMSE and R2 over the records whose target is not NaN. R2 is 1 - (sum of squared
    errors) / (sum of squared deviations from the mean target). R2 may be negative.
    """
    known = ~np.isnan(target_N)
    predicted_N, target_N = predicted_N[known], target_N[known]
    square = float(((predicted_N - target_N) ** 2).sum())
    spread = float(((target_N - target_N.mean()) ** 2).sum()) if len(target_N) else 0.0
    return {
        "Spearman": spearman(predicted_N, target_N),
        "Pearson": pearson(predicted_N, target_N),
        "RMSE": (square / len(target_N)) ** 0.5 if len(target_N) else np.nan,
        "R2": 1 - square / spread if spread > 0 else np.nan,
    }


NUMBER_COLUMNS = ("Spearman", "Pearson", "RMSE", "R2")


def number_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the metrics for the targets `names`. There is no mean RMSE, since units of targets differ."""
    return NUMBER_COLUMNS if len(names) < 2 else ("Spearman", "Pearson", "R2", *(f"Spearman {name}" for name in names))


def number_row(
    predicted_T: npt.NDArray[np.floating], target_T: npt.NDArray[np.floating], names: Sequence[str]
) -> dict[str, float | npt.NDArray[np.float64]]:
    """Return the predicted and the true value of each target of a record, as a row for `number_summary`."""
    row: dict[str, float | npt.NDArray[np.float64]] = {}
    for t, name in enumerate(names):
        of = f" {name}" if len(names) > 1 else ""
        row[f"prediction{of}"], row[f"target{of}"] = float(predicted_T[t]), float(target_T[t])
    return row | {"values": np.stack([predicted_T, target_T]).astype(np.float64)}


def number_summary(rows: Sequence[Row], names: Sequence[str]) -> dict[str, float]:
    """Compute the metrics of `of_numbers` for each target. For several targets, also return means, but not of RMSE."""
    values_2NT = np.concatenate([np.asarray(row["values"]) for row in rows], axis=1).reshape(2, len(rows), len(names))
    each = [of_numbers(values_2NT[0, :, t], values_2NT[1, :, t]) for t in range(len(names))]
    if len(names) == 1:
        return each[0]
    summary = {c: mean(np.array([scores[c] for scores in each])) for c in NUMBER_COLUMNS if c != "RMSE"}
    return summary | {
        f"{c} {name}": scores[c] for name, scores in zip(names, each, strict=True) for c in NUMBER_COLUMNS
    }


PREDICTIVE = "sd of a measurement"
"""The column with the standard deviation that a Gaussian process expects of a measurement, in the target's unit."""


def coverage(error_N: npt.NDArray[np.float64], sd_N: npt.NDArray[np.float64], level: float) -> float:
    """Return the share of errors inside the intervals that should contain the share `level` of a normal distribution.

    >>> coverage(np.array([-1.0, 2.0]), np.ones(2), 0.8)
    0.5
    """
    return float((np.abs(error_N) <= ndtri((1 + level) / 2) * sd_N).mean()) if len(error_N) else math.nan


# Classes


def confusion(target_M: npt.NDArray[np.int64], predicted_M: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.int64]:
    """Return the confusion matrix [n, n]: row i counts how often each class was predicted for records of class i."""
    return np.bincount(target_M * n + predicted_M, minlength=n * n).reshape(n, n)


def of_confusion(counts_CC: npt.NDArray[np.float64]) -> dict[str, float]:
    """Compute accuracy, MCC and macro-F1 from a confusion matrix (see `confusion`). If all counts are 0, they are NaN.

    MCC is computed as for several classes (Gorodkin 2004, doi:10.1016/j.compbiolchem.2004.09.006). MCC is 0 if all
    targets or all predictions are of one class. Macro-F1 is the mean over classes that occur as target or prediction.
    """
    samples, right_C = counts_CC.sum(), counts_CC.diagonal()
    if not samples:
        return {"accuracy": np.nan, "MCC": np.nan, "macro-F1": np.nan}
    target_C, predicted_C = counts_CC.sum(1), counts_CC.sum(0)
    scale = np.sqrt((samples**2 - predicted_C @ predicted_C) * (samples**2 - target_C @ target_C))
    mcc = (right_C.sum() * samples - predicted_C @ target_C) / scale if scale > 0 else 0.0
    return {
        "accuracy": float(right_C.sum() / samples),
        "MCC": float(mcc),
        "macro-F1": f1(right_C, predicted_C, target_C),
    }


def f1(
    right_C: npt.NDArray[np.float64], predicted_C: npt.NDArray[np.float64], target_C: npt.NDArray[np.float64]
) -> float:
    """Compute the mean F1 score of the classes that occur as a prediction or target, from the counts of each class."""
    both_C = predicted_C + target_C
    occurs = both_C > 0
    return float((2 * right_C[occurs] / both_C[occurs]).mean()) if occurs.any() else np.nan


def calibration(confidence_M: npt.NDArray[np.floating], correct_M: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Count predictions in bins of confidence, for `calibration_error`. The rows of the result, float64 [3, bins], are
    the number of predictions, the sum of their confidences, and the number of correct predictions.
    """
    confidence_M = np.nan_to_num(confidence_M)  # the confidences of a diverged model are NaN
    bin_M = np.minimum((confidence_M * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
    weights = (None, confidence_M, correct_M)
    return np.stack([np.bincount(bin_M, w, minlength=CALIBRATION_BINS) for w in weights]).astype(np.float64)


def calibration_error(bins_3B: npt.NDArray[np.float64]) -> float:
    """Compute the expected calibration error (ECE): the mean |confidence - accuracy| of bins, weighted by count."""
    count_B, confidence_B, right_B = bins_3B
    return float(np.abs(confidence_B - right_B).sum() / count_B.sum()) if count_B.any() else np.nan


# Rankings


def ranking(score_N: npt.NDArray[Any], truth_N: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Compute AUROC and AUPRC (average precision). If the scores are places (see `ranked`), the time is linear. Both
    metrics are NaN if no record is positive, or if a score is NaN. AUROC is also NaN if no record is negative.
    """
    if not truth_N.any() or np.isnan(score_N).any():
        return {"AUROC": np.nan, "AUPRC": np.nan}
    place_N = _places(score_N)
    false_B, true_B = np.bincount(place_N[~truth_N], minlength=place_N.max() + 1), np.bincount(place_N[truth_N])
    true_B = np.pad(true_B, (0, len(false_B) - len(true_B)))
    n_false, n_true = int(false_B.sum()), int(true_B.sum())
    false_below = np.cumsum(false_B) - false_B
    found_B, taken_B = np.cumsum(true_B[::-1]), np.cumsum((true_B + false_B)[::-1])
    return {
        "AUROC": float((true_B * (false_below + false_B / 2)).sum() / (n_true * n_false)) if n_false else np.nan,
        "AUPRC": float((true_B[::-1] * found_B / np.maximum(taken_B, 1)).sum() / n_true),
    }


# Several labels


def fmax_terms(probability_C: npt.NDArray[np.floating], truth_C: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Return the four numbers that a protein adds to the sums for `fmax` at each threshold, [4, thresholds].

    They are the precision, 1 if the precision is defined, the recall, and 1. A label is predicted if its probability is
    at least the threshold. Precision is undefined if no label is predicted. A protein without labels adds zeros, since
    CAFA scores only annotated proteins.
    """
    terms = np.zeros((4, len(THRESHOLDS)))
    if truth_C.any():
        ordered, true = np.sort(probability_C), np.sort(probability_C[truth_C])
        predicted = len(ordered) - np.searchsorted(ordered, THRESHOLDS)
        right = len(true) - np.searchsorted(true, THRESHOLDS)
        terms[0], terms[1] = right / np.maximum(predicted, 1), predicted > 0
        terms[2], terms[3] = right / len(true), 1
    return terms


def fmax(terms: npt.NDArray[np.float64]) -> float:
    """Compute Fmax of CAFA (Radivojac et al. 2013, doi:10.1038/nmeth.2340) from the sum of `fmax_terms` over proteins.
    Precision is averaged over the proteins with a prediction at the threshold, and recall over all labelled proteins.
    """
    precision, predicted, recall, proteins = terms
    if not proteins[0]:
        return np.nan
    precision, recall = precision / np.maximum(predicted, 1), recall / proteins
    return float((2 * precision * recall / np.maximum(precision + recall, 1e-12)).max())


# Intervals


@dataclass(frozen=True)
class Interval:
    """A metric with its 95% bootstrap interval over records. If there is no interval, `low` and `high` are NaN."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return "-" if math.isnan(self.value) else f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def draws(n: int, block_N: npt.NDArray[np.int64] | None = None, seed: int = 0) -> Iterator[npt.NDArray[np.int64]]:
    """Yield bootstrap resamples: int64 arrays of about n record indices. With `block_N`, whole blocks are resampled.

    The same records and seed give the same resamples, so two methods can be compared in each resample. With fewer than
    LEAST records or blocks, there are no resamples. A resample serves all metrics, unlike in
    `scipy.stats.bootstrap`, which computes one metric from one array.
    """
    if count_units(n, block_N) < LEAST:
        return
    members = None
    if block_N is not None:
        order = np.argsort(block_N, kind="stable")
        members = np.split(order, np.flatnonzero(np.diff(block_N[order])) + 1)
    units, rng = n if members is None else len(members), np.random.default_rng(seed)
    for _ in range(min(RESAMPLES, max(200, MOST_ROWS // units))):
        draw = rng.integers(0, units, units)
        yield draw if members is None else np.concatenate([members[k] for k in draw])


def bootstrap(
    summary: Callable[[Sequence[R]], Mapping[str, float]],
    rows: Sequence[R],
    seed: int = 0,
    block_N: npt.NDArray[np.int64] | None = None,
) -> dict[str, list[float]]:
    """Return a list for each metric: the value over all rows, then a value for each resample (see `draws`)."""
    samples = [summary(rows), *(summary([rows[n] for n in draw]) for draw in draws(len(rows), block_N, seed))]
    return {name: [sample.get(name, np.nan) for sample in samples] for name in samples[0]}


def count_units(n: int, block_N: npt.NDArray[np.int64] | None) -> int:
    """Return the number of units to resample: n, or the number of blocks in `block_N` except -1 (the wild type)."""
    return n if block_N is None else len(np.unique(block_N[block_N >= 0]))


def interval(values: Sequence[float], metric: str = "") -> Interval:
    """Compute the 95% interval of a metric from its list in the result of `bootstrap`. Resamples with NaN are left out.

    The result is the percentile interval. For a metric in BIASED, or if the percentile interval does not contain the
    estimate, the result is the basic bootstrap interval, widened to contain the estimate. It reflects the percentiles
    at the estimate, which corrects the bias of the resamples (Davison and Hinkley 1997, Bootstrap Methods and their
    Application, section 5.2). For a metric in BIASED no limit is below 0.
    """
    plain = difference(values, [0.0] * len(values), metric)
    return Interval(plain.value, max(plain.low, 0.0), plain.high) if metric in BIASED else plain


def difference(ours: Sequence[float], theirs: Sequence[float], metric: str = "") -> Interval:
    """Compute the difference `ours` - `theirs` of a metric and its interval. Both lists are from
    `bootstrap` over the same records with the same seed. If one of the lists has no resamples, the limits are NaN.
    """
    value, *resampled = (a - b for a, b in zip(ours, theirs, strict=False))
    known = [v for v in resampled if not np.isnan(v)]
    if np.isnan(value) or not known:
        return Interval(float(value), np.nan, np.nan)
    low, high = map(float, np.percentile(known, [2.5, 97.5]))
    if metric in BIASED or not low <= value <= high:
        low, high = min(2 * value - high, value), max(2 * value - low, value)
    return Interval(float(value), float(low), float(high))


def variant_units(variants: Sequence[tuple[Mutation, ...]]) -> tuple[npt.NDArray[np.int64], str]:
    """Return the index of each variant's unit in the bootstrap, int64 [N], and the noun for a unit.

    The unit is a `position`, `site combination` or `variant`. Variants that change the same sites are not independent,
    so they form a block and are resampled together. This needs at least LEAST blocks, none with more than half of the
    variants. Otherwise, as in a library of few sites, each variant is a unit. Replicates of a variant are one unit.
    """
    block_N = site_blocks(variants)
    if count_units(len(variants), block_N) >= LEAST and np.bincount(block_N + 1).max() <= len(variants) / 2:
        return block_N, "position" if all(len(variant) < 2 for variant in variants) else "site combination"
    names = [name_of(variant) for variant in variants]
    return np.unique(names, return_inverse=True)[1].astype(np.int64), "variant"


def variant_spearman(
    predicted_N: npt.NDArray[np.float64],
    measured_N: npt.NDArray[np.float64],
    variants: Sequence[tuple[Mutation, ...]],
    fold_N: npt.NDArray[np.int64] | None = None,
) -> tuple[Interval, str]:
    """Compute Spearman's correlation within folds (`spearman_within`) with its interval. Also return the noun for the
    units that are resampled, such as `position`. By default all variants are in one fold.
    """
    fold_N = np.zeros(len(variants), dtype=np.int64) if fold_N is None else fold_N
    block_N, unit = variant_units(variants)
    values = [spearman_within(predicted_N, measured_N, fold_N)]
    for draw in draws(len(variants), block_N):
        values.append(spearman_within(predicted_N[draw], measured_N[draw], fold_N[draw]))
    return interval(values), unit
