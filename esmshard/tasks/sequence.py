"""Labels of whole proteins: numbers (one or several, which may be missing), one class, or several labels."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field, ValidationInfo, field_validator
from torch import nn

from esmshard.batch import Inputs, TokenBatch
from esmshard.data.batching.loader import Example, Examples
from esmshard.data.labels.label_sources import label_source
from esmshard.data.labels.protein_labels import ProteinLabels, protein_labels
from esmshard.errors import InputError, UsageError
from esmshard.io.store import TokenStore
from esmshard.io.tables import shown
from esmshard.model.dropout import RecordDropout
from esmshard.model.finetuner import FineTuner
from esmshard.recipe.data_section import DataSettings
from esmshard.tasks import metrics
from esmshard.tasks.base import LossSum, on_device_of, regression_loss, require_two_values
from esmshard.tasks.baselines import Linear, fit_classes, fit_labels, fit_numbers
from esmshard.tasks.classes import (
    OUTPUTS,
    LabelSettings,
    LabelTask,
    check_counts,
    class_weights,
    known_classes,
    logits_of_shares,
    of_probabilities,
    probability_row,
    sigmoid,
    softmax,
    temperature_of,
)
from esmshard.tasks.metrics import Row
from esmshard.vocab import STANDARD, encode_residues, is_residue

MOST_SHOWN = 32
"""Classes up to which a record's row has a confusion matrix."""
_AMINO_ACIDS = np.frombuffer(encode_residues(STANDARD), dtype=np.uint8)


class SequenceSettings(LabelSettings):
    """Numbers, a class or several classes for a whole protein."""

    name: Literal["sequence"]

    data_keys: ClassVar[tuple[str, ...]] = ("labels", "target", "sequence_column", "id_column")

    kind: Literal["number", "class", "multilabel"] = "number"
    """`number` is for one or several numbers, `class` for one of several classes, `multilabel` for any of them."""
    loss: Literal["mse", "huber"] | None = Field(None, validate_default=True)
    """The loss for numbers, by default `mse`. `huber` counts errors over one standard deviation linearly, for data with
    outliers. Classes have cross-entropy, and no such key."""

    @field_validator("loss")
    @classmethod
    def _of_numbers(cls, loss: str | None, info: ValidationInfo) -> str | None:
        kind = info.data.get("kind")
        if loss is not None and kind in ("class", "multilabel"):
            raise ValueError(f"{loss} is for kind number, and the recipe has {kind}; remove it")
        return loss or ("mse" if kind == "number" else None)


class SequenceHead(nn.Module):
    """The mean over residues, without `<cls>`, `<eos>` and linkers between chains; LayerNorm, dropout, and one or two
    linear layers.

    `<cls>` is no summary: ESM-2 was trained without anything that would make it one.
    """

    parts: ClassVar[int] = 1
    """The number of vectors of the model's width that `combined` makes of a record."""

    def __init__(self, dim: int, hidden: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.dropout = RecordDropout(dropout)
        self.hidden_dropout = RecordDropout(dropout, layer=1)
        self.hidden = nn.Linear(self.parts * dim, hidden) if hidden else None
        self.out = nn.Linear(hidden or self.parts * dim, outputs)
        nn.init.normal_(self.out.weight, std=0.02)  # nearly zero: a new head says what the bias says, whatever it sees
        nn.init.zeros_(self.out.bias)

    def forward(self, x_TD: torch.Tensor, batch: TokenBatch) -> list[torch.Tensor]:
        """Return [T] or [C] for each record."""
        h_NF = self.dropout(self.combined(torch.stack(batch.means(x_TD))), batch.draw_N)
        if self.hidden is not None:
            h_NF = self.hidden_dropout(F.gelu(self.hidden(h_NF)), batch.draw_N)
        return list(self.out(h_NF))

    def combined(self, mean_SD: torch.Tensor) -> torch.Tensor:
        """Convert the means of all S sequences of a pack to one vector for each record, [N, F]."""
        normed_SD: torch.Tensor = self.norm(mean_SD)
        return normed_SD


class SequenceTask(LabelTask):
    """A protein's numbers, class or labels. Outputs: standardised numbers [T], or logits [C].

    Facts, of `number`: `targets` (names), `mean` and `std` of the training labels; of `class` and `multilabel`:
    `classes` (names), `counts` and `records` of the training split, and `temperature` (see `fit_temperature`).
    """

    Settings: ClassVar[type[SequenceSettings]] = SequenceSettings
    settings: SequenceSettings
    fitted: ClassVar[tuple[str, ...]] = ("length", "composition", "frozen embedding")
    head_class: ClassVar[type[SequenceHead]] = SequenceHead

    @property
    def columns(self) -> tuple[str, ...]:
        """The metrics of the table. The first one is Spearman (of several targets their mean); for one class MCC, which
        naming the most frequent class does not raise; for several labels Fmax.
        """
        if self.settings.kind == "multilabel":
            return ("Fmax", "AUPRC", "macro-F1", "ECE", "log loss")
        if self.settings.kind == "class":
            ranked = ("AUROC", "AUPRC") if len(self.names) == 2 else ()
            return ("MCC", "accuracy", "macro-F1", *ranked, "ECE", "log loss")
        return metrics.number_columns(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the targets, or of the classes."""
        return tuple(self.facts.get("targets" if self.settings.kind == "number" else "classes", ()))

    def labels(self, fasta: Path, store: TokenStore, data: DataSettings) -> ProteinLabels:
        """Read labels from a table, or from the headers of the FASTA file; see `protein_labels`."""
        if data.mask is not None:
            raise UsageError("data.mask: is for labels of residues (task residue); remove it")
        source = label_source(fasta, data)
        if isinstance(source, Path):
            raise InputError(f"{source}: a label FASTA has labels of residues; give those of whole proteins in a table")
        kind, target = self.settings.kind, data.target or ()
        several = len(target) > 1
        if several and kind == "class":
            raise UsageError("data.target: a class comes from one column; name one, or set task.kind: multilabel")
        found = protein_labels(
            store,
            fasta,
            kind,
            source,
            columns=target,
            id_column=data.id_column,
            required=not several,
        )
        if kind != "number" and not several:
            return known_classes(found, self.names, store, fasta)
        if self.names and found.names != self.names:
            raise UsageError(f"data.target: the model was trained on {', '.join(self.names)}; name these in this order")
        return found

    def learn(self, train: Examples) -> Self:
        """Learn mean and deviation of each target, or the count of each class, over training examples."""
        if not len(train):
            raise InputError(f"{train.path}: no training record has a label; give labels, or another file")
        assert isinstance(train.labels, ProteinLabels)
        names, kind = train.labels.names, self.settings.kind
        found = np.stack([train.get(n).labels["target"] for n in range(len(train))])
        facts: dict[str, Any]
        if kind == "number":
            known_NT = ~np.isnan(found)
            for t, name in enumerate(names):
                require_two_values(train.path, name, found[known_NT[:, t], t], "record")
            mean_T, std_T = (of(found, 0, dtype=np.float64).tolist() for of in (np.nanmean, np.nanstd))
            facts = {"targets": list(names), "mean": mean_T, "std": std_T}
        else:
            counts = (
                np.bincount(found, minlength=len(names)) if kind == "class" else found.sum(0, dtype=np.float64)
            ).astype(np.int64)
            if kind == "class":
                check_counts(train.path, names, counts, "record")
            never = [name for name, count in zip(names, counts, strict=True) if not count]
            if never:
                raise InputError(
                    f"{train.path}: no training record has the label {shown(never[0])}, so that it cannot be learned; "
                    "divide the records in another way, or leave it out"
                )
            if kind == "multilabel" and (counts == len(found)).all():
                raise InputError(f"{train.path}: every training record has the same labels; give others")
            facts = {"classes": list(names), "counts": counts.tolist(), "records": len(found)}
        return type(self)(self.settings, facts)

    def new_head(self, dim: int, outputs: int) -> SequenceHead:
        """Make a head of `head_class`."""
        hidden = dim if self.settings.hidden is None else self.settings.hidden
        return self.head_class(dim, hidden, outputs, self.settings.dropout)

    def inputs(self, example: Example) -> Inputs:
        """Return the target: float32 [T], standardised, NaN where missing; int64 []; or float32 [C] of 0 and 1."""
        target = example.labels["target"]
        if self.settings.kind == "number":
            target = ((target - np.array(self.facts["mean"])) / np.array(self.facts["std"])).astype(np.float32)
        # A copy, which may be written to, as torch wants it.
        return Inputs(example.tokens, np.array(target), tracks=example.tracks)

    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        """Compute squared errors or Huber losses of the known values, in standard deviations; weighted cross-entropy
        over the weights of the records; or binary cross-entropy over all labels.
        """
        output, settings = torch.stack(list(outputs)), self.settings
        target = on_device_of(torch.stack(list(targets)), output)
        if settings.kind == "number":
            return regression_loss(output, target, settings.loss or "mse")
        weight_C = on_device_of(torch.from_numpy(self._weights()).float(), output)
        if settings.kind == "class":
            return LossSum(F.cross_entropy(output, target, weight_C, reduction="sum"), weight_C[target].sum())
        total = F.binary_cross_entropy_with_logits(output, target, pos_weight=weight_C, reduction="sum")
        return LossSum(total, torch.full((), float(target.numel()), device=output.device))

    def score(self, outputs: Sequence[npt.NDArray[np.float32]], targets: Sequence[npt.NDArray[Any]]) -> list[Row]:
        """Return predicted and true values, or what the metrics of classes need of a record."""
        rows: dict[str, Callable[[Any, Any], Row]]
        rows = {"number": self._number_row, "class": self._class_row, "multilabel": self._labels_row}
        row = rows[self.settings.kind]
        return [row(output, target) for output, target in zip(outputs, targets, strict=True)]

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """Compute metrics over records. For several targets they are given for each target too, and the means are over
        the known ones.
        """
        if self.settings.kind == "class":
            return _of_classes(rows, len(self.names))
        if self.settings.kind == "multilabel":
            return _of_labels(rows)
        return metrics.number_summary(rows, self.names)

    def prepared(self, rows: Sequence[Row]) -> list[Row]:
        """Add the ranks from which AUPRC of several labels is computed."""
        return metrics.ranked(rows, "score") if self.settings.kind == "multilabel" else list(rows)

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return numbers in the unit of the labels, float32 [T], or calibrated probabilities, float32 [C]."""
        if self.settings.kind == "number":
            mean_T, std_T = np.array(self.facts["mean"]), np.array(self.facts["std"])
            return np.asarray(output.astype(np.float64) * std_T + mean_T, dtype=np.float32)
        return (softmax if self.settings.kind == "class" else sigmoid)(output / temperature_of(self.facts))

    def baselines(self, train: Sequence[Example], base: FineTuner) -> dict[str, npt.NDArray[Any]]:
        """Fit linear models to the features of each baseline of `fitted`."""
        targets = np.stack([self.inputs(example).target for example in train])
        found: dict[str, npt.NDArray[Any]] = {}
        for name in self.fitted:
            x_NF = np.stack([self.features(name, example, base) for example in train])
            found |= self._fit(x_NF, targets, 0).arrays(name)
        return found

    def look_ahead_to_fit(self, train: Sequence[Example], mine: Sequence[int], base: FineTuner) -> None:
        """Keep the mean representations."""
        for n in mine:
            base.remembered["means"][digest(train[n])] = self.means(train[n], base)

    def probe(self, head: nn.Module, train: Sequence[Example], base: FineTuner, seed: int) -> None:
        """Fit ridge or logistic regression to what the head makes of the mean representations."""
        assert isinstance(head, SequenceHead)
        targets = np.stack([self.inputs(example).target for example in train])
        mean_SD = torch.from_numpy(np.concatenate([self.means(example, base) for example in train]))
        with torch.no_grad():
            x_NF = head.combined(mean_SD.to(head.norm.weight))
            self._fit(x_NF.cpu().numpy(), targets, seed).copy_to(head.out)

    def means(self, example: Example, base: FineTuner) -> npt.NDArray[np.float64]:
        """Return the mean representation of each sequence of a record, [1, D]."""
        if (mean_1D := base.remembered["means"].get(digest(example))) is not None:
            return np.asarray(mean_1D)
        (x_LD,) = base.representations([Inputs(example.tokens, tracks=example.tracks)])
        return np.asarray(x_LD[is_residue(example.tokens[1:-1])].mean(0, dtype=np.float64))[None]

    def features(self, name: str, example: Example, base: FineTuner | None) -> npt.NDArray[np.float64]:
        """Return what a baseline of `fitted` sees of a record, [F]."""
        residues = example.tokens[is_residue(example.tokens)]
        if name == "length":
            return np.array([len(residues), np.log(len(residues))])
        if name == "composition":
            return np.asarray((residues[:, None] == _AMINO_ACIDS).mean(0))
        assert base is not None
        (mean_D,) = self.means(example, base)
        return np.asarray(mean_D)

    def prior(self) -> npt.NDArray[np.float32]:
        """Return the output that predicts the mean, or the frequencies, of the training labels."""
        if self.settings.kind == "number":
            return np.zeros(len(self.names) or 1, dtype=np.float32)
        if not self.facts:
            return np.zeros(OUTPUTS, dtype=np.float32)
        counts = np.array(self.facts["counts"])
        if self.settings.kind == "class":
            return logits_of_shares(counts)
        share_C = (counts + 0.5) / (self.facts["records"] + 1)
        return np.asarray(np.log(share_C / (1 - share_C)), dtype=np.float32)

    def _weights(self) -> npt.NDArray[np.float64]:
        """Return the weight of each class; for `multilabel`, the weight of the proteins that have the label."""
        counts = np.array(self.facts["counts"])
        if self.settings.kind == "class":
            return class_weights(counts, self.settings.balance)
        share_C = (counts + 0.5) / (self.facts["records"] + 1)
        return np.asarray(((1 - share_C) / share_C) ** self.settings.balance)

    def _fit(self, x_NF: npt.NDArray[np.floating], targets: npt.NDArray[Any], seed: int) -> Linear:
        if self.settings.kind == "number":
            return fit_numbers(x_NF, targets)
        if self.settings.kind == "class":
            return fit_classes(x_NF, targets, len(self.names), self._weights(), seed)
        return fit_labels(x_NF, targets, self._weights(), seed)

    def _number_row(self, output_T: npt.NDArray[np.float32], target_T: npt.NDArray[np.float32]) -> Row:
        return metrics.number_row(self.predict(output_T), self.predict(target_T), self.names)

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
        truth_C = target_C > 0
        return {
            "labels": float(truth_C.sum()),
            "predicted": float((logits_C >= 0).sum()),
            "correct": float((truth_C & (logits_C >= 0)).sum()),
            "score": logits_C,
            "truth": truth_C,
            "Fmax terms": metrics.fmax_terms(self.predict(logits_C), truth_C),
            **probability_row(logits_C[None], truth_C[None], self.facts),
        }


def digest(example: Example) -> str:
    """Return a key of all that the model sees of a record."""
    digest = hashlib.sha256(example.tokens.tobytes())
    for name, values in example.tracks.items():
        digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()


def _of_labels(rows: Sequence[Row]) -> dict[str, float]:
    true_NC = np.stack([np.asarray(row["truth"]) for row in rows])
    predicted_NC = np.stack([np.asarray(row["score"]) for row in rows]) >= 0
    counted = (true_NC & predicted_NC, predicted_NC, true_NC)
    right_C, predicted_C, true_C = (x_NC.sum(0).astype(np.float64) for x_NC in counted)
    return {
        "Fmax": metrics.fmax(metrics.total(rows, "Fmax terms")),
        "AUPRC": metrics.pooled_ranking(rows, "score", "truth")["AUPRC"],
        "macro-F1": metrics.f1(right_C, predicted_C, true_C),
        **of_probabilities(rows),
    }


def _of_classes(rows: Sequence[Row], n_classes: int) -> dict[str, float]:
    target_N, predicted_N = (np.array([row[key] for row in rows], dtype=np.int64) for key in ("target", "prediction"))
    found = metrics.of_confusion(metrics.confusion(target_N, predicted_N, n_classes).astype(np.float64))
    if n_classes == 2:
        found |= metrics.of_scores(np.array([row["logit"] for row in rows]), target_N == 1)
    return found | of_probabilities(rows)
