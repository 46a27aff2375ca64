"""Precision of ranked contacts, as the ESM papers report it, without the defects of their notebook.

For one protein of L resolved residues and one range of separations, the floor(L/k) highest-scored valid pairs are
taken; P@L/k is the share of them that are contacts. The reported number is the mean over proteins. It equals
`compute_precisions` of fair-esm's contact notebook on complete proteins of at least 60 residues
(`tests/tasks/test_contact_precision.py`). Differences:

- pairs without a label are never ranked, so the value cannot become negative;
- a protein with fewer valid pairs than floor(L/k) has no value (NaN) and is left out of the mean;
- only the upper triangle is scored: symmetrise first;
- scores of which one is not finite, as those of a model that has diverged, have no order: no metric has a value;
- of equal scores the pair that comes first (lower i, then lower j) ranks first.
"""

import numpy as np
import numpy.typing as npt

from esmshard.tasks import metrics

RANGES: dict[str, tuple[int, float]] = {
    "all": (6, np.inf),
    "short": (6, 12),
    "medium": (12, 24),
    "long": (24, np.inf),
}
"""Separations j - i, from (inclusive) and to (exclusive)."""

CUTS = {"P@L": 1, "P@L/2": 2, "P@L/5": 5}


def resolved(labels_LL: npt.NDArray[np.int8]) -> int:
    """Count the residues with coordinates."""
    return int((labels_LL.diagonal() >= 0).sum())


def valid_pairs(labels_LL: npt.NDArray[np.int8], name: str) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return (i, j) of the labelled pairs i < j in one of RANGES."""
    low, high = RANGES[name]
    i, j = np.triu_indices(len(labels_LL), low)
    keep = (labels_LL[i, j] >= 0) & (j - i < high)
    return i[keep], j[keep]


def contact_precision(scores_LL: npt.NDArray[np.float32], labels_LL: npt.NDArray[np.int8]) -> dict[str, float]:
    """Compute the metrics of one protein: `long P@L`, `long P@L/2`, ... for each of RANGES, and `AUPRC` over all valid
    pairs.

    Args:
        scores_LL: any score, higher is more likely a contact; the upper triangle is read.
        labels_LL: 1, 0, or -1 where undefined (see `contact_labels`). L is the number of resolved residues.
    """
    n_resolved = resolved(labels_LL)
    row: dict[str, float] = {}
    for name in RANGES:
        i, j = valid_pairs(labels_LL, name)
        scores, hits = scores_LL[i, j], labels_LL[i, j]
        ranked = hits[np.argsort(-scores, kind="stable")]
        for cut, k in CUTS.items():
            top = n_resolved // k
            row[f"{name} {cut}"] = float(ranked[:top].mean()) if 0 < top <= len(ranked) else np.nan
    i, j = valid_pairs(labels_LL, "all")
    if not np.isfinite(scores_LL[i, j]).all():
        return dict.fromkeys([*row, "AUPRC"], np.nan)
    hits = labels_LL[i, j]
    row["AUPRC"] = metrics.of_scores(scores_LL[i, j], hits == 1)["AUPRC"]
    return row


def base_rate(labels_LL: npt.NDArray[np.int8]) -> dict[str, float]:
    """Compute what a random order is expected to reach: the share of contacts among the valid pairs of each range."""
    n_resolved = resolved(labels_LL)
    row: dict[str, float] = {}
    for name in RANGES:
        hits = labels_LL[valid_pairs(labels_LL, name)]
        for cut, k in CUTS.items():
            row[f"{name} {cut}"] = float(hits.mean()) if 0 < n_resolved // k <= len(hits) else np.nan
    hits = labels_LL[valid_pairs(labels_LL, "all")]
    row["AUPRC"] = float(hits.mean()) if hits.any() else np.nan
    return row


def calibration(logits_LL: npt.NDArray[np.float32], labels_LL: npt.NDArray[np.int8]) -> npt.NDArray[np.float64]:
    """Count the valid pairs by their predicted probability of a contact (see `metrics.calibration`). No pair is counted
    if a logit is NaN.
    """
    i, j = valid_pairs(labels_LL, "all")
    if np.isnan(logits_LL[i, j]).any():
        i, j = i[:0], j[:0]
    probabilities = 1 / (1 + np.exp(-logits_LL[i, j].astype(np.float64)))
    return metrics.calibration(probabilities, labels_LL[i, j] == 1)
