"""What tasks of labels share: counts, weights and priors of the training labels, and calibrated probabilities."""

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, ValidationInfo, field_validator
from scipy import sparse, special
from torch import nn

from esmshard.data.batching.loader import Example
from esmshard.data.labels.protein_labels import ProteinLabels
from esmshard.errors import InputError
from esmshard.io.store import TokenStore
from esmshard.io.tables import shown
from esmshard.model.config import ModelConfig
from esmshard.model.finetuner import FineTuner
from esmshard.recipe.task_section import TaskSettings
from esmshard.tasks import metrics
from esmshard.tasks.base import Facts, Task
from esmshard.tasks.baselines import kept
from esmshard.tasks.metrics import LEAST, Row

OUTPUTS = 8
"""The number of classes that a plan assumes before labels are read."""
TEMPERATURES = 2.0 ** (np.arange(-16, 41) / 8)
"""The temperatures that are tried, from 1/4 to 32; each is 9% higher than the one before."""


class LabelSettings(TaskSettings):
    """The settings that tasks of labels share."""

    kind: str
    """Overridden by each task with the kinds of labels that it has."""
    balance: float = Field(0.0, ge=0, le=1)
    """The weight of a class in the loss is its frequency to the power of minus this number. With 0 all labels count the
    same, with 1 all classes. For `multilabel`, the weight of the proteins with a label is the odds of this label to the
    power of minus this number. Not for numbers."""
    hidden: int | None = Field(None, ge=0, le=8192)
    """The width of the head's hidden layer; 0 for a linear head. The default is the width of the model."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """The share of the inputs of the head and of its hidden layer that dropout sets to 0 in training."""

    @field_validator("balance")
    @classmethod
    def _of_classes(cls, balance: float, info: ValidationInfo) -> float:
        if balance and info.data.get("kind") == "number":
            raise ValueError("weighs classes, and the recipe has kind number; remove it")
        return balance

    def no_probe(self) -> str | None:
        """A probe can fit a linear head only."""
        return None if self.hidden == 0 else "probe fits a linear head; set task.hidden: 0"


class LabelTask(Task):
    """What tasks of labels share: a head that starts at the prior, baselines that are linear models, and calibration.

    Their heads have a last layer `out`.
    """

    settings: LabelSettings
    of_base: ClassVar[tuple[str, ...]] = ("frozen embedding",)
    fitted: ClassVar[tuple[str, ...]]
    """The baselines that are linear in `features`."""

    @property
    def one_of_names(self) -> bool:
        """Whether the numbers are probabilities of classes of which one is right."""
        return self.settings.kind == "class"

    def head(self, config: ModelConfig) -> nn.Module:
        """Make the head of `new_head`. It starts at the mean, or the shares, of the training labels."""
        prior = self.prior()
        head = self.new_head(config.dim, len(prior))
        with torch.no_grad():
            head.get_parameter("out.bias").copy_(torch.from_numpy(prior))
        return head

    @abstractmethod
    def new_head(self, dim: int, outputs: int) -> nn.Module:
        """Make a head with random weights."""

    @abstractmethod
    def prior(self) -> npt.NDArray[np.float32]:
        """Return the output that predicts the mean, or the frequencies, of the training labels, [O]. Without facts, it
        has OUTPUTS zeros for classes that no setting names.
        """

    @abstractmethod
    def features(self, name: str, example: Example, base: FineTuner | None) -> npt.NDArray[np.floating]:
        """Return what a baseline of `fitted` sees of a record, [F], or of each residue, [L, F]."""

    def learn_from_validation(self, rows: Sequence[Row]) -> Facts:
        """Return the temperature of the probabilities; nothing for numbers."""
        return {} if self.settings.kind == "number" else fit_temperature(rows)

    def baseline_outputs(
        self, example: Example, known: Mapping[str, npt.NDArray[Any]], base: FineTuner | None
    ) -> Mapping[str, npt.NDArray[np.float32] | Row]:
        """`mean` or `majority`: what the training labels say of everything. Of `fitted`: linear models."""
        prior = self.prior()
        if self.per_residue:
            prior = np.tile(prior, (len(example.tokens) - 2, 1))
        outputs: dict[str, npt.NDArray[np.float32] | Row] = {
            "majority" if self.settings.kind == "class" else "mean": prior
        }
        for name in self.fitted:
            model = kept(known, name)
            if model is not None and (base is not None or name not in self.of_base):
                outputs[name] = model(self.features(name, example, base))
        return outputs


def known_classes(labels: ProteinLabels, known: Sequence[str], store: TokenStore, fasta: Path) -> ProteinLabels:
    """Return the same labels with the classes of the training split. For the training split itself, these are the
    classes of its records.

    A table may hold other proteins, whose classes do not matter.

    Raises:
        InputError: naming a record with another class.
    """
    labelled = np.flatnonzero(labels.labelled_N)
    if labels.kind == "multilabel":
        places, codes = labels.values[labelled].nonzero()
    else:
        places, codes = np.arange(len(labelled)), labels.values[labelled]
    used = np.unique(codes)
    names = tuple(known) or tuple(labels.names[k] for k in used)
    for k in used:
        if labels.names[k] not in names:
            first = int(labelled[places[codes == k].min()])
            raise InputError(
                f"{fasta}: record {shown(store.id(first))} has the class {shown(labels.names[k])}, which no training "
                "record has; fix the label, or leave the record out"
            )
    place = {name: number for number, name in enumerate(names)}
    number_of = np.array([place.get(name, -1) for name in labels.names])  # -1 for classes of other proteins alone
    if labels.kind == "multilabel":
        ones = labels.values.tocoo()
        known_E = number_of[ones.col] >= 0
        at = ones.row[known_E], number_of[ones.col[known_E]]
        values = sparse.csr_array((ones.data[known_E], at), shape=(len(labels.labelled_N), len(names)))
        return dataclasses.replace(labels, names=names, values=values)
    values = np.where(labels.labelled_N, number_of[labels.values], -1)
    return dataclasses.replace(labels, names=names, values=values)


def check_counts(path: Path, names: Sequence[str], counts: npt.NDArray[np.int64], what: str) -> None:
    """Refuse training labels that nothing can be learned from.

    Args:
        path: of the training records.
        names: of the C classes.
        counts: how many training labels there are of each.
        what: has a class: `record` or `residue`.

    Raises:
        InputError: there are no labels, those of one class only, or none of a class that was named or that the other
            records of the file have.
    """
    found = np.flatnonzero(counts)
    if not len(found):
        raise InputError(f"{path}: no training {what} has a label; look at labels and masks")
    if len(found) == 1:
        raise InputError(
            f"{path}: every training {what} has the class {shown(names[found[0]])}; give labels of two classes or more"
        )
    without = [shown(name) for name, count in zip(names, counts, strict=True) if not count]
    if without:
        more = ", ..." if len(without) > 3 else ""
        raise InputError(
            f"{path}: no training {what} has the class {', '.join(without[:3])}{more}, so that it cannot be learned; "
            "divide the records in another way, join it with another class, or leave it out"
        )


def class_weights(counts: npt.NDArray[np.integer], balance: float) -> npt.NDArray[np.float64]:
    """Return the weight of each class, [C]: frequency to the power of -balance, of mean 1 over the training labels."""
    share_C = counts / counts.sum()
    weight_C = share_C**-balance
    return np.asarray(weight_C / (share_C * weight_C).sum())


def logits_of_shares(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """Return the logits whose probabilities are the frequencies of the classes, [C]."""
    return np.asarray(np.log(counts / counts.sum()), dtype=np.float32)


def softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the probabilities of the classes, along the last dimension."""
    return np.asarray(special.softmax(logits.astype(np.float64), axis=-1), dtype=np.float32)


def sigmoid(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the probability of each label."""
    return np.asarray(special.expit(logits.astype(np.float64)), dtype=np.float32)


def temperature_of(facts: Mapping[str, Any]) -> float:
    """Return the number that logits are divided by before they become probabilities; 1 if none was fitted."""
    return float(facts.get("temperature") or 1.0)


def probability_row(
    logits_MC: npt.NDArray[np.float32], truth: npt.NDArray[np.integer | np.bool_], facts: Mapping[str, Any]
) -> dict[str, float | npt.NDArray[Any]]:
    """Return what M predictions of a record add to ECE, log loss and the fit of the temperature.

    Args:
        logits_MC: the logits of C classes, or of C labels.
        truth: the right class of each prediction, integers [M]; or whether each label is right, bool [M, C].
        facts: of the task. With a fitted temperature the row holds ECE and log loss before the scaling, too.
    """

    def bins(temperature: float) -> npt.NDArray[np.float64]:
        if truth.dtype == np.bool_:
            return metrics.calibration(sigmoid(logits_MC / temperature).ravel(), truth.ravel().astype(np.bool_))
        probability_MC = softmax(logits_MC / temperature)
        return metrics.calibration(probability_MC.max(1, initial=0), logits_MC.argmax(1) == truth)

    def log_loss(temperature: float) -> float:
        z_MC = logits_MC.astype(np.float64) / temperature
        with np.errstate(invalid="ignore"):  # of a model whose weights are lost
            if truth.dtype == np.bool_:
                return float((np.logaddexp(0, z_MC) - z_MC * truth).sum())
            right_M = z_MC[np.arange(len(z_MC)), truth.astype(np.int64)]
            return float((np.logaddexp.reduce(z_MC, axis=1) - right_M).sum())

    temperature = temperature_of(facts)
    row: dict[str, float | npt.NDArray[Any]] = {
        "log loss": log_loss(temperature) / truth.size if truth.size else np.nan,
        "calibration": bins(temperature),
    }
    if facts.get("temperature") is not None:
        return row | {"before scaling": np.append(bins(1), [log_loss(1), truth.size])}
    return row | {"log losses": np.array([log_loss(t) for t in TEMPERATURES])}


def of_probabilities(rows: Sequence[Row], predictions: npt.NDArray[np.float64] | None = None) -> dict[str, float]:
    """Compute ECE and log loss of all predictions, and both before temperature scaling if there was one.

    Args:
        rows: of `probability_row`.
        predictions: the number of predictions of each row; by default all rows have the same.
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
    """Return the facts `temperature` and `validation_records`.

    The temperature is the one of TEMPERATURES whose probabilities have the highest likelihood (Guo et al. 2017,
    arXiv:1706.04599); None for fewer than LEAST records, and for outputs that are not finite.

    Args:
        rows: of the validation split, by a task that has no temperature yet.
    """
    labelled = [row for row in rows if not np.isnan(row["log loss"]).all()]
    facts: dict[str, Any] = {"temperature": None, "validation_records": len(labelled)}
    if len(labelled) >= LEAST and np.isfinite(loss_T := metrics.total(labelled, "log losses")).all():
        facts["temperature"] = float(TEMPERATURES[loss_T.argmin()])
    return facts
