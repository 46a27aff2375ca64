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

In a record of several chains these metrics are about the pairs within its chains, which are ranked together. Pairs of
two chains have metrics of their own, `interchain P@L/k`, at any separation. There L is the number of resolved residues
of the shortest chain, as for the top Ls/k of a heterodimer in Guo et al. 2022 (CDPred, doi:10.1038/s41467-022-34600-2);
of three and more chains, all pairs of two of them are ranked together.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from esmshard.data.structures.contact_labels import chain_numbers
from esmshard.tasks import metrics

RANGES: dict[str, tuple[int, float]] = {
    "all": (6, np.inf),
    "short": (6, 12),
    "medium": (12, 24),
    "long": (24, np.inf),
}
"""Separations j - i, from (inclusive) and to (exclusive)."""

CUTS = {"P@L": 1, "P@L/2": 2, "P@L/5": 5}
INTERCHAIN = "interchain"
"""The name of the pairs of two chains, beside RANGES."""
INTERCHAIN_CUTS = {**CUTS, "P@L/10": 10}


def resolved(labels_LL: npt.NDArray[np.int8]) -> int:
    """Count the residues with coordinates."""
    return int((labels_LL.diagonal() >= 0).sum())


def valid_pairs(labels_LL: npt.NDArray[np.int8], name: str) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return (i, j) of the labelled pairs i < j: those of a chain in one of RANGES, or INTERCHAIN ones."""
    low, high = (1, np.inf) if name == INTERCHAIN else RANGES[name]
    chain_L = chain_numbers(labels_LL)
    i, j = np.triu_indices(len(labels_LL), low)
    keep = (labels_LL[i, j] >= 0) & (j - i < high) & ((chain_L[i] != chain_L[j]) == (name == INTERCHAIN))
    return i[keep], j[keep]


def contact_precision(scores_LL: npt.NDArray[np.float32], labels_LL: npt.NDArray[np.int8]) -> dict[str, float]:
    """Compute the metrics of one protein: `long P@L`, `long P@L/2`, ... for each of RANGES, and `AUPRC` over all valid
    pairs of a chain. Only a record of several chains has `interchain P@L`, ..., and `interchain AUPRC`.

    Args:
        scores_LL: any score, higher is more likely a contact; the upper triangle is read.
        labels_LL: 1, 0, or -1 where undefined (see `contact_labels`). L is the number of resolved residues.
    """
    n_resolved = resolved(labels_LL)
    row: dict[str, float] = {}
    for name in RANGES:
        i, j = valid_pairs(labels_LL, name)
        row |= _precision(name, scores_LL[i, j], labels_LL[i, j], n_resolved, CUTS)
    i, j = valid_pairs(labels_LL, "all")
    if not np.isfinite(scores_LL[i, j]).all():
        row = dict.fromkeys(row, np.nan) | {"AUPRC": np.nan}
    else:
        row["AUPRC"] = metrics.of_scores(scores_LL[i, j], labels_LL[i, j] == 1)["AUPRC"]
    shortest = shortest_chain(labels_LL)
    if shortest is None:
        return row
    i, j = valid_pairs(labels_LL, INTERCHAIN)
    scores, hits = scores_LL[i, j], labels_LL[i, j]
    between = _precision(INTERCHAIN, scores, hits, shortest, INTERCHAIN_CUTS)
    between[f"{INTERCHAIN} AUPRC"] = metrics.of_scores(scores, hits == 1)["AUPRC"]
    return row | (between if np.isfinite(scores).all() else dict.fromkeys(between, np.nan))


def _precision(
    name: str, scores: npt.NDArray[np.float32], hits: npt.NDArray[np.int8], length: int, cuts: Mapping[str, int]
) -> dict[str, float]:
    """Return the shares of contacts among the floor(length / k) best pairs; NaN if there are fewer pairs."""
    ranked = hits[np.argsort(-scores, kind="stable")]
    tops = {cut: length // k for cut, k in cuts.items()}
    return {f"{name} {cut}": float(ranked[:n].mean()) if 0 < n <= len(ranked) else np.nan for cut, n in tops.items()}


def shortest_chain(labels_LL: npt.NDArray[np.int8]) -> int | None:
    """Return the number of resolved residues of the shortest chain; None for a record of one chain.

    Chains without coordinates are passed over, unless no two others are left: then it is 0.
    """
    chain_L = chain_numbers(labels_LL)
    if chain_L[-1] == 0:
        return None
    counts = np.unique(chain_L[labels_LL.diagonal() >= 0], return_counts=True)[1]
    return int(counts.min()) if len(counts) > 1 else 0


def base_rate(labels_LL: npt.NDArray[np.int8]) -> dict[str, float]:
    """Compute what a random order is expected to reach: the share of contacts among the valid pairs of each range, and
    of two chains.
    """
    n_resolved, shortest = resolved(labels_LL), shortest_chain(labels_LL)
    row: dict[str, float] = {}
    for name in RANGES:
        row |= _share(name, labels_LL, n_resolved, CUTS)
    row["AUPRC"] = _share_of_all("all", labels_LL)
    if shortest is not None:
        row |= _share(INTERCHAIN, labels_LL, shortest, INTERCHAIN_CUTS)
        row[f"{INTERCHAIN} AUPRC"] = _share_of_all(INTERCHAIN, labels_LL)
    return row


def _share(name: str, labels_LL: npt.NDArray[np.int8], length: int, cuts: Mapping[str, int]) -> dict[str, float]:
    hits = labels_LL[valid_pairs(labels_LL, name)]
    return {f"{name} {cut}": float(hits.mean()) if 0 < length // k <= len(hits) else np.nan for cut, k in cuts.items()}


def _share_of_all(name: str, labels_LL: npt.NDArray[np.int8]) -> float:
    hits = labels_LL[valid_pairs(labels_LL, name)]
    return float(hits.mean()) if hits.any() else np.nan


def calibration(logits_LL: npt.NDArray[np.float32], labels_LL: npt.NDArray[np.int8]) -> npt.NDArray[np.float64]:
    """Count the valid pairs, within chains and of two chains, by their predicted probability of a contact (see
    `metrics.calibration`). No pair is counted if a logit is NaN.
    """
    i, j = np.concatenate([valid_pairs(labels_LL, name) for name in ("all", INTERCHAIN)], axis=1)
    if np.isnan(logits_LL[i, j]).any():
        i, j = i[:0], j[:0]
    probabilities = 1 / (1 + np.exp(-logits_LL[i, j].astype(np.float64)))
    return metrics.calibration(probabilities, labels_LL[i, j] == 1)
