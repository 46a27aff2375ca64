"""Tensor parallelism: a few neighbouring ranks compute each layer together (Shoeybi et al. 2019, arXiv:1909.08053).

Each rank computes some attention heads, and some columns of the feed-forward part, for all tokens of the pack (a batch
without padding). For norms and the residual stream, each rank computes only its own tokens (Korthikanti et al. 2022,
arXiv:2205.05198). So a layer communicates four times in the forward pass:

    norm of own tokens -> gather tokens -> own heads    -> sum over ranks, scatter tokens -> add to own tokens
    norm of own tokens -> gather tokens -> own columns  -> sum over ranks, scatter tokens -> add to own tokens

In the backward pass, each gather becomes a sum and scatter, and each sum and scatter becomes a gather. Every rank
computes embedding, last norm, LM head and task head for all tokens, so tasks do not depend on tensor parallelism. FSDP
shards these modules over all ranks, and sums their gradients. Each rank has the gradient of the embedding for its own
tokens, and 1/N of the gradients of the outputs (N ranks divide a layer). `context_parallel` divides tokens in
the same way.

Parameters of layers are DTensors over the mesh dimension `tensor`, and FSDP shards them over the other dimensions. So
names, shapes and checkpoints are the same as in one process. A layer computes with this rank's parts as plain tensors.

torch's function `parallelize_module` (torch 2.13) needs equal numbers of tokens on all ranks, but packs have any number
of tokens. Here `DTensor.redistribute` communicates and computes the gradients. `esmshard.batch` explains the letters
of tensor names; R is the number of this rank's tokens.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from esmshard.batch import TokenBatch
from esmshard.model import attention
from esmshard.model.attention import PackedAttention, SelfAttention, TrunkBlock
from esmshard.model.config import ModelConfig
from esmshard.model.lora import LoraLinear
from esmshard.model.trunk import Pack, Trunk

Forward = Callable[..., Any]
Wrapper = Callable[[Forward], Forward]
"""A function that gets the `forward` method of a module, and returns a changed `forward`."""
DIMENSION = "tensor"
"""The name of the last dimension of the device mesh. The ranks along it divide each layer, and are neighbours."""
SMALL = 2**20
"""The maximum number of values of a small parameter. One collective sums the gradients of all small ones of a layer."""
NORMS = ("self_attn_layer_norm", "final_layer_norm")
"""The norms of a block, which each rank applies to its own tokens."""


class Rows(Pack):
    """Exchanges the tokens of a pack among the ranks of the one-dimensional `mesh`, which compute layers together.

    The backward passes of `all`, `all_heads` and `sum_of_parts` sum gradients over the ranks. This is right: either
    each rank uses the result only for its own heads, columns or tokens, or all N ranks compute the same outputs, and
    each has 1/N of their gradients (`divide_tokens`).
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.tokens = 0
        """The number of tokens of the current pack on all ranks together (T)."""

    @property
    def place(self) -> slice:
        """The indices of this rank's tokens in the pack. The ranks divide the tokens like `torch.chunk`."""
        each = -(-self.tokens // self.size)
        return slice(min(each * self.rank, self.tokens), min(each * (self.rank + 1), self.tokens))

    def own(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Select the rows [R, D] of this rank's tokens in a tensor [T, D] that every rank has computed."""
        self.tokens = len(x_TD)
        return x_TD[self.place].clone()  # a view would keep the tokens of all ranks in memory

    def all(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Gather the rows [R, D] of each rank's tokens, and return the rows [T, D] of all tokens."""
        shape = torch.Size((self.tokens, x_RD.shape[1]))
        whole = DTensor.from_local(x_RD, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=(x_RD.shape[1], 1))
        return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def summed(self, y_TD: torch.Tensor) -> torch.Tensor:
        """Sum the tensors [T, D] of all ranks, and return the sum's rows [R, D] for this rank's tokens."""
        return self._redistributed(y_TD, Partial(), Shard(0)).to_local()

    def sum_of_parts(self, y_T1: torch.Tensor) -> torch.Tensor:
        """Sum the tensors [T, 1] of all ranks, and return the sum on every rank."""
        return self._redistributed(y_T1, Partial(), Replicate()).to_local(grad_placements=[Partial()])

    def all_heads(self, q_THK: torch.Tensor) -> torch.Tensor:
        """Gather queries or keys of this rank's heads, and return them for all heads, [T, H, K]."""
        return self._redistributed(q_THK, Shard(1), Replicate()).to_local(grad_placements=[Partial()])

    def _redistributed(self, x: torch.Tensor, before: Placement, after: Placement) -> DTensor:
        return DTensor.from_local(x, self.mesh, [before], run_check=False).redistribute(placements=[after])


def trunk_of(model: nn.Module) -> Trunk:
    """Return the `Trunk` (the language model) in a model. The model may itself be a `Trunk`."""
    return next(module for module in model.modules() if isinstance(module, Trunk))


def divide_tokens(model: nn.Module, rows: Rows) -> None:
    """Change a model in place, so that its blocks compute only this rank's tokens."""
    trunk_of(model).pack = rows

    def divide_gradients(_module: nn.Module, _given: object, outputs: Any) -> None:
        """Divide the gradients of the outputs by N, because each of N ranks computes all outputs."""
        for output in outputs if isinstance(outputs, list) else ():
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient / rows.size)

    model.register_forward_hook(divide_gradients)


def split(model: nn.Module, mesh: DeviceMesh) -> list[Wrapper]:
    """Divide the layers of a model over the ranks of `mesh`, in place. Call this function before torch's `fully_shard`.

    The model must contain a `Trunk` whose sizes have passed `layout.check_tensor`. Every parameter of a layer becomes a
    DTensor over `mesh`. The ranks divide the matrices in `ModelConfig.matrices`.

    Returns:
        A function for each layer, which changes the layer's `forward` so that it computes with this rank's parts.
    """
    trunk, rows = trunk_of(model), Rows(mesh)
    divide_tokens(model, rows)
    return [_split_block(block, trunk.config, rows) for block in trunk.layers]


def computing_with(
    module: nn.Module, tensors_of: Callable[[dict[str, nn.Parameter]], Mapping[str, torch.Tensor]], forward: Forward
) -> Forward:
    """Return a function like the module's `forward` that computes with the tensors of `tensors_of` as parameters.

    `tensors_of` gets the parameters by name, and returns tensors by name. Parameters that it omits are not replaced.
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
        _place(block.get_submodule(name), rows.mesh, Replicate(), None)
    assert isinstance(block, TrunkBlock)
    for name in block.reads:
        block.get_submodule(name).register_forward_hook(lambda _module, _given, x_RD: rows.all(x_RD))
    attention = block.get_submodule("self_attn")
    assert isinstance(attention, SelfAttention)
    attention.core = _TensorAttention(rows)
    for name in ("q_norm", "k_norm"):
        if (full_norm := getattr(attention, name)) is not None:
            norm = DividedNorm(full_norm, rows)
            _place(norm, rows.mesh, Shard(0), None)
            setattr(attention, name, norm)
    return partial(computing_with, block, partial(_local_parts, summed if rows.rank else ()))


def _place(module: nn.Module, mesh: DeviceMesh, weight: Placement, bias: Placement | None) -> None:
    """Replace the weight and the bias of a module by DTensors. If `bias` is None, each rank has the complete bias."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = weight if name == "weight" else bias or Replicate()
        whole = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _local_parts(zero: Collection[str], parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return this rank's parts of a layer's parameters as plain tensors, by name.

    If a parameter is not divided, each rank computes a part of its gradient, and the backward pass sums the parts. The
    biases named in `zero` become zero. These are biases that a sum over ranks must contain only once, so `zero` is
    empty on the first of the ranks that divide the layer.
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
    """Return the values of `x`. In the backward pass, the gradient becomes the sum of all ranks' gradients."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


class _TensorAttention(PackedAttention):
    """Computes the attention of this rank's heads, for all tokens."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows
        self.whole = rows.all_heads  # type: ignore[method-assign]

    def attend(self, q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        if (bias := batch.distance_bias) is None:
            return super().attend(q_THK, k_THK, v_THK, batch)
        own = bias._replace(bias_EH=bias.bias_EH.chunk(self.rows.size, 1)[self.rows.rank])
        return attention.attend_biased(q_THK, k_THK, v_THK, batch, own)  # type: ignore[no-any-return]


class DividedNorm(nn.LayerNorm):
    """Computes a LayerNorm over the model's width D, when each rank has only the columns of its attention heads.

    For each token, the ranks exchange a sum and a sum of squares. A gather would exchange all D numbers.
    """

    def __init__(self, norm: nn.LayerNorm, rows: Rows) -> None:
        super().__init__(norm.normalized_shape, norm.eps, bias=False, device="meta")
        self.weight, self.rows = norm.weight, rows

    def forward(self, y_TD: torch.Tensor) -> torch.Tensor:
        """Return the normalised columns [T, D / N] in fp32 or fp64."""
        with torch.autocast(y_TD.device.type, enabled=False):
            width = y_TD.shape[1] * self.rows.size
            dtype = torch.promote_types(y_TD.dtype, torch.float32)
            y_TD, weight_D = y_TD.to(dtype), self.weight.to(dtype)
            centred_TD = y_TD - self.rows.sum_of_parts(y_TD.sum(1, keepdim=True)) / width
            variance_T1 = self.rows.sum_of_parts(centred_TD.square().sum(1, keepdim=True)) / width
            return centred_TD * torch.rsqrt(variance_T1 + self.eps) * weight_D
