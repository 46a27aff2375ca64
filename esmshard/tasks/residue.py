"""Labels of residues: a class or a number for each, some of which may be undefined."""

from collections.abc import Callable, Sequence
from functools import partial
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
from esmshard.data.labels.residue_labels import ResidueLabels, residue_labels
from esmshard.errors import InputError, UsageError
from esmshard.io import remote
from esmshard.io.store import TokenStore
from esmshard.model.dropout import RecordDropout, of_tokens
from esmshard.model.finetuner import FineTuner
from esmshard.recipe.data_section import DataSettings
from esmshard.tasks import metrics
from esmshard.tasks.base import LossSum, on_device_of, regression_loss
from esmshard.tasks.baselines import Linear, fit_classes, fit_numbers
from esmshard.tasks.classes import (
    OUTPUTS,
    LabelSettings,
    LabelTask,
    check_counts,
    class_weights,
    logits_of_shares,
    of_probabilities,
    probability_row,
    softmax,
    temperature_of,
)
from esmshard.tasks.metrics import Row
from esmshard.vocab import STANDARD, encode_residues

WINDOW = 7
"""One-hot baseline: residues on either side."""
KERNEL = 7
"""The width of the head's convolution in residues."""
MOST_RESIDUES = 50_000
"""The most residues to which baselines and probes are fitted. They are spread evenly over the training examples."""
_CODE = np.full(256, -1, dtype=np.int64)
_CODE[np.frombuffer(encode_residues(STANDARD), dtype=np.uint8)] = np.arange(20)


class ResidueSettings(LabelSettings):
    """A class or a number for each residue."""

    name: Literal["residue"]

    data_keys: ClassVar[tuple[str, ...]] = ("labels", "target", "sequence_column", "id_column", "mask")
    may_crop: ClassVar[bool] = True

    kind: Literal["class", "number"] = "class"
    """Whether a label is a letter or a number."""
    classes: tuple[str, ...] | None = Field(None, strict=False)
    """The letters of each class. Several letters may be one class: [HGI, EB, STC] are the three states of secondary
    structure. By default each letter of the training labels is a class."""
    hidden: int = Field(0, ge=0, le=8192)
    """The channels of a convolution over 7 residues before the last layer; 0 for a linear head."""
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
            raise ValueError("names each class by its letters in ASCII, as in [HGI, EB, STC]")
        twice = [letter for place, letter in enumerate(letters) if letter in letters[:place]]
        if twice:
            raise ValueError(f"has the letter {twice[0]} twice; a letter belongs to one class")
        if len(classes) < 2:
            raise ValueError("has one class only, so that there is nothing to learn; name two or more")
        return classes

    def head_bytes(self, tokens: int, n_logits: int) -> int:
        """Count the hidden layer before and after gelu, a copy of it with all records end to end, and the probabilities
        of the classes. Tensors as wide as the model are small compared with its layers.
        """
        return 4 * tokens * (3 * self.hidden + 2 * OUTPUTS)


class ResidueHead(nn.Module):
    """LayerNorm, dropout, and a linear layer for each residue, or before it a convolution over 7 residues.

    Each record is convolved alone, with zeros beyond its ends.
    """

    def __init__(self, dim: int, hidden: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.dropout = RecordDropout(dropout)
        self.hidden_dropout = RecordDropout(dropout, layer=1)
        self.conv = nn.Conv1d(dim, hidden, KERNEL, padding=KERNEL // 2) if hidden else None
        self.out = nn.Linear(hidden or dim, outputs)
        nn.init.normal_(self.out.weight, std=0.02)  # nearly zero: a new head says what the bias says, whatever it sees
        nn.init.zeros_(self.out.bias)

    def forward(self, x_TD: torch.Tensor, batch: TokenBatch) -> list[torch.Tensor]:
        """Return [L, O] for each record."""
        draw_T = of_tokens(batch)
        x_TD = self.dropout(self.norm(x_TD), draw_T)
        if self.conv is None:
            return batch.residues(self.out(x_TD))
        hidden = [F.gelu(self.conv(x_LD.T[None])[0].T) for x_LD in batch.residues(x_TD)]
        draw_L = None if draw_T is None else torch.cat(batch.residues(draw_T))
        return list(self.out(self.hidden_dropout(torch.cat(hidden), draw_L)).split(batch.lengths))


class ResidueTask(LabelTask):
    """A class or a number for each residue. Outputs: logits [L, C], or standardised numbers [L, 1].

    Facts, of `class`: `classes` (letters of each), `counts` of the training residues, and `temperature` (see
    `fit_temperature`); of `number`: `mean` and `std` of the training labels.
    """

    Settings = ResidueSettings
    settings: ResidueSettings
    per_residue = True
    fitted = ("length", "one-hot window", "frozen embedding")

    @property
    def columns(self) -> tuple[str, ...]:
        """The metrics of the table. The first one is accuracy over residues, called Q3, Q8 and so on; for two classes,
        one of which is mostly rare, MCC; for numbers, Spearman over residues.
        """
        if self.settings.kind == "number":
            return ("Spearman", "Spearman per protein", "RMSE")
        accuracy = f"Q{len(self._classes())}"
        if accuracy == "Q2":
            return ("MCC", "AUPRC", "AUROC", "macro-F1", "Q2", "Q2 per protein", "ECE", "log loss")
        return (accuracy, f"{accuracy} per protein", "MCC", "macro-F1", "ECE", "log loss")

    @property
    def names(self) -> tuple[str, ...]:
        """The letters of each class, or `value` for a number."""
        return self._classes() if self.settings.kind == "class" else ("value",)

    def labels(self, fasta: Path, store: TokenStore, data: DataSettings) -> ResidueLabels:
        """Read labels from a table, a label FASTA, an `.npz` or the headers of the FASTA file; see `residue_labels`."""
        source, target = label_source(fasta, data), data.target or (None,)
        if len(target) > 1:
            raise UsageError(f"data.target: residues have one label, not {len(target)}; name one")
        if isinstance(source, Path) and target[0] is not None:
            raise UsageError(f"data.target: the label FASTA {source} has no columns; remove it")
        return residue_labels(
            store,
            fasta,
            self.settings.kind,
            source,
            mask=None if data.mask is None else remote.data_file(data.mask),
            column=target[0],
            id_column=data.id_column,
            classes="".join(self._classes()),
        )

    def learn(self, train: Examples) -> Self:
        """Learn the classes and the number of training residues of each, or mean and deviation of the numbers."""
        if not len(train):
            raise InputError(f"{train.path}: no training record has a label; give labels, or another file")
        assert isinstance(train.labels, ResidueLabels)
        every = (train.get(n).labels["target"] for n in range(len(train)))
        if self.settings.kind == "class":
            classes = self._classes() or tuple(train.labels.names)
            class_of, counts = _class_of(classes), np.zeros(len(classes), dtype=np.int64)
            for target_L in every:
                counts += np.bincount(class_of[target_L[target_L >= 0]], minlength=len(classes))
            check_counts(train.path, classes, counts, "residue")
            return type(self)(self.settings, {"classes": list(classes), "counts": counts.tolist()})
        values = np.concatenate(list(every))
        values = values[~np.isnan(values)].astype(np.float64)
        if not len(values):
            raise InputError(f"{train.path}: no training residue has a label; look at labels and masks")
        mean, std = float(values.mean()), float(values.std())
        if values.min() == values.max():
            raise InputError(
                f"{train.path}: every training residue is labelled {values[0]:g}, of which nothing can be learned; "
                "give other labels"
            )
        return type(self)(self.settings, {"mean": mean, "std": std})

    def new_head(self, dim: int, outputs: int) -> ResidueHead:
        """Make a `ResidueHead`."""
        return ResidueHead(dim, self.settings.hidden, outputs, self.settings.dropout)

    def inputs(self, example: Example) -> Inputs:
        """Return the target: int64 [L], -1 where undefined; or float32 [L], standardised, NaN where undefined."""
        target_L = example.labels["target"]
        if self.settings.kind == "number":
            scaled = (target_L.astype(np.float64) - self.facts["mean"]) / self.facts["std"]
            return Inputs(example.tokens, scaled.astype(np.float32), tracks=example.tracks)
        class_of = _class_of(self.facts["classes"])
        return Inputs(example.tokens, np.where(target_L >= 0, class_of[target_L], -1), tracks=example.tracks)

    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        """Compute weighted cross-entropy, or squared error in standard deviations, over all labelled residues alike.

        Not averaged within proteins first: the metrics are pooled over residues, as the field reports them, and each
        residue of a long protein says as much as one of a short one. The count is the sum of the weights.
        """
        output_ML = torch.cat(list(outputs))
        target_M = on_device_of(torch.cat(list(targets)), output_ML)
        if self.settings.kind == "number":
            return regression_loss(output_ML[:, 0], target_M, "mse")
        weight_C = on_device_of(torch.from_numpy(self._weights()).float(), output_ML)
        total = F.cross_entropy(output_ML, target_M, weight_C, ignore_index=-1, reduction="sum")
        return LossSum(total, (weight_C[target_M.clamp(min=0)] * (target_M >= 0)).sum())

    def score(self, outputs: Sequence[npt.NDArray[np.float32]], targets: Sequence[npt.NDArray[Any]]) -> list[Row]:
        """Compute each protein's own accuracy or Spearman, and counts for the metrics over all residues."""
        row = self._number_row if self.settings.kind == "number" else self._class_row
        return [row(output, target) for output, target in zip(outputs, targets, strict=True)]

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """Compute metrics pooled over residues, and the means over proteins."""
        if self.settings.kind == "number":
            square, count = metrics.total(rows, "square")
            return {
                "Spearman": metrics.pooled_spearman(rows, "predicted", "truth"),
                "Spearman per protein": metrics.means(rows, ["Spearman"])["Spearman"],
                "RMSE": float((square / count) ** 0.5) if count else np.nan,
            }
        accuracy = f"Q{len(self.facts['classes'])}"
        found = metrics.of_confusion(metrics.total(rows, "confusion"))
        found = {accuracy: found.pop("accuracy"), **found}
        found[f"{accuracy} per protein"] = metrics.means(rows, [accuracy])[accuracy]
        found |= of_probabilities(rows, np.array([row["labelled"] for row in rows]))
        if accuracy == "Q2":
            found |= metrics.pooled_ranking(rows, "score", "truth")
        return found

    def prepared(self, rows: Sequence[Row]) -> list[Row]:
        """Add the ranks from which Spearman, or AUROC and AUPRC, of all residues are computed."""
        if self.settings.kind == "number":
            return metrics.ranked(rows, "predicted", "truth")
        return metrics.ranked(rows, "score") if len(self.names) == 2 else list(rows)

    def profile(self, row: Row) -> npt.NDArray[np.float64]:
        """Return true and predicted classes, or numbers in the unit of the labels, [2, L]; NaN without a label."""
        known_L = np.asarray(row["known"])
        both_2L = np.full((2, len(known_L)), np.nan)
        both_2L[:, known_L] = [np.asarray(row["truth"]), np.asarray(row["predicted"])]
        if self.settings.kind == "class":
            return both_2L
        return np.stack([self.predict(values_L[:, None].astype(np.float32)) for values_L in both_2L]).astype(np.float64)

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return calibrated probabilities, float32 [L, C], or numbers in the unit of the labels, float32 [L]."""
        if self.settings.kind == "class":
            return softmax(output / temperature_of(self.facts))
        return np.asarray(output[:, 0].astype(np.float64) * self.facts["std"] + self.facts["mean"], dtype=np.float32)

    def baselines(self, train: Sequence[Example], base: FineTuner) -> dict[str, npt.NDArray[Any]]:
        """Fit linear models to the protein's length, to the neighbourhood of each residue, and to the frozen model's
        representation of it.
        """
        found: dict[str, npt.NDArray[Any]] = {}
        for name in self.fitted:
            x_MF, target_M = self._gather(train, partial(self._some_features, name, base=base))
            if len(target_M):
                found |= self._fit(x_MF, target_M, 0).arrays(name)
        return found

    def look_ahead_to_fit(self, train: Sequence[Example], mine: Sequence[int], base: FineTuner) -> None:
        """Keep the representations of the residues that the linear models are fitted to."""
        taken, _ = self._chosen(train)
        for n in mine:
            if len(taken[n]):
                kept = self._some_features("frozen embedding", n, train[n], taken[n], base=base)
                base.remembered["residues"][n] = np.asarray(kept, dtype=np.float32)

    def probe(self, head: nn.Module, train: Sequence[Example], base: FineTuner, seed: int) -> None:
        """Fit ridge or logistic regression to the head's LayerNorm of the representations."""
        assert isinstance(head, ResidueHead)

        def normed(_: int, example: Example, taken: npt.NDArray[np.intp]) -> npt.NDArray[np.floating]:
            x_LD = torch.from_numpy(self.features("frozen embedding", example, base)).to(head.norm.weight)
            return np.asarray(head.norm(x_LD).cpu().numpy())[taken]

        with torch.no_grad():
            x_MF, target_M = self._gather(train, normed)
            if not len(target_M):
                raise InputError("adapt.method probe: no residue of the training examples has a label; give labels")
            self._fit(x_MF, target_M, seed).copy_to(head.out)

    def features(self, name: str, example: Example, base: FineTuner | None) -> npt.NDArray[np.floating]:
        """Return what a baseline sees of each residue, [L, F]."""
        if name == "frozen embedding":
            assert base is not None
            return base.representations([Inputs(example.tokens, tracks=example.tracks)])[0]
        residues = len(example.tokens) - 2
        if name == "length":
            return np.tile([residues, np.log(residues)], (residues, 1))
        codes_L = np.pad(_CODE[example.tokens[1:-1]], WINDOW, constant_values=20)
        codes_LW = np.lib.stride_tricks.sliding_window_view(codes_L, 2 * WINDOW + 1)
        # 20 amino acids, and one for what lies beyond the ends; other letters are none of these.
        return np.asarray((codes_LW[:, :, None] == np.arange(21)).reshape(len(codes_LW), -1), dtype=np.float32)

    def _some_features(
        self, name: str, n: int, example: Example, taken: npt.NDArray[np.intp], *, base: FineTuner
    ) -> npt.NDArray[np.floating]:
        """Return what a baseline sees of some residues of training example n, [P, F]."""
        if name == "frozen embedding" and n in base.remembered["residues"]:
            return np.asarray(base.remembered["residues"][n])
        return self.features(name, example, base)[taken]

    def _classes(self) -> tuple[str, ...]:
        """Return the letters of each class, as far as they are known."""
        return tuple(self.facts.get("classes", self.settings.classes or ()))

    def prior(self) -> npt.NDArray[np.float32]:
        """Return the output that predicts the mean, or the frequencies, of the training labels."""
        if self.settings.kind == "number":
            return np.zeros(1, dtype=np.float32)
        if not self.facts:
            return np.zeros(len(self._classes()) or OUTPUTS, dtype=np.float32)
        return logits_of_shares(np.array(self.facts["counts"]))

    def _weights(self) -> npt.NDArray[np.float64]:
        return class_weights(np.array(self.facts["counts"]), self.settings.balance)

    def _chosen(self, train: Sequence[Example]) -> tuple[list[npt.NDArray[np.intp]], list[npt.NDArray[Any]]]:
        """Choose at most MOST_RESIDUES labelled residues of some examples, evenly spread. Return the places in each
        example, and all its targets.
        """
        targets = [self.inputs(example).target for example in train]
        known = [t >= 0 if self.settings.kind == "class" else ~np.isnan(t) for t in targets]
        step = max(1, -(-sum(int(k.sum()) for k in known) // MOST_RESIDUES))
        taken, passed = list[npt.NDArray[np.intp]](), 0
        for known_L in known:
            places = np.flatnonzero(known_L)
            taken.append(places[-passed % step :: step])
            passed += len(places)
        return taken, targets

    def _gather(
        self,
        train: Sequence[Example],
        features: Callable[[int, Example, npt.NDArray[np.intp]], npt.NDArray[np.floating]],
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Gather features [M, F] and targets [M] of the residues of `_chosen`.

        Args:
            train: the examples.
            features: returns [P, F] for the number of an example, the example, and P places in it.
        """
        taken, targets = self._chosen(train)
        some = [n for n in range(len(train)) if len(taken[n])]
        if not some:
            return np.zeros((0, 1)), np.zeros(0)
        x_MF = np.concatenate([np.asarray(features(n, train[n], taken[n]), dtype=np.float32) for n in some])
        return x_MF, np.concatenate([targets[n][taken[n]] for n in some])

    def _fit(self, x_MF: npt.NDArray[np.floating], target_M: npt.NDArray[Any], seed: int) -> Linear:
        if self.settings.kind == "number":
            return fit_numbers(x_MF, target_M[:, None])
        return fit_classes(x_MF, target_M, len(self.facts["classes"]), self._weights(), seed)

    def _class_row(self, logits_LC: npt.NDArray[np.float32], target_L: npt.NDArray[np.int64]) -> Row:
        known_L = target_L >= 0
        target_L, logits_LC, n = target_L[known_L], logits_LC[known_L], logits_LC.shape[1]
        predicted_L = logits_LC.argmax(1)
        row: dict[str, float | npt.NDArray[Any]] = {
            "labelled": float(len(target_L)),
            f"Q{n}": float((predicted_L == target_L).mean()) if len(target_L) else np.nan,
            "confusion": metrics.confusion(target_L, predicted_L, n),
            **probability_row(logits_LC, target_L, self.facts),
            "known": known_L,
            "truth": target_L.astype(np.int8),
            "predicted": predicted_L.astype(np.int8),
        }
        if n == 2:
            row["score"] = logits_LC[:, 1] - logits_LC[:, 0]
        return row

    def _number_row(self, output_L1: npt.NDArray[np.float32], target_L: npt.NDArray[np.float32]) -> Row:
        known_L = ~np.isnan(target_L)
        # Ranks are those of the outputs: in the unit of the labels, values of a new head may be equal in fp32.
        output_M, target_M = output_L1[known_L, 0], target_L[known_L]
        predicted, truth = (self.predict(x[:, None]).astype(np.float64) for x in (output_M, target_M))
        return {
            "labelled": float(len(truth)),
            "Spearman": metrics.spearman(output_M.astype(np.float64), target_M.astype(np.float64)),
            "RMSE": float(((predicted - truth) ** 2).mean() ** 0.5) if len(truth) else np.nan,
            "square": np.array([((predicted - truth) ** 2).sum(), len(truth)]),
            "known": known_L,
            "predicted": output_M,
            "truth": target_M,
        }


def _class_of(classes: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the class of each letter, if the letters of all classes stand in a row."""
    return np.repeat(np.arange(len(classes)), [len(letters) for letters in classes])
