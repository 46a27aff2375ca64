"""Metrics against scikit-learn, scipy and examples by hand."""

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as reference

from esmshard.tasks import metrics


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_pooled_ranks_are_exact(rng: np.random.Generator) -> None:
    a = (1 + 1e-6 * rng.normal(size=500)).astype(np.float32)  # a new head's outputs hardly spread, and tie
    b = (np.log(np.abs(a - 1) / 1e-6 + 0.01) + rng.normal(size=500)).round(1).astype(np.float32)

    def spearman(rows: list[metrics.Row]) -> float:
        return metrics.spearman(metrics.joined(rows, "ranked a"), metrics.joined(rows, "ranked b"))

    cuts = [3, 3, 20]
    rows = [{"ranked a": x, "ranked b": y} for x, y in zip(np.split(a, cuts), np.split(b, cuts), strict=True)]
    ready, again = metrics.ranked(rows), [3, 3, 0, 1]  # a resample, by ranks among all
    for order in (range(4), again):
        values = (np.concatenate([rows[n][f"ranked {key}"] for n in order]) for key in "ab")
        expected = pytest.approx(stats.spearmanr(*values).statistic, abs=1e-12)
        assert spearman([rows[n] for n in order]) == spearman([ready[n] for n in order]) == expected
    assert np.isnan(spearman([ready[1]]))
    assert np.isnan(spearman(metrics.ranked([{"ranked a": a, "ranked b": np.ones(500)}])))


def test_macro_f1_leaves_out_what_never_occurs(rng: np.random.Generator) -> None:
    target, predicted = rng.integers(0, 4, (2, 300))
    target %= 3  # class 3 is only predicted, and class 4 never occurs
    found = metrics.of_confusion(metrics.confusion(target, predicted, 5).astype(float))
    assert found["macro-F1"] == pytest.approx(reference.f1_score(target, predicted, average="macro", labels=range(4)))
    assert found["MCC"] == pytest.approx(reference.matthews_corrcoef(target, predicted))
    assert np.isnan(metrics.f1(np.zeros(2), np.zeros(2), np.zeros(2)))


def test_rankings_are_scored_as_scikit_learn_does(rng: np.random.Generator) -> None:
    truth = rng.random(400) < 0.2
    score = (rng.normal(size=400) + truth).round(1)  # with ties
    found = metrics.ranking(score, truth)
    assert found["AUROC"] == pytest.approx(reference.roc_auc_score(truth, score))
    assert found["AUPRC"] == pytest.approx(reference.average_precision_score(truth, score))
    assert np.isnan(list(metrics.ranking(score, np.zeros(400, bool)).values())).all()
    assert np.isnan(metrics.ranking(score, np.ones(400, bool))["AUROC"])
    (ready,) = metrics.ranked([{"ranked score": score}])
    assert metrics.ranking(ready["ranked score"], truth) == found


def test_the_best_are_chosen_within_folds_and_ties_count_by_their_chance() -> None:
    fold_N = np.repeat([0, 1], [200, 50])
    y_N = np.concatenate([np.arange(200.0), 1000 + np.arange(50.0)])
    x_N = y_N.copy()
    x_N[fold_N == 0] += 5000  # an offset of the model of a fold
    assert [metrics.best_count(y_N[fold_N == fold]) for fold in (0, 1)] == [2, 1]
    assert metrics.top_of_list(x_N, y_N, fold_N) == (1, (199 + 198 + 1049) / 3)
    x_N[199] = 0  # the best of fold 0 is missed, and the third takes its place
    assert metrics.top_of_list(x_N, y_N, fold_N) == pytest.approx((2 / 3, (198 + 197 + 1049) / 3))
    recall, mean = metrics.top_of_list(np.zeros(250), y_N, fold_N)
    assert (recall, mean) == pytest.approx(((2 * 2 / 200 + 1 / 50) / 3, (2 * 99.5 + 1024.5) / 3)), "by chance"
    assert np.isnan(metrics.top_of_list(np.full(250, np.nan), y_N, fold_N)).all()
    assert np.isnan(metrics.top_of_list(x_N, np.full(250, np.nan), fold_N)).all()
