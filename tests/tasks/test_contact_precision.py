"""Precision of ranked contacts against the definition of fair-esm's contact notebook, and where that one fails."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from esmshard.tasks import metrics
from esmshard.tasks.contact import CUTS, RANGES, calibration, contact_precision, valid_pairs

KEYS = [f"{name} {cut}" for name in RANGES for cut in CUTS]
NOTEBOOK_RANGES = {"all": (6, None), "short": (6, 12), "medium": (12, 24), "long": (24, None)}
NOTEBOOK_BINS = {"P@L": 9, "P@L/2": 4, "P@L/5": 1}


def protein(length: int, seed: int = 0, density: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Scores that know something, and labels; both symmetric, all residues resolved."""
    rng = np.random.default_rng((length, seed))
    labels_LL = np.triu(rng.random((length, length)) < density).astype(np.int8)
    labels_LL |= labels_LL.T
    np.fill_diagonal(labels_LL, 1)
    scores_LL = (rng.random((length, length)) + 0.15 * labels_LL).astype(np.float32)
    return (scores_LL + scores_LL.T) / 2, labels_LL


def unresolve(labels_LL: np.ndarray, residues: np.ndarray | list[int]) -> np.ndarray:
    labels_LL = labels_LL.copy()
    labels_LL[residues], labels_LL[:, residues] = -1, -1
    return labels_LL


def as_the_notebook(scores_LL: np.ndarray, labels_LL: np.ndarray) -> dict[str, float]:
    """What the notebook computes for one complete protein, including its float32 arithmetic of 0.1, 0.2 ... of L."""
    scores, labels = torch.from_numpy(scores_LL.copy()), torch.from_numpy(labels_LL.astype(np.int64))
    length = len(labels)
    place = torch.arange(length)
    separation = place[None, :] - place[:, None]
    row = {}
    for name, (low, high) in NOTEBOOK_RANGES.items():
        wrong = (separation < low) | (labels < 0)
        if high is not None:
            wrong = wrong | (separation >= high)
        i, j = torch.triu_indices(length, length, offset=low)
        order = scores.masked_fill(wrong, -math.inf)[i, j].argsort(descending=True)[:length]
        hits = labels[i, j][order].float().cumsum(0)
        last = (torch.arange(0.1, 1.1, 0.1) * length).long() - 1
        precision = hits[last] / (last + 1)
        row |= {f"{name} {cut}": float(precision[k]) for cut, k in NOTEBOOK_BINS.items()}
    return row


def same(row: dict[str, float], expected: dict[str, float]) -> bool:
    return [row[k] for k in KEYS] == pytest.approx([expected[k] for k in KEYS], abs=1e-6)


def test_complete_proteins_score_as_in_the_notebook() -> None:
    for length in (60, 61, 67, 99, 100, 128, 177):
        values = set()
        for seed, density in enumerate((0.02, 0.1, 0.4)):
            scores_LL, labels_LL = protein(length, seed, density)
            row = contact_precision(scores_LL, labels_LL)
            i, j = valid_pairs(labels_LL, "all")
            average = reference.average_precision_score(labels_LL[i, j], scores_LL[i, j])
            assert row["AUPRC"] == pytest.approx(average)
            assert same(row, as_the_notebook(scores_LL, labels_LL)), length
            values |= {row[key] for key in KEYS}
        assert len(values) > 15


@pytest.mark.filterwarnings("error")
def test_a_short_protein_has_the_values_that_its_pairs_allow() -> None:
    for length, defined in (
        (9, {"all P@L/2", "all P@L/5", "short P@L/2", "short P@L/5"}),  # six pairs
        (7, {"all P@L/5", "short P@L/5"}),  # one pair
        (6, set()),
        (1, set()),
    ):
        scores_LL, labels_LL = protein(length, density=2)  # every pair touches
        for row in (contact_precision(scores_LL, labels_LL), contact_precision(None, labels_LL)):
            assert {key for key in KEYS if not math.isnan(row[key])} == defined
            assert math.isnan(row["AUPRC"]) == (not defined)
    scores_LL, labels_LL = protein(28)  # ten long pairs
    row = contact_precision(scores_LL, labels_LL)
    assert {key for key, value in row.items() if math.isnan(value)} == {"long P@L", "long P@L/2"}


def test_calibration_counts_pairs_by_their_probability() -> None:
    """Against a loop over pairs; probabilities of exactly 0 and 1 lie in the outer bins."""
    scores_LL, labels_LL = protein(60, density=0.3)
    logits_LL, labels_LL = (8 * scores_LL - 4).astype(np.float32), unresolve(labels_LL, [3, 50])
    logits_LL[0, 20], logits_LL[0, 21] = 800, -700
    expected = np.zeros((3, metrics.CALIBRATION_BINS))
    for i, j in zip(*valid_pairs(labels_LL, "all"), strict=True):
        p = 1 / (1 + math.exp(-float(logits_LL[i, j])))
        expected[:, min(int(15 * p), 14)] += 1, p, labels_LL[i, j]
    assert calibration(logits_LL, labels_LL) == pytest.approx(expected)
    assert expected[0].min() > 0
    error = np.abs(expected[1] - expected[2]).sum() / expected[0].sum()
    assert metrics.calibration_error(expected) == pytest.approx(error)


def test_a_model_that_has_diverged_has_no_value() -> None:
    """One pair is enough, for it would stand anywhere in the order. A pair that is not scored does not matter."""
    for value in (math.nan, math.inf, -math.inf):
        scores_LL, labels_LL = protein(60)
        expected = contact_precision(scores_LL, labels_LL)
        scores_LL[0, 3] = value
        assert contact_precision(scores_LL, labels_LL) == expected
        scores_LL[0, 30] = value
        found = contact_precision(scores_LL, labels_LL)
        assert found.keys() == expected.keys()
        assert all(math.isnan(number) for number in found.values())
        pairs = 0 if math.isnan(value) else len(valid_pairs(labels_LL, "all")[0])
        assert calibration(scores_LL, labels_LL)[0].sum() == pairs
