"""Tensor parallelism: a few neighbouring ranks compute each layer together (Shoeybi et al. 2019, arXiv:1909.08053).

Each rank of a group holds the projections of some attention heads and some columns of the feed-forward part. Between
these matrices, in norms and in the residual stream, each rank has some tokens of the pack and all D numbers of them
(Korthikanti et al. 2022, arXiv:2205.05198). A layer therefore communicates four times in the forward pass:

    norm of own tokens -> gather tokens -> own heads    -> sum over ranks, scatter tokens -> add to own tokens
    norm of own tokens -> gather tokens -> own columns  -> sum over ranks, scatter tokens -> add to own tokens

and in the backward pass each gather becomes a sum and scatter, and the other way round. `shared_tokens` says what
happens before and after the layers.

Parameters are DTensors over the dimension `tensor` of the mesh before FSDP divides them over the other dimensions, so
that names, shapes and checkpoints are those of one process. While a layer computes, the parts of this rank take their
place as plain tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from esmshard.model.attention import PackedAttention, SelfAttention, TrunkBlock
from esmshard.model.config import ModelConfig
from esmshard.model.lora import LoraLinear
from esmshard.parallel.shared_tokens import Rows, divide_tokens, trunk_of

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""The type of a function that takes a `forward` and returns another one."""
DIMENSION = "tensor"
"""The name of this dimension of the mesh. It is the last one: ranks of a group are neighbours."""
SMALL = 2**20
"""Numbers of a whole parameter whose gradient is summed over the ranks together with others. Joining copies it."""
NORMS = ("self_attn_layer_norm", "final_layer_norm")
"""The norms of a block whose output goes into matrices that are divided by rows."""


def split(model: nn.Module, mesh: DeviceMesh) -> list[Wrapper]:
    """Divide the layers of a model over the ranks of `mesh`, in place.

    Every parameter becomes a DTensor over `mesh`: those of `ModelConfig.matrices` in parts, all others whole.

    Args:
        model: a trunk or a module that holds one, best on the meta device. `layout.check_tensor` has passed.
        mesh: the dimension `tensor` of the mesh.

    Returns:
        For each layer a function that wraps its `forward`, so that the layer has this rank's parts of its parameters
        while it runs. Whoever wraps `forward` otherwise, too, chooses what is inside. The next step is `fully_shard`.
    """
    trunk, rows = trunk_of(model), Rows(mesh)
    divide_tokens(model, rows)
    wrappers = [_split_block(block, trunk.config, rows) for block in trunk.layers]
    inside = {id(parameter) for parameter in trunk.layers.parameters()}
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():  # A tied parameter has several owners, and stays one.
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in inside:
                done.setdefault(id(parameter), _placed(parameter, mesh, Replicate()))
                setattr(module, name, done[id(parameter)])
    in_layers = set(trunk.layers.modules())
    outside = [module for module in model.modules() if module not in in_layers]
    model.forward = _with_own_parts(outside, (), model.forward)
    for block in trunk.layers:  # Activation checkpointing calls a layer again when `model.forward` has ended.
        assert isinstance(block, TrunkBlock)
        block.add_between = _with_own_parts(outside, (), block.add_between)  # type: ignore[method-assign]
    return wrappers


def _split_block(block: nn.Module, config: ModelConfig, rows: Rows) -> Wrapper:
    summed: list[nn.Module] = []
    for matrix in config.matrices:
        linear = block.get_submodule(matrix.path)
        by_columns = matrix.target in ("out", "fc2")
        _place(linear, rows.mesh, Shard(1 if by_columns else 0), None if by_columns else Shard(0))
        if isinstance(linear, LoraLinear):
            _place(linear.lora_A, rows.mesh, Shard(1) if by_columns else Replicate(), None)
            _place(linear.lora_B, rows.mesh, Replicate() if by_columns else Shard(0), None)
        if by_columns:
            summed.append(linear)
            linear.register_forward_hook(lambda _module, _given, y_TD: rows.summed(y_TD))
    for name in NORMS:
        norm = block.get_submodule(name)
        _place(norm, rows.mesh, Replicate(), None)
        norm.register_forward_hook(lambda _module, _given, x_RD: rows.all(x_RD))
    attention = block.get_submodule("self_attn")
    assert isinstance(attention, SelfAttention)
    attention.core = _OwnHeads(rows)
    for name in ("q_norm", "k_norm"):
        if (full_norm := getattr(attention, name)) is not None:
            norm = NormOfWidth(full_norm, rows)
            _place(norm, rows.mesh, Shard(0), None)
            setattr(attention, name, norm)
    return partial(_with_own_parts, list(block.modules()), summed if rows.rank else ())


def _place(module: nn.Module, mesh: DeviceMesh, weight: Placement, bias: Placement | None) -> None:
    """Replace the weight and the bias of one layer by DTensors. Without a placement of its own a bias stays whole."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, _placed(parameter, mesh, weight if name == "weight" else bias or Replicate()))


def _placed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    whole = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _with_own_parts(
    modules: Sequence[nn.Module], without_bias: Sequence[nn.Module], forward: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the same `forward`, in which the modules hold this rank's parts of their parameters as plain tensors.

    Args:
        modules: the modules, each for its own parameters.
        without_bias: the modules whose biases are zero on this rank. Outputs that are summed over the ranks have the
            bias of the first one.
        forward: the function.
    """

    def run(*args: Any, **options: Any) -> Any:
        with _own_parts(modules, without_bias):
            return forward(*args, **options)

    return run


@contextmanager
def _own_parts(modules: Sequence[nn.Module], without_bias: Sequence[nn.Module]) -> Iterator[None]:
    holders: list[tuple[Any, str, DTensor]] = []
    for module in modules:
        named: list[tuple[str, Any]] = [*module._parameters.items()]
        holders += [(module._parameters, name, whole) for name, whole in named if isinstance(whole, DTensor)]
    try:
        parts = _parts([whole for _, _, whole in holders])
        for holder, name, whole in holders:
            holder[name] = parts[id(whole)]
        for holder in (module._parameters for module in without_bias):
            if (bias := holder["bias"]) is not None:
                holder["bias"] = bias * 0.0  # type: ignore[assignment]
        yield
    finally:
        for holder, name, whole in holders:
            holder[name] = whole


def _parts(parameters: Sequence[DTensor]) -> dict[int, torch.Tensor]:
    """Return this rank's part of each parameter, by the id of the parameter. A tied parameter has one part.

    If a parameter is whole on each rank, each computes a part of its gradient, and the parts are summed. A layer has
    six such norms and biases, and six matrices of a LoRA. They are joined, because each sum takes the time of an empty
    collective.
    """
    parts = {id(parameter): parameter.to_local() for parameter in parameters}
    if not torch.is_grad_enabled():
        return parts
    whole = {id(p): p for p in parameters if p.requires_grad and not p.placements[0].is_shard()}
    small = [p for p in whole.values() if p.numel() <= SMALL]
    parts |= {n: _gradient_summed(parts[n], p.device_mesh) for n, p in whole.items() if p.numel() > SMALL}
    if small:
        joined = _gradient_summed(torch.cat([parts[id(p)].flatten() for p in small]), small[0].device_mesh)
        pieces = torch.split(joined, [p.numel() for p in small])  # type: ignore[no-untyped-call]
        parts |= {id(p): piece.view(p.shape) for p, piece in zip(small, pieces, strict=True)}
    return parts


def _gradient_summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the same numbers, of whose gradient each rank has a part."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


class _OwnHeads(PackedAttention):
    """Attention of this rank's heads."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.whole = rows.all_heads  # type: ignore[method-assign]


class NormOfWidth(nn.LayerNorm):
    """LayerNorm over the width of the model, of which each rank has the numbers of its own heads.

    The mean and then the mean square are summed over the ranks: two numbers for each token, where gathering the
    vectors would send D.
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
