"""The contact task: labels, loss, metrics and baselines."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from model_files import TINY, fair_esm, ours

from esmshard.data.batching.loader import Example
from esmshard.model.finetuner import FineTuner
from esmshard.tasks import contact
from esmshard.tasks.contact import ContactSettings, ContactTask
from esmshard.vocab import encode

TASK = ContactTask(ContactSettings(name="contact", channels=8, blocks=3), {})


@pytest.fixture(scope="module")
def model() -> FineTuner:
    torch.manual_seed(0)
    return FineTuner(ours(fair_esm(TINY), TINY), TASK.head(TINY)).eval()


def labels(length: int, *contacts: tuple[int, int], unresolved: tuple[int, ...] = ()) -> torch.Tensor:
    """int8 [L, L] of the contacts named, all other pairs 0, those of unresolved residues -1."""
    labels_LL = torch.eye(length, dtype=torch.int8)
    for i, j in contacts:
        labels_LL[i, j] = labels_LL[j, i] = 1
    for i in unresolved:
        labels_LL[i], labels_LL[:, i] = -1, -1
    return labels_LL


def entropy(logit: float | torch.Tensor, label: int) -> float:
    return math.log1p(math.exp(-float(logit) if label else float(logit)))


def test_the_loss_is_what_one_computes_by_hand() -> None:
    """Nine residues have six pairs at least six apart; residue 8 is unresolved, which leaves three with a gradient."""
    logits_LL = torch.arange(81.0).reshape(9, 9) / 40 - 1
    target_LL = labels(9, (0, 6), (1, 2), (0, 8), (3, 8), unresolved=(8,))
    first = (entropy(logits_LL[0, 6], 1) + entropy(logits_LL[0, 7], 0) + entropy(logits_LL[1, 7], 0)) / 3
    found = TASK.loss([logits_LL.requires_grad_()], [target_LL])
    assert float(found.sum.detach()) == pytest.approx(first, rel=1e-6)
    assert float(found.count) == 1
    found.sum.backward()
    assert {tuple(pair) for pair in logits_LL.grad.nonzero().tolist()} == {(0, 6), (0, 7), (1, 7)}

    # A second protein of one pair weighs as much as the first; a third without a pair weighs nothing.
    second_LL, third_LL = torch.full((7, 7), 2.0), torch.full((6, 6), 5.0)
    found = TASK.loss([logits_LL, second_LL, third_LL], [target_LL, labels(7, (0, 6)), labels(6)])
    assert float(found.sum.detach()) == pytest.approx(first + entropy(2.0, 1), rel=1e-6)
    assert float(found.count) == 2


def test_a_row_and_the_summary_of_two() -> None:
    """Ten pairs of seven apart or more in ten residues; logits of 0 and of log 3 are probabilities 1/2 and 3/4."""
    outputs = np.zeros((10, 10)), np.full((10, 10), math.log(3))
    targets = [labels(10, (0, 6), (1, 8), (2, 9)).numpy(), labels(10, (0, 7), unresolved=(9,)).numpy()]
    rows = list(map(TASK.score, outputs, targets))
    # Bins are 1/15 wide: 1/2 lies in [7/15, 8/15), 3/4 in [11/15, 12/15).
    expected = np.zeros((2, 3, 15))
    expected[0, :, 7], expected[1, :, 11] = (10, 5, 3), (6, 4.5, 1)
    assert np.stack([row["calibration"] for row in rows]) == pytest.approx(expected)
    found = TASK.summary(rows)
    assert found["ECE"] == pytest.approx((abs(5 - 3) + abs(4.5 - 1)) / 16)
    assert set(TASK.columns[:7]) <= found.keys()
    assert "calibration" not in found
    assert found["AUPRC"] == pytest.approx((3 / 10 + 1 / 6) / 2)
    assert found["all P@L/5"] == pytest.approx((1 / 2 + 0) / 2)
    assert math.isnan(TASK.summary([{"long P@L": math.nan}])["long P@L"])


def test_the_separation_prior_by_hand(model: FineTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "contact_labels", lambda labels_LL: labels_LL)
    targets = labels(8, (0, 6), (0, 7)), labels(7, (0, 6)), labels(8, (1, 7), unresolved=(0,)), labels(10)
    *train, test = [Example("x", encode("M" * len(target)), {"cb": target.numpy()}) for target in targets]
    known = TASK.baselines(train, model)
    # Six apart: (0,6) (1,7) of the first, (0,6) of the second, (1,7) of the third; seven apart: (0,7) of the first.
    prior = np.log([1 / 99] * 6 + [4 / 100, 2 / 99])
    assert known["separation prior"] == pytest.approx(prior)
    outputs: Any = TASK.baseline_outputs([test], known, None)
    assert list(outputs) == ["base rate", "separation prior"]
    assert math.isnan(outputs["base rate"][0]["AUPRC"])
    apart_LL = np.abs(np.arange(10)[:, None] - np.arange(10))
    assert outputs["separation prior"][0] == pytest.approx(prior[np.minimum(apart_LL, 7)])
    assert list(TASK.baseline_outputs([test], {}, None)) == ["base rate"]
