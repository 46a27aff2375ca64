"""Residue-residue contacts: labels from Cb coordinates, loss and scores on valid pairs only, baselines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from esmshard.data.batching.loader import Example, Examples
from esmshard.data.labels.coordinates import CoordinateLabels
from esmshard.data.store.token_store import TokenStore
from esmshard.data.structures.contact_labels import MIN_SEPARATION, contact_labels
from esmshard.errors import InputError
from esmshard.model.config import ModelConfig
from esmshard.model.weights.open_weights import Weights
from esmshard.recipe.data_section import DataSettings
from esmshard.tasks import metrics
from esmshard.tasks.base import BEFORE, Inputs, LossSum, Row, Task, on_device_of
from esmshard.tasks.contact import contact_heads, unsupervised
from esmshard.tasks.contact.contact_heads import AttentionHead
from esmshard.tasks.contact.contact_precision import (
    base_rate,
    calibration,
    contact_precision,
    valid_pairs,
)
from esmshard.tasks.contact.contact_settings import ContactSettings

if TYPE_CHECKING:
    from esmshard.tasks.finetuner import FineTuner


class ContactTask(Task):
    """Contacts: Cb-Cb < 8 A (Ca for glycine), six or more residues apart."""

    settings: ContactSettings
    columns = ("long P@L", "long P@L/2", "long P@L/5", "medium P@L", "short P@L", "all P@L/5", "AUPRC")
    names = ()
    of_base = ("unsupervised head", BEFORE)

    def labels(self, fasta: Path, store: TokenStore, data: DataSettings) -> CoordinateLabels:
        """Read coordinates from the `.npz` beside the FASTA file."""
        return CoordinateLabels(fasta, store)

    def learn(self, train: Examples) -> Self:
        """Check that there is something to learn. `InputError` if no record has a contact."""
        for n in range(len(train)):
            target_LL = self.inputs(train.get(n)).target
            if (target_LL[valid_pairs(target_LL, "all")] == 1).any():
                return self
        raise InputError(
            f"{train.path}: no record has a contact, that is residues six or more apart with Cb atoms under 8 A; give "
            "structures of folded domains"
        )

    def head(self, config: ModelConfig) -> nn.Module:
        """Make the head; see `contact_heads`."""
        return contact_heads.new_head(self.settings, config)

    def start(self, head: nn.Module, found: Weights) -> str | None:
        """Copy the model's contact regression; see `contact_heads.start`."""
        return contact_heads.start(head, found)

    def inputs(self, example: Example) -> Inputs:
        """Return the target int8 [L, L]: 1 for a contact, 0 for none, -1 where undefined (see `contact_labels`)."""
        return Inputs(example.tokens, contact_labels(example.labels["cb"]), tracks=example.tracks)

    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        """Compute binary cross-entropy, averaged over the valid pairs of each protein and summed over proteins.

        The mean within a protein keeps long ones, whose pairs grow with the square, from deciding everything. The count
        is the number of proteins that have a valid pair.
        """
        total = torch.stack([o.sum() for o in outputs]).sum() * 0.0  # keeps the graph when no pair is valid
        count = torch.zeros((), device=total.device)
        for logits_LL, target_LL in zip(outputs, targets, strict=True):
            labels_LL = on_device_of(target_LL, logits_LL)
            valid_LL = (labels_LL >= 0).triu(MIN_SEPARATION)
            n_valid = valid_LL.sum()
            losses_LL = F.binary_cross_entropy_with_logits(logits_LL, labels_LL.clamp(min=0).float(), reduction="none")
            # Masked products and not indexing: no size that the host must wait for.
            total = total + (losses_LL * valid_LL).sum() / n_valid.clamp(min=1)
            count = count + (n_valid > 0)
        return LossSum(total, count)

    def score(self, outputs: Sequence[npt.NDArray[np.float32]], targets: Sequence[npt.NDArray[np.int8]]) -> list[Row]:
        """Compute `contact_precision`, and `calibration` of the probabilities of the valid pairs."""
        return [
            {**contact_precision(logits_LL, labels_LL), "calibration": calibration(logits_LL, labels_LL)}
            for logits_LL, labels_LL in zip(outputs, targets, strict=True)
        ]

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """Compute means over proteins, and if there are probabilities `ECE`, the expected calibration error over all
        pairs.
        """
        found = metrics.means(rows, [column for column in rows[0] if column != "calibration"])
        if "calibration" in rows[0]:
            found["ECE"] = metrics.calibration_error(metrics.total(rows, "calibration"))
        return found

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return symmetric probabilities, float32 [L, L]."""
        return (1 / (1 + np.exp(-output.astype(np.float64)))).astype(np.float32)

    def baselines(self, train: Sequence[Example], base: "FineTuner") -> dict[str, npt.NDArray[Any]]:
        """`separation prior` [S]: log odds of a contact at each separation, smoothed by one contact in a hundred pairs.
        `unsupervised head` [C + 1]: weights and bias of `unsupervised.fit`, where a record has a contact.
        """
        targets = [self.inputs(example).target for example in train]
        longest = max(len(labels_LL) for labels_LL in targets)
        pairs, contacts = np.full(longest, 100.0), np.full(longest, 1.0)
        for labels_LL in targets:
            for separation in range(MIN_SEPARATION, len(labels_LL)):
                diagonal = labels_LL.diagonal(separation)
                pairs[separation] += (diagonal >= 0).sum()
                contacts[separation] += (diagonal == 1).sum()
        found = {"separation prior": np.log(contacts / (pairs - contacts)).astype(np.float32)}
        if contacts.sum() > longest:
            weight_C, bias = unsupervised.fit(base.trunk, train, targets, seed=0)
            found["unsupervised head"] = np.append(weight_C, np.float32(bias))
        return found

    def baseline_outputs(
        self, example: Example, known: Mapping[str, npt.NDArray[Any]], base: "FineTuner | None"
    ) -> Mapping[str, npt.NDArray[np.float32] | Row]:
        """`base rate`: a random order. `separation prior`: the same score for every pair at one separation, whatever
        the sequence. `unsupervised head`: a regression over the attention maps of the model before the first step.
        `before fine-tuning`: that model with its new head.
        """
        inputs = self.inputs(example)
        found: dict[str, npt.NDArray[np.float32] | Row] = {"base rate": base_rate(inputs.target)}
        if (prior := known.get("separation prior")) is not None:
            place_L = np.arange(len(inputs.target))
            separation_LL = np.abs(place_L[:, None] - place_L[None, :])
            found["separation prior"] = prior[np.minimum(separation_LL, len(prior) - 1)]
        if base is not None:
            if (fitted := known.get("unsupervised head")) is not None:
                found["unsupervised head"] = unsupervised.logits(base.trunk, example, fitted[:-1], fitted[-1])
            found[BEFORE] = base.outputs([inputs])[0]
        return found

    def probe(self, head: nn.Module, train: Sequence[Example], base: "FineTuner", seed: int) -> None:
        """Fit the attention head as `unsupervised.fit` does."""
        assert isinstance(head, AttentionHead)
        targets = [self.inputs(example).target for example in train]
        weight_C, bias = unsupervised.fit(base.trunk, train, targets, seed)
        with torch.no_grad():
            head.regression.weight.copy_(torch.from_numpy(weight_C)[None])
            head.regression.bias.fill_(bias)
