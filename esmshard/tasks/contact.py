"""Task `contact`: contacts between residues, from Cb coordinates.

The metrics are precisions of the highest-scored pairs, as in the ESM papers. P@L/k of a protein with L resolved
residues is the share of contacts among the floor(L/k) valid pairs with the highest scores. The reported number is the
mean over proteins. For complete proteins of at least 60 residues it equals `compute_precisions` of fair-esm's contact
notebook (`tests/tasks/test_contact_precision.py`), except that here:

- pairs without a label are never ranked. The notebook may rank them last and count each as -1 contacts, so its value
  can be negative;
- a protein with fewer valid pairs than floor(L/k) has no value (NaN) and is left out of the mean;
- only the upper triangle is scored, so scores must be symmetrised first;
- if a score of a protein is not finite, as after a diverged training, all its metrics are NaN;
- if scores are equal, the pair with the lower i ranks first, and then the pair with the lower j.

For a record of several chains, these metrics use only pairs within a chain, and rank the pairs of all chains together.
The metrics `interchain P@L/k` use all pairs of residues in two different chains, at any separation. Here L is the
number of resolved residues of the shortest chain, like Ls for a heterodimer in Guo et al. 2022 (CDPred,
doi:10.1038/s41467-022-34600-2).

The main baseline follows Rao et al. 2021 (doi:10.1101/2020.12.15.422761): an L1 logistic regression with C = 0.15. Its
features are the symmetrised and corrected attention maps of all layers. It is fitted to 20 training proteins, on pairs
at least six residues apart.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from torch import nn

from esmshard.batch import Inputs, pack
from esmshard.data.batching.loader import Example, Examples
from esmshard.data.labels.coordinates import (
    LINKER,
    MIN_SEPARATION,
    CoordinateLabels,
    chain_numbers,
    contact_labels,
    mark_linkers,
)
from esmshard.errors import InputError
from esmshard.io.store import TokenStore
from esmshard.model.config import ModelConfig
from esmshard.model.contacts import ContactAccumulators, corrected_maps
from esmshard.model.finetuner import FineTuner
from esmshard.model.trunk import Trunk
from esmshard.recipe.sections import DataSettings, TaskSettings
from esmshard.tasks import metrics
from esmshard.tasks.base import BEFORE, LossSum, Outputs, Task, on_device_of
from esmshard.tasks.baselines import copy_to
from esmshard.tasks.contact_heads import KEPT_PAIRS, MAPS, AttentionHead, BothHead, PairwiseHead
from esmshard.tasks.metrics import Row
from esmshard.vocab import SEPARATOR

RANGES: dict[str, tuple[int, float]] = {
    "all": (6, np.inf),
    "short": (6, 12),
    "medium": (12, 24),
    "long": (24, np.inf),
}  # lowest separation j - i in the range, and lowest separation above the range

CUTS = {"P@L": 1, "P@L/2": 2, "P@L/5": 5}
INTERCHAIN = "interchain"  # all residue pairs in two different chains of a record
INTERCHAIN_CUTS = {**CUTS, "P@L/10": 10}
OF_CHAINS = tuple(f"{INTERCHAIN} {name}" for name in ("P@L/5", "P@L/10", "AUPRC"))
"""The metrics of the final table that only records of several chains have."""

PROTEINS = 20
C = 0.15  # inverse strength of the L1 penalty, as in Rao et al. 2021
PREFERRED = 256  # proteins with more residues are used only if there are too few shorter proteins
MOST_NUMBERS = 40_000_000
"""The maximum number of feature values in `fit_regression`. liblinear needs 36 bytes per value, so 1.4 GB in all."""


class ContactSettings(TaskSettings):
    """Contacts: pairs of residues whose Cb atoms (Ca for glycine) are closer than 8 A, six or more residues apart."""

    name: Literal["contact"]

    may_crop: ClassVar[bool] = True
    predicts_contacts: ClassVar[bool] = True

    head: Literal["attention", "pairwise", "both"] = "pairwise"
    """`attention` is a regression over the attention maps of all layers, as in ESM (Rao et al. 2021). It starts from
    the contact regression of the model, if the model has one. `pairwise` is a small network of dilated 2-D
    convolutions over products of the representations of two residues. `both` adds the outputs of `attention` and of a
    network like `pairwise` that also reads attention maps."""
    channels: int = Field(32, ge=4, le=512)
    """The number of channels of the pair representation, for the heads `pairwise` and `both`."""
    blocks: int = Field(4, ge=0, le=64)
    """The number of residual blocks of 3x3 convolutions, for the heads `pairwise` and `both`. The dilations of
    successive blocks cycle through 1, 2 and 4."""

    def no_probe(self) -> str | None:
        reason = "probe fits a regression over attention maps; set task.head: attention"
        return None if self.head == "attention" else reason

    def head_bytes(self, tokens: int, n_logits: int, dim: int) -> int:
        """Return the size of all pair maps in bytes: four maps, and six per block, have `channels` numbers per pair.

        With more than KEPT_PAIRS pairs, each block keeps one map, and the backward pass computes the six maps of one
        block at a time again. Attention maps and logits have one number per pair. Queries and keys are not counted
        here, but with the model.
        """
        attended = {"attention": 4, "pairwise": 0, "both": 4 * (MAPS + 1)}[self.head]
        blocks, maps = self.blocks, 0
        if self.head != "attention":
            maps = 4 + (6 * blocks if tokens**2 <= KEPT_PAIRS else blocks + 6 * min(blocks, 1))
        return 4 * tokens**2 * (self.channels * maps + attended + 2)


class ContactTask(Task):
    """Predicts contacts: residue pairs with Cb-Cb < 8 A (Ca for glycine), six or more apart or in different chains."""

    Settings = ContactSettings
    settings: ContactSettings
    columns = ("long P@L", "long P@L/2", "long P@L/5", "medium P@L", "short P@L", "all P@L/5", "AUPRC", *OF_CHAINS)
    names = ()
    of_base = ("unsupervised head", BEFORE)

    def labels(self, fasta: Path, store: TokenStore, data: DataSettings) -> CoordinateLabels:
        return CoordinateLabels(fasta, store)

    def learn(self, train: Examples) -> Self:
        for n in range(len(train)):
            target_LL = self.inputs(train.get(n)).target
            if any((target_LL[valid_pairs(target_LL, name)] == 1).any() for name in ("all", INTERCHAIN)):
                return self
        raise InputError(
            f"{train.path}: no record has a contact (Cb atoms under 8 A, six or more residues apart); give structures "
            "of folded domains"
        )

    def head(self, config: ModelConfig) -> nn.Module:
        n_maps, size = config.n_layers * config.n_heads, (config.dim, self.settings.channels, self.settings.blocks)
        if self.settings.head == "pairwise":
            return PairwiseHead(*size)
        return AttentionHead(n_maps) if self.settings.head == "attention" else BothHead(n_maps, *size)

    def inputs(self, example: Example) -> Inputs:
        """Return the model's input with the target, int8 [L, L]: 1 is a contact, 0 no contact, -1 undefined. The
        diagonal marks linkers between chains (see `mark_linkers`).
        """
        linker_L, labels_LL = example.tokens[1:-1] == SEPARATOR, contact_labels(example.labels["cb"])
        return Inputs(
            example.tokens,
            mark_linkers(labels_LL, linker_L) if linker_L.any() else labels_LL,
            tracks=example.tracks,
        )

    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        """Compute the mean binary cross-entropy over the valid pairs of each protein, and sum the means over proteins.

        The count is the number of proteins with a valid pair. Without means, long proteins would dominate, since the
        number of pairs grows with the square of the length.
        """
        total = torch.stack([o.sum() for o in outputs]).sum() * 0.0  # the gradient is 0, not missing, without pairs
        count = torch.zeros((), device=total.device)
        for logits_LL, target_LL in zip(outputs, targets, strict=True):
            labels_LL = on_device_of(target_LL, logits_LL)
            chain_L = (labels_LL.diagonal() == LINKER).cumsum(0)  # the number of the chain of each residue
            near_LL = (chain_L[:, None] == chain_L).triu(1 - MIN_SEPARATION).tril(MIN_SEPARATION - 1)
            valid_LL = (labels_LL >= 0).triu(1) & ~near_LL
            n_valid = valid_LL.sum()
            losses_LL = F.binary_cross_entropy_with_logits(logits_LL, labels_LL.clamp(min=0).float(), reduction="none")
            # The product masks invalid pairs. With an index, the host would have to wait for the number of pairs.
            total = total + (losses_LL * valid_LL).sum() / n_valid.clamp(min=1)
            count = count + (n_valid > 0)
        return LossSum(total, count)

    def score(self, output: npt.NDArray[np.float32], target: npt.NDArray[np.int8]) -> Row:
        return {**contact_precision(output, target), "calibration": calibration(output, target)}

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        columns = dict.fromkeys(column for row in rows for column in row if column != "calibration")
        values = metrics.means(rows, list(columns))
        if "calibration" in rows[0]:
            values["ECE"] = metrics.calibration_error(metrics.total(rows, "calibration"))
        return values

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the probability of a contact for each pair, a symmetric map, float32 [L, L]."""
        return np.asarray(expit(output.astype(np.float64)), dtype=np.float32)

    def baselines(self, train: Sequence[Example], base: FineTuner) -> dict[str, npt.NDArray[Any]]:
        """Return the fitted arrays of two baselines.

        `separation prior` [S] has the log odds of a contact at each separation, as if one of 100 additional pairs were
        a contact. Index 0 is for residues in two chains. `unsupervised head` [C + 1] has weights and bias from
        `fit_regression`. It is left out if no training pair within a chain is a contact, or if the model's attention
        maps cannot be read.
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
        fitted = {"separation prior": np.log(contacts / (pairs - contacts)).astype(np.float32)}
        if contacts[MIN_SEPARATION:].sum() > longest - MIN_SEPARATION and not base.trunk.config.only_represents:
            fitted["unsupervised head"] = fit_regression(base.trunk, train, targets, seed=0)
        return fitted

    def baseline_outputs(
        self, examples: Sequence[Example], known: Mapping[str, npt.NDArray[Any]], base: FineTuner | None
    ) -> Outputs:
        """Return the outputs of four baselines.

        `base rate` ranks pairs at random. `separation prior` scores pairs by their separation. `unsupervised head` is a
        regression over the attention maps of the model before training. `before fine-tuning` is this model with its new
        head.
        """
        inputs = [self.inputs(example) for example in examples]
        outputs: Outputs = {"base rate": [contact_precision(None, record.target) for record in inputs]}
        if (prior := known.get("separation prior")) is not None:
            outputs["separation prior"] = [self._of_separation(prior, record.target) for record in inputs]
        if base is not None:
            if (fitted := known.get("unsupervised head")) is not None:
                outputs["unsupervised head"] = [regression_logits(base.trunk, record, fitted) for record in examples]
            outputs[BEFORE] = base.outputs(inputs)
        return outputs

    def _of_separation(
        self, prior: npt.NDArray[np.float32], labels_LL: npt.NDArray[np.int8]
    ) -> npt.NDArray[np.float32] | Row:
        place_L, chain_L = np.arange(len(labels_LL)), chain_numbers(labels_LL)
        separation_LL = np.minimum(np.abs(place_L[:, None] - place_L[None, :]), len(prior) - 1)
        separation_LL[chain_L[:, None] != chain_L[None, :]] = 0
        scores_LL: npt.NDArray[np.float32] = prior[separation_LL]
        if not chain_L[-1]:
            return scores_LL
        # All pairs between chains have the same score, so they cannot be ranked.
        return {name: value for name, value in self.score(scores_LL, labels_LL).items() if INTERCHAIN not in name}

    def probe(self, head: nn.Module, train: Sequence[Example], base: FineTuner, seed: int) -> None:
        assert isinstance(head, AttentionHead)
        targets = [self.inputs(example).target for example in train]
        copy_to(head.regression, fit_regression(base.trunk, train, targets, seed)[None])


def valid_pairs(labels_LL: npt.NDArray[np.int8], name: str) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the indices i < j of labelled pairs. `name` is a key of RANGES (pairs within chains) or INTERCHAIN."""
    low, high = (1, np.inf) if name == INTERCHAIN else RANGES[name]
    chain_L = chain_numbers(labels_LL)
    i, j = np.triu_indices(len(labels_LL), low)
    keep = (labels_LL[i, j] >= 0) & (j - i < high) & ((chain_L[i] != chain_L[j]) == (name == INTERCHAIN))
    return i[keep], j[keep]


def contact_precision(scores_LL: npt.NDArray[np.float32] | None, labels_LL: npt.NDArray[np.int8]) -> dict[str, float]:
    """Compute the metrics of one protein: `long P@L`, `long P@L/2`, ... for each range in RANGES, and `AUPRC`.

    `AUPRC` is over all valid pairs within chains. Only a record of several chains has `interchain P@L`, ..., and
    `interchain AUPRC`.

    Args:
        scores_LL: the score of each pair; higher means a more likely contact. Only the upper triangle is read. With
            None, return the expected metrics of a random order: the share of contacts among the pairs.
        labels_LL: 1 for a contact, 0 for no contact, -1 for an undefined pair (see `contact_labels`).
    """
    row, usable, shortest = dict[str, float](), True, shortest_chain(labels_LL)
    lengths = dict.fromkeys(RANGES, int((labels_LL.diagonal() >= 0).sum()))
    lengths |= {} if shortest is None else {INTERCHAIN: shortest}
    for name, length in lengths.items():
        i, j = valid_pairs(labels_LL, name)
        contact_P = labels_LL[i, j] == 1
        scores_P = None if scores_LL is None else scores_LL[i, j]
        if name in ("all", INTERCHAIN):  # `all` includes the pairs of the other ranges
            usable = scores_P is None or bool(np.isfinite(scores_P).all())
            auprc = float(contact_P.mean()) if contact_P.any() else np.nan
            if scores_P is not None:
                auprc = metrics.ranking(scores_P, contact_P)["AUPRC"] if usable else np.nan
            row["AUPRC" if name == "all" else f"{name} AUPRC"] = auprc
        if scores_P is not None:
            contact_P = contact_P[np.argsort(-scores_P, kind="stable")]
        for cut, k in (INTERCHAIN_CUTS if name == INTERCHAIN else CUTS).items():
            top = length // k
            best_P = contact_P if scores_P is None else contact_P[:top]
            row[f"{name} {cut}"] = float(best_P.mean()) if usable and 0 < top <= len(contact_P) else np.nan
    return row


def shortest_chain(labels_LL: npt.NDArray[np.int8]) -> int | None:
    """Return the number of resolved residues of the shortest chain that has coordinates. Return None for a record of
    one chain, and 0 if fewer than two chains have coordinates.
    """
    chain_L = chain_numbers(labels_LL)
    if chain_L[-1] == 0:
        return None
    counts = np.unique(chain_L[labels_LL.diagonal() >= 0], return_counts=True)[1]
    return int(counts.min()) if len(counts) > 1 else 0


def calibration(logits_LL: npt.NDArray[np.float32], labels_LL: npt.NDArray[np.int8]) -> npt.NDArray[np.float64]:
    """Count valid pairs in bins of predicted probability (see `metrics.calibration`); all 0 if a logit is NaN."""
    i, j = np.concatenate([valid_pairs(labels_LL, name) for name in ("all", INTERCHAIN)], axis=1)
    if np.isnan(logits_LL[i, j]).any():
        i, j = i[:0], j[:0]
    return metrics.calibration(expit(logits_LL[i, j].astype(np.float64)), labels_LL[i, j] == 1)


def fit_regression(
    trunk: Trunk, examples: Sequence[Example], labels: Sequence[npt.NDArray[np.int8]], seed: int
) -> npt.NDArray[np.float32]:
    """Fit a logistic regression over attention maps. Return the weight of each map and then the bias, [maps + 1].

    Maps are ordered layer by layer, as in `contact_head.regression`. If the features have more than MOST_NUMBERS
    values, only a random part of the pairs without contact is used. The pairs in this part get a higher weight,
    so that the expected loss and the meaning of the penalty C stay the same.

    Args:
        trunk: a model in evaluation mode.
        examples: the examples from which at most 20 are chosen.
        labels: the label of each pair in each example, int8 [L, L]: 1 is a contact, 0 no contact, -1 undefined.
        seed: the random seed of the choice of proteins and pairs.
    """
    rng = np.random.default_rng(seed)
    chosen = choose(labels, rng)
    pairs = [valid_pairs(labels[n], "all") for n in chosen]
    contacts = [labels[n][ij] == 1 for n, ij in zip(chosen, pairs, strict=True)]
    keep, weights = thin(np.concatenate(contacts), trunk.config.n_layers * trunk.config.n_heads, rng)
    features, start = [], 0
    for n, (i, j) in zip(chosen, pairs, strict=True):
        kept = keep[start : start + len(i)]
        features.append(pair_features(trunk, examples[n], i[kept], j[kept]))
        start += len(i)
    # Both variants of `l1` select an L1 penalty. scikit-learn 1.8 renamed the argument.
    l1 = {"l1_ratio": 1.0} if LogisticRegression().penalty == "deprecated" else {"penalty": "l1"}
    regression = LogisticRegression(C=C, solver="liblinear", max_iter=1000, random_state=seed, **l1)
    regression.fit(np.concatenate(features), np.concatenate(contacts)[keep], weights[keep])
    return np.append(regression.coef_[0], regression.intercept_).astype(np.float32)


def choose(labels: Sequence[npt.NDArray[np.int8]], rng: np.random.Generator) -> list[int]:
    """Return the indices of at most 20 examples that have both contacts and other valid pairs, in random order. Those
    with up to PREFERRED residues come first. Raises `InputError` if no example can be chosen.
    """
    order = sorted(rng.permutation(len(labels)), key=lambda n: len(labels[n]) > PREFERRED)
    usable = (int(n) for n in order if len(np.unique(labels[n][valid_pairs(labels[n], "all")])) == 2)
    chosen = list(islice(usable, PROTEINS))
    if not chosen:
        raise InputError(
            "no training record has contacts between residues at least six apart; give records with coordinates of "
            "whole domains"
        )
    return chosen


def thin(
    contacts_P: npt.NDArray[np.bool_], n_maps: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Return which of P residue pairs the regression uses, bool [P], and the weight of each pair, fp64 [P]."""
    keep, weights = np.ones(len(contacts_P), dtype=bool), np.ones(len(contacts_P))
    room = max(MOST_NUMBERS // n_maps - int(contacts_P.sum()), int(contacts_P.sum()))
    others = np.flatnonzero(~contacts_P)
    if len(others) > room:
        keep[rng.permutation(others)[room:]] = False
        weights[others] = len(others) / room
    return keep, weights


@torch.no_grad()
def pair_features(
    trunk: Trunk, example: Example, i: npt.NDArray[np.intp], j: npt.NDArray[np.intp]
) -> npt.NDArray[np.float32]:
    """Return all attention maps at P pairs (i, j), fp32 [P, maps]. Only one layer's maps are in memory at a time."""
    device = trunk.device
    rows, columns = torch.from_numpy(i).to(device), torch.from_numpy(j).to(device)
    features: list[npt.NDArray[np.float32]] = []

    def add(layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
        features.append(corrected_maps(q_THK, k_THK)[:, rows, columns].T.cpu().numpy())

    trunk(pack([example.tokens], tracks=[example.tracks]).to(device), layers=(), on_attention=add)
    return np.concatenate(features, axis=1)


@torch.no_grad()
def regression_logits(trunk: Trunk, example: Example, regression: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Apply the regression from `fit_regression` to one protein, and return the contact logits, fp32 [L, L]."""
    weight_1C, bias_1 = torch.from_numpy(regression).to(trunk.device).tensor_split([-1])
    sums = ContactAccumulators(1, weight_1C[None], bias_1)
    trunk(pack([example.tokens], tracks=[example.tracks]).to(trunk.device), layers=(), on_attention=sums.add)
    return sums.logits()[0][0].cpu().numpy()
