"""Linear models on fixed features, fitted by scikit-learn: for baselines and probes.

Features are standardised, and the fitted model is folded back, so that it takes them as they are. The penalty is
chosen on a part of the examples and holds for all: as the strength of a prior, it does not grow with their number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

RIDGE_ROWS, LOGISTIC_ROWS = 1000, 3000
"""Examples on which a penalty is chosen: more make it hardly better, and slow. With 1,280 features, so many examples
take a second, and leave-one-out of twice as many takes ten."""
ALPHAS = np.logspace(-1, 5, 13)
"""Penalties of ridge regression."""
CS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Inverse penalties of logistic regression."""
FOLDS = 3
ABSENT = -30.0
"""Logit of a class without an example, which cannot be fitted."""

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Linear:
    """A linear model with O outputs of F features."""

    weight_OF: Array
    bias_O: Array

    def __call__(self, x_F: npt.NDArray[np.floating]) -> Array:
        """Convert [..., F] to [..., O]."""
        return (x_F.astype(np.float64) @ self.weight_OF.T.astype(np.float64) + self.bias_O).astype(np.float32)

    @torch.no_grad()
    def copy_to(self, layer: nn.Linear) -> None:
        """Make a layer of F inputs and O outputs compute the same."""
        layer.weight.copy_(torch.from_numpy(self.weight_OF))
        layer.bias.copy_(torch.from_numpy(self.bias_O))

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that are kept with a model, for `kept`."""
        return {f"{name}.weight": self.weight_OF, f"{name}.bias": self.bias_O}


def kept(known: dict[str, npt.NDArray[Any]] | Any, name: str) -> Linear | None:
    """Return the model of this name among kept arrays, or None."""
    return Linear(known[f"{name}.weight"], known[f"{name}.bias"]) if f"{name}.weight" in known else None


def fit_numbers(
    x_NF: npt.NDArray[np.floating], y_NT: npt.NDArray[np.floating], light_F: npt.NDArray[np.floating] | None = None
) -> Linear:
    """Fit ridge regression for each target to the examples that have it. The penalty is chosen by leave-one-out error.

    A target with fewer than two different values is predicted by its mean; without any value, by 0.

    Args:
        x_NF: features.
        y_NT: targets, NaN where there is none.
        light_F: what each standardised feature is multiplied by: the penalty on it falls with the square.
    """
    from sklearn.linear_model import Ridge, RidgeCV

    scaled_NF, fold = _standardise(x_NF, light_F)
    weight_TF, bias_T = np.zeros((y_NT.shape[1], x_NF.shape[1])), np.zeros(y_NT.shape[1])
    known_NT = ~np.isnan(y_NT)
    # Targets that the same examples have are fitted at once: the costly part is that of the features.
    patterns, of_T = np.unique(known_NT.T, axis=0, return_inverse=True)
    for number, known_N in enumerate(patterns):
        targets = np.flatnonzero(of_T.ravel() == number)
        y_MT = y_NT[np.ix_(known_N, targets)].astype(np.float64)
        if not len(y_MT):
            continue
        bias_T[targets] = y_MT.mean(0)
        varies = y_MT.min(0) < y_MT.max(0)
        if not varies.any():
            continue
        targets, y_MT = targets[varies], y_MT[:, varies]
        x_MF = scaled_NF[known_N]
        some = np.linspace(0, len(x_MF) - 1, min(len(x_MF), RIDGE_ROWS)).astype(np.int64)
        model: Any = RidgeCV(ALPHAS, alpha_per_target=True).fit(x_MF[some], y_MT[some])
        if len(some) < len(x_MF):
            model = Ridge(np.atleast_1d(model.alpha_), solver="cholesky").fit(x_MF, y_MT)
        weight_TF[targets] = np.reshape(model.coef_, (len(targets), -1))
        bias_T[targets] = model.intercept_
    return fold(weight_TF, bias_T)


def fit_classes(
    x_NF: npt.NDArray[np.floating],
    y_N: npt.NDArray[np.integer],
    n_classes: int,
    weight_C: npt.NDArray[np.floating] | None = None,
    seed: int = 0,
) -> Linear:
    """Fit multinomial logistic regression. For two classes, the first has the logit 0.

    Args:
        x_NF: features.
        y_N: class of each example.
        n_classes: C; a class without an example gets the logit ABSENT.
        weight_C: of each class in the loss.
        seed: of the folds on which the penalty is chosen.
    """
    scaled_NF, fold = _standardise(x_NF)
    weight_CF, bias_C = np.zeros((n_classes, x_NF.shape[1])), np.full(n_classes, ABSENT)
    classes = np.unique(y_N)
    if len(classes) < 2:
        bias_C[classes] = 0
        return fold(weight_CF, bias_C)
    weight_N = np.ones(len(y_N)) if weight_C is None else weight_C[y_N]
    model = _logistic(scaled_NF, y_N, weight_N, _choose(scaled_NF, y_N, weight_N, seed))
    if len(classes) == 2:
        weight_CF[classes[1]], bias_C[classes] = model.coef_[0], (0, model.intercept_[0])
    else:
        weight_CF[classes], bias_C[classes] = model.coef_, model.intercept_
    return fold(weight_CF, bias_C)


def fit_labels(
    x_NF: npt.NDArray[np.floating],
    y_NC: npt.NDArray[np.floating],
    weight_C: npt.NDArray[np.floating] | None = None,
    seed: int = 0,
) -> Linear:
    """Fit logistic regression for each of C labels. All labels have the penalty that is best for the label nearest to
    one half.

    Args:
        x_NF: features.
        y_NC: 0 and 1. A label that all examples have, or none, is predicted by its smoothed share.
        weight_C: of the examples that have a label, in the loss.
        seed: of the folds on which the penalty is chosen.
    """
    scaled_NF, fold = _standardise(x_NF)
    share_C = (y_NC.sum(0, dtype=np.float64) + 0.5) / (len(y_NC) + 1)
    weight_CF, bias_C = np.zeros((y_NC.shape[1], x_NF.shape[1])), np.log(share_C / (1 - share_C))
    varies = np.flatnonzero(y_NC.min(0) < y_NC.max(0))
    weight_NC = np.ones(y_NC.shape) if weight_C is None else np.where(y_NC > 0, weight_C, 1.0)
    if len(varies):
        even = varies[np.argmin(np.abs(share_C[varies] - 0.5))]
        c = _choose(scaled_NF, y_NC[:, even].astype(np.int64), weight_NC[:, even], seed)
        for label in varies:
            model = _logistic(scaled_NF, y_NC[:, label].astype(np.int64), weight_NC[:, label], c)
            weight_CF[label], bias_C[label] = model.coef_[0], model.intercept_[0]
    return fold(weight_CF, bias_C)


def _standardise(
    x_NF: npt.NDArray[np.floating], light_F: npt.NDArray[np.floating] | None = None
) -> tuple[Array, Callable[..., Linear]]:
    """Scale features to mean 0 and deviation 1 (times `light_F`). Also return a function that converts a model of them
    to one of the features themselves.
    """
    mean_F, scale_F = x_NF.mean(0, dtype=np.float64), x_NF.std(0, dtype=np.float64)
    scale_F[scale_F <= 1e-6 * np.abs(mean_F) + 1e-12] = np.inf  # a constant feature has no information
    if light_F is not None:
        scale_F = scale_F / light_F

    def fold(weight_OF: npt.NDArray[np.float64], bias_O: npt.NDArray[np.float64]) -> Linear:
        weight_OF = weight_OF / scale_F
        return Linear(weight_OF.astype(np.float32), (bias_O - weight_OF @ mean_F).astype(np.float32))

    return ((x_NF - mean_F) / scale_F).astype(np.float32), fold


def _logistic(x_NF: Array, y_N: npt.NDArray[np.integer], weight_N: npt.NDArray[np.floating], c: float) -> Any:
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # nearly there is good enough for a baseline
        return LogisticRegression(C=c, max_iter=300).fit(x_NF, y_N, sample_weight=weight_N)


def _choose(x_NF: Array, y_N: npt.NDArray[np.integer], weight_N: npt.NDArray[np.floating], seed: int) -> float:
    """Return the C of the lowest log loss under cross-validation, in folds that have the classes in equal shares.

    The first example of each class is never held out, so that every fold knows every class.
    """
    order = np.random.default_rng(seed).permutation(len(y_N))[:LOGISTIC_ROWS]
    classes = np.unique(y_N)
    order = np.union1d(order, [np.argmax(y_N == k) for k in classes])
    x_NF, y_N, weight_N = x_NF[order], y_N[order], weight_N[order]
    nth_N = np.zeros(len(y_N), dtype=np.int64)  # within its class
    for k in classes:
        nth_N[y_N == k] = np.arange((y_N == k).sum())
    losses = np.zeros(len(CS))
    for held in range(FOLDS):
        out_N = (nth_N % FOLDS == held) & (nth_N > 0)
        if not out_N.any():
            continue
        place = np.searchsorted(classes, y_N[out_N])
        for n, c in enumerate(CS):
            share_OC = _logistic(x_NF[~out_N], y_N[~out_N], weight_N[~out_N], c).predict_proba(x_NF[out_N])
            losses[n] -= (weight_N[out_N] * np.log(share_OC[np.arange(len(place)), place] + 1e-12)).sum()
    return CS[int(np.argmin(losses))]
