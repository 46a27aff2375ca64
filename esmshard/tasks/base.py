"""Defines the base class of every task, and functions that several tasks share."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import Inputs, TokenBatch, batch_of
from esmshard.data.batching.loader import FIXED, Example, Examples, Labels
from esmshard.errors import InputError, UsageError
from esmshard.io.store import TokenStore
from esmshard.model.config import ModelConfig
from esmshard.model.finetuner import FineTuner
from esmshard.recipe.sections import DataSettings, TaskSettings
from esmshard.tasks.metrics import Row, means
from esmshard.vocab import is_residue

MAIN = "fine-tuned"  # how an evaluation names the fine-tuned model
BEFORE = "before fine-tuning"
"""The name of a baseline: the model before training, with a new head or with the model's LM head."""

Facts = Mapping[str, Any]
"""Values that a task computes from training labels, such as class names. They are saved as JSON with the model."""
Outputs = dict[str, Sequence[npt.NDArray[np.float32] | Row]]
"""Maps a baseline's name to a list with one item per record: an array like the head's output, or a `Row`."""


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum and a count. A step adds up both over all ranks and micro-batches, and divides sum by count."""

    sum: torch.Tensor  # the sum of the loss terms, a scalar with a gradient
    count: torch.Tensor  # the number of terms, or their total weight, a scalar; may be 0


class Task(ABC):
    """Defines one kind of fine-tuning: its head, loss, metrics and baselines.

    A subclass must define the class `Settings`, the property `columns`, and the methods `head`, `inputs`, `loss` and
    `score`. The other methods have defaults. They suit a task without labels that predicts one number per protein.

    Args:
        settings: the task section of a recipe.
        facts: the result of the method `learn`; empty before that.
    """

    Settings: ClassVar[type[TaskSettings]]
    """The settings class of the task. Recipes name the task by the field `name` of this class."""
    lower_is_better: ClassVar[bool] = False
    """Whether a lower value of the headline metric is better, as for errors and perplexities."""
    per_residue: ClassVar[bool] = False
    """Whether the method `predict` returns one row for each residue."""
    baseline_records: ClassVar[int] = 2000
    """The maximum number of records to which baselines are fitted. They are spread evenly over the training split."""
    of_base: ClassVar[tuple[str, ...]] = ()
    """The names of the baselines that compute with the model before training."""

    def __init__(self, settings: Any, facts: Facts) -> None:
        self.settings = settings
        self.facts = facts

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The names of the metrics in the final table. The first is the headline metric."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the predicted numbers: targets, classes or amino acids. Empty for maps of residue pairs."""
        return ("value",)

    @property
    def averages_units(self) -> bool:
        """Whether each metric is the mean over the units of the method `units`, each of which is scored alone."""
        return False

    @property
    def one_of_names(self) -> bool:
        """Whether the predicted numbers are class probabilities, and exactly one class is true."""
        return False

    def labels(self, fasta: Path, store: TokenStore, data: DataSettings) -> Labels | None:
        """Open the labels of the records in a FASTA file. A task without labels returns None."""
        return None

    def learn(self, train: Examples) -> Self:
        """Return a copy of this task with facts about the training labels. Raises `InputError` for unusable labels."""
        return self

    @abstractmethod
    def head(self, config: ModelConfig) -> nn.Module:
        """Make a new head. `head(x_TD, batch)` returns a list of N tensors, one for each record.

        A head may have three optional members:
        - `attention(batch)` returns an object, which becomes the head's third argument. Each layer calls the object's
          method `add(layer, sequence, q_THK, k_THK)` (see `esmshard.model.attention`).
        - `reads_logits = True`: the third argument is the logits at `TokenBatch.logits_at_P`, float [P, V].
        - `start(weights)` copies weights of the language model to a new head. It returns a sentence about them or None.
        """

    @abstractmethod
    def inputs(self, example: Example) -> Inputs:
        """Return the model's input and the target for an example. Use `example.draw` as the random seed."""

    def question(self, example: Example) -> Inputs:
        """Return the model's input for a record without labels: its tokens and tracks."""
        return Inputs(example.tokens, tracks=example.tracks)

    @abstractmethod
    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        """Return the sum of the losses in a batch, and the number of terms in this sum."""

    @abstractmethod
    def score(self, output: npt.NDArray[np.float32], target: npt.NDArray[Any]) -> Row:
        """Return a record's row: the values from which metrics are computed. A row must not depend on other records.

        Some keys of a row have a special meaning. The report plots `profile`, the observed and the predicted values
        along the sequence, [2, L]. For keys that begin with `ranked `, see `metrics.ranked`.
        """

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """Compute the metrics in `columns` from the rows. By default each metric is the mean over the rows."""
        return means(rows, self.columns)

    def calibrate(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return further facts, which `predict` needs, from the rows of all validation records. A task without these
        facts has computed the rows.
        """
        return {}

    def uncalibrated(self) -> Self:
        """Return the task for the outputs of baselines, without the facts that `calibrate` fitted to the model."""
        return self

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Convert the head's output for a record to probabilities, or to values in the labels' unit."""
        return output

    def residue_weights(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
        """Return the part of a head's output that has the weights of the L residues in the prediction, [L] without
        linkers, whose sum over each separately read chain is 1. None if the head has no weights.
        """
        return None

    def units(self, data: Examples) -> tuple[npt.NDArray[np.int64] | None, str]:
        """Return the units that the bootstrap resamples: the index of each record's unit, int64 [N], or None if each
        record is a unit. Also return a noun for a unit, such as `record`.
        """
        return data.blocks(), "record"

    def groups(self, data: Examples, known: Mapping[str, npt.NDArray[Any]]) -> list[str]:
        """Return the name of each record's group ('' for no group), or [] if there are no groups. `known` is as in
        `baseline_outputs`. An evaluation also computes the metrics of each group.
        """
        return []

    def look_ahead(self, train: Sequence[Example], mine: Sequence[int], base: FineTuner) -> None:
        """Compute the outputs of `base`, the model before training, that the method `baselines` needs. Store them in
        `base.remembered`.

        Each rank computes its examples `mine`, which are indices of `train`. Then the first rank calls `baselines` with
        the outputs of all ranks.
        """
        return

    def baselines(self, train: Sequence[Example], base: FineTuner) -> dict[str, npt.NDArray[Any]]:
        """Fit baselines to training examples. Return the fitted arrays by name. `base` is the model before training."""
        return {}

    def baseline_outputs(
        self, examples: Sequence[Example], known: Mapping[str, npt.NDArray[Any]], base: FineTuner | None
    ) -> Outputs:
        """Return each baseline's outputs for each record. `known` is the result of the method `baselines`. If `base` is
        None, the baselines in `of_base` are left out.
        """
        return {}

    def probe(self, head: nn.Module, train: Sequence[Example], base: FineTuner, seed: int) -> None:
        """Fit a linear head to frozen representations. Called only if the settings' `no_probe` returns None."""
        raise TypeError(
            f"{type(self).__name__} has no method `probe`; return a reason from the method `no_probe` of its settings"
        )


def of_residues(task: Task, values: npt.NDArray[Any], residues: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Remove the linkers between chains from the predictions or targets of one record. If `values` belong to the record
    and not to its residues, they stay unchanged. `residues` are the tokens without `<cls>` and `<eos>`, uint8 [L].
    """
    is_residue_L = is_residue(residues)
    if is_residue_L.all() or (task.names and not task.per_residue):
        return values
    return values[is_residue_L] if task.names else values[is_residue_L][:, is_residue_L]


def collate(task: Task, examples: Sequence[Example]) -> tuple[TokenBatch, list[torch.Tensor]]:
    """Return a batch of the examples, and their targets. In training, the batch has a dropout seed per record."""
    inputs = [task.inputs(example) for example in examples]
    if any(record.tracks.keys() != example.tracks.keys() for record, example in zip(inputs, examples, strict=True)):
        raise UsageError(
            f"task {task.settings.name}: its method `inputs` leaves out the records' tracks; pass "
            "tracks=example.tracks to Inputs"
        )
    batch = batch_of(inputs, [e.id for e in examples])
    if all(example.draw != FIXED for example in examples):
        batch = replace(batch, draw_N=torch.from_numpy(np.array([_draw(e) for e in examples], dtype=np.int32)))
    return batch, [torch.from_numpy(i.target) for i in inputs]


def regression_loss(output: torch.Tensor, target: torch.Tensor, loss: str) -> LossSum:
    """Return the sum of squared errors (`mse`) or Huber losses (`huber`) over all targets that are not NaN."""
    known = ~target.isnan()
    target = torch.where(known, target, output.detach())  # makes the error and its gradient 0, not NaN
    errors = (F.huber_loss if loss == "huber" else F.mse_loss)(output, target, reduction="sum")
    return LossSum(errors, known.sum())


def require_two_values(path: Path, target: str, values: npt.NDArray[Any]) -> None:
    """Raise `InputError` if the training `values` of a target have fewer than two distinct values."""
    distinct = np.unique(values)
    if len(distinct) < 2:
        what = f"has only the value {distinct[0]:g}" if len(distinct) else "has no value"
        raise InputError(f"{path}: {target} {what} in training; give other values, or name another data.target")


def _draw(example: Example) -> int:
    digest = hashlib.sha256(f"dropout:{example.draw}:{example.id}".encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def on_device_of(tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Move targets or weights from the host to the device of a head's output.

    On CUDA the copy does not wait for the forward pass. This is safe, since CUDA has read the numbers from the host's
    memory when the call returns. Other devices do not guarantee this, so there the copy waits.
    """
    return tensor.to(output.device, non_blocking=output.device.type == "cuda")
