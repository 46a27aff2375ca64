"""Computes ESM's contact regression over attention maps, layer by layer.

fair-esm (`esm.modules.ContactPredictionHead`, Rao et al. 2021) stacks all maps: 2.6 GiB for one protein of 1,024
residues in the 650M model. Let P_c be the map of head c without `<cls>` and `<eos>`, and S_c = P_c + P_c^T. Then

    logit = b + sum_c w_c F_c,    F_c = S_c - a_c a_c^T / A_c,    a_c = row sums of S_c,    A_c = sum of a_c.

Here w_c and b are the regression's weights and bias. So the sum M = sum_c w_c P_c [L, L] and the vectors a_c determine
all logits, and no map stays in memory. The maps are computed a few at a time, and once more in the backward pass of
training.
"""

import torch
from torch.utils.checkpoint import checkpoint

from esmshard.batch import TokenBatch
from esmshard.errors import UsageError
from esmshard.model.attention import attention_map
from esmshard.model.trunk import Trunk

MAP_NUMBERS = 1 << 20
"""The maximum number of entries of attention maps in memory (4 MiB). One map per regression is always allowed."""


class ContactAccumulators:
    """Computes the contact logits of several regressions (their number is A) for each sequence, with gradients.

    In the backward pass, activation checkpointing calls the method `add` again. Autograd needs the results of this
    second call, but the call must not change the sums.

    Args:
        weight_AC: the weights of the A regressions for the C maps of all layers in order.
        bias_A: the biases of the A regressions.
    """

    def __init__(self, n_sequences: int, weight_AC: torch.Tensor, bias_A: torch.Tensor) -> None:
        self._weight_AC, self._bias_A = weight_AC.float(), bias_A.float()
        self._sums: list[torch.Tensor | None] = [None] * n_sequences
        self._row_sums: list[list[torch.Tensor]] = [[] for _ in range(n_sequences)]
        self._summed = False

    def add(self, layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
        """Add the H attention maps of one layer and sequence to the sums, in fp32. Pass this method to `Trunk.forward`
        as `on_attention`.
        """
        n_tokens, n_heads = q_THK.shape[:2]
        weight_AH = self._weight_AC[:, layer * n_heads : (layer + 1) * n_heads]
        at_once = max(len(weight_AH), MAP_NUMBERS // n_tokens**2)
        parts = (torch.split(q_THK, at_once, 1), torch.split(k_THK, at_once, 1), torch.split(weight_AH, at_once, 1))
        for q, k, weight in zip(*parts, strict=True):
            with torch.autocast(q.device.type, enabled=False):
                if torch.is_grad_enabled():
                    partial_ATT, row_sums_HL = checkpoint(
                        _weighed_maps, q, k, weight, use_reentrant=False, preserve_rng_state=False
                    )
                    if self._summed:
                        continue
                    sum_ATT = self._sums[sequence]
                    sum_ATT = partial_ATT if sum_ATT is None else sum_ATT + partial_ATT
                else:
                    sum_ATT = self._sums[sequence]
                    if sum_ATT is None:
                        sum_ATT = torch.zeros(len(weight), n_tokens, n_tokens, device=q.device)
                    maps_HTT = attention_map(q, k)
                    sum_ATT.flatten(1).addmm_(weight, maps_HTT.flatten(1))
                    row_sums_HL = _row_sums(maps_HTT)
            self._sums[sequence] = sum_ATT
            self._row_sums[sequence].append(row_sums_HL)

    def logits(self) -> list[torch.Tensor]:
        """Return the contact logits of each sequence, fp32 [A, L, L]. Call this method once, after the last layer."""
        logits: list[torch.Tensor] = []
        self._summed = True
        while self._sums:  # `pop` frees each sum before the next logits are computed.
            sum_ATT, row_sums = self._sums.pop(0), self._row_sums.pop(0)
            assert sum_ATT is not None, "no attention was added"
            with torch.autocast(sum_ATT.device.type, enabled=False):
                a_CL, sum_ALL = torch.cat(row_sums), sum_ATT[:, 1:-1, 1:-1]
                correction_ALL = a_CL.T @ (a_CL * (self._weight_AC / a_CL.sum(-1))[:, :, None])
                logits.append(sum_ALL + sum_ALL.mT - correction_ALL + self._bias_A[:, None, None])
        return logits


def _weighed_maps(
    q_THK: torch.Tensor, k_THK: torch.Tensor, weight_AH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one weighted sum of the H attention maps per regression, [A, T, T], and the maps' `_row_sums`, [H, L]."""
    maps_HTT = attention_map(q_THK, k_THK)
    return (weight_AH @ maps_HTT.flatten(1)).view(-1, *maps_HTT.shape[1:]), _row_sums(maps_HTT)


def _row_sums(maps_HTT: torch.Tensor) -> torch.Tensor:
    """Return the row sums a_c of S_c (see the top of this file) for each map, [H, L].

    Products with a vector of ones and zeros are faster than sums over a part of each map. Each row of a map sums to
    1, so its sum without the columns of `<cls>` and `<eos>` is also 1 minus these two columns. But this difference
    would be only a rounding error if a head attends only to `<cls>`.
    """
    inner_T = torch.ones(maps_HTT.shape[-1], device=maps_HTT.device)
    inner_T[0] = inner_T[-1] = 0
    return (maps_HTT @ inner_T + inner_T @ maps_HTT)[:, 1:-1]


def corrected_maps(q_THK: torch.Tensor, k_THK: torch.Tensor) -> torch.Tensor:
    """Return the regression's inputs F_c (see the top of this file) for H heads of one layer, fp32 [H, L, L]."""
    maps_HTT = attention_map(q_THK, k_THK)
    a_HL, maps_HLL = _row_sums(maps_HTT), maps_HTT[:, 1:-1, 1:-1]
    return maps_HLL + maps_HLL.mT - a_HL[:, :, None] * (a_HL / a_HL.sum(-1, keepdim=True))[:, None, :]


def predict_contacts(model: Trunk, batch: TokenBatch) -> list[torch.Tensor]:
    """Predict the contact probabilities of each sequence, fp32 [L, L], with gradients. Raises `UsageError` if the model
    has no contact regression.
    """
    if model.config.only_represents:
        raise UsageError(f"models of the family {model.config.family} have no contact regression; choose another model")
    regression = model.contact_head.regression
    sums = ContactAccumulators(len(batch), regression.weight, regression.bias)
    model(batch, layers=(), on_attention=sums.add)
    return [logits_1LL[0].sigmoid() for logits_1LL in sums.logits()]
