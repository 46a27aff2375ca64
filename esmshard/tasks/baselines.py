"""Fits linear models to fixed features with scikit-learn, for baselines and probes.

A model is one array [O, F + 1]: the weights of F features for each of O outputs, then the bias. The penalty is chosen
on a part of the examples, and used for all. It is the strength of a prior on the weights, so it does not depend on the
number of examples.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.preprocessing import StandardScaler
from torch import nn

RIDGE_ROWS, LOGISTIC_ROWS = 1000, 3000
"""The maximum number of examples on which the penalty is chosen, for ridge and for logistic regression. With 1,280
features, leave-one-out takes one second for 1,000 examples and ten seconds for 2,000."""
ALPHAS = np.logspace(-1, 5, 13)  # the candidate penalties of ridge regression
CS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # the candidate inverse penalties of logistic regression
FOLDS = 3
ABSENT = -30.0  # the logit that a model predicts for a class without examples

Floats = npt.NDArray[np.floating]
Array = npt.NDArray[np.float32]


def apply(model: Array, x_F: Floats) -> Array:
    """Compute the outputs [..., O] of a linear model from features [..., F]."""
    return (x_F.astype(np.float64) @ model[:, :-1].T.astype(np.float64) + model[:, -1]).astype(np.float32)


@torch.no_grad()
def copy_to(layer: nn.Linear, model: Array) -> None:
    """Copy a linear model of F features and O outputs into a torch layer."""
    layer.weight.copy_(torch.from_numpy(model[:, :-1]))
    layer.bias.copy_(torch.from_numpy(model[:, -1]))


def fit_numbers(x_NF: Floats, y_NT: Floats, light_F: Floats | None = None) -> Array:
    """Fit ridge regression for each target to the examples that have this target, and return one linear model.

    The penalty is chosen by leave-one-out error. If a target has only one distinct value, the model predicts this
    value.

    Args:
        x_NF: features.
        y_NT: targets; NaN for a missing target. The model predicts 0 for a target without values.
        light_F: a factor for each standardised feature. A factor k divides the penalty on the feature by k^2.
    """
    scaled_NF, fold = _standardise(x_NF, light_F)
    weight_TF, bias_T = np.zeros((y_NT.shape[1], x_NF.shape[1])), np.zeros(y_NT.shape[1])
    for t, y_N in enumerate(y_NT.T.astype(np.float64)):
        known_N = ~np.isnan(y_N)
        x_MF, y_M = scaled_NF[known_N], y_N[known_N]
        if len(np.unique(y_M)) < 2:
            bias_T[t] = y_M[0] if len(y_M) else 0
            continue
        sampled = np.linspace(0, len(x_MF) - 1, min(len(x_MF), RIDGE_ROWS)).astype(np.int64)
        alpha = RidgeCV(ALPHAS).fit(x_MF[sampled], y_M[sampled]).alpha_
        model = Ridge(alpha, solver="cholesky").fit(x_MF, y_M)
        weight_TF[t], bias_T[t] = model.coef_, model.intercept_
    return fold(weight_TF, bias_T)


def fit_classes(
    x_NF: Floats, y_N: npt.NDArray[np.integer], n_classes: int, weight_C: Floats | None = None, seed: int = 0
) -> Array:
    """Fit multinomial logistic regression. If only two classes have examples, the logit of the first one is 0.

    Args:
        x_NF: features.
        y_N: class of each example.
        n_classes: the number C of classes. A class without examples gets the logit ABSENT.
        weight_C: the weight of each class in the loss.
        seed: the random seed of the folds on which the penalty is chosen.
    """
    scaled_NF, fold = _standardise(x_NF)
    weight_CF, bias_C = np.zeros((n_classes, x_NF.shape[1])), np.full(n_classes, ABSENT)
    classes = np.unique(y_N)
    bias_C[classes] = 0
    if len(classes) > 1:
        weight_N = np.ones(len(y_N)) if weight_C is None else weight_C[y_N]
        model = _logistic(_choose(scaled_NF, y_N, seed), scaled_NF, y_N, weight_N)
        fitted = classes[1:] if len(classes) == 2 else classes
        weight_CF[fitted], bias_C[fitted] = model.coef_, model.intercept_
    return fold(weight_CF, bias_C)


def fit_labels(x_NF: Floats, y_NC: Floats, weight_C: Floats | None = None, seed: int = 0) -> Array:
    """Fit logistic regression for each of C labels, with one penalty, which is chosen on the most balanced label.

    Args:
        x_NF: features.
        y_NC: 1 if an example has the label, 0 if not. A label that all examples have, or that none has, gets a model
            with a constant output.
        weight_C: for each label, the loss weight of the examples that have the label.
        seed: the random seed of the folds on which the penalty is chosen.
    """
    scaled_NF, fold = _standardise(x_NF)
    share_C = (y_NC.sum(0, dtype=np.float64) + 0.5) / (len(y_NC) + 1)
    weight_CF, bias_C = np.zeros((y_NC.shape[1], x_NF.shape[1])), np.log(share_C / (1 - share_C))
    weight_NC = np.ones(y_NC.shape) if weight_C is None else np.where(y_NC > 0, weight_C, 1.0)
    varies = np.flatnonzero(y_NC.min(0) < y_NC.max(0))
    c = 0.0
    for label in sorted(varies, key=lambda label: abs(share_C[label] - 0.5)):
        y_N = y_NC[:, label].astype(np.int64)
        c = c or _choose(scaled_NF, y_N, seed)
        model = _logistic(c, scaled_NF, y_N, weight_NC[:, label])
        weight_CF[label], bias_C[label] = model.coef_[0], model.intercept_[0]
    return fold(weight_CF, bias_C)


def _standardise(x_NF: Floats, light_F: Floats | None = None) -> tuple[Array, Callable[..., Array]]:
    """Scale features to mean 0 and standard deviation 1, and multiply them by `light_F`. Also return a function that
    converts weights [O, F] and biases [O] for scaled features to a model of the original features.
    """
    scaler = StandardScaler().fit(x_NF.astype(np.float64))
    mean_F, scale_F = scaler.mean_, scaler.scale_ / (1 if light_F is None else light_F)

    def fold(weight_OF: npt.NDArray[np.float64], bias_O: npt.NDArray[np.float64]) -> Array:
        weight_OF = weight_OF / scale_F
        return np.column_stack([weight_OF, bias_O - weight_OF @ mean_F]).astype(np.float32)

    return ((x_NF - mean_F) / scale_F).astype(np.float32), fold


def _logistic(c: float, x_NF: Array, y_N: npt.NDArray[np.integer], weight_N: Floats) -> Any:
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # 300 iterations are close enough
        return LogisticRegression(C=c, max_iter=300).fit(x_NF, y_N, sample_weight=weight_N)


def _choose(x_NF: Array, y_N: npt.NDArray[np.integer], seed: int) -> float:
    """Return the inverse penalty in CS with the lowest cross-validated log loss. Classes with fewer than FOLDS examples
    are left out. If fewer than two classes remain, return the first value of CS.
    """
    sampled = np.random.default_rng(seed).permutation(len(y_N))[:LOGISTIC_ROWS]
    classes, counts = np.unique(y_N[sampled], return_counts=True)
    sampled = sampled[np.isin(y_N[sampled], classes[counts >= FOLDS])]
    if (counts >= FOLDS).sum() < 2:
        return CS[0]
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    search = GridSearchCV(LogisticRegression(max_iter=300), {"C": CS}, scoring="neg_log_loss", cv=folds, refit=False)
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        return float(search.fit(x_NF[sampled], y_N[sampled]).best_params_["C"])
