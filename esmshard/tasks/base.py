"""The base class of every task, and functions that several tasks share."""

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

MAIN = "fine-tuned"
"""The name of the fine-tuned model among the methods that an evaluation compares."""
BEFORE = "before fine-tuning"
"""The name of the baseline that uses the model before the first step, with a new head or with the model's LM head."""

Facts = Mapping[str, Any]
"""Facts that a task learns from the training labels, such as class names, as JSON. They are saved with the model."""
Outputs = dict[str, Sequence[npt.NDArray[np.float32] | Row]]
"""For the name of each baseline, a list with one item for each record: an array like the head's output, or a `Row`."""


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum and a count. A step divides the total sum of all ranks and micro-batches by their total count."""

    sum: torch.Tensor
    """The sum of the loss terms, a scalar with a gradient."""
    count: torch.Tensor
    """The number, or the total weight, of the terms in the sum, as a scalar. This number may be 0."""


class Task(ABC):
    """One kind of fine-tuning: its head, its scores, and the facts about the labels.

    A subclass must define the class `Settings`, the property `columns`, and the methods `head`, `inputs`, `loss` and
    `score`. Other methods have defaults for a task that needs no labels and predicts one number for each protein.

    Args:
        settings: the task section of a recipe.
        facts: the facts that the method `learn` computes from the training labels; empty before that.
    """

    Settings: ClassVar[type[TaskSettings]]
    """The settings class of the task. Recipes name the task by the field `name` of this class."""
    lower_is_better: ClassVar[bool] = False
    """Whether a lower value of the headline metric is better, as for errors and perplexities."""
    per_residue: ClassVar[bool] = False
    """Whether the method `predict` returns one row for each residue of a record."""
    baseline_records: ClassVar[int] = 2000
    """The maximum number of records to which baselines are fitted. They are spread evenly over the training split."""
    of_base: ClassVar[tuple[str, ...]] = ()
    """The names of the baselines that compute with the model before the first training step."""

    def __init__(self, settings: Any, facts: Facts) -> None:
        self.settings = settings
        self.facts = facts

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The names of the metrics from `summary` that the final table shows. The first is the headline metric."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the numbers in a prediction: targets, classes or amino acids. Empty for maps of pairs."""
        return ("value",)

    @property
    def one_of_names(self) -> bool:
        """Whether the numbers of a prediction are probabilities of classes, and exactly one class is true."""
        return False

    def labels(self, fasta: Path, store: TokenStore, data: DataSettings) -> Labels | None:
        """Open the labels of the records in a FASTA file. Check that the labels fit the records and the task's facts.

        A task without labels returns None.
        """
        return None

    def learn(self, train: Examples) -> Self:
        """Return a copy of this task with facts about the training labels. `InputError` if nothing can be learned."""
        return self

    @abstractmethod
    def head(self, config: ModelConfig) -> nn.Module:
        """Make a new head: `head(x_TD, batch)` returns a list of N tensors, one for each record, on any device.

        A head may have a method `attention(batch)`, which returns an object. Each layer calls the object's method
        `add(layer, sequence, q_THK, k_THK)` (see `esmshard.model.attention`), and the head gets the object as its third
        argument. A head whose attribute `reads_logits` is True instead gets the logits of the language model at
        `TokenBatch.logits_at_P`, float [P, V]. A head may have a method `start(weights)`, which copies weights of the
        language model into a new head. `start` returns a sentence about these weights, or None.
        """

    @abstractmethod
    def inputs(self, example: Example) -> Inputs:
        """Return the model's input and the target of an example. The field `example.draw` is a random seed."""

    def question(self, example: Example) -> Inputs:
        """Return the model's input for a record without labels: the tokens and tracks of the record."""
        return Inputs(example.tokens, tracks=example.tracks)

    @abstractmethod
    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        """Return the sum of the losses of the records in a batch, and the number of terms in this sum."""

    @abstractmethod
    def score(self, output: npt.NDArray[np.float32], target: npt.NDArray[Any]) -> Row:
        """Return the row of a record, from which the metrics are computed. A row never depends on other records.

        Three kinds of keys in a row have a special use. `log losses` are the numbers to which a temperature is fitted
        (`esmshard.tasks.labels`). `profile` holds observed and predicted values along the sequence, [2, L], for a plot
        in the report. The function `metrics.ranked` replaces the values of keys that begin with `ranked `.
        """

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """Compute the metrics over `rows`; the property `columns` names the metrics that the result must have.

        By default each metric is the mean of its values in the rows.
        """
        return means(rows, self.columns)

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Convert the head's output for a record to a prediction: probabilities, or values in the labels' unit."""
        return output

    def units(self, data: Examples) -> tuple[npt.NDArray[np.int64] | None, str]:
        """Return the units that the bootstrap resamples: the block number of each record, int64 [N], or None if each
        record is a unit. Also return the noun for a unit.
        """
        return data.blocks(), "record"

    def groups(self, data: Examples, known: Mapping[str, npt.NDArray[Any]]) -> list[str]:
        """Return the name of each record's group, '' for a record without a group. Return an empty list if the task has
        no groups. An evaluation also reports the metrics of each group. `known` is the result of method `baselines`.
        """
        return []

    def look_ahead(self, train: Sequence[Example], mine: Sequence[int], base: FineTuner) -> None:
        """Compute outputs of the base model that the method `baselines` needs, and store them in `base.remembered`.

        The ranks of a run divide the examples `train` among them: `mine` are the indices of this rank's examples. Then
        only the first rank calls `baselines`, with the outputs that all ranks have stored. `base` is the model before
        the first training step.
        """
        return

    def baselines(self, train: Sequence[Example], base: FineTuner) -> dict[str, npt.NDArray[Any]]:
        """Fit the baselines to training examples. Return the fitted arrays by name, which are saved with the model.
        The argument `base` is the model before the first training step.
        """
        return {}

    def baseline_outputs(
        self, examples: Sequence[Example], known: Mapping[str, npt.NDArray[Any]], base: FineTuner | None
    ) -> Outputs:
        """Return the outputs of each baseline for each record. `known` is the result of the method `baselines`. If
        `base` is None, baselines that use the model before the first step are left out.
        """
        return {}

    def probe(self, head: nn.Module, train: Sequence[Example], base: FineTuner, seed: int) -> None:
        """Fit a linear head with scikit-learn to the frozen model's representations of training examples.

        This method is called only if the method `no_probe` of the settings returns None.
        """
        raise TypeError(
            f"{type(self).__name__} has no method `probe`; let the method `no_probe` of its settings give a reason"
        )


def of_residues(task: Task, values: npt.NDArray[Any], residues: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Remove the linkers between chains from `values`, the predictions or targets of one record for its residues or
    residue pairs. Values for the whole record stay unchanged. `residues` are the tokens of the record without `<cls>`
    and `<eos>`, uint8 [L].
    """
    is_residue_L = is_residue(residues)
    if is_residue_L.all() or (task.names and not task.per_residue):
        return values
    return values[is_residue_L] if task.names else values[is_residue_L][:, is_residue_L]


def collate(task: Task, examples: Sequence[Example]) -> tuple[TokenBatch, list[torch.Tensor]]:
    """Return a batch with the sequences of the examples, and the targets of the examples. In training, the batch also
    has a random seed for the dropout of each example (field `TokenBatch.draw_N`).
    """
    inputs = [task.inputs(example) for example in examples]
    if any(record.tracks.keys() != example.tracks.keys() for record, example in zip(inputs, examples, strict=True)):
        raise UsageError(
            f"task {task.settings.name}: its method `inputs` returns no tracks, but the records have some; pass "
            "tracks=example.tracks to Inputs"
        )
    batch = batch_of(inputs, [e.id for e in examples])
    if all(example.draw != FIXED for example in examples):
        batch = replace(batch, draw_N=torch.from_numpy(np.array([_draw(e) for e in examples], dtype=np.int32)))
    return batch, [torch.from_numpy(i.target) for i in inputs]


def regression_loss(output: torch.Tensor, target: torch.Tensor, loss: str) -> LossSum:
    """Return the sum of squared errors (`mse`) or Huber losses (`huber`) over all targets that are not NaN."""
    known = ~target.isnan()
    target = torch.where(known, target, output.detach())  # the error is then 0, and its gradient 0 and not NaN
    errors = (F.huber_loss if loss == "huber" else F.mse_loss)(output, target, reduction="sum")
    return LossSum(errors, known.sum())


def require_two_values(path: Path, target: str, values: npt.NDArray[Any], unit: str) -> None:
    """Refuse a target without training `values`, or with only one distinct value. `unit` is the noun in messages for
    the thing that has a value, such as `residue`.
    """
    distinct = np.unique(values)
    if len(distinct) < 2:
        what = f"is {distinct[0]:g} for every {unit} that has one" if len(distinct) else "has no value"
        raise InputError(
            f"{path}: {target} {what} in training, so that nothing can be learned; give other values, or name another "
            "data.target"
        )


def _draw(example: Example) -> int:
    """Return the random seed for the dropout of an example, from the recipe's seed, the epoch and the record's id."""
    digest = hashlib.sha256(f"dropout:{example.draw}:{example.id}".encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def on_device_of(tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Move targets or weights from the host to the device of a head's output.

    On CUDA the host does not wait for the forward pass, since CUDA has read the numbers when the call returns. Other
    devices do not guarantee this, so on them the host waits until the copy is done.
    """
    return tensor.to(output.device, non_blocking=output.device.type == "cuda")
