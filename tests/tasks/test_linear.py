"""Linear fits, compared with scikit-learn on the features as they are, and what cannot be fitted."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss, roc_auc_score

from esmshard.tasks import baselines
from esmshard.tasks.baselines import ABSENT, apply, fit_classes, fit_labels, fit_numbers


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.fixture
def x_NF(rng: np.random.Generator) -> np.ndarray:
    """Features of very different means and scales."""
    return (rng.normal(size=(300, 6)) * [1, 100, 0.01, 3, 1, 5] + [0, 1000, 5, 0, -2, 1]).astype(np.float32)


def standardised(x_NF: np.ndarray) -> np.ndarray:
    x_NF = x_NF.astype(np.float64)
    return (x_NF - x_NF.mean(0)) / x_NF.std(0)


def test_numbers_are_those_of_ridge_on_standardised_features(x_NF: np.ndarray, rng: np.random.Generator) -> None:
    scaled = standardised(x_NF)
    y = scaled @ np.arange(6) + 3 + 0.5 * rng.normal(size=300)
    model = fit_numbers(x_NF, y[:, None])
    predicted = apply(model, x_NF)
    assert predicted.shape == (300, 1)
    assert predicted.dtype == np.float32
    fits = [Ridge(alpha).fit(scaled, y).predict(scaled) for alpha in baselines.ALPHAS]
    best = int(np.argmin([np.abs(fit - predicted[:, 0]).max() for fit in fits]))
    assert np.abs(fits[best] - predicted[:, 0]).max() < 1e-3
    assert baselines.ALPHAS[best] <= 10  # little noise
    assert apply(model, x_NF[7]) == pytest.approx(predicted[7])


def test_each_target_is_fitted_on_the_examples_that_have_it(x_NF: np.ndarray, rng: np.random.Generator) -> None:
    y = standardised(x_NF) @ rng.normal(size=(6, 3))
    y[:100, 0] = y[150:, 1] = np.nan
    together = apply(fit_numbers(x_NF, y), x_NF)
    for t in range(3):
        known = ~np.isnan(y[:, t])
        assert together[known, t] == pytest.approx(y[known, t], abs=0.1)


def test_classes_are_those_of_logistic_regression(x_NF: np.ndarray, rng: np.random.Generator) -> None:
    scaled = standardised(x_NF)
    for n_classes in (2, 3):
        logits = scaled @ rng.normal(size=(6, n_classes)) * 2
        y = (logits + rng.gumbel(size=logits.shape)).argmax(1)
        predicted = apply(fit_classes(x_NF, y, n_classes), x_NF)
        predicted -= predicted[:, :1]
        differences = []
        for c in baselines.CS:
            fit = LogisticRegression(C=c, max_iter=1000, tol=1e-6).fit(scaled, y).decision_function(scaled)
            fit = np.stack([np.zeros(300), fit], 1) if n_classes == 2 else fit - fit[:, :1]
            differences.append(np.abs(fit - predicted).max())
        assert min(differences) < 0.03  # of logits up to 13
        assert baselines.CS[int(np.argmin(differences))] >= 0.1  # there is much to be learned
        assert log_loss(y, np.exp(predicted) / np.exp(predicted).sum(1, keepdims=True)) < 0.8 * np.log(n_classes)


def test_classes_without_an_example_are_not_told(rng: np.random.Generator) -> None:
    for classes in ([1], [1, 3], [0, 1, 3]):
        x, y = rng.normal(size=(60, 2)), rng.choice(classes, 60)
        predicted = apply(fit_classes(x, y, 4), x)
        assert (predicted[:, [k for k in range(4) if k not in classes]] == ABSENT).all()
        assert (predicted[:, classes] > -20).all()


def test_labels_are_fitted_one_by_one(rng: np.random.Generator) -> None:
    x = rng.normal(size=(400, 5))
    y = np.stack([x[:, 0] > 0, x[:, 1] > 1.5, np.zeros(400), np.ones(400)], 1).astype(np.float32)
    predicted = apply(fit_labels(x, y), x)
    assert roc_auc_score(y[:, 0], predicted[:, 0]) > 0.99
    assert roc_auc_score(y[:, 1], predicted[:, 1]) > 0.99
    assert predicted[:, 2] == pytest.approx(np.full(400, np.log(0.5 / 400.5)))
    assert predicted[:, 3] == pytest.approx(np.full(400, np.log(400.5 / 0.5)))
    y[:, 1] = rng.random(400) < 0.1  # nothing can be learned, but for the share
    plain, weighted = (apply(fit_labels(x, y, np.array([1.0, w, 1, 1])), x)[:, 1].mean() for w in (1, 9))
    assert plain == pytest.approx(np.log(1 / 9), abs=0.3)
    assert weighted == pytest.approx(0, abs=0.3)
    assert np.isfinite(apply(fit_labels(x[:1], y[:1]), x)).all()
