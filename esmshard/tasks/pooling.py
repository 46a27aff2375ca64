"""Poolings of the tasks `sequence` and `pair`: one vector for each sequence, as a weighted sum over its residues.

A pooling is called with the representations of a batch, [T, D]. It returns a list of vectors and a list of weights, one
of each for every sequence. The weights are float32 [L] for L residues, without a gradient, and their sum is 1. `<cls>`,
`<eos>` and `SEPARATOR` tokens are left out.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.model.finetuner import RecordDropout, of_tokens
from esmshard.vocab import chain_spans

Pooling = Literal["mean", "attention", "light_attention"]

KERNEL = 9  # the width in residues of the convolutions, as in the paper
NUMBERS: Mapping[Pooling, int] = {"mean": 0, "attention": 2, "light_attention": 4}
"""How many numbers each pooling keeps for the backward pass, for each number of the representations."""


class Attention(nn.Module):
    """A mean of the representations with the weights softmax(q LayerNorm(x)), where q are D learned numbers, as in
    DeepLoc 2.0 (Thumuluri et al. 2022, doi:10.1093/nar/gkac278), but without its smoothing over neighbours. A new q is
    zero, so a new head weights all residues equally.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        # A scale would repeat q, and biases do not change a softmax. So the layers have no other parameters.
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.query = nn.Linear(dim, 1, bias=False)
        nn.init.zeros_(self.query.weight)

    def forward(self, x_TD: torch.Tensor, batch: TokenBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return a vector [D] and the weights [L] for each sequence."""
        score_T, vectors, weights = self.query(self.norm(x_TD))[:, 0].float(), [], []
        for x_chains, score_chains in zip(_chains(x_TD, batch), _chains(score_T, batch), strict=True):
            weight_L = torch.cat(score_chains).softmax(0)
            vectors.append((weight_L[:, None] * torch.cat(x_chains)).sum(0).to(x_TD.dtype))
            weights.append(weight_L.detach())
        return vectors, weights


class LightAttention(nn.Module):
    """Light Attention (Stärk et al. 2021, doi:10.1093/bioadv/vbab035), after a LayerNorm of each residue.

    Two convolutions over KERNEL residues compute D values and D scores of each residue. The vector has for each feature
    the sum of the values, weighted with the softmax of the scores over the residues, and then the maximum of the
    values. Dropout is applied to the values. The weight of a residue is its mean weight over all features.

    As in the paper, the convolutions connect all features, with D (18 D + 1) parameters: 1.8 million for D = 320 (ESM-2
    8M), 29 million for 1,280 (650M), 118 million for 2,560 (3B). Each chain is convolved separately, with zeros beyond
    its ends. `LabelHead` replaces the paper's next layers (32 units, dropout, ReLU, batch norm).
    """

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.values = nn.Conv1d(dim, dim, KERNEL, padding=KERNEL // 2)
        self.scores = nn.Conv1d(dim, dim, KERNEL, padding=KERNEL // 2, bias=False)  # a bias does not change a softmax
        self.dropout = RecordDropout(dropout, layer=2)  # the head has the layers 0 and 1

    def forward(self, x_TD: torch.Tensor, batch: TokenBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return a vector [2D] and the weights [L] for each sequence."""
        draw_T, vectors, weights = of_tokens(batch), [], []
        draws = [None] * len(batch) if draw_T is None else list(map(torch.cat, _chains(draw_T, batch)))
        for chains, draw_L in zip(_chains(self.norm(x_TD), batch), draws, strict=True):
            value_LD, score_LD = (
                torch.cat([layer(x_LD.T[None])[0].T for x_LD in chains]) for layer in (self.values, self.scores)
            )
            value_LD = self.dropout(value_LD, draw_L)
            weight_LD = score_LD.float().softmax(0)
            sum_D = (weight_LD * value_LD).sum(0).to(value_LD.dtype)
            vectors.append(torch.cat([sum_D, value_LD.amax(0)]))
            weights.append(weight_LD.detach().mean(1))
        return vectors, weights


def _chains(x_TD: torch.Tensor, batch: TokenBatch) -> list[list[torch.Tensor]]:
    """Split a tensor of all tokens [T, ...] into the chains of each sequence, [L, ...] each. The CPU waits for the GPU
    only if a sequence has several chains.
    """
    tokens, linked_N = batch.residues(batch.tokens_T), batch.linked_N or (0,) * len(batch)
    return [
        [x_LD[slice(*span)] for span in chain_spans(tokens_L.cpu().numpy())] if linked else [x_LD]
        for x_LD, tokens_L, linked in zip(batch.residues(x_TD), tokens, linked_N, strict=True)
    ]
