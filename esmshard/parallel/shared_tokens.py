"""The division of a pack's tokens over a few neighbouring ranks that compute its layers together.

Each rank of such a group has some tokens of the residual stream. Embedding, last norm, LM head and task head are
computed by every rank for all tokens, alike, so that no task has to know of this. FSDP divides their parameters over
the ranks of the group, too, and adds up their gradients: those of the embedding are of each rank's own tokens, and of
those of the outputs each rank counts 1/N.

`tensor_parallel` and `context_parallel` divide the work within the layers. All communication and its gradients are
torch's `DTensor.redistribute`. `esmshard.batch` explains the letters of tensor names; R is the number of a rank's own
tokens.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from esmshard.model.trunk import Pack, Trunk


class Rows(Pack):
    """The collectives over the tokens of a pack, among the ranks of one group.

    The gradients of `all`, `all_heads` and `sum_of_parts` are sums over the ranks: each rank computes a part of what
    follows, or counts 1/N of what all compute alike.

    Args:
        mesh: the mesh of the group, of one dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.tokens = 0
        """T of the pack in the present forward pass."""

    @property
    def place(self) -> slice:
        """The places of this rank's tokens in the pack. They are divided as `torch.chunk` divides."""
        each = -(-self.tokens // self.size)
        return slice(min(each * self.rank, self.tokens), min(each * (self.rank + 1), self.tokens))

    def own(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [R, D] of a tensor [T, D] that all ranks have computed alike."""
        self.tokens = len(x_TD)
        return x_TD[self.place].clone()  # a view would keep the tokens of all ranks in memory

    def all(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Return the tokens of all ranks [T, D]."""
        shape = torch.Size((self.tokens, x_RD.shape[1]))
        whole = DTensor.from_local(x_RD, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=(x_RD.shape[1], 1))
        return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def summed(self, y_TD: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [R, D] of the sum of all ranks' tensors [T, D]."""
        return self._changed(y_TD, Partial(), Shard(0)).to_local()

    def sum_of_parts(self, y_T1: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors."""
        return self._changed(y_T1, Partial(), Replicate()).to_local(grad_placements=[Partial()])

    def all_heads(self, q_THK: torch.Tensor) -> torch.Tensor:
        """Return the queries or keys of the heads of all ranks."""
        return self._changed(q_THK, Shard(1), Replicate()).to_local(grad_placements=[Partial()])

    def _changed(self, x: torch.Tensor, before: Placement, after: Placement) -> DTensor:
        return DTensor.from_local(x, self.mesh, [before], run_check=False).redistribute(placements=[after])


class _Counted(torch.autograd.Function):
    """The same tensor, of whose gradient a share counts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: int) -> torch.Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] / ctx.share, None


def _counted(x: torch.Tensor, ranks: int) -> torch.Tensor:
    counted: torch.Tensor = _Counted.apply(x, ranks)  # type: ignore[no-untyped-call]
    return counted


def trunk_of(model: nn.Module) -> Trunk:
    """Return the trunk of a model, which may be the model itself."""
    return next(module for module in model.modules() if isinstance(module, Trunk))


def divide_tokens(model: nn.Module, rows: Rows) -> None:
    """Let the blocks of a model have their own tokens, and everything around them all tokens, in place.

    Args:
        model: a trunk or a module that holds one.
        rows: the collectives of the group.
    """
    trunk_of(model).pack = rows

    def count(_module: nn.Module, _given: object, found: Any) -> Any:
        """Of the gradients of the outputs, which all ranks compute alike, each counts 1/N."""
        return [_counted(one, rows.size) for one in found] if isinstance(found, list) else found

    model.register_forward_hook(count)
