"""The protocol that every task fulfils."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from esmshard.batch import TokenBatch, pack
from esmshard.data.loader import Example, Labels
from esmshard.data.store import TokenStore
from esmshard.model.config import EsmConfig

Row = dict[str, float]
"""Metrics of one record; NaN where undefined."""


@dataclass(frozen=True)
class LossSum:
    """A loss is a sum and a count: divided once, by the count over all ranks and micro-batches of a step."""

    sum: torch.Tensor
    """Scalar, carries the gradient."""
    count: torch.Tensor
    """Scalar, how many terms the sum has. May be 0."""


class Task(Protocol):
    """One kind of fine-tuning. Objects are made from the recipe's `task` section and hold settings only."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The metrics worth a column in the final table; the first one is the headline, higher is better."""
        ...

    def labels(self, fasta: Path, store: TokenStore) -> Labels:
        """Open the labels that belong to a FASTA file and check them against its records."""
        ...

    def head(self, config: EsmConfig) -> nn.Module:
        """A new head: `head(x_TD, batch) -> list of N outputs`, a tensor for each record."""
        ...

    def targets(self, example: Example) -> npt.NDArray[Any]:
        """What the head should say of one record."""
        ...

    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        """Sum and count over the records of a batch."""
        ...

    def score(self, outputs: Sequence[npt.NDArray[np.float32]], targets: Sequence[npt.NDArray[Any]]) -> list[Row]:
        """One row of metrics a record. A record's row never depends on the others."""
        ...

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The head's output of one record as a user reads it, such as probabilities."""
        ...

    def baselines(self, train: Sequence[npt.NDArray[Any]]) -> Mapping[str, list[float]]:
        """Numbers of the training targets that the baselines need; kept with the model."""
        ...

    def baseline_outputs(
        self, targets: npt.NDArray[Any], known: Mapping[str, list[float]]
    ) -> Mapping[str, npt.NDArray[np.float32] | None]:
        """What each baseline says of one record, like an output of the head. None stands for a random order."""
        ...

    def base_rate(self, targets: npt.NDArray[Any]) -> Row:
        """What a random order is expected to score on one record, in the columns of `score`."""
        ...


def collate(task: Task, examples: Sequence[Example]) -> tuple[TokenBatch, list[torch.Tensor]]:
    """Pack examples, and make their targets."""
    batch = pack([e.tokens for e in examples], [e.id for e in examples])
    return batch, [torch.from_numpy(task.targets(e)) for e in examples]
