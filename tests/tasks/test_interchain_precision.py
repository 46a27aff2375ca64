"""Contacts of records with several chains: pairs within chains and of two chains, each with metrics of their own."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from esmshard.data.batching.loader import Example
from esmshard.data.labels.coordinates import chain_numbers, contact_labels, mark_linkers
from esmshard.tasks.contact import ContactSettings, ContactTask, contact_precision, shortest_chain, valid_pairs
from esmshard.vocab import encode

TASK = ContactTask(ContactSettings(name="contact"), {})
BETWEEN = ["interchain P@L", "interchain P@L/2", "interchain P@L/5", "interchain P@L/10", "interchain AUPRC"]


def joined(
    lengths: list[int], linker: int, seed: int = 0, hidden: tuple[int, ...] = ()
) -> tuple[np.ndarray, np.ndarray, list[int | None]]:
    """Scores that know something, labels, and the chain of each place (None in a linker)."""
    rng = np.random.default_rng(seed)
    chain_of: list[int | None] = []
    for k, length in enumerate(lengths):
        chain_of += [None] * (linker if k else 0) + [k] * length
    size = len(chain_of)
    labels_LL = np.triu(rng.random((size, size)) < 0.15).astype(np.int8)
    labels_LL |= labels_LL.T
    np.fill_diagonal(labels_LL, 1)
    scores_LL = (rng.random((size, size)) + 0.3 * labels_LL).astype(np.float32)
    labels_LL[list(hidden)] = labels_LL[:, list(hidden)] = -1
    labels_LL = mark_linkers(labels_LL, np.array([one is None for one in chain_of]))
    return (scores_LL + scores_LL.T) / 2, labels_LL, chain_of


def pairs_by_hand(labels_LL: np.ndarray, chain_of: list[int | None], *, between: bool) -> list[tuple[int, int]]:
    places = [k for k, one in enumerate(chain_of) if one is not None and labels_LL[k, k] >= 0]
    return [
        (i, j)
        for i in places
        for j in places
        if i < j and (chain_of[i] != chain_of[j] if between else chain_of[i] == chain_of[j] and j - i >= 6)
    ]


def top(scores_LL: np.ndarray, labels_LL: np.ndarray, pairs: list[tuple[int, int]], count: int) -> float:
    best = sorted(pairs, key=lambda pair: -scores_LL[pair])[:count]
    return float(np.mean([labels_LL[pair] for pair in best])) if 0 < count <= len(pairs) else math.nan


@pytest.mark.parametrize(
    ("lengths", "linker", "hidden", "shortest", "resolved"),
    [
        ([40, 50], 1, (0, 3, 41, 42), 38, 86),  # place 40 is the linker
        ([50, 40, 31], 3, (), 31, 121),
        ([50, 40, 11], 2, tuple(range(94, 105)), 40, 90),  # the last chain has no coordinates
    ],
)
def test_the_definition_in_loops(
    lengths: list[int], linker: int, hidden: tuple[int, ...], shortest: int, resolved: int
) -> None:
    scores_LL, labels_LL, chain_of = joined(lengths, linker, hidden=hidden)
    assert shortest_chain(labels_LL) == shortest
    found = contact_precision(scores_LL, labels_LL)
    between = pairs_by_hand(labels_LL, chain_of, between=True)
    within = pairs_by_hand(labels_LL, chain_of, between=False)
    assert set(zip(*valid_pairs(labels_LL, "interchain"), strict=True)) == set(between)
    assert set(zip(*valid_pairs(labels_LL, "all"), strict=True)) == set(within)
    assert set(found) >= {*BETWEEN, "all P@L", "long P@L/5", "AUPRC"}
    for k, cut in ((1, "P@L"), (2, "P@L/2"), (5, "P@L/5"), (10, "P@L/10")):
        expected = top(scores_LL, labels_LL, between, shortest // k)
        assert found[f"interchain {cut}"] == pytest.approx(expected, nan_ok=True)
        if k < 10:
            long = [(i, j) for i, j in within if j - i >= 24]
            assert found[f"all {cut}"] == pytest.approx(top(scores_LL, labels_LL, within, resolved // k))
            expected = top(scores_LL, labels_LL, long, resolved // k)
            assert found[f"long {cut}"] == pytest.approx(expected, nan_ok=True)
    hits = np.array([labels_LL[pair] for pair in sorted(between, key=lambda pair: -scores_LL[pair])])
    precision = hits.cumsum() / np.arange(1, len(hits) + 1)
    assert found["interchain AUPRC"] == pytest.approx(precision[hits == 1].mean())
    rate = contact_precision(None, labels_LL)
    assert list(rate) == list(found)
    assert rate["interchain P@L/5"] == rate["interchain AUPRC"] == pytest.approx(hits.mean())
    assert rate["all P@L"] == pytest.approx(np.mean([labels_LL[pair] for pair in within]))


def test_the_loss_is_over_the_same_pairs() -> None:
    """All pairs of two chains, even neighbours over a linker of one token; none of a linker; in chains from six on."""
    for linker in (1, 25):
        scores_LL, labels_LL, chain_of = joined([15, 12], linker, hidden=(2,))
        pairs = [pair for between in (True, False) for pair in pairs_by_hand(labels_LL, chain_of, between=between)]
        i, j = torch.tensor(pairs).T
        logits_LL, target_LL = torch.from_numpy(scores_LL), torch.from_numpy(labels_LL)
        expected = F.binary_cross_entropy_with_logits(logits_LL[i, j], target_LL[i, j].float())
        found = TASK.loss([logits_LL], [target_LL])
        assert float(found.sum / found.count) == pytest.approx(float(expected), rel=1e-5)
        assert (14, 14 + linker + 1) in pairs


def test_targets_follow_from_tokens_and_coordinates() -> None:
    """Chain B lies on chain A, a linker of three between them: (i, i) of both is a contact, whatever lies between."""
    cb_L3 = np.zeros((10 + 3 + 10, 3), np.float32)
    cb_L3[:10, 0] = cb_L3[13:, 0] = 20 * np.arange(10)
    cb_L3[13:, 1] = 5
    cb_L3[[4, 10, 11, 12]] = np.nan
    target_LL = TASK.inputs(Example("a_A:B", encode("ACDEFGHIKL:LKIHGFEDCA", linker=3), {"cb": cb_L3})).target
    assert chain_numbers(target_LL).tolist() == [0] * 10 + [1, 2] + [3] * 11
    assert target_LL.diagonal().tolist() == [1] * 4 + [-1] + [1] * 5 + [-2] * 3 + [1] * 10
    assert np.argwhere(np.triu(target_LL, 1) == 1).tolist() == [[k, 13 + k] for k in range(10) if k != 4]
    assert (target_LL[10:13][:, [*range(10), *range(13, 23)]] < 0).all()
    alone = TASK.inputs(Example("a_A", encode("ACDEFGHIKL"), {"cb": cb_L3[:10]})).target
    assert np.array_equal(target_LL[:10, :10], alone)
    assert np.array_equal(alone, contact_labels(cb_L3[:10]))


def test_a_pair_of_chains_has_no_separation() -> None:
    """The prior knows how many pairs of two chains are in contact, and ranks none above another. The regression on
    attention is not fitted, since no chain has a contact of its own.
    """
    cb_L3 = np.full((64, 3), np.nan, np.float32)
    cb_L3[:30] = cb_L3[34:] = np.arange(30)[:, None] * np.array([20, 0, 0])
    cb_L3[34:, 1] = np.where(np.arange(30) < 12, 5, 50)
    example = Example("a_A:B", encode(f"{'ACDEFGHIKL' * 3}:{'ACDEFGHIKL' * 3}", linker=4), {"cb": cb_L3})
    known = TASK.baselines([example], None)  # type: ignore[arg-type]
    assert known.keys() == {"separation prior"}
    prior = known["separation prior"]
    assert prior[0] == pytest.approx(math.log(13 / (1000 - 13)), abs=1e-5)  # 12 of 900, and 1 of 100
    assert prior[6] == pytest.approx(math.log(1 / (100 + 2 * 24 - 1)), abs=1e-5)
    assert prior[30] == pytest.approx(math.log(1 / 99), abs=1e-5)  # no pair of a chain is so far apart
    found: Any = {name: rows[0] for name, rows in TASK.baseline_outputs([example], known, None).items()}
    assert not [name for name in found["separation prior"] if "interchain" in name]
    assert found["separation prior"]["all P@L"] == 0
    assert found["separation prior"]["calibration"][0].sum() == 900 + 2 * 300
    assert found["base rate"]["interchain AUPRC"] == pytest.approx(12 / 900)
