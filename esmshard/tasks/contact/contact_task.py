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
from esmshard.data.structures.contact_labels import LINKER, MIN_SEPARATION, chain_numbers, contact_labels, mark_linkers
from esmshard.errors import InputError
from esmshard.model.config import ModelConfig
from esmshard.model.weights import Weights
from esmshard.recipe.data_section import DataSettings
from esmshard.tasks import metrics
from esmshard.tasks.base import BEFORE, Inputs, LossSum, Row, Task, on_device_of
from esmshard.tasks.contact import contact_heads, unsupervised
from esmshard.tasks.contact.contact_heads import AttentionHead
from esmshard.tasks.contact.contact_precision import (
    INTERCHAIN,
    base_rate,
    calibration,
    contact_precision,
    valid_pairs,
)
from esmshard.tasks.contact.contact_settings import ContactSettings
from esmshard.vocab import SEPARATOR

if TYPE_CHECKING:
    from esmshard.tasks.finetuner import FineTuner

OF_CHAINS = tuple(f"{INTERCHAIN} {name}" for name in ("P@L/5", "P@L/10", "AUPRC"))
"""The further metrics of the table if a record has several chains."""


class ContactTask(Task):
    """Contacts: Cb-Cb < 8 A (Ca for glycine), six or more residues apart in a chain, or in two chains of a record."""

    settings: ContactSettings
    columns = ("long P@L", "long P@L/2", "long P@L/5", "medium P@L", "short P@L", "all P@L/5", "AUPRC")
    names = ()
    of_base = ("unsupervised head", BEFORE)

    def columns_of(self, rows: Sequence[Row]) -> tuple[str, ...]:
        """Return `columns`, and contacts of two chains if a record has several chains."""
        return (*self.columns, *(OF_CHAINS if any(OF_CHAINS[0] in row for row in rows) else ()))

    def labels(self, fasta: Path, store: TokenStore, data: DataSettings) -> CoordinateLabels:
        """Read coordinates from the `.npz` beside the FASTA file."""
        return CoordinateLabels(fasta, store)

    def learn(self, train: Examples) -> Self:
        """Check that there is something to learn. `InputError` if no record has a contact."""
        for n in range(len(train)):
            target_LL = self.inputs(train.get(n)).target
            if any((target_LL[valid_pairs(target_LL, name)] == 1).any() for name in ("all", INTERCHAIN)):
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
        """Return the target int8 [L, L]: 1 for a contact, 0 for none, -1 where undefined (see `contact_labels`), and
        linkers as `mark_linkers` does.
        """
        linker_L, labels_LL = example.tokens[1:-1] == SEPARATOR, contact_labels(example.labels["cb"])
        return Inputs(
            example.tokens,
            mark_linkers(labels_LL, linker_L) if linker_L.any() else labels_LL,
            tracks=example.tracks,
        )

    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        """Compute binary cross-entropy, averaged over the valid pairs of each protein and summed over proteins.

        The mean within a protein keeps long ones, whose pairs grow with the square, from deciding everything. The count
        is the number of proteins that have a valid pair.
        """
        total = torch.stack([o.sum() for o in outputs]).sum() * 0.0  # keeps the graph when no pair is valid
        count = torch.zeros((), device=total.device)
        for logits_LL, target_LL in zip(outputs, targets, strict=True):
            labels_LL = on_device_of(target_LL, logits_LL)
            chain_L = (labels_LL.diagonal() == LINKER).cumsum(0)  # another number in each chain, as `chain_numbers`
            near_LL = (chain_L[:, None] == chain_L).triu(1 - MIN_SEPARATION).tril(MIN_SEPARATION - 1)
            valid_LL = (labels_LL >= 0).triu(1) & ~near_LL
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
        columns = dict.fromkeys(column for row in rows for column in row if column != "calibration")
        found = metrics.means(rows, list(columns))
        if "calibration" in rows[0]:
            found["ECE"] = metrics.calibration_error(metrics.total(rows, "calibration"))
        return found

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return symmetric probabilities, float32 [L, L]."""
        return (1 / (1 + np.exp(-output.astype(np.float64)))).astype(np.float32)

    def baselines(self, train: Sequence[Example], base: "FineTuner") -> dict[str, npt.NDArray[Any]]:
        """`separation prior` [S]: log odds of a contact at each separation, smoothed by one contact in a hundred pairs;
        the first are those of any pair of two chains.
        `unsupervised head` [C + 1]: weights and bias of `unsupervised.fit`, where a record has a contact.
        """
        targets = [self.inputs(example).target for example in train]
        longest = max(len(labels_LL) for labels_LL in targets)
        pairs, contacts = np.full(longest, 100.0), np.full(longest, 1.0)
        for labels_LL in targets:
            for name in ("all", INTERCHAIN):
                i, j = valid_pairs(labels_LL, name)
                place = j - i if name == "all" else 0 * i
                pairs += np.bincount(place, minlength=longest)
                contacts += np.bincount(place[labels_LL[i, j] == 1], minlength=longest)
        found = {"separation prior": np.log(contacts / (pairs - contacts)).astype(np.float32)}
        if contacts[MIN_SEPARATION:].sum() > longest - MIN_SEPARATION:
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
            place_L, chain_L = np.arange(len(inputs.target)), chain_numbers(inputs.target)
            separation_LL = np.minimum(np.abs(place_L[:, None] - place_L[None, :]), len(prior) - 1)
            separation_LL[chain_L[:, None] != chain_L[None, :]] = 0
            found["separation prior"] = prior[separation_LL]
            if chain_L[-1]:  # between chains all pairs have one score, and no order
                row = self.score([prior[separation_LL]], [inputs.target])[0]
                found["separation prior"] = {name: row[name] for name in row if not name.startswith(INTERCHAIN)}
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
