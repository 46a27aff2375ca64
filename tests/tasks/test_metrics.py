"""Metrics against scikit-learn, scipy and examples by hand."""

import warnings

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as reference

from esmshard.tasks import metrics


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_numbers_are_compared_as_scipy_and_scikit_learn_do(rng: np.random.Generator) -> None:
    target = rng.integers(0, 12, 200) * 0.5  # with ties
    predicted = target + rng.normal(size=200).round(1)
    found = metrics.of_numbers(predicted, target)
    assert found["Spearman"] == pytest.approx(stats.spearmanr(predicted, target).statistic)
    assert found["Pearson"] == pytest.approx(stats.pearsonr(predicted, target).statistic)
    assert found["RMSE"] == pytest.approx(reference.root_mean_squared_error(target, predicted))
    assert found["R2"] == pytest.approx(reference.r2_score(target, predicted))


def in_rows(**arrays: np.ndarray) -> list[dict[str, np.ndarray]]:
    """The values in rows of different sizes, one of which is empty."""
    cuts = [3, 3, 20]
    parts = {key: np.split(array, cuts) for key, array in arrays.items()}
    return [{key: part[n] for key, part in parts.items()} for n in range(4)]


def pooled_spearman(rows: list[dict[str, np.ndarray]]) -> float:
    return metrics.spearman(metrics.joined(rows, "ranked a"), metrics.joined(rows, "ranked b"))


def test_pooled_ranks_are_exact(rng: np.random.Generator) -> None:
    spread = 1e-6
    a = (1 + spread * rng.normal(size=500)).astype(np.float32)  # a new head's outputs hardly spread, and tie
    b = (np.log(np.abs(a - 1) / spread + 0.01) + rng.normal(size=500)).round(1).astype(np.float32)
    rows, expected = in_rows(**{"ranked a": a, "ranked b": b}), stats.spearmanr(a, b).statistic
    ready = metrics.ranked(rows)
    for found in (rows, ready):
        assert pooled_spearman(found) == pytest.approx(expected, abs=1e-12)
    draw = [3, 3, 0, 1]  # of a resample, by ranks among all
    again = stats.spearmanr(*(np.concatenate([rows[n][f"ranked {key}"] for n in draw]) for key in "ab")).statistic
    assert pooled_spearman([ready[n] for n in draw]) == pytest.approx(again, abs=1e-12)
    assert np.isnan(pooled_spearman([ready[1]]))
    assert np.isnan(pooled_spearman(metrics.ranked(in_rows(**{"ranked a": a, "ranked b": np.ones(500)}))))


def test_classes_are_compared_as_scikit_learn_does(rng: np.random.Generator) -> None:
    target, predicted = rng.integers(0, 4, (2, 300))
    predicted = np.where(rng.random(300) < 0.5, target, predicted)
    found = metrics.of_confusion(metrics.confusion(target, predicted, 5).astype(float))  # class 4 never occurs
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(target, predicted))
    assert found["MCC"] == pytest.approx(reference.matthews_corrcoef(target, predicted))
    assert found["macro-F1"] == pytest.approx(reference.f1_score(target, predicted, average="macro"))
    target %= 3  # class 3 is predicted and never occurs
    found = metrics.of_confusion(metrics.confusion(target, predicted, 5).astype(float))
    assert found["macro-F1"] == pytest.approx(reference.f1_score(target, predicted, average="macro", labels=range(4)))
    counts = metrics.confusion(target, predicted, 4)
    assert counts.tolist() == reference.confusion_matrix(target, predicted).tolist()


def test_rankings_are_scored_as_scikit_learn_does(rng: np.random.Generator) -> None:
    truth = rng.random(400) < 0.2
    score = (rng.normal(size=400) + truth).round(1)  # with ties
    found = metrics.ranking(score, truth)
    assert found["AUROC"] == pytest.approx(reference.roc_auc_score(truth, score))
    assert found["AUPRC"] == pytest.approx(reference.average_precision_score(truth, score))
    assert np.isnan(list(metrics.ranking(score, np.zeros(400, bool)).values())).all()
    assert np.isnan(metrics.ranking(score, np.ones(400, bool))["AUROC"])
    rows = in_rows(**{"ranked score": score, "truth": truth})
    for ready in (rows, metrics.ranked(rows)):
        pooled = metrics.ranking(metrics.joined(ready, "ranked score"), metrics.joined(ready, "truth"))
        assert pooled == pytest.approx(found)
        assert np.isnan(metrics.ranking(ready[1]["ranked score"], ready[1]["truth"])["AUPRC"])


def test_macro_f1_of_labels_leaves_out_those_that_never_occur(rng: np.random.Generator) -> None:
    truth, predicted = rng.random((2, 50, 5)) < 0.4
    truth[:, 3], predicted[:, 3] = False, False
    right, of_predicted, of_truth = (x.sum(0).astype(float) for x in (truth & predicted, predicted, truth))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = reference.f1_score(truth, predicted, average=None, zero_division=0)
    assert metrics.f1(right, of_predicted, of_truth) == pytest.approx(np.delete(expected, 3).mean())
    assert np.isnan(metrics.f1(np.zeros(2), np.zeros(2), np.zeros(2)))


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
