"""Tensor parallelism: a few neighbouring ranks compute each layer together (Shoeybi et al. 2019, arXiv:1909.08053).

The ranks of a group divide the attention heads with their projections, and the columns of the feed-forward part. For
norms and the residual stream they divide the tokens of the pack: each rank has all D numbers of its own tokens
(Korthikanti et al. 2022, arXiv:2205.05198). So a layer communicates four times in the forward pass:

    norm of own tokens -> gather tokens -> own heads    -> sum over ranks, scatter tokens -> add to own tokens
    norm of own tokens -> gather tokens -> own columns  -> sum over ranks, scatter tokens -> add to own tokens

In the backward pass, each gather becomes a sum and scatter, and each sum and scatter becomes a gather. Every rank
computes embedding, last norm, LM head and task head for all tokens, so tasks do not depend on tensor parallelism. FSDP
also shards the parameters of these modules over the group, and sums their gradients: each rank has the gradient of the
embedding for its own tokens, and 1/N of the gradients of the outputs. `context_parallel` divides tokens the same way.

Parameters of layers are DTensors over the mesh dimension `tensor`. FSDP then shards them over the other dimensions. So
names, shapes and checkpoints are the same as in one process. A layer computes with this rank's parts as plain tensors
(`torch.func.functional_call`).

torch's own styles for `parallelize_module` make DTensors of activations with `DTensor.from_local`, which needs equally
long parts. But packs have any number of tokens, and five tokens on two ranks raise an error (torch 2.13,
`SequenceParallel`, `ColwiseParallel` and `RowwiseParallel` over the tokens). Here `DTensor.redistribute` does all
communication and computes its gradients. `esmshard.batch` explains the letters of tensor names; R is the number of this
rank's tokens.
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
"""The type of a function that takes a `forward` and returns a changed `forward`."""
DIMENSION = "tensor"
"""The name of the mesh dimension over which layers are divided. It is the last, so ranks of a group are neighbours."""
SMALL = 2**20
"""Gradients of parameters up to this size, in numbers, are joined to one tensor before the sum over ranks."""
NORMS = ("self_attn_layer_norm", "final_layer_norm")
"""The norms of a block after which the tokens of all ranks are gathered."""


class Rows(Pack):
    """The collectives over the tokens of a pack, among the ranks of one group.

    The gradients of `all`, `all_heads` and `sum_of_parts` are summed over the ranks. This is right, because each rank
    computes only a part of the later results, or has 1/N of the gradient of a result that all N ranks compute.

    Args:
        mesh: a one-dimensional mesh of the ranks of the group.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.tokens = 0
        """The number T of tokens of the current pack."""

    @property
    def place(self) -> slice:
        """The indices of this rank's tokens in the pack. Ranks divide the tokens like `torch.chunk`."""
        each = -(-self.tokens // self.size)
        return slice(min(each * self.rank, self.tokens), min(each * (self.rank + 1), self.tokens))

    def own(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the rows [R, D] of this rank's tokens from a tensor [T, D] that every rank has computed."""
        self.tokens = len(x_TD)
        return x_TD[self.place].clone()  # a view would keep the tokens of all ranks in memory

    def all(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all ranks' tokens, [T, D]."""
        shape = torch.Size((self.tokens, x_RD.shape[1]))
        whole = DTensor.from_local(x_RD, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=(x_RD.shape[1], 1))
        return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def summed(self, y_TD: torch.Tensor) -> torch.Tensor:
        """Sum the tensors [T, D] of all ranks, and return the rows [R, D] of this rank's tokens."""
        return self._changed(y_TD, Partial(), Shard(0)).to_local()

    def sum_of_parts(self, y_T1: torch.Tensor) -> torch.Tensor:
        """Sum the tensors of all ranks, and return the sum on every rank."""
        return self._changed(y_T1, Partial(), Replicate()).to_local(grad_placements=[Partial()])

    def all_heads(self, q_THK: torch.Tensor) -> torch.Tensor:
        """Gather the queries or keys of all heads, [T, H, K], from the ranks' own heads."""
        return self._changed(q_THK, Shard(1), Replicate()).to_local(grad_placements=[Partial()])

    def _changed(self, x: torch.Tensor, before: Placement, after: Placement) -> DTensor:
        return DTensor.from_local(x, self.mesh, [before], run_check=False).redistribute(placements=[after])


def trunk_of(model: nn.Module) -> Trunk:
    """Return the trunk in a model. The model may itself be a trunk."""
    return next(module for module in model.modules() if isinstance(module, Trunk))


def divide_tokens(model: nn.Module, rows: Rows) -> None:
    """Change a model in place, so that blocks compute this rank's tokens, and all other modules compute all tokens."""
    trunk_of(model).pack = rows

    def count(_module: nn.Module, _given: object, outputs: Any) -> None:
        """Divide the gradients of the outputs by N, because each of N ranks computes all outputs."""
        for output in outputs if isinstance(outputs, list) else ():
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient / rows.size)

    model.register_forward_hook(count)


def split(model: nn.Module, mesh: DeviceMesh) -> list[Wrapper]:
    """Divide the layers of a model over the ranks of `mesh`, in place. The next step is `fully_shard`.

    Every parameter of a layer becomes a DTensor over `mesh`. Matrices in `ModelConfig.matrices` are divided, and most
    other parameters are whole on each rank. Parameters outside the layers do not change.

    Args:
        model: a trunk or a module that contains a trunk, preferably on the meta device. Call `layout.check_tensor`
            first.
        mesh: the dimension `tensor` of the mesh.

    Returns:
        For each layer, a function that wraps its `forward`. The layer then computes with this rank's parts.
    """
    trunk, rows = trunk_of(model), Rows(mesh)
    divide_tokens(model, rows)
    return [_split_block(block, trunk.config, rows) for block in trunk.layers]


def computing_with(
    module: nn.Module, tensors_of: Callable[[dict[str, nn.Parameter]], Mapping[str, torch.Tensor]], forward: Forward
) -> Forward:
    """Return a function like `forward` of a module that computes with other tensors instead of the parameters.

    `tensors_of` gets the parameters by name and returns these tensors by name. Parameters that it omits are used as
    they are.
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
    """Replace the weight and the bias of one module by DTensors. With `bias` None, the bias is whole on each rank."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = weight if name == "weight" else bias or Replicate()
        whole = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _own_parts(zero: Collection[str], parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return this rank's parts of the parameters of a layer as plain tensors, by name.

    If a parameter is whole on each rank, each rank computes a part of its gradient, and the parts are summed. A layer
    has six such norms and biases, and six such matrices of LoRA. One collective sums all their gradients.

    Args:
        zero: the names of biases that this rank sets to zero, because only the first rank adds them to a sum.
        parameters: the parameters of the layer, by name.
    """
    tensors = {name: parameter for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
    parts = {name: tensor.to_local() for name, tensor in tensors.items()}
    whole = [name for name, p in tensors.items() if p.requires_grad and not p.placements[0].is_shard()]
    if whole and torch.is_grad_enabled():
        mesh = tensors[whole[0]].device_mesh
        small = [name for name in whole if parts[name].numel() <= SMALL]
        parts |= {name: _gradient_summed(parts[name], mesh) for name in whole if name not in small}
        if small:
            joined = _gradient_summed(torch.cat([parts[name].flatten() for name in small]), mesh)
            pieces = torch.split(joined, [parts[name].numel() for name in small])  # type: ignore[no-untyped-call]
            parts |= {name: piece.view(parts[name].shape) for name, piece in zip(small, pieces, strict=True)}
    return {name: part * 0.0 if name in zero else part for name, part in parts.items()}


def _gradient_summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return `x`. In the backward pass, the gradient becomes the sum of all ranks' gradients."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


class _AttentionOfOwnHeads(PackedAttention):
    """Attention of this rank's heads."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.whole = rows.all_heads  # type: ignore[method-assign]


class NormOfWidth(nn.LayerNorm):
    """LayerNorm over the width of the model, of which each rank has only the part of its own heads.

    The ranks exchange two numbers for each token: a sum, and then a sum of squares. Gathering the vectors would send D.
    """

    def __init__(self, norm: nn.LayerNorm, rows: Rows) -> None:
        super().__init__(norm.normalized_shape, norm.eps, bias=False, device="meta")
        self.weight, self.rows = norm.weight, rows

    def forward(self, y_TD: torch.Tensor) -> torch.Tensor:
        """Map y [T, D / N] to the same shape, in fp32 or fp64."""
        with torch.autocast(y_TD.device.type, enabled=False):
            width = y_TD.shape[1] * self.rows.size
            dtype = torch.promote_types(y_TD.dtype, torch.float32)
            y_TD, weight_D = y_TD.to(dtype), self.weight.to(dtype)
            centred_TD = y_TD - self.rows.sum_of_parts(y_TD.sum(1, keepdim=True)) / width
            variance_T1 = self.rows.sum_of_parts(centred_TD.square().sum(1, keepdim=True)) / width
            return centred_TD * torch.rsqrt(variance_T1 + self.eps) * weight_D
