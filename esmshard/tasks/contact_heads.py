"""Defines heads that predict contacts: logits [L, L] from representations or attention maps."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from esmshard.batch import TokenBatch
from esmshard.model.contacts import ContactAccumulators
from esmshard.model.trunk import embedding
from esmshard.model.weights import Weights
from esmshard.vocab import SEPARATOR

MAX_SEPARATION = 64  # the largest separation with its own embedding, which larger separations share
DILATIONS = (1, 2, 4)  # the dilations of the first convolution in successive `PairBlock`s, repeated
MAPS = 8  # the number of mixtures of attention maps that the head `both` reads
KEPT_PAIRS = 256**2
"""If a map has more residue pairs than this, the backward pass computes each `PairBlock` again to save memory."""
PRIOR = 0.03  # the approximate share of contacts among pairs six or more apart; a new head predicts it
PRIOR_LOGIT = math.log(PRIOR / (1 - PRIOR))


class AttentionHead(nn.Module):
    """The contact head of ESM: a logistic regression over the attention maps of all layers (Rao et al. 2021).

    The head's gradient also trains the layers of the model. Attention maps are symmetrised, corrected (APC) and summed
    layer by layer; see `esmshard.model.contacts`.
    """

    def __init__(self, n_maps: int) -> None:
        super().__init__()
        self.regression = nn.Linear(n_maps, 1)
        nn.init.constant_(self.regression.bias, PRIOR_LOGIT)  # type: ignore[arg-type]

    def start(self, weights: Weights) -> str | None:
        """Copy the model's contact regression. Return a sentence about it, or None without such a regression."""
        if "contact_head" in weights.absent or weights.seed is not None:
            return None
        for name, parameter in self.regression.named_parameters():
            parameter.data.copy_(weights[f"contact_head.regression.{name}"])
        return f"the head starts from the contact regression of {weights.source}"

    def attention(self, batch: TokenBatch) -> ContactAccumulators:
        return ContactAccumulators(len(batch), self.regression.weight, self.regression.bias)

    def forward(self, x_TD: torch.Tensor, batch: TokenBatch, given: ContactAccumulators) -> list[torch.Tensor]:
        # The regression does not read the last layer's output. `zero` gives this output a gradient of zeros. Otherwise
        # FSDP would not gather the layer for the backward pass, and its last matrices would have no optimizer state.
        zero = x_TD[:0].sum()
        return [logits_1LL[0] + zero for logits_1LL in given.logits()]


class PairBlock(nn.Module):
    """A residual block over a map of residue pairs: normalisation, gelu and a 3x3 convolution, two times."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.norm1 = nn.InstanceNorm2d(channels, affine=True)
        # No bias, since the normalisation after the convolution would subtract it.
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation, bias=False)
        self.norm2 = nn.InstanceNorm2d(channels, affine=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, z_1CLL: torch.Tensor) -> torch.Tensor:
        h_1CLL = self.conv1(F.gelu(self.norm1(z_1CLL)))
        return z_1CLL + self.conv2(F.gelu(self.norm2(h_1CLL)))  # type: ignore[no-any-return]


class PairwiseHead(nn.Module):
    """A head that computes contact logits from the representations of residue pairs.

    Two projections of x_LD to C channels are multiplied for each pair, as left_i right_j + right_i left_j, and an
    embedding of |i - j| is added. Residues in different chains get the embedding of the largest separations. A small
    dilated residual network and a linear layer follow. The logits of (i, j) and (j, i) are averaged. Each record has a
    separate map, so no padding enters the normalisation.

    Pair maps of C x L x L numbers need most of the memory. In training, the backward pass computes the blocks of a
    large map again. A LayerNorm over channels would need less memory, but the head learned less with it
    (docs/tasks.md). The argument `maps` is the number of attention maps that `forward` gets for each record, [maps, L,
    L].
    """

    def __init__(self, dim: int, channels: int, blocks: int, maps: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.left = nn.Linear(dim, channels)
        self.right = nn.Linear(dim, channels)
        self.separation = embedding(MAX_SEPARATION + 1, channels)
        self.widen = nn.Linear(maps, channels, bias=False) if maps else None
        self.blocks = nn.ModuleList(PairBlock(channels, DILATIONS[n % len(DILATIONS)]) for n in range(blocks))
        self.out = nn.Conv2d(channels, 1, 1)
        # Weights near zero, so that training starts at PRIOR. With zeros all pairs would get the same score.
        nn.init.uniform_(self.out.weight, -0.02, 0.02)
        nn.init.constant_(self.out.bias, PRIOR_LOGIT)  # type: ignore[arg-type]

    def forward(
        self, x_TD: torch.Tensor, batch: TokenBatch, maps: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Return a list with the symmetric logits [L, L] of each record."""
        x_TD = self.norm(x_TD)
        left, right = batch.residues(self.left(x_TD)), batch.residues(self.right(x_TD))
        chain = batch.residues((batch.tokens_T == SEPARATOR).cumsum(0))  # a number that differs between the chains
        return [
            self._logits(left[n].T, right[n].T, chain[n], None if maps is None else maps[n].to(x_TD.dtype))
            for n in range(len(batch))
        ]

    def _logits(
        self, left_CL: torch.Tensor, right_CL: torch.Tensor, chain_L: torch.Tensor, maps_ALL: torch.Tensor | None
    ) -> torch.Tensor:
        length = left_CL.shape[1]
        if length == 1:  # the normalisation needs a variance, so the residue is doubled
            maps_ALL = None if maps_ALL is None else maps_ALL.expand(-1, 2, 2)
            left_CL, right_CL, chain_L = left_CL.expand(-1, 2), right_CL.expand(-1, 2), chain_L.expand(2)
            return self._logits(left_CL, right_CL, chain_L, maps_ALL)[:1, :1]
        place_L = torch.arange(length, device=left_CL.device)
        separation_LL = (place_L[:, None] - place_L[None, :]).abs().clamp(max=MAX_SEPARATION)
        separation_LL = separation_LL.masked_fill(chain_L[:, None] != chain_L, MAX_SEPARATION)
        z_CLL = left_CL[:, :, None] * right_CL[:, None, :] + right_CL[:, :, None] * left_CL[:, None, :]
        z_CLL = z_CLL + self.separation(separation_LL).permute(2, 0, 1)
        if self.widen is not None:
            assert maps_ALL is not None
            z_CLL = z_CLL + torch.einsum("ca,aij->cij", self.widen.weight, maps_ALL)
        z_1CLL = z_CLL[None]
        again = torch.is_grad_enabled() and length**2 > KEPT_PAIRS
        for block in self.blocks:
            z_1CLL = checkpoint(block, z_1CLL, use_reentrant=False) if again else block(z_1CLL)
        logits_LL: torch.Tensor = self.out(z_1CLL)[0, 0]
        return (logits_LL + logits_LL.T) / 2


class BothHead(AttentionHead):
    """A head whose logits are the sum of the logits of an `AttentionHead` and of a `PairwiseHead`.

    The pairwise head reads products of representations, the attention head's logits and MAPS weighted sums of
    attention maps. Its output starts near zero, so a new head predicts nearly the logits of the attention head.
    """

    def __init__(self, n_maps: int, dim: int, channels: int, blocks: int) -> None:
        super().__init__(n_maps)
        # Values of corrected maps are about 1 / L, so weights of about 1 make mixtures as large as the products.
        self.mix = nn.Parameter(torch.empty(MAPS, n_maps).uniform_(-1, 1))
        self.pairwise = PairwiseHead(dim, channels, blocks, maps=MAPS + 1)
        nn.init.zeros_(self.pairwise.out.bias)  # type: ignore[arg-type]

    def attention(self, batch: TokenBatch) -> ContactAccumulators:
        weight_AC = torch.cat([self.regression.weight, self.mix])
        return ContactAccumulators(len(batch), weight_AC, F.pad(self.regression.bias, (0, MAPS)))

    def forward(self, x_TD: torch.Tensor, batch: TokenBatch, given: ContactAccumulators) -> list[torch.Tensor]:
        maps = given.logits()
        products = self.pairwise(x_TD, batch, maps)
        return [maps_ALL[0] + logits_LL for maps_ALL, logits_LL in zip(maps, products, strict=True)]
