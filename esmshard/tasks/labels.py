"""The common parts of the tasks `sequence`, `pair` and `residue`: settings, heads, losses, baselines, calibration. A
label is a number, one of several classes, or any of several classes (kind `multilabel`).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field, ValidationInfo, field_validator
from scipy import special
from torch import nn

from esmshard.batch import Inputs
from esmshard.data.batching.loader import Example, Examples
from esmshard.errors import InputError
from esmshard.io.tables import first_three, shown
from esmshard.model.config import ModelConfig
from esmshard.model.finetuner import FineTuner, RecordDropout
from esmshard.recipe.sections import TaskSettings
from esmshard.tasks import metrics
from esmshard.tasks.base import LossSum, Outputs, Task, on_device_of, regression_loss, require_two_values
from esmshard.tasks.baselines import apply, copy_to, fit_classes, fit_labels, fit_numbers
from esmshard.tasks.metrics import LEAST, Row

OUTPUTS = 8  # the number of classes that memory estimates assume before labels are read
MOST_ROWS = 50_000
"""The maximum number of residues to which baselines and probes are fitted."""
TEMPERATURES = 2.0 ** (np.arange(-16, 41) / 8)  # the candidates, from 1/4 to 32 in steps of 9%
FROZEN = "frozen embedding"  # a linear model of the representations before training


class LabelSettings(TaskSettings):
    """The settings that the tasks `sequence`, `pair` and `residue` share."""

    kind: str
    """The kind of the labels, such as `number` or `class`. The allowed kinds depend on the task."""
    balance: float = Field(0.0, ge=0, le=1)
    """The exponent b of the loss weights: the weight of a class is frequency^-b. With 0 all labels have the same
    weight. With 1 all classes have the same total weight. For `multilabel`, proteins with a label have the weight
    odds^-b, where odds = share with the label / share without. For kind `number` only 0 is allowed."""
    hidden: int | None = Field(None, ge=0, le=8192)
    """The width of the head's hidden layer. 0 makes a linear head. The default is the width of the model."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """The share of the inputs of the head and of its hidden layer that dropout sets to 0 in training."""

    @property
    def head_options(self) -> dict[str, Any]:
        """Further keyword arguments of the head's class."""
        return {}

    @field_validator("balance")
    @classmethod
    def _of_classes(cls, balance: float, info: ValidationInfo) -> float:
        if balance and info.data.get("kind") == "number":
            raise ValueError("is for classes, and the recipe has kind number; remove it")
        return balance

    def no_probe(self) -> str | None:
        return None if self.hidden == 0 else "probe fits a linear head; set task.hidden: 0"


class LabelHead(nn.Module):
    """The base class of heads with a LayerNorm of width `dim` and one or two layers. The first layer has `inputs`
    inputs. With `hidden=0` the head is linear: it has no hidden layer.
    """

    def __init__(self, dim: int, inputs: int, hidden: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.dropout = RecordDropout(dropout)
        self.hidden_dropout = RecordDropout(dropout, layer=1)
        self.hidden = self.new_hidden(inputs, hidden) if hidden else None
        self.out = nn.Linear(hidden or inputs, outputs)
        nn.init.normal_(self.out.weight, std=0.02)  # nearly zero, so a new head predicts nearly its bias
        nn.init.zeros_(self.out.bias)

    def new_hidden(self, inputs: int, hidden: int) -> nn.Module:
        return nn.Linear(inputs, hidden)

    def combined(self, x_SD: torch.Tensor) -> torch.Tensor:
        """Convert the representations of S residues or sequences, [S, D], to inputs of the first layer."""
        normed_SD: torch.Tensor = self.norm(x_SD)
        return normed_SD


class LabelTask(Task):
    """The base class of tasks with labels. Outputs: T standardised numbers [T] or logits [C], per record or residue.

    Facts for kind `number`: `targets` (names), and `mean` and `std` of the training labels. Facts for classes:
    `classes` (names), `counts` (training labels of each class), `records` (the number of training records), and
    `temperature` (see `fit_temperature`).
    """

    settings: LabelSettings
    of_base: ClassVar[tuple[str, ...]] = (FROZEN,)
    fitted: ClassVar[tuple[str, ...]]
    """The names of the baselines that are linear models, fitted to the result of the method `features`."""
    head_class: ClassVar[type[LabelHead]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.facts.get("targets" if self.settings.kind == "number" else "classes", ()))

    @property
    def one_of_names(self) -> bool:
        return self.settings.kind == "class"

    def calibrate(self, rows: Sequence[Row]) -> dict[str, Any]:
        return fit_temperature(rows)

    def uncalibrated(self) -> Self:
        return type(self)(self.settings, {**self.facts, "temperature": None})

    def learn(self, train: Examples) -> Self:
        labels, unit = train.labels, "residue" if self.per_residue else "record"
        if not len(train):
            raise InputError(f"{train.path}: no training record has a label; give labels, or another file")
        names = self.names or tuple(labels.names)  # type: ignore[union-attr]
        if self.settings.kind == "number":
            targets = [train.get(n).labels["target"] for n in range(len(train))]
            values_MT = np.concatenate(targets).reshape(-1, len(names)).astype(np.float64)
            known = [y_M[~np.isnan(y_M)] for y_M in values_MT.T]
            for name, y_M in zip(names, known, strict=True):
                what = "the label" if self.per_residue else f"the target {shown(name)}"
                require_two_values(train.path, what, y_M)
            mean, std = [float(y_M.mean()) for y_M in known], [float(y_M.std()) for y_M in known]
            return type(self)(self.settings, {"targets": list(names), "mean": mean, "std": std})
        named = type(self)(self.settings, {"classes": list(names)})
        counts = np.zeros(len(names), dtype=np.int64)
        several = self.settings.kind == "multilabel"
        for n in range(len(train)):
            target = named.inputs(train.get(n)).target
            counts += target.astype(np.int64) if several else np.bincount(target[target >= 0], minlength=len(names))
        self._check_counts(train, names, counts, unit)
        return type(self)(self.settings, {"classes": list(names), "counts": counts.tolist(), "records": len(train)})

    def _check_counts(self, train: Examples, names: Sequence[str], counts: npt.NDArray[np.int64], unit: str) -> None:
        absent = [shown(name) for name, count in zip(names, counts, strict=True) if not count]
        several, problem = self.settings.kind == "multilabel", ""
        if not counts.any():
            problem = f"no training {unit} has a label; check labels and masks"
        elif several and (counts == len(train)).all():
            problem = "every training record has the same labels; give labels that differ"
        elif not several and len(absent) == len(names) - 1:
            name = shown(names[int(counts.argmax())])
            problem = f"every training {unit} has the class {name}; give labels of two classes or more"
        elif absent:
            problem = (
                f"no training {unit} has the {'label' if several else 'class'} {first_three(absent, str)}; "
                "split the records in another way, merge it into another class, or remove its records"
            )
        if problem:
            raise InputError(f"{train.path}: {problem}")

    def head(self, config: ModelConfig) -> nn.Module:
        """Return a new head of class `head_class`. At first it predicts the mean or class shares of training labels."""
        prior = self.prior()
        hidden = config.dim if self.settings.hidden is None else self.settings.hidden
        options = {"dropout": self.settings.dropout, **self.settings.head_options}
        head = self.head_class(config.dim, hidden=hidden, outputs=len(prior), **options)  # type: ignore[call-arg]
        with torch.no_grad():
            head.out.bias.copy_(torch.from_numpy(prior))
        return head

    def target(self, label: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Convert the label of a record to T numbers [..., T], classes [...], or zeros and ones for C classes [C]."""
        return label

    def inputs(self, example: Example) -> Inputs:
        """Return the model's input with the target. Numbers are standardised, NaN if missing, float32 [..., T]. A class
        is int64 [...], -1 if missing. `multilabel` targets are 0 or 1, float32 [C].
        """
        target = self.target(example.labels["target"])
        if self.settings.kind == "number":
            target = ((target - np.array(self.facts["mean"])) / np.array(self.facts["std"])).astype(np.float32)
        return Inputs(example.tokens, np.array(target), tracks=example.tracks)  # torch needs a writable copy

    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        """Compute the loss. All residues of a batch count equally, as in the metrics.

        - `number`: squared errors or Huber losses of standardised values, without missing values.
        - `class`: weighted cross-entropy, whose count is the sum of the weights.
        - `multilabel`: binary cross-entropy over all labels.
        """
        join = torch.cat if self.per_residue else torch.stack
        output = join(list(outputs))
        target = on_device_of(join(list(targets)), output)
        if self.settings.kind == "number":
            return regression_loss(output, target, getattr(self.settings, "loss", "mse"))
        weight_C = on_device_of(torch.from_numpy(self._weights()).float(), output)
        if self.settings.kind == "class":
            total = F.cross_entropy(output, target, weight_C, ignore_index=-1, reduction="sum")
            return LossSum(total, (weight_C[target.clamp(min=0)] * (target >= 0)).sum())
        total = F.binary_cross_entropy_with_logits(output, target, pos_weight=weight_C, reduction="sum")
        return LossSum(total, torch.full((), float(target.numel()), device=output.device))

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return numbers in the unit of the labels, [T] or for residues [L], or calibrated probabilities [..., C]."""
        if self.settings.kind == "number":
            values = output.astype(np.float64) * np.array(self.facts["std"]) + np.array(self.facts["mean"])
            return np.asarray(values[:, 0] if self.per_residue else values, dtype=np.float32)
        return self.probabilities(output / temperature_of(self.facts))

    def probabilities(self, logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Convert logits to class probabilities. Classes are along the last dimension."""
        logits = logits.astype(np.float64)
        is_class = self.settings.kind == "class"
        return np.asarray(special.softmax(logits, axis=-1) if is_class else special.expit(logits), dtype=np.float32)

    def prior(self) -> npt.NDArray[np.float32]:
        """Return the head's output [O] that predicts the labels' mean or class frequencies; zeros without facts."""
        if self.settings.kind == "number":
            return np.zeros(len(self.names) or 1, dtype=np.float32)
        if not self.facts:
            return np.zeros(len(self.names) or OUTPUTS, dtype=np.float32)
        shares_C = self._shares()
        odds = shares_C / (1 - shares_C) if self.settings.kind == "multilabel" else shares_C
        return np.asarray(np.log(odds), dtype=np.float32)

    def _shares(self) -> npt.NDArray[np.float64]:
        """Return the share of each class in the training labels, [C]. For `multilabel` it is a share of the records."""
        counts = np.array(self.facts["counts"])
        several = self.settings.kind == "multilabel"
        return np.asarray((counts + 0.5) / (self.facts["records"] + 1) if several else counts / counts.sum())

    def _weights(self) -> npt.NDArray[np.float64]:
        """Return the loss weight of each class, [C], whose mean over the training labels is 1. For `multilabel`, return
        for each label the loss weight of the proteins with this label.
        """
        shares_C = self._shares()
        if self.settings.kind == "multilabel":
            return np.asarray(((1 - shares_C) / shares_C) ** self.settings.balance)
        weight_C = shares_C**-self.settings.balance
        return np.asarray(weight_C / (shares_C * weight_C).sum())

    # Baselines and the probe

    @abstractmethod
    def features(self, name: str, example: Example, base: FineTuner | None) -> npt.NDArray[np.floating]:
        """Return the F features of the baseline `name` for each residue [L, F], or for a record [1, F]."""

    @abstractmethod
    def represented(self, example: Example, base: FineTuner) -> npt.NDArray[np.floating]:
        """Return the representation of each residue by the model `base` [L, D], or the mean of each sequence [S, D]."""

    def _chosen(self, train: Sequence[Example]) -> tuple[list[npt.NDArray[np.intp]], npt.NDArray[Any]]:
        """Choose at most MOST_ROWS labelled residues, evenly spread, or all records if records have labels. Return the
        chosen indices in each example, and the targets at all these indices, [M] or [M, O].
        """
        targets = [self.inputs(example).target for example in train]
        targets = targets if self.per_residue else [target[None] for target in targets]
        known = [t >= 0 if t.dtype.kind == "i" else ~np.isnan(t).all(-1) for t in targets]
        step = max(1, -(-sum(int(k.sum()) for k in known) // MOST_ROWS)) if self.per_residue else 1
        taken, passed = list[npt.NDArray[np.intp]](), 0
        for known_L in known:
            places = np.flatnonzero(known_L)
            taken.append(places[-passed % step :: step])
            passed += len(places)
        return taken, np.concatenate([target[places] for target, places in zip(targets, taken, strict=True)])

    def _fit(self, x_MF: npt.NDArray[np.floating], target_M: npt.NDArray[Any], seed: int) -> npt.NDArray[np.float32]:
        if self.settings.kind == "number":
            return fit_numbers(x_MF, target_M)
        if self.settings.kind == "class":
            return fit_classes(x_MF, target_M, len(self.names), self._weights(), seed)
        return fit_labels(x_MF, target_M, self._weights(), seed)

    def look_ahead(self, train: Sequence[Example], mine: Sequence[int], base: FineTuner) -> None:
        taken, _ = self._chosen(train)
        for n in mine:
            if len(taken[n]):
                base.remembered[FROZEN][n] = self.features(FROZEN, train[n], base)[taken[n]]

    def baselines(self, train: Sequence[Example], base: FineTuner) -> dict[str, npt.NDArray[Any]]:
        (taken, target_M), models = self._chosen(train), dict[str, npt.NDArray[Any]]()
        for name in self.fitted if len(target_M) else ():
            kept = base.remembered[FROZEN] if name == FROZEN else {}
            pairs = [(n, places) for n, places in enumerate(taken) if len(places)]
            x = [kept[n] if n in kept else self.features(name, train[n], base)[places] for n, places in pairs]
            models[name] = self._fit(np.concatenate(x), target_M, 0)
        return models

    def baseline_outputs(
        self, examples: Sequence[Example], known: Mapping[str, npt.NDArray[Any]], base: FineTuner | None
    ) -> Outputs:
        """Return the outputs of the constant baseline `mean` or `majority`, and of the linear baselines in `fitted`."""
        prior = self.prior()
        outputs: Outputs = {
            "majority" if self.settings.kind == "class" else "mean": [
                np.tile(prior, (len(example.tokens) - 2, 1)) if self.per_residue else prior for example in examples
            ]
        }
        for name in self.fitted:
            if name in known and (base is not None or name not in self.of_base):
                predicted = [apply(known[name], self.features(name, example, base)) for example in examples]
                outputs[name] = predicted if self.per_residue else [output_1O[0] for output_1O in predicted]
        return outputs

    @torch.no_grad()
    def probe(self, head: nn.Module, train: Sequence[Example], base: FineTuner, seed: int) -> None:
        """Fit the last layer of the head to the frozen model's representations, by ridge or logistic regression."""
        assert isinstance(head, LabelHead)
        taken, target_M = self._chosen(train)
        x = []
        for example, places in zip(train, taken, strict=True):
            if len(places):
                x_SD = torch.from_numpy(self.represented(example, base)).to(head.norm.weight)
                x.append(head.combined(x_SD).cpu().numpy()[places])
        copy_to(head.out, self._fit(np.concatenate(x), target_M, seed))


# Probabilities


def temperature_of(facts: Mapping[str, Any]) -> float:
    """Return the number by which logits are divided before the softmax: 1 if no temperature was fitted."""
    return float(facts.get("temperature") or 1.0)


def probability_row(
    logits_MC: npt.NDArray[np.float32], truth: npt.NDArray[np.integer | np.bool_], facts: Mapping[str, Any]
) -> dict[str, float | npt.NDArray[Any]]:
    """Return the values of a record's row from which ECE, log loss and the temperature are computed.

    Args:
        logits_MC: the logits of C classes, or of C labels, for M predictions.
        truth: the true class of each prediction, integers [M]; or whether each label is true, bool [M, C].
        facts: `Task.facts`. If they have a temperature, the row also has the values without this temperature.
    """
    several = truth.dtype == np.bool_

    def bins(temperature: float) -> npt.NDArray[np.float64]:
        z_MC = (logits_MC / temperature).astype(np.float64)
        if several:
            return metrics.calibration(special.expit(z_MC).astype(np.float32).ravel(), truth.ravel().astype(np.bool_))
        confidence_M = special.softmax(z_MC, axis=1).astype(np.float32).max(1, initial=0)
        return metrics.calibration(confidence_M, logits_MC.argmax(1) == truth)

    def log_losses(temperature_K: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        z_KMC = logits_MC.astype(np.float64) / np.asarray(temperature_K)[:, None, None]
        with np.errstate(invalid="ignore"):  # the logits of a diverged model are NaN
            if several:
                return np.asarray((np.logaddexp(0, z_KMC) - z_KMC * truth).sum((1, 2)))
            right_KM = z_KMC[:, np.arange(len(truth)), truth.astype(np.int64)]
            return np.asarray((np.logaddexp.reduce(z_KMC, axis=2) - right_KM).sum(1))

    temperature = temperature_of(facts)
    row: dict[str, float | npt.NDArray[Any]] = {
        "log loss": float(log_losses([temperature])[0]) / truth.size if truth.size else np.nan,
        "calibration": bins(temperature),
    }
    if facts.get("temperature") is not None:
        return row | {"before scaling": np.concatenate([bins(1).ravel(), log_losses([1]), [truth.size]])}
    return row | {"log losses": log_losses(TEMPERATURES)}


def of_probabilities(rows: Sequence[Row], predictions: npt.NDArray[np.float64] | None = None) -> dict[str, float]:
    """Compute ECE and log loss over all predictions; with a fitted temperature, also both metrics without it.

    Args:
        rows: results of `probability_row`.
        predictions: the number of predictions in each row; by default all rows have equally many predictions.
    """
    loss_N = np.array([row["log loss"] for row in rows], dtype=np.float64)
    weight_N = np.ones(len(rows)) if predictions is None else predictions
    count = weight_N.sum()
    values = {
        "ECE": metrics.calibration_error(metrics.total(rows, "calibration")),
        "log loss": float(loss_N[weight_N > 0] @ weight_N[weight_N > 0] / count) if count else np.nan,
    }
    if "before scaling" in rows[0]:
        *bins, loss, count = metrics.total(rows, "before scaling")
        values["ECE before scaling"] = metrics.calibration_error(np.reshape(bins, (3, -1)))
        values["log loss before scaling"] = float(loss / count) if count else np.nan
    return values


def fit_temperature(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the facts `temperature` and `validation_records`. If the rows have no `log losses`, return no facts.

    The temperature is the value in TEMPERATURES with the lowest log loss (Guo et al. 2017, arXiv:1706.04599). If fewer
    than LEAST records are labelled, or if a log loss is not finite, the temperature is None. Pass rows of
    validation records, from a task without a temperature.
    """
    if "log losses" not in rows[0]:
        return {}
    labelled = [row for row in rows if not np.isnan(row["log loss"]).all()]
    facts: dict[str, Any] = {"temperature": None, "validation_records": len(labelled)}
    if len(labelled) >= LEAST and np.isfinite(loss_T := metrics.total(labelled, "log losses")).all():
        facts["temperature"] = float(TEMPERATURES[loss_T.argmin()])
    return facts
