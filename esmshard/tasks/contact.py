"""Residue-residue contacts: labels from Cb coordinates, a pairwise head, loss and scores on valid pairs only."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.data.labels import CoordinateLabels
from esmshard.data.loader import Example
from esmshard.data.store import TokenStore
from esmshard.data.structures import MIN_SEPARATION, contact_labels
from esmshard.model.config import EsmConfig
from esmshard.settings import TaskSettings
from esmshard.tasks.numbers import MAX_SEPARATION
from esmshard.tasks.precision import base_rate, contact_precision
from esmshard.tasks.protocol import LossSum, Row

PRIOR = 0.03
"""About the share of contacts among pairs six or more apart: where the head's output starts."""
DILATIONS = (1, 2, 4)


class ConvBlock(nn.Module):
    """Residual block over a pair map: normalise, gelu, 3x3 convolution, twice."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.norm1 = nn.InstanceNorm2d(channels, affine=True)
        # No bias: the normalisation after it would take it away again.
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation, bias=False)
        self.norm2 = nn.InstanceNorm2d(channels, affine=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, z_1CLL: torch.Tensor) -> torch.Tensor:
        """[1, C, L, L] to the same."""
        h_1CLL = self.conv1(F.gelu(self.norm1(z_1CLL)))
        return z_1CLL + self.conv2(F.gelu(self.norm2(h_1CLL)))  # type: ignore[no-any-return]


class PairwiseHead(nn.Module):
    """Contact logits from pairs of representations.

    Two projections of x_LD to C channels are multiplied for each pair (i, j), both ways round, and an embedding of
    |i - j| is added; a small dilated residual network and a linear layer follow; logits of (i, j) and (j, i) are
    averaged. Each record goes through alone: its borders are the map's borders, and no padding enters a statistic.
    """

    def __init__(self, dim: int, channels: int, blocks: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.left = nn.Linear(dim, channels)
        self.right = nn.Linear(dim, channels)
        table = torch.empty(MAX_SEPARATION + 1, channels).uniform_(-1, 1)  # see ESM2 for why not nn.Embedding's own
        self.separation = nn.Embedding(MAX_SEPARATION + 1, channels, _weight=table)
        self.blocks = nn.ModuleList(ConvBlock(channels, DILATIONS[n % len(DILATIONS)]) for n in range(blocks))
        self.out = nn.Conv2d(channels, 1, 1)
        # Nearly zero: the first loss is that of the prior. Not zero: an untrained head would score all pairs alike.
        nn.init.uniform_(self.out.weight, -0.02, 0.02)
        nn.init.constant_(self.out.bias, math.log(PRIOR / (1 - PRIOR)))  # type: ignore[arg-type]

    def forward(self, x_TD: torch.Tensor, batch: TokenBatch) -> list[torch.Tensor]:
        """Symmetric logits [L, L] of each record."""
        x_TD = self.norm(x_TD)
        left_TC, right_TC = self.left(x_TD), self.right(x_TD)
        pairs = zip(batch.residues(left_TC), batch.residues(right_TC), strict=True)
        return [self._pair_logits(left_LC.T, right_LC.T) for left_LC, right_LC in pairs]

    def _pair_logits(self, left_CL: torch.Tensor, right_CL: torch.Tensor) -> torch.Tensor:
        if left_CL.shape[1] == 1:  # one residue has no pair, and a map of one pixel no variance to normalise by
            return self._pair_logits(left_CL.expand(-1, 2), right_CL.expand(-1, 2))[:1, :1]
        place_L = torch.arange(left_CL.shape[1], device=left_CL.device)
        separation_LL = (place_L[:, None] - place_L[None, :]).abs().clamp(max=MAX_SEPARATION)
        product_CLL = left_CL[:, :, None] * right_CL[:, None, :]
        z_1CLL = (product_CLL + product_CLL.mT + self.separation(separation_LL).permute(2, 0, 1))[None]
        for block in self.blocks:
            z_1CLL = block(z_1CLL)
        logits_LL = self.out(z_1CLL)[0, 0]
        return (logits_LL + logits_LL.T) / 2  # type: ignore[no-any-return]


class ContactTask:
    """Contacts: Cb-Cb < 8 A (Ca for glycine), six or more residues apart."""

    columns: tuple[str, ...] = ("long P@L", "long P@L/2", "long P@L/5", "medium P@L", "short P@L", "all P@L/5", "AUPRC")

    def __init__(self, settings: TaskSettings) -> None:
        self._settings = settings

    def labels(self, fasta: Path, store: TokenStore) -> CoordinateLabels:
        """Coordinates from the `.npz` beside the FASTA file."""
        return CoordinateLabels(fasta, store)

    def head(self, config: EsmConfig) -> nn.Module:
        """See `PairwiseHead`."""
        return PairwiseHead(config.dim, self._settings.channels, self._settings.blocks)

    def targets(self, example: Example) -> npt.NDArray[np.int8]:
        """int8 [L, L]: 1 contact, 0 none, -1 undefined (see `contact_labels`)."""
        return contact_labels(example.labels["cb"])

    def loss(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> LossSum:
        """Binary cross-entropy, averaged over the valid pairs of each protein, summed over proteins.

        The mean within a protein keeps long ones, whose pairs grow with the square, from deciding everything. The count
        is the number of proteins that have a valid pair.
        """
        total = torch.stack([o.sum() for o in outputs]).sum() * 0.0  # keeps the graph when no pair is valid
        count = torch.zeros((), device=total.device)
        for logits_LL, target_LL in zip(outputs, targets, strict=True):
            labels_LL = target_LL.to(logits_LL.device)
            valid_LL = (labels_LL >= 0).triu(MIN_SEPARATION)
            n_valid = valid_LL.sum()
            losses_LL = F.binary_cross_entropy_with_logits(logits_LL, labels_LL.clamp(min=0).float(), reduction="none")
            # Masked products and not indexing: no size that the host must wait for.
            total = total + (losses_LL * valid_LL).sum() / n_valid.clamp(min=1)
            count = count + (n_valid > 0)
        return LossSum(total, count)

    def score(self, outputs: Sequence[npt.NDArray[np.float32]], targets: Sequence[npt.NDArray[np.int8]]) -> list[Row]:
        """See `contact_precision`."""
        return [contact_precision(logits_LL, labels_LL) for logits_LL, labels_LL in zip(outputs, targets, strict=True)]

    def predict(self, output: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Probabilities, float32 [L, L], symmetric."""
        return (1 / (1 + np.exp(-output.astype(np.float64)))).astype(np.float32)

    def baselines(self, train: Sequence[npt.NDArray[np.int8]]) -> Mapping[str, list[float]]:
        """Log frequency of contacts at each separation, smoothed by one contact in a hundred pairs."""
        longest = max(len(labels_LL) for labels_LL in train)
        pairs, contacts = np.full(longest, 100.0), np.full(longest, 1.0)
        for labels_LL in train:
            for separation in range(MIN_SEPARATION, len(labels_LL)):
                diagonal = labels_LL.diagonal(separation)
                pairs[separation] += (diagonal >= 0).sum()
                contacts[separation] += (diagonal == 1).sum()
        return {"separation prior": np.log(contacts / pairs).tolist()}

    def baseline_outputs(
        self, targets: npt.NDArray[np.int8], known: Mapping[str, list[float]]
    ) -> Mapping[str, npt.NDArray[np.float32] | None]:
        """`separation prior`: the same score for every pair at one separation, whatever the sequence."""
        prior = np.array(known["separation prior"], dtype=np.float32)
        place_L = np.arange(len(targets))
        separation_LL = np.abs(place_L[:, None] - place_L[None, :])
        return {"base rate": None, "separation prior": prior[np.minimum(separation_LL, len(prior) - 1)]}

    def base_rate(self, targets: npt.NDArray[np.int8]) -> Row:
        """See `precision.base_rate`."""
        return base_rate(targets)
