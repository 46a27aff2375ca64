"""Task `residue`: a class or a number for each residue of a protein. Some residues may have no label."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field, ValidationInfo, field_validator
from torch import nn

from esmshard.batch import Inputs, TokenBatch
from esmshard.data.batching.loader import Example
from esmshard.data.labels.label_sources import label_source
from esmshard.data.labels.residue_labels import ResidueLabels, residue_labels
from esmshard.errors import UsageError
from esmshard.io import remote
from esmshard.io.store import TokenStore
from esmshard.model.finetuner import FineTuner, of_tokens
from esmshard.recipe.sections import DataSettings
from esmshard.tasks import metrics
from esmshard.tasks.labels import (
    FROZEN,
    OUTPUTS,
    LabelHead,
    LabelSettings,
    LabelTask,
    of_probabilities,
    probability_row,
)
from esmshard.tasks.metrics import Row
from esmshard.vocab import STANDARD, encode_residues

WINDOW = 7  # how many residues on either side the baseline `one-hot window` reads
KERNEL = 7  # the width in residues of the head's convolution
_CODE = np.full(256, -1, dtype=np.int64)
_CODE[np.frombuffer(encode_residues(STANDARD), dtype=np.uint8)] = np.arange(20)


class ResidueSettings(LabelSettings):
    """Settings of the task for residues. Each residue has a class, a number or no label."""

    name: Literal["residue"]

    data_keys: ClassVar[tuple[str, ...]] = ("labels", "target", "sequence_column", "id_column", "mask")
    may_crop: ClassVar[bool] = True

    kind: Literal["class", "number"] = "class"
    """Whether a label is a letter or a number."""
    classes: tuple[str, ...] | None = Field(None, strict=False)
    """The letters of each class. A class may have several letters: [HGI, EB, STC] are the three states of secondary
    structure. By default each letter of the training labels is a class."""
    hidden: int = Field(0, ge=0, le=8192)
    """The number of channels of a convolution over 7 residues before the last layer. 0 makes a linear head."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """The share of the inputs of the head and of its hidden layer that dropout sets to 0 in training."""

    @field_validator("classes")
    @classmethod
    def _groups(cls, classes: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        if classes is None:
            return None
        if info.data.get("kind") == "number":
            raise ValueError("is for kind class; remove it")
        letters = "".join(classes)
        if not (letters.isascii() and letters.isprintable()) or " " in letters or "" in classes:
            raise ValueError("must give the ASCII letters of each class, as in [HGI, EB, STC]")
        twice = [letter for place, letter in enumerate(letters) if letter in letters[:place]]
        if twice:
            raise ValueError(f"has the letter {twice[0]} twice; a letter belongs to one class")
        if len(classes) < 2:
            raise ValueError("has only one class; name two or more")
        return classes

    def head_bytes(self, tokens: int, n_logits: int, dim: int) -> int:
        """Return the size in bytes of the hidden layer (before and after gelu, concatenated) and of the outputs."""
        return 4 * tokens * (3 * self.hidden + 2 * OUTPUTS)


class ResidueHead(LabelHead):
    """A head that applies LayerNorm, dropout and a linear layer to each residue. A hidden layer before the linear layer
    is a convolution over 7 residues. Each record is convolved separately, with zeros beyond both ends.
    """

    def __init__(self, dim: int, hidden: int, outputs: int, dropout: float) -> None:
        super().__init__(dim, dim, hidden, outputs, dropout)

    def new_hidden(self, inputs: int, hidden: int) -> nn.Module:
        return nn.Conv1d(inputs, hidden, KERNEL, padding=KERNEL // 2)

    def forward(self, x_TD: torch.Tensor, batch: TokenBatch) -> list[torch.Tensor]:
        """Return the outputs of each record, [L, O]: O numbers for each of L residues."""
        draw_T = of_tokens(batch)
        x_TD = self.dropout(self.norm(x_TD), draw_T)
        if self.hidden is None:
            return batch.residues(self.out(x_TD))
        hidden = [F.gelu(self.hidden(x_LD.T[None])[0].T) for x_LD in batch.residues(x_TD)]
        draw_L = None if draw_T is None else torch.cat(batch.residues(draw_T))
        return list(self.out(self.hidden_dropout(torch.cat(hidden), draw_L)).split(batch.lengths))


class ResidueTask(LabelTask):
    """Predicts a class or a number for each residue. Outputs: logits [L, C], or standardised numbers [L, 1]."""

    Settings = ResidueSettings
    settings: ResidueSettings
    per_residue = True
    fitted = ("length", "one-hot window", FROZEN)
    head_class = ResidueHead

    @property
    def names(self) -> tuple[str, ...]:
        """For each class its letters, such as `HGI`; empty before `learn` unless the setting `classes` is given. For
        kind `number` the only name is `value`.
        """
        return ("value",) if self.settings.kind == "number" else super().names or self.settings.classes or ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The metrics of the final table. The first is Qn, the accuracy over residues for n classes, such as Q3. For
        two classes it is MCC, since one class is often rare. For numbers it is Spearman over residues.
        """
        if self.settings.kind == "number":
            return ("Spearman", "Spearman per protein", "RMSE")
        accuracy = f"Q{len(self.names)}"
        if accuracy == "Q2":
            return ("MCC", "AUPRC", "AUROC", "macro-F1", "Q2", "Q2 per protein", "ECE", "log loss")
        return (accuracy, f"{accuracy} per protein", "MCC", "macro-F1", "ECE", "log loss")

    def labels(self, fasta: Path, store: TokenStore, data: DataSettings) -> ResidueLabels:
        """Read labels from a table, a label FASTA, an `.npz` file or the headers of `fasta`; see `residue_labels`."""
        source, target = label_source(fasta, data), data.target or (None,)
        if len(target) > 1:
            raise UsageError(f"data.target: residues have one label, not {len(target)}; name one column")
        if isinstance(source, Path) and target[0] is not None:
            raise UsageError(f"data.target: the label FASTA {source} has no columns; remove data.target")
        return residue_labels(
            store,
            fasta,
            self.settings.kind,
            source,
            mask=None if data.mask is None else remote.data_file(data.mask),
            column=target[0],
            id_column=data.id_column,
            classes="".join(self.names) if self.settings.kind == "class" else "",
        )

    def target(self, label: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Convert a record's label to numbers [L, 1], or to classes, int64 [L], with -1 for residues without label."""
        if self.settings.kind == "number":
            return label[:, None]
        class_of = np.repeat(np.arange(len(self.names)), [len(letters) for letters in self.names])
        return np.where(label >= 0, class_of[label], -1)

    def score(self, output: npt.NDArray[np.float32], target: npt.NDArray[Any]) -> Row:
        """Compute accuracy or Spearman of one protein, and counts for the metrics over all residues. `profile` [2, L]
        has true and predicted classes, or numbers in the labels' unit; NaN for residues without a label.
        """
        known_L = ~np.isnan(target[:, 0]) if self.settings.kind == "number" else target >= 0
        row_of = self._number_row if self.settings.kind == "number" else self._class_row
        row, both_2M = row_of(output[known_L], target[known_L])
        profile_2L = np.full((2, len(known_L)), np.nan, np.float32)
        profile_2L[:, known_L] = both_2M
        return {"labelled": float(known_L.sum()), **row, "profile": profile_2L}

    def _class_row(self, logits_MC: npt.NDArray[np.float32], target_M: npt.NDArray[np.int64]) -> tuple[Row, Any]:
        n, predicted_M = logits_MC.shape[1], logits_MC.argmax(1)
        row: dict[str, float | npt.NDArray[Any]] = {
            f"Q{n}": float((predicted_M == target_M).mean()) if len(target_M) else np.nan,
            "confusion": metrics.confusion(target_M, predicted_M, n),
            **probability_row(logits_MC, target_M, self.facts),
        }
        if n == 2:
            row |= {"ranked score": logits_MC[:, 1] - logits_MC[:, 0], "truth": target_M == 1}
        return row, (target_M, predicted_M)

    def _number_row(self, output_M1: npt.NDArray[np.float32], target_M1: npt.NDArray[np.float32]) -> tuple[Row, Any]:
        # Ranks use the raw outputs: in the labels' unit, different outputs may become equal in fp32.
        output_M, target_M = output_M1[:, 0], target_M1[:, 0]
        truth, predicted = (self.predict(x_M1).astype(np.float64) for x_M1 in (target_M1, output_M1))
        square = ((predicted - truth) ** 2).sum()
        row: Row = {
            "Spearman": metrics.spearman(output_M, target_M),
            "RMSE": float((square / len(truth)) ** 0.5) if len(truth) else np.nan,
            "square": np.array([square, len(truth)]),
            "ranked predicted": output_M,
            "ranked truth": target_M,
        }
        return row, (truth, predicted)

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """Compute metrics over all residues together, and means over proteins."""
        if self.settings.kind == "number":
            square, count = metrics.total(rows, "square")
            predicted, truth = (metrics.joined(rows, f"ranked {what}") for what in ("predicted", "truth"))
            return {
                "Spearman": metrics.spearman(predicted, truth),
                "Spearman per protein": metrics.means(rows, ["Spearman"])["Spearman"],
                "RMSE": float((square / count) ** 0.5) if count else np.nan,
            }
        accuracy = f"Q{len(self.names)}"
        values = metrics.of_confusion(metrics.total(rows, "confusion"))
        values = {accuracy: values.pop("accuracy"), **values}
        values[f"{accuracy} per protein"] = metrics.means(rows, [accuracy])[accuracy]
        values |= of_probabilities(rows, np.array([row["labelled"] for row in rows]))
        if accuracy == "Q2":
            values |= metrics.ranking(metrics.joined(rows, "ranked score"), metrics.joined(rows, "truth"))
        return values

    def features(self, name: str, example: Example, base: FineTuner | None) -> npt.NDArray[np.floating]:
        residues = len(example.tokens) - 2
        if name == "length":
            return np.tile([residues, np.log(residues)], (residues, 1))
        if name == FROZEN:
            assert base is not None
            return self.represented(example, base)
        codes_L = np.pad(_CODE[example.tokens[1:-1]], WINDOW, constant_values=20)
        codes_LW = np.lib.stride_tricks.sliding_window_view(codes_L, 2 * WINDOW + 1)
        # 20 columns are for the amino acids, and one for positions beyond the ends. Other letters have zeros.
        return np.asarray((codes_LW[:, :, None] == np.arange(21)).reshape(len(codes_LW), -1), dtype=np.float32)

    def represented(self, example: Example, base: FineTuner) -> npt.NDArray[np.float32]:
        return base.representations([Inputs(example.tokens, tracks=example.tracks)])[0]
