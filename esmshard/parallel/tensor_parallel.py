"""Tensor parallelism: a few neighbouring ranks compute each layer together (Shoeybi et al. 2019, arXiv:1909.08053).

Each rank of a group holds the projections of some attention heads and some columns of the feed-forward part. Between
these matrices, in norms and in the residual stream, each rank has some tokens of the pack and all D numbers of them
(Korthikanti et al. 2022, arXiv:2205.05198). A layer therefore communicates four times in the forward pass:

    norm of own tokens -> gather tokens -> own heads    -> sum over ranks, scatter tokens -> add to own tokens
    norm of own tokens -> gather tokens -> own columns  -> sum over ranks, scatter tokens -> add to own tokens

In the backward pass each gather becomes a sum and scatter, and each sum and scatter becomes a gather. Every rank
computes embedding, last norm, LM head and task head for all tokens, so tasks need not know of tensor parallelism. FSDP
divides the parameters of these parts over the ranks of the group too, and adds up their gradients: each rank has the
gradient of the embedding for its own tokens, and counts 1/N of the gradients of the outputs. `context_parallel` divides
tokens in the same way.

Parameters of layers are DTensors over the dimension `tensor` of the mesh before FSDP divides them over the other
dimensions, so names, shapes and checkpoints are equal to those of one process. A layer computes with the parts of this
rank as plain tensors (`torch.func.functional_call`).

torch's styles for `parallelize_module` make DTensors of activations with `DTensor.from_local`, which needs equally long
parts. But packs have any number of tokens: five tokens on two ranks end in a size mismatch (torch 2.13,
`SequenceParallel`, `ColwiseParallel` and `RowwiseParallel` over the tokens). Here `DTensor.redistribute` makes all
communication and its gradients. `esmshard.batch` explains the letters of tensor names; R is the number of this rank's
tokens.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from esmshard.model.attention import PackedAttention, SelfAttention
from esmshard.model.config import ModelConfig
from esmshard.model.lora import LoraLinear
from esmshard.model.trunk import Pack, Trunk

Forward = Callable[..., Any]
Wrapper = Callable[[Forward], Forward]
"""The type of a function that takes a `forward` and returns another one."""
DIMENSION = "tensor"
"""The name of the last dimension of the mesh: ranks of a group are neighbours."""
SMALL = 2**20
"""The largest parameter, in numbers, whose gradient is joined with others before the sum over ranks."""
NORMS = ("self_attn_layer_norm", "final_layer_norm")
"""The norms of a block before matrices that are divided by rows."""


class Rows(Pack):
    """The collectives over the tokens of a pack, among the ranks of one group.

    The gradients of `all`, `all_heads` and `sum_of_parts` are sums over the ranks: each rank computes a part of the
    later results, or counts 1/N of a result that all ranks compute.

    Args:
        mesh: the mesh of the group, of one dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.tokens = 0
        """T, the number of tokens of the current pack."""

    @property
    def place(self) -> slice:
        """The places of this rank's tokens in the pack. Ranks divide the tokens as `torch.chunk` does."""
        each = -(-self.tokens // self.size)
        return slice(min(each * self.rank, self.tokens), min(each * (self.rank + 1), self.tokens))

    def own(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [R, D] of a tensor [T, D] that every rank has computed."""
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


def trunk_of(model: nn.Module) -> Trunk:
    """Return the trunk of a model, which may be the model itself."""
    return next(module for module in model.modules() if isinstance(module, Trunk))


def divide_tokens(model: nn.Module, rows: Rows) -> None:
    """Give the blocks of a model this rank's tokens, and everything around the blocks all tokens, in place."""
    trunk_of(model).pack = rows

    def count(_module: nn.Module, _given: object, outputs: Any) -> None:
        """Count 1/N of the gradients of the outputs, because each of N ranks computes all of them."""
        for output in outputs if isinstance(outputs, list) else ():
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient / rows.size)

    model.register_forward_hook(count)


def split(model: nn.Module, mesh: DeviceMesh) -> list[Wrapper]:
    """Divide the layers of a model over the ranks of `mesh`, in place.

    Every parameter of a layer becomes a DTensor over `mesh`: the matrices `ModelConfig.matrices` in parts, all others
    whole. Parameters outside the layers do not change.

    Args:
        model: a trunk or a module that holds one, best on the meta device. `layout.check_tensor` has passed.
        mesh: the dimension `tensor` of the mesh.

    Returns:
        For each layer a function that wraps its `forward`, so that the layer computes with this rank's parts of its
        parameters. The next step is `fully_shard`.
    """
    trunk, rows = trunk_of(model), Rows(mesh)
    divide_tokens(model, rows)
    return [_split_block(block, trunk.config, rows) for block in trunk.layers]


def computing_with(
    module: nn.Module, tensors_of: Callable[[dict[str, nn.Parameter]], Mapping[str, torch.Tensor]], forward: Forward
) -> Forward:
    """Return `forward` of a module, computed with other tensors in place of parameters.

    `tensors_of` returns these tensors by name, from the parameters by name. Parameters without a tensor stay.
    """
    callee = nn.Module()  # `functional_call` calls a module, and `module` itself would call this function again
    callee.module, callee.forward = module, forward  # type: ignore[method-assign]

    def run(*args: Any, **options: Any) -> Any:
        tensors = tensors_of(dict(module.named_parameters()))
        return functional_call(callee, {f"module.{name}": tensor for name, tensor in tensors.items()}, args, options)

    return run


def _split_block(block: nn.Module, config: ModelConfig, rows: Rows) -> Wrapper:
    summed: list[str] = []
    for matrix in config.matrices:
        linear = block.get_submodule(matrix.path)
        by_columns = matrix.target in ("out", "fc2")
        _place(linear, rows.mesh, Shard(1 if by_columns else 0), None if by_columns else Shard(0))
        if isinstance(linear, LoraLinear):
            _place(linear.lora_A, rows.mesh, Shard(1) if by_columns else Replicate(), None)
            _place(linear.lora_B, rows.mesh, Replicate() if by_columns else Shard(0), None)
        if by_columns:
            summed.append(f"{matrix.path}.bias")
            linear.register_forward_hook(lambda _module, _given, y_TD: rows.summed(y_TD))
    for name in NORMS:
        norm = block.get_submodule(name)
        _place(norm, rows.mesh, Replicate(), None)
        norm.register_forward_hook(lambda _module, _given, x_RD: rows.all(x_RD))
    attention = block.get_submodule("self_attn")
    assert isinstance(attention, SelfAttention)
    attention.core = _AttentionOfOwnHeads(rows)
    for name in ("q_norm", "k_norm"):
        if (full_norm := getattr(attention, name)) is not None:
            norm = NormOfWidth(full_norm, rows)
            _place(norm, rows.mesh, Shard(0), None)
            setattr(attention, name, norm)
    return partial(computing_with, block, partial(_own_parts, summed if rows.rank else ()))


def _place(module: nn.Module, mesh: DeviceMesh, weight: Placement, bias: Placement | None) -> None:
    """Replace the weight and the bias of one module by DTensors. A bias without a placement stays whole."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = weight if name == "weight" else bias or Replicate()
        whole = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _own_parts(zero: Collection[str], parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return this rank's parts of the parameters of a layer as plain tensors, by name.

    If a parameter is whole on each rank, each rank computes a part of its gradient, and the parts are summed. A layer
    has six such norms and biases, and six matrices of a LoRA. Their gradients are joined for one collective.

    Args:
        zero: the names of biases that are zero on this rank. Only the first rank adds the bias of a summed output.
        parameters: the parameters by name.
    """
    divided = {name: whole for name, whole in parameters.items() if isinstance(whole, DTensor)}
    parts = {name: parameter.to_local() for name, parameter in divided.items()}
    whole = [name for name, p in divided.items() if p.requires_grad and not p.placements[0].is_shard()]
    if whole and torch.is_grad_enabled():
        mesh = divided[whole[0]].device_mesh
        small = [name for name in whole if parts[name].numel() <= SMALL]
        parts |= {name: _gradient_summed(parts[name], mesh) for name in whole if name not in small}
        if small:
            joined = _gradient_summed(torch.cat([parts[name].flatten() for name in small]), mesh)
            pieces = torch.split(joined, [parts[name].numel() for name in small])  # type: ignore[no-untyped-call]
            parts |= {name: piece.view(parts[name].shape) for name, piece in zip(small, pieces, strict=True)}
    return {name: part * 0.0 if name in zero else part for name, part in parts.items()}


def _gradient_summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the same numbers. Their gradient is the sum of the ranks' gradients."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


class _AttentionOfOwnHeads(PackedAttention):
    """Attention of this rank's heads."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.whole = rows.all_heads  # type: ignore[method-assign]


class NormOfWidth(nn.LayerNorm):
    """LayerNorm over the width of the model, where each rank has the numbers of its own heads.

    The ranks sum the mean and then the mean square: two numbers for each token. Gathering the vectors would send D.
    """

    def __init__(self, norm: nn.LayerNorm, rows: Rows) -> None:
        super().__init__(norm.normalized_shape, norm.eps, bias=False, device="meta")
        self.weight, self.rows = norm.weight, rows

    def forward(self, y_TD: torch.Tensor) -> torch.Tensor:
        """Map y [T, D / N] to the same shape, in fp32 at least."""
        with torch.autocast(y_TD.device.type, enabled=False):
            width = y_TD.shape[1] * self.rows.size
            dtype = torch.promote_types(y_TD.dtype, torch.float32)
            y_TD, weight_D = y_TD.to(dtype), self.weight.to(dtype)
            centred_TD = y_TD - self.rows.sum_of_parts(y_TD.sum(1, keepdim=True)) / width
            variance_T1 = self.rows.sum_of_parts(centred_TD.square().sum(1, keepdim=True)) / width
            return centred_TD * torch.rsqrt(variance_T1 + self.eps) * weight_D
