"""Context parallelism: a few neighbouring ranks divide the tokens of each pack, attention included.

All matrices are whole on each rank, and FSDP divides them over all ranks. In a layer each rank computes its own tokens.
Their queries attend to the keys and values of all tokens, which are gathered once a layer; the gradients of keys and
values are summed and scattered. Every rank has all heads, so that the number of ranks need not divide them.

The keys and values of one layer are whole on each rank. A ring, in which they pass from rank to rank (Liu et al. 2023,
arXiv:2310.01889), would divide these as well; it needs the log-sum-exp of each part, which torch's attention returns
from private functions only. `esmshard.batch` explains the letters of tensor names; R is the number of a rank's own
tokens.
"""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from esmshard.batch import TokenBatch
from esmshard.model.attention import OnAttention, SelfAttention, attend_from
from esmshard.model.trunk import Trunk
from esmshard.sharding.shared_tokens import Rows, divide_tokens, trunk_of

DIMENSION = "context"
"""The name of this dimension of the mesh of ranks."""


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the tokens of each pack over the ranks of `mesh`, in place. The next step is `fully_shard`.

    Args:
        model: a trunk or a module that holds one, best on the meta device.
        mesh: the mesh of the group, of one dimension.
    """
    trunk, rows = trunk_of(model), Rows(mesh)
    divide_tokens(model, rows)
    _own_positions(trunk, rows)

    def attend(q_RHK: torch.Tensor, k_RHK: torch.Tensor, v_RHK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        kv_TE = rows.all(torch.cat((k_RHK, v_RHK), 1).flatten(1))
        k_THK, v_THK = kv_TE.view(rows.tokens, 2, *k_RHK.shape[1:]).unbind(1)
        return attend_from(q_RHK, k_THK, v_THK, batch, rows.place.start)

    def handed_out(q_RHK: torch.Tensor) -> torch.Tensor:
        return rows.all(q_RHK.flatten(1)).view(rows.tokens, *q_RHK.shape[1:])

    for block in trunk.layers:
        attention = block.get_submodule("self_attn")
        assert isinstance(attention, SelfAttention)
        attention.attend, attention.handed_out = attend, handed_out


def _own_positions(trunk: Trunk, rows: Rows) -> None:
    """Let blocks see the positions of their own tokens. All else in a batch is that of the pack."""
    run_block = trunk.run_block

    def run(index: int, x_RD: torch.Tensor, batch: TokenBatch, on_attention: OnAttention | None) -> torch.Tensor:
        return run_block(index, x_RD, replace(batch, position_T=batch.position_T[rows.place]), on_attention)

    trunk.run_block = run  # type: ignore[method-assign,assignment]
