"""Context parallelism: a few neighbouring ranks divide the tokens of each pack (a batch without padding).

Each rank computes a layer for its own tokens only, but with all matrices and all attention heads. FSDP shards the
matrices over all ranks. Each layer gathers the keys and values of all tokens once. The backward pass sums and scatters
their gradients.

Ring attention (Liu et al. 2023, arXiv:2310.01889) would divide keys and values, too. But ring attention needs the
log-sum-exp of the attention scores for each rank's keys, and only private functions of torch return it.
`esmshard.batch` explains the letters of tensor names; R is the number of this rank's tokens.
"""

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from esmshard.batch import TokenBatch
from esmshard.model.attention import PackedAttention, Parts, SelfAttention, attend_biased_parts, kernel_name
from esmshard.parallel.tensor_parallel import Rows, divide_tokens, trunk_of

DIMENSION = "context"
"""The name of the dimension of the device mesh over which the tokens of a pack are divided."""


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Change a model in place, so that the ranks of the one-dimensional `mesh` divide the tokens of each pack.

    The model must contain a `Trunk`. Call this function before torch's `fully_shard`.
    """
    rows = _ContextRows(mesh)
    divide_tokens(model, rows)
    for block in trunk_of(model).layers:
        attention = block.get_submodule("self_attn")
        assert isinstance(attention, SelfAttention)
        attention.core = _ContextAttention(rows)


class _ContextRows(Rows):
    def positions(self, batch: TokenBatch) -> TokenBatch:
        """Return a copy of the batch with the positions of this rank's tokens only."""
        return replace(batch, position_T=batch.position_T[self.place])


class _ContextAttention(PackedAttention):
    """Computes attention from the queries of this rank's tokens to the keys and values of all tokens."""

    compiles = False

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows

    def attend(self, q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Compute attention from this rank's R tokens to all T tokens. The arguments contain only the R tokens."""
        kv_TE = self.rows.all(torch.cat((k_THK, v_THK), 1).flatten(1))
        k_all_THK, v_all_THK = kv_TE.view(self.rows.tokens, 2, *k_THK.shape[1:]).unbind(1)
        return attend_from(q_THK, k_all_THK, v_all_THK, batch, self.rows.place.start)

    def whole(self, q_THK: torch.Tensor) -> torch.Tensor:
        """Return the queries or keys [T, H, K] of all tokens, gathered from all ranks."""
        return self.rows.all(q_THK.flatten(1)).view(self.rows.tokens, *q_THK.shape[1:])


def attend_from(
    q_RHK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch, first: int
) -> torch.Tensor:
    """Return the attention output [R, H, K] of R consecutive tokens, which begin at the index `first` of the pack."""
    last = first + len(q_RHK)
    parts = [
        (max(start, first) - first, min(end, last) - first, start, end)
        for start, end in itertools.pairwise(batch.bounds)
        if max(start, first) < min(end, last)
    ]
    if not parts:  # A rank without tokens must still take part in the collectives of keys and values, backward too.
        bias = () if batch.distance_bias is None else (batch.distance_bias.bias_EH,)
        return q_RHK + torch.stack([x[:0].sum() for x in (k_THK, v_THK, *bias)]).sum()
    if batch.distance_bias is not None:
        return attend_biased_parts(q_RHK, k_THK, v_THK, batch.position_T, batch.distance_bias, parts)
    if kernel_name(q_RHK.device, q_RHK.dtype) == "varlen":
        return _attend_varlen(q_RHK, k_THK, v_THK, parts)  # type: ignore[no-any-return]
    return _attend_parts(q_RHK, k_THK, v_THK, parts)  # type: ignore[no-any-return]


def _attend_varlen(q_RHK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, parts: Parts) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    keys = slice(parts[0][2], parts[-1][3])
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(part[k + 1] - part[k] for part in parts)], dtype=torch.int32).to(
            q_RHK.device, non_blocking=True
        )
        for k in (0, 2)
    )
    longest_q, longest_k = (max(part[k + 1] - part[k] for part in parts) for k in (0, 2))
    out_RHK = varlen_attn(q_RHK, k_THK[keys], v_THK[keys], cu_q, cu_k, longest_q, longest_k)
    assert isinstance(out_RHK, torch.Tensor)
    return out_RHK


def _attend_parts(q_RHK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, parts: Parts) -> torch.Tensor:
    out = []
    for q_start, q_end, start, end in parts:
        q_1HRK, k_1HTK, v_1HTK = (
            x.transpose(0, 1).unsqueeze(0) for x in (q_RHK[q_start:q_end], k_THK[start:end], v_THK[start:end])
        )
        out.append(F.scaled_dot_product_attention(q_1HRK, k_1HTK, v_1HTK).squeeze(0).transpose(0, 1))
    return torch.cat(out) if len(out) > 1 else out[0]
