"""ESM's contact regression over attention maps, accumulated layer by layer.

The reference (`esm.modules.ContactPredictionHead`, Rao et al. 2021) stacks all maps: 2.6 GiB for one protein of 1,024
residues in the 650M model. With P_c the map of head c, `<cls>` and `<eos>` stripped, and S_c = P_c + P_c^T, it computes

    logit = b + sum_c w_c (S_c - a_c a_c^T / A_c),    a_c = row sums of S_c,    A_c = sum of a_c,

which is linear in the maps: one [L, L] accumulator M = sum_c w_c P_c and the vectors a_c are enough. Maps are made for
a few heads at a time and, in training, once more in the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from esmshard.batch import TokenBatch
from esmshard.model.attention import attention_map

if TYPE_CHECKING:
    from esmshard.model.esm2 import ESM2

MAP_NUMBERS = 1 << 20
"""Numbers of the maps that are alive at once (one head's, if that is more): 4 MiB, which a cache may hold."""


class ContactAccumulator:
    """Sums the regression of one sequence over heads and layers. Gradients flow through it."""

    def __init__(self, weight_C: torch.Tensor, bias: torch.Tensor) -> None:
        self._weight_C, self._bias = weight_C.float(), bias.float()
        self._sum_TT: torch.Tensor | None = None
        self._row_sums: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []

    def add(self, layer: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
        """Add the H maps of one layer (counted from 0, layer-major as in fair-esm)."""
        n_tokens, n_heads = q_THK.shape[:2]
        weight_H = self._weight_C[layer * n_heads : (layer + 1) * n_heads]
        at_once = max(1, MAP_NUMBERS // n_tokens**2)
        parts = (torch.split(q_THK, at_once, 1), torch.split(k_THK, at_once, 1), torch.split(weight_H, at_once))
        for q, k, weight in zip(*parts, strict=True):
            if torch.is_grad_enabled():
                partial_TT, row_sums = checkpoint(_weighed_maps, q, k, weight, use_reentrant=False)
                self._sum_TT = partial_TT if self._sum_TT is None else self._sum_TT + partial_TT
            else:
                if self._sum_TT is None:
                    self._sum_TT = torch.zeros(n_tokens, n_tokens, device=q.device)
                maps_HTT = attention_map(q, k)
                self._sum_TT.view(1, -1).addmm_(weight[None], maps_HTT.flatten(1))
                row_sums = _row_sums(maps_HTT)
            self._row_sums.append(row_sums)
        self._weights.append(weight_H)

    def logits(self) -> torch.Tensor:
        """fp32 [L, L], symmetric."""
        assert self._sum_TT is not None, "no attention was added"
        a_CL, weight_C = torch.cat(self._row_sums), torch.cat(self._weights)
        sum_LL = self._sum_TT[1:-1, 1:-1]
        correction_LL = a_CL.T @ (a_CL * (weight_C / a_CL.sum(-1))[:, None])
        return sum_LL + sum_LL.T - correction_LL + self._bias


def _weighed_maps(
    q_THK: torch.Tensor, k_THK: torch.Tensor, weight_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps of some heads as their weighed sum [T, T], `<cls>` and `<eos>` still in it, and row sums of S_c [H, L]."""
    maps_HTT = attention_map(q_THK, k_THK)
    return (weight_H @ maps_HTT.flatten(1)).view(maps_HTT.shape[1:]), _row_sums(maps_HTT)


def _row_sums(maps_HTT: torch.Tensor) -> torch.Tensor:
    """[H, L]: row plus column sums of the residues' part of each map.

    The softmax ran over all tokens; both ends are cut off afterwards, without a new normalisation. Products with a
    vector of ones are faster than sums over a part of each map. Not 1 less the two ends: heads that look at `<cls>`
    only would leave nothing but rounding.
    """
    inner_T = torch.ones(maps_HTT.shape[-1], device=maps_HTT.device)
    inner_T[0] = inner_T[-1] = 0
    return (maps_HTT @ inner_T + inner_T @ maps_HTT)[:, 1:-1]


class ContactRegression(nn.Module):
    """Holder of `contact_head.regression` under fair-esm's name: one weight per attention head of every layer."""

    def __init__(self, n_maps: int) -> None:
        super().__init__()
        self.regression = nn.Linear(n_maps, 1)


def predict_contacts(model: ESM2, batch: TokenBatch) -> list[torch.Tensor]:
    """Contact probabilities of each sequence by the model's own regression, fp32 [L, L]; with gradients if enabled."""
    regression = model.contact_head.regression
    sums = [ContactAccumulator(regression.weight[0], regression.bias) for _ in range(len(batch))]
    model(batch, layers=(), on_attention=lambda layer, n, q_THK, k_THK: sums[n].add(layer, q_THK, k_THK))
    return [s.logits().sigmoid() for s in sums]
