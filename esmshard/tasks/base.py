"""The base of every task."""

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
"""Name of the fine-tuned model among the methods of an evaluation."""
BEFORE = "before fine-tuning"
"""Name of the baseline that is the model before the first step: its weights under a new head, or its own LM head."""

Facts = Mapping[str, Any]
"""The facts of a task about its training labels, as JSON: names of classes, means. They are kept with the model."""
Outputs = dict[str, Sequence[npt.NDArray[np.float32] | Row]]
"""The outputs of each baseline by its name: for each record an array like an output of the head, or its row of metrics.
"""


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum and a count. The sum is divided once, by the count over all ranks and micro-batches of a step."""

    sum: torch.Tensor
    """A scalar with a gradient."""
    count: torch.Tensor
    """A scalar: the number of terms of the sum, which may be 0."""


class Task(ABC):
    """One kind of fine-tuning: its head, its scores, and the facts about the labels.

    A task must have `columns`, `head`, `inputs`, `loss` and `score`. The defaults of the rest suit a task that needs no
    labels and predicts one number for each protein. Objects hold settings and facts, and nothing else.

    Args:
        settings: the task section of a recipe.
        facts: the facts that `learn` has found in the training labels; empty before `learn`.
    """

    Settings: ClassVar[type[TaskSettings]]
    """The settings of the task, whose `name` is the one in recipes."""
    lower_is_better: ClassVar[bool] = False
    """Whether a lower headline is better, as for errors and perplexities."""
    per_residue: ClassVar[bool] = False
    """Whether `predict` has a row for each residue."""
    baseline_records: ClassVar[int] = 2000
    """The most training records that the baselines learn from. They are spread evenly over the training split."""
    of_base: ClassVar[tuple[str, ...]] = ()
    """Names of the baselines that use the model before the first step."""

    def __init__(self, settings: Any, facts: Facts) -> None:
        self.settings = settings
        self.facts = facts

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The metrics that get a column in the final table, if `summary` has them. The first one is the headline."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the numbers of a prediction: targets, classes, amino acids. Empty for pair maps."""
        return ("value",)

    @property
    def one_of_names(self) -> bool:
        """Whether the numbers are probabilities of classes that exclude each other."""
        return False

    def labels(self, fasta: Path, store: TokenStore, data: DataSettings) -> Labels | None:
        """Open the labels of a FASTA file and check them against its records, and against `facts` if there are any.

        None for a task without labels.
        """
        return None

    def learn(self, train: Examples) -> Self:
        """Return this task with the facts of the training labels. `InputError` if the labels teach nothing."""
        return self

    @abstractmethod
    def head(self, config: ModelConfig) -> nn.Module:
        """Make a new head: `head(x_TD, batch)` returns a list of N outputs, one tensor a record, on any device.

        A head may have a method `attention(batch)`. It returns an object whose method `add(layer, sequence, q_THK,
        k_THK)` is called in each layer (see `esmshard.model.attention`), and which is then the third argument of
        `head`. A head with `reads_logits` gets the logits of the language model at `TokenBatch.logits_at_P`, float
        [P, V]. A method `start(weights)` gives a new head the values that the language model has for it, if any, and
        returns a sentence about them, or None.
        """

    @abstractmethod
    def inputs(self, example: Example) -> Inputs:
        """Return the input of the model for one example, and the target. Random choices follow from `example.draw`."""

    def question(self, example: Example) -> Inputs:
        """Return the input of the model for a record without labels: its sequence."""
        return Inputs(example.tokens, tracks=example.tracks)

    @abstractmethod
    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        """Return sum and count over the records of a batch."""

    @abstractmethod
    def score(self, output: npt.NDArray[np.float32], target: npt.NDArray[Any]) -> Row:
        """Return the row of a record, from which the metrics are computed. It never depends on other records.

        Three keys have a meaning: `log losses`, to which a temperature is fitted (`esmshard.tasks.labels`);
        `profile`, observed and predicted values along the sequence, [2, L], which a report draws; and keys that begin
        with `ranked ` (`metrics.ranked`).
        """

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return the metrics of some records, `columns` among them; NaN if undefined. By default the means of rows."""
        return means(rows, self.columns)

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Convert the head's output of one record for the user: probabilities, or values in the unit of the labels."""
        return output

    def units(self, data: Examples) -> tuple[npt.NDArray[np.int64] | None, str]:
        """Return the units that an interval over a split resamples: the block of each record, int64 [N], or None for
        single records. Also return the noun for a unit.
        """
        return data.blocks(), "record"

    def groups(self, data: Examples, known: Mapping[str, npt.NDArray[Any]]) -> list[str]:
        """Return the group of each record, '' for none; an empty list if there are no groups. An evaluation also gives
        the metrics of each group. `known` is the result of `baselines`.
        """
        return []

    def look_ahead(self, train: Sequence[Example], mine: Sequence[int], base: FineTuner) -> None:
        """Store outputs of the base model that `baselines` needs in `base.remembered`.

        The ranks of a run divide the examples `train`: `mine` are the numbers of this rank's examples. Then the first
        rank alone calls `baselines`, with the outputs that all ranks have stored. `base` is as for `baselines`.
        """
        return

    def baselines(self, train: Sequence[Example], base: FineTuner) -> dict[str, npt.NDArray[Any]]:
        """Fit the baselines to training examples, and return them as arrays by name, which are kept with the model.
        `base` is the model before the first step.
        """
        return {}

    def baseline_outputs(
        self, examples: Sequence[Example], known: Mapping[str, npt.NDArray[Any]], base: FineTuner | None
    ) -> Outputs:
        """Return the outputs of each baseline for each record. `known` is the result of `baselines`. None for `base`
        leaves out the baselines that use the model before the first step.
        """
        return {}

    def probe(self, head: nn.Module, train: Sequence[Example], base: FineTuner, seed: int) -> None:
        """Fit a linear head with scikit-learn to the frozen model's representations of training examples. Called only
        if `Settings.no_probe` allows it.
        """
        raise NotImplementedError


def of_residues(task: Task, values: npt.NDArray[Any], residues: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return outputs, predictions or targets of one record without the linkers between its chains. `residues` are the
    tokens of the record without `<cls>` and `<eos>`, uint8 [L].
    """
    is_residue_L = is_residue(residues)
    if is_residue_L.all() or (task.names and not task.per_residue):
        return values
    return values[is_residue_L] if task.names else values[is_residue_L][:, is_residue_L]


def collate(task: Task, examples: Sequence[Example]) -> tuple[TokenBatch, list[torch.Tensor]]:
    """Pack examples, and make their targets. Examples of an epoch have draws for dropout (`TokenBatch.draw_N`)."""
    inputs = [task.inputs(example) for example in examples]
    if any(seen.tracks.keys() != example.tracks.keys() for seen, example in zip(inputs, examples, strict=True)):
        raise UsageError(
            f"task {task.settings.name}: its method inputs leaves out the tracks of records; pass "
            "tracks=example.tracks to Inputs"
        )
    batch = batch_of(inputs, [e.id for e in examples])
    if all(example.draw != FIXED for example in examples):
        batch = replace(batch, draw_N=torch.from_numpy(np.array([_draw(e) for e in examples], dtype=np.int32)))
    return batch, [torch.from_numpy(i.target) for i in inputs]


def regression_loss(output: torch.Tensor, target: torch.Tensor, loss: str) -> LossSum:
    """Return squared errors (`mse`) or Huber losses (`huber`) over the values that are known; NaN marks the others."""
    known = ~target.isnan()
    target = torch.where(known, target, output.detach())  # an error of 0, whose gradient is 0 and not NaN
    errors = (F.huber_loss if loss == "huber" else F.mse_loss)(output, target, reduction="sum")
    return LossSum(errors, known.sum())


def require_two_values(path: Path, target: str, values: npt.NDArray[Any], unit: str) -> None:
    """Refuse a target whose known `values` in training are all the same, or none. `unit` is the noun for the place of a
    value, such as `residue`.
    """
    distinct = np.unique(values)
    if len(distinct) < 2:
        what = f"is {distinct[0]:g} for every {unit} that has one" if len(distinct) else "has no value"
        raise InputError(
            f"{path}: {target} {what} in training, so that nothing can be learned; give other values, or name another "
            "data.target"
        )


def _draw(example: Example) -> int:
    """Return a number that follows from seed, epoch and id, and not from the draws of crops and hidden residues."""
    digest = hashlib.sha256(f"dropout:{example.draw}:{example.id}".encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def on_device_of(tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Move targets or weights from the host to the device of a head's output.

    On CUDA the host does not wait for the forward pass, since CUDA has copied the numbers when the call returns. Other
    devices do not promise this, so that the host waits.
    """
    return tensor.to(output.device, non_blocking=output.device.type == "cuda")
