"""The protocol that every task fulfils."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from esmshard.batch import TokenBatch, pack, pack_variants
from esmshard.data.loader import FIXED, Example, Examples, Labels
from esmshard.data.store import TokenStore
from esmshard.data_settings import DataSettings
from esmshard.model.config import EsmConfig
from esmshard.model.weights import Weights

if TYPE_CHECKING:
    from esmshard.tasks.finetuner import FineTuner

BEFORE = "before fine-tuning"
"""Name of the baseline that is the model before the first step: its weights under a new head, or its own LM head."""

Row = Mapping[str, float | npt.NDArray[Any]]
"""What one record adds to the metrics. Numbers (NaN where undefined) become columns of `per_protein.csv`; arrays, such
as counts of classes, are there for `Task.summary` only."""

Facts = Mapping[str, Any]
"""What a task knows of its training labels, as JSON: names of classes, means. Kept with the model."""


@dataclass(frozen=True)
class LossSum:
    """A loss is a sum and a count: divided once, by the count over all ranks and micro-batches of a step."""

    sum: torch.Tensor
    """Scalar, carries the gradient."""
    count: torch.Tensor
    """Scalar, how many terms the sum has. May be 0."""


@dataclass(frozen=True)
class Inputs:
    """One example as the model gets it."""

    tokens: npt.NDArray[np.uint8]
    """`<cls> ... <eos>`, uint8 [L + 2]."""
    target: npt.NDArray[Any]
    """What the head should say."""
    logits_at: npt.NDArray[np.int64] | None = None
    """Places in `tokens` at which logits of the language model are wanted; None where the head does not ask for any."""
    wild_type: npt.NDArray[np.uint8] | None = None
    """Of a variant, tokens of the protein, the same for all inputs of a batch: they are packed once for all of them."""
    wild_type_logits: bool = False
    """Whether logits are wanted there, at the changed residues."""
    wild_type_alone: bool = False
    """Whether it is all that the model sees."""


class Task(Protocol):
    """One kind of fine-tuning: `TASKS[name](settings, facts)`. Objects hold settings and facts, and nothing else.

    A task may have `baseline_records`, how many training examples its baselines learn from at most; `of_base`, names of
    the baselines that ask the model before the first step; `keeps_ids`, true if the ids of training and validation
    records are to go with the model;
    `look_ahead(data, base)`, which is called with a split before `baseline_outputs` is asked for each of its examples,
    and `prepared(rows)`, which gets all rows of a split and returns them as `summary` reads thousands of resamples of
    them the fastest.
    """

    @property
    def facts(self) -> Facts:
        """Empty before `learn`."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The metrics worth a column in the final table; the first one is the headline."""
        ...

    @property
    def lower_is_better(self) -> bool:
        """Of the headline: true for errors and perplexities."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """What the numbers of a protein or residue are that `predict` gives: targets, classes, amino acids. Empty for
        pair maps.
        """
        ...

    @property
    def per_residue(self) -> bool:
        """Whether `predict` has a row for each residue."""
        ...

    @property
    def one_of_names(self) -> bool:
        """Whether these are probabilities of classes of which one is right."""
        ...

    def labels(self, fasta: Path, store: TokenStore, data: DataSettings) -> Labels | None:
        """Open the labels of a FASTA file and check them against its records, and against `facts` if there are any.

        None for a task without labels.
        """
        ...

    def learn(self, train: Examples) -> "Task":
        """This task with the facts of the training labels. `InputError` for labels that nothing can be learned from."""
        ...

    def head(self, config: EsmConfig) -> nn.Module:
        """A new head: `head(x_TD, batch) -> list of N outputs`, a tensor for each record, on any device.

        A head with a method `attention(batch)` gets what that returns, an object with a method
        `add(layer, sequence, q_THK, k_THK)`, as a third argument, after each layer has called `add`; see
        `esmshard.model.attention` for what is given to it. A head with `reads_logits` gets the logits of the language
        model that the batch asks for, float [P, V].
        """
        ...

    def start(self, head: nn.Module, found: Weights) -> str | None:
        """Give a new head the values that the language model has for it, if any. Returns a sentence on what it was."""
        ...

    def inputs(self, example: Example) -> Inputs:
        """What the model sees of one example, and what the head should say of it.

        Random choices are drawn from `example.draw`.
        """
        ...

    def question(self, example: Example) -> Inputs:
        """What the model sees of a record without labels, for a prediction. The target is empty."""
        ...

    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        """Sum and count over the records of a batch."""
        ...

    def score(self, outputs: Sequence[npt.NDArray[np.float32]], targets: Sequence[npt.NDArray[Any]]) -> list[Row]:
        """What each record adds to the metrics. A record's row never depends on the others."""
        ...

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """The metrics of a set of records, `columns` among them; NaN where undefined."""
        ...

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The head's output of one record as a user reads it: probabilities, or values in the unit of the labels."""
        ...

    def baselines(self, train: Sequence[Example], base: "FineTuner") -> dict[str, npt.NDArray[Any]]:
        """What the baselines learn from training examples, as arrays by name; kept with the model.

        Args:
            train: some examples of the training split.
            base: the model before the first step.
        """
        ...

    def baseline_outputs(
        self, example: Example, known: Mapping[str, npt.NDArray[Any]], base: "FineTuner | None"
    ) -> Mapping[str, npt.NDArray[np.float32] | Row]:
        """What each baseline says of one record: like an output of the head, or its row itself.

        Args:
            example: the record.
            known: of `baselines`.
            base: the model before the first step; without it, baselines that ask it are left out.
        """
        ...

    def probe(self, head: nn.Module, train: Sequence[Example], base: "FineTuner", seed: int) -> None:
        """Fit a linear head with scikit-learn on what the frozen model says of training examples.

        Raises:
            InputError: the task, or its head, has no such fit.
        """
        ...


def batch_of(inputs: Sequence[Inputs], record_ids: Sequence[str] | None = None) -> TokenBatch:
    """Pack what the model sees."""
    first = inputs[0]
    if first.wild_type is not None:
        asked = {"logits": first.wild_type_logits, "alone": first.wild_type_alone}
        return pack_variants([i.tokens for i in inputs], first.wild_type, record_ids, **asked)
    places = [i.logits_at for i in inputs if i.logits_at is not None]
    return pack([i.tokens for i in inputs], record_ids, places or None)


def collate(task: Task, examples: Sequence[Example]) -> tuple[TokenBatch, list[torch.Tensor]]:
    """Pack examples, and make their targets. Examples of an epoch have draws for dropout (`TokenBatch.draw_N`)."""
    inputs = [task.inputs(example) for example in examples]
    batch = batch_of(inputs, [e.id for e in examples])
    if all(example.draw != FIXED for example in examples):
        batch = replace(batch, draw_N=torch.from_numpy(np.array([_draw(e) for e in examples], dtype=np.int32)))
    return batch, [torch.from_numpy(i.target) for i in inputs]


def _draw(example: Example) -> int:
    """A number that follows from seed, epoch and id, and is another one than that of crops and hidden residues."""
    digest = hashlib.sha256(f"dropout:{example.draw}:{example.id}".encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def on_device_of(tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Targets or weights of the host, on the device of a head's output.

    The host does not wait for a GPU that is still busy with the forward pass: CUDA has taken the numbers out of
    ordinary memory when the call returns. Other devices do not promise that, so that there it waits.
    """
    return tensor.to(output.device, non_blocking=output.device.type == "cuda")
