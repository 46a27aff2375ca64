"""Task `sequence`: labels of whole proteins, which are one or several numbers, one class, or several classes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field, ValidationInfo, field_validator
from scipy import sparse
from torch import nn

from esmshard.batch import Inputs, TokenBatch
from esmshard.data.batching.loader import Example
from esmshard.data.labels.label_sources import label_source
from esmshard.data.labels.protein_labels import ProteinLabels, protein_labels
from esmshard.errors import InputError, UsageError
from esmshard.io.store import TokenStore
from esmshard.io.tables import shown
from esmshard.model.finetuner import FineTuner
from esmshard.recipe.sections import DataSettings
from esmshard.tasks import metrics
from esmshard.tasks.base import LossSum
from esmshard.tasks.labels import FROZEN, LabelHead, LabelSettings, LabelTask, of_probabilities, probability_row
from esmshard.tasks.metrics import Row
from esmshard.tasks.pooling import NUMBERS, Attention, LightAttention, Pooling
from esmshard.vocab import STANDARD, encode_residues, is_residue

MOST_SHOWN = 32  # the maximum number of classes for which a record's row has a confusion matrix
_AMINO_ACIDS = np.frombuffer(encode_residues(STANDARD), dtype=np.uint8)


class SequenceSettings(LabelSettings):
    """Settings of the task for whole proteins. Each protein has numbers, a class or several classes."""

    name: Literal["sequence"]

    data_keys: ClassVar[tuple[str, ...]] = ("labels", "target", "sequence_column", "id_column")

    kind: Literal["number", "class", "multilabel"] = "number"
    """What a protein has. `number`: one or several numbers; `class`: one class; `multilabel`: any of several classes.
    """
    pooling: Pooling = "mean"
    """How the head makes one vector of the residues: their mean; a mean with learned weights (`attention`); or
    convolutions over 9 residues, whose values are summed with learned weights (`light_attention`)."""
    loss: Literal["mse", "huber"] | None = Field(None, validate_default=True)
    """The loss for kind `number`, by default `mse`. With `huber`, errors above one standard deviation count linearly,
    which suits data with outliers. Other kinds always use cross-entropy."""

    @field_validator("loss")
    @classmethod
    def _of_numbers(cls, loss: str | None, info: ValidationInfo) -> str | None:
        kind = info.data.get("kind")
        if loss is not None and kind in ("class", "multilabel"):
            raise ValueError(f"{loss} is for kind number, and the recipe has {kind}; remove it")
        return loss or ("mse" if kind == "number" else None)

    @property
    def head_options(self) -> dict[str, Any]:
        return {"pooling": self.pooling}

    def no_probe(self) -> str | None:
        if self.pooling != "mean":
            return f"probe reads mean representations, not {self.pooling}; set task.pooling: mean, or choose head"
        return super().no_probe()

    def head_bytes(self, tokens: int, n_logits: int, dim: int) -> int:
        """Return the size in bytes of the pooling's arrays, such as the values and weights of `light_attention`."""
        return 4 * tokens * dim * NUMBERS[self.pooling]


class SequenceHead(LabelHead):
    """A head that averages the residues of a protein, without `<cls>`, `<eos>` and linkers between chains, or pools
    them in another way (`esmshard.tasks.pooling`). LayerNorm, dropout, and one or two linear layers follow. ESM-2 was
    not trained to summarise a protein in `<cls>`.
    """

    parts: ClassVar[int] = 1  # how many vectors of the model's width `combined` joins

    def __init__(self, dim: int, hidden: int, outputs: int, dropout: float, pooling: Pooling = "mean") -> None:
        width = 2 * dim if pooling == "light_attention" else dim
        super().__init__(width, self.parts * width, hidden, outputs, dropout)
        self.pooling: nn.Module | None = None
        if pooling != "mean":
            self.pooling = Attention(dim) if pooling == "attention" else LightAttention(dim, dropout)

    def forward(self, x_TD: torch.Tensor, batch: TokenBatch) -> list[torch.Tensor]:
        """Return the outputs of each record: T numbers [T], or the logits of C classes [C]. With a pooling other than
        `mean` they are followed by the weights of the L residues, [T + L] or [C + L].
        """
        vectors, weights = (batch.means(x_TD), None) if self.pooling is None else self.pooling(x_TD, batch)
        h_NF = self.dropout(self.combined(torch.stack(vectors)), batch.draw_N)
        if self.hidden is not None:
            h_NF = self.hidden_dropout(F.gelu(self.hidden(h_NF)), batch.draw_N)
        outputs = list(self.out(h_NF))
        if weights is None:
            return outputs
        chains = len(weights) // len(outputs)  # 2 for a pair
        return [torch.cat([output, *weights[n * chains :][:chains]]) for n, output in enumerate(outputs)]


class SequenceTask(LabelTask):
    """Predicts numbers, a class or several classes of a protein. Outputs: standardised numbers [T], or logits [C]. With
    a pooling other than `mean`, the weights of the residues follow (see `SequenceHead`).
    """

    Settings: ClassVar[type[SequenceSettings]] = SequenceSettings
    settings: SequenceSettings
    fitted: ClassVar[tuple[str, ...]] = ("length", "composition", FROZEN)
    head_class: ClassVar[type[LabelHead]] = SequenceHead

    @property
    def columns(self) -> tuple[str, ...]:
        """The metrics of the final table. The first metric is Spearman (the mean over targets) for numbers, and Fmax
        for `multilabel`. For `class` it is MCC, which is 0 if only the most frequent class is predicted.
        """
        if self.settings.kind == "multilabel":
            return ("Fmax", "AUPRC", "macro-F1", "ECE", "log loss")
        if self.settings.kind == "class":
            ranked = ("AUROC", "AUPRC") if len(self.names) == 2 else ()
            return ("MCC", "accuracy", "macro-F1", *ranked, "ECE", "log loss")
        return metrics.number_columns(self.names)

    def labels(self, fasta: Path, store: TokenStore, data: DataSettings) -> ProteinLabels:
        source = label_source(fasta, data)
        if isinstance(source, Path):
            raise InputError(f"{source}: a FASTA file has labels of residues; give labels of proteins in a table")
        kind, target = self.settings.kind, data.target or ()
        several = len(target) > 1
        if several and kind == "class":
            raise UsageError("data.target: kind class reads one column; name one, or set task.kind: multilabel")
        labels = protein_labels(
            store, fasta, kind, source, columns=target, id_column=data.id_column, required=not several
        )
        if kind != "number" and not several:
            return _of_training(labels, self.names, store, fasta)
        if self.names and labels.names != self.names:
            raise UsageError(f"data.target: the model was trained on {', '.join(self.names)}; name them in this order")
        return labels

    def residue_weights(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
        return None if self.settings.pooling == "mean" else output[len(self.names) :]

    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        return super().loss([output[: len(self.names)] for output in outputs], targets)

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return super().predict(output[: len(self.names)])

    def score(self, output: npt.NDArray[np.float32], target: npt.NDArray[Any]) -> Row:
        """Compute the values of one protein for the metrics. `weights` are those of its residues, [L]."""
        weight_L = self.residue_weights(output)
        row = self._row(output[: len(self.names)], target)
        return row if weight_L is None or not weight_L.size else {**row, "weights": weight_L}

    def _row(self, output: npt.NDArray[np.float32], target: npt.NDArray[Any]) -> Row:
        if self.settings.kind == "number":
            return metrics.number_row(self.predict(output), self.predict(target), self.names)
        return self._class_row(output, target) if self.settings.kind == "class" else self._labels_row(output, target)

    def _class_row(self, logits_C: npt.NDArray[np.float32], target: npt.NDArray[np.int64]) -> Row:
        predicted, truth = int(logits_C.argmax()), int(target)
        row: dict[str, float | npt.NDArray[Any]] = {
            "target": truth,
            "prediction": predicted,
            "correct": float(predicted == truth),
            "confidence": float(self.predict(logits_C)[predicted]),
        }
        if len(logits_C) == 2:
            row["logit"] = float(logits_C[1] - logits_C[0])
        if len(logits_C) <= MOST_SHOWN:
            row["confusion"] = metrics.confusion(np.array([truth]), np.array([predicted]), len(logits_C))
        return row | probability_row(logits_C[None], np.array([truth]), self.facts)

    def _labels_row(self, logits_C: npt.NDArray[np.float32], target_C: npt.NDArray[np.float32]) -> Row:
        truth_C, predicted_C = target_C > 0, logits_C >= 0
        return {
            "labels": float(truth_C.sum()),
            "predicted": float(predicted_C.sum()),
            "correct": float((truth_C & predicted_C).sum()),
            "ranked score": logits_C,
            "truth": truth_C,
            "F1 counts": np.stack([truth_C & predicted_C, predicted_C, truth_C]).astype(np.int64),
            "Fmax terms": metrics.fmax_terms(self.predict(logits_C), truth_C),
            **probability_row(logits_C[None], truth_C[None], self.facts),
        }

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        if self.settings.kind == "number":
            return metrics.number_summary(rows, self.names)
        if self.settings.kind == "multilabel":
            return {
                "Fmax": metrics.fmax(metrics.total(rows, "Fmax terms")),
                "AUPRC": metrics.ranking(metrics.joined(rows, "ranked score"), metrics.joined(rows, "truth"))["AUPRC"],
                "macro-F1": metrics.f1(*metrics.total(rows, "F1 counts")),
                **of_probabilities(rows),
            }
        target_N, predicted_N = (np.array([row[key] for row in rows], np.int64) for key in ("target", "prediction"))
        values = metrics.of_confusion(metrics.confusion(target_N, predicted_N, len(self.names)).astype(np.float64))
        if len(self.names) == 2:
            values |= metrics.ranking(np.array([row["logit"] for row in rows]), target_N == 1)
        return values | of_probabilities(rows)

    def features(self, name: str, example: Example, base: FineTuner | None) -> npt.NDArray[np.floating]:
        residues = example.tokens[is_residue(example.tokens)]
        if name == "length":
            return np.array([[len(residues), np.log(len(residues))]])
        if name == "composition":
            return np.asarray((residues[:, None] == _AMINO_ACIDS).mean(0))[None]
        assert base is not None
        return self.represented(example, base)

    def represented(self, example: Example, base: FineTuner) -> npt.NDArray[np.float64]:
        (x_LD,) = base.representations([Inputs(example.tokens, tracks=example.tracks)])
        return np.asarray(x_LD[is_residue(example.tokens[1:-1])].mean(0, dtype=np.float64))[None]


def _of_training(labels: ProteinLabels, known: Sequence[str], store: TokenStore, fasta: Path) -> ProteinLabels:
    """Renumber the classes of the labels by their index in `known`, the class names of the training split. For the
    training split itself `known` is empty; the result then has only the classes that records have.

    Classes in the table that no record of the split has are left out. Raises `InputError` if a record has a class that
    is not in `known`.
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
    number_of = np.array([place.get(name, -1) for name in labels.names])  # -1 for a class that no record has
    if labels.kind == "multilabel":
        ones = labels.values.tocoo()
        known_E = number_of[ones.col] >= 0
        at = ones.row[known_E], number_of[ones.col[known_E]]
        values = sparse.csr_array((ones.data[known_E], at), shape=(len(labels.labelled_N), len(names)))
        return replace(labels, names=names, values=values)
    values = np.where(labels.labelled_N, number_of[labels.values], -1)
    return replace(labels, names=names, values=values)
