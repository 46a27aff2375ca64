"""ESM's contact regression over attention maps, accumulated layer by layer.

The reference (`esm.modules.ContactPredictionHead`, Rao et al. 2021) stacks all maps: 2.6 GiB for one protein of 1,024
residues in the 650M model. With P_c the map of head c, `<cls>` and `<eos>` stripped, and S_c = P_c + P_c^T, it computes

    logit = b + sum_c w_c (S_c - a_c a_c^T / A_c),    a_c = row sums of S_c,    A_c = sum of a_c,

which is linear in the maps: one [L, L] accumulator M = sum_c w_c P_c and the vectors a_c are enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from esmshard.batch import TokenBatch

if TYPE_CHECKING:
    from esmshard.model.esm2 import ESM2


class ContactAccumulator:
    """Sums the regression of one sequence over heads and layers. Gradients flow through it."""

    def __init__(self, weight_C: torch.Tensor, bias: torch.Tensor, n_heads: int) -> None:
        self._weight_C, self._bias, self._n_heads = weight_C, bias, n_heads
        self._sum_LL: torch.Tensor | None = None
        self._row_sums: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []

    def add(self, layer: int, probabilities_HLL: torch.Tensor) -> None:
        """Add the H maps of one layer (counted from 0, layer-major as in fair-esm)."""
        weight_H = self._weight_C[layer * self._n_heads : (layer + 1) * self._n_heads].float()
        partial_LL = torch.einsum("hij,h->ij", probabilities_HLL, weight_H)
        self._sum_LL = partial_LL if self._sum_LL is None else self._sum_LL + partial_LL
        self._row_sums.append(probabilities_HLL.sum(-1) + probabilities_HLL.sum(-2))
        self._weights.append(weight_H)

    def logits(self) -> torch.Tensor:
        """fp32 [L, L], symmetric."""
        assert self._sum_LL is not None, "no attention map was added"
        a_CL, weight_C = torch.cat(self._row_sums), torch.cat(self._weights)
        correction_LL = a_CL.T @ (a_CL * (weight_C / a_CL.sum(-1))[:, None])
        return self._sum_LL + self._sum_LL.T - correction_LL + self._bias.float()


class ContactRegression(nn.Module):
    """Holder of `contact_head.regression` under fair-esm's name: one weight per attention head of every layer."""

    def __init__(self, n_maps: int) -> None:
        super().__init__()
        self.regression = nn.Linear(n_maps, 1)


def predict_contacts(model: ESM2, batch: TokenBatch) -> list[torch.Tensor]:
    """Contact probabilities of each sequence by the model's own regression, fp32 [L, L]."""
    regression = model.contact_head.regression
    sums = [ContactAccumulator(regression.weight[0], regression.bias, model.config.n_heads) for _ in range(len(batch))]
    model(batch, layers=(), on_attention=lambda layer, n, maps_HLL: sums[n].add(layer, maps_HLL))
    return [s.logits().sigmoid() for s in sums]
