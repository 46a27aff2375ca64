"""Tensor parallelism: a few neighbouring ranks compute each layer together (Shoeybi et al. 2019, arXiv:1909.08053).

Each rank of a group holds the projections of some attention heads and some columns of the feed-forward part. Between
these matrices, in norms and in the residual stream, each rank has some tokens of the pack and all D numbers of them
(Korthikanti et al. 2022, arXiv:2205.05198). A layer therefore communicates four times in the forward pass:

    norm of own tokens -> gather tokens -> own heads    -> sum over ranks, scatter tokens -> add to own tokens
    norm of own tokens -> gather tokens -> own columns  -> sum over ranks, scatter tokens -> add to own tokens

and in the backward pass each gather becomes a sum and scatter, and the other way round. Embedding, last norm, LM head
and task head are computed by every rank for all tokens, so that no task has to know of this.

Parameters are DTensors over the dimension `tensor` of the mesh before FSDP divides them over the other dimensions, so
that names, shapes and checkpoints are those of one process. While a layer computes, the parts of this rank take their
place as plain tensors: attention joins three matrices, rotates in place and calls kernels that know no DTensor. This is
also why the styles of torch's `parallelize_module`, which act on the calls of linear layers, are not used. All
communication and its gradients are torch's `DTensor.redistribute`. `esmshard.batch` explains the letters of tensor
names; R is the number of a rank's own tokens, H and F are those of a rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from esmshard.batch import TokenBatch
from esmshard.model.attention import Between, OnAttention, SelfAttention, TrunkBlock
from esmshard.model.config import ModelConfig
from esmshard.model.lora import LoraLinear
from esmshard.model.trunk import Trunk

DIMENSION = "tensor"
"""The name of this dimension of the mesh. It is the last one: ranks of a group are neighbours."""
NORMS = ("self_attn_layer_norm", "final_layer_norm")
"""The norms of a block whose output goes into matrices that are divided by rows."""


class Rows:
    """The collectives over the tokens of a pack, among the ranks of one group.

    Args:
        mesh: the mesh of the group.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.tokens = 0
        """T of the pack in the present forward pass."""

    def own(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [R, D] of a tensor [T, D] that all ranks have computed."""
        self.tokens = len(x_TD)
        return self._changed(x_TD, Replicate(), Shard(0)).to_local()

    def all_again(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Return the tokens of all ranks [T, D], for a computation that every rank does alike."""
        return self._gathered(x_RD).to_local(grad_placements=[Replicate()])

    def all_for_parts(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Return the tokens of all ranks [T, D], of which each rank then computes a part of the results."""
        return self._gathered(x_RD).to_local(grad_placements=[Partial()])

    def summed(self, y_TD: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [R, D] of the sum of all ranks' tensors [T, D]."""
        return self._changed(y_TD, Partial(), Shard(0)).to_local()

    def sum_of_parts(self, y_T1: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, with which each rank then computes a part of the results."""
        return self._changed(y_T1, Partial(), Replicate()).to_local(grad_placements=[Partial()])

    def heads(self, q_THK: torch.Tensor) -> torch.Tensor:
        """Return the queries or keys of all heads, for a computation that every rank does alike."""
        return self._changed(q_THK, Shard(1), Replicate()).to_local(grad_placements=[Replicate()])

    def _gathered(self, x_RD: torch.Tensor) -> DTensor:
        shape = torch.Size((self.tokens, *x_RD.shape[1:]))
        whole = DTensor.from_local(
            x_RD, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=(x_RD[0:1].numel(), 1)
        )
        return whole.redistribute(placements=[Replicate()])

    def _changed(self, x: torch.Tensor, before: Placement, after: Placement) -> DTensor:
        return DTensor.from_local(x, self.mesh, [before], run_check=False).redistribute(placements=[after])


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the layers of a model over the ranks of `mesh`, in place. The next step is `fully_shard`.

    Every parameter becomes a DTensor over `mesh`: those of `ModelConfig.matrices` in parts, all others whole.

    Args:
        model: a trunk or a module that holds one, best on the meta device. `layout.check_tensor` has passed.
        mesh: the dimension `tensor` of the mesh.
    """
    trunk = next(module for module in model.modules() if isinstance(module, Trunk))
    rows = Rows(mesh)
    for block in trunk.layers:
        assert isinstance(block, TrunkBlock)
        _split_block(block, trunk.config, rows)
    inside = {id(parameter) for parameter in trunk.layers.parameters()}
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():  # A tied parameter has several owners, and stays one.
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in inside:
                done.setdefault(id(parameter), _placed(parameter, mesh, Replicate()))
                setattr(module, name, done[id(parameter)])
    _give_and_take_rows(trunk, rows)
    outside = [module for name, module in model.named_modules() if not _is_in(module, trunk.layers)]
    model.forward = _with_own_parts(outside, _computed_alike(rows), model.forward)


def _is_in(module: nn.Module, layers: nn.ModuleList) -> bool:
    return any(module is other for other in layers.modules())


def _split_block(block: TrunkBlock, config: ModelConfig, rows: Rows) -> None:
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
        norm.register_forward_hook(lambda _module, _given, x_RD: rows.all_for_parts(x_RD))
    attention = block.get_submodule("self_attn")
    assert isinstance(attention, SelfAttention)
    attention.n_heads //= rows.size
    if attention.reordered is not None:
        attention.reordered //= rows.size
    for full_norm in (attention.q_norm, attention.k_norm):
        if full_norm is not None:
            _place(full_norm, rows.mesh, Shard(0), None)
    attention.norm_of_width = lambda *given: _norm_of_width(rows, *given)
    add_between = block.add_between
    block.add_between = lambda *given: _between(rows, add_between, *given)  # type: ignore[method-assign]
    block.forward = _with_own_parts(list(block.modules()), _computed_in_parts(rows, summed), block.forward)


def _place(module: nn.Module, mesh: DeviceMesh, weight: Placement, bias: Placement | None) -> None:
    """Replace the weight and the bias of one layer by DTensors. Without a placement of its own a bias stays whole."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, _placed(parameter, mesh, weight if name == "weight" else bias or Replicate()))


def _placed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    whole = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


Part = Callable[[nn.Module, str, DTensor], torch.Tensor]
"""Returns this rank's part of a parameter of a module, by its name there."""


def _computed_in_parts(rows: Rows, summed: list[nn.Module]) -> Part:
    """Return the parts of a layer's parameters. Each rank has a part of the gradient of a parameter that is whole.

    Args:
        rows: the collectives of the group.
        summed: the linear layers whose outputs are summed over the ranks. Only the first rank adds their biases.
    """

    def part(module: nn.Module, name: str, parameter: DTensor) -> torch.Tensor:
        if parameter.placements[0].is_shard():
            return parameter.to_local()
        own = parameter.to_local(grad_placements=[Partial()])
        return own * float(rows.rank == 0) if name == "bias" and module in summed else own

    return part


def _computed_alike(rows: Rows) -> Part:
    """Return parameters outside the layers. All ranks compute the same gradients, of which the mean is taken: a GPU
    adds in no fixed order, and copies that differ in the last digit would drift apart.
    """

    def part(module: nn.Module, name: str, parameter: DTensor) -> torch.Tensor:
        own = parameter.to_local(grad_placements=[Partial()])
        if own.requires_grad:
            own.register_hook(lambda gradient: gradient / rows.size)  # type: ignore[no-untyped-call]
        return own

    return part


def _with_own_parts(modules: list[nn.Module], part: Part, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same `forward`, in which the modules hold this rank's parts as plain tensors."""

    def run(*args: Any, **options: Any) -> Any:
        with _own_parts(modules, part):
            return forward(*args, **options)

    return run


@contextmanager
def _own_parts(modules: list[nn.Module], part: Part) -> Iterator[None]:
    wholes: list[tuple[Any, str, DTensor]] = []
    known: dict[int, torch.Tensor] = {}
    try:
        for module in modules:
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    wholes.append((module._parameters, name, parameter))
                    if id(parameter) not in known:  # a tied one has one gradient
                        known[id(parameter)] = part(module, name, parameter)
        for holder, name, whole in wholes:
            holder[name] = known[id(whole)]
        yield
    finally:
        for holder, name, whole in wholes:
            holder[name] = whole


def _give_and_take_rows(trunk: Trunk, rows: Rows) -> None:
    """Let the blocks of a trunk have their own tokens, and callers of the trunk all of them."""
    trunk.before_blocks, trunk.after_blocks = rows.own, rows.all_again  # type: ignore[method-assign,assignment]
    run_block = trunk.run_block

    def run(index: int, x_RD: torch.Tensor, batch: TokenBatch, on_attention: OnAttention | None) -> torch.Tensor:
        def of_all_heads(layer: int, sequence: int, q_THK: torch.Tensor, k_THK: torch.Tensor) -> None:
            assert on_attention is not None
            on_attention(layer, sequence, rows.heads(q_THK), rows.heads(k_THK))

        return run_block(index, x_RD, batch, None if on_attention is None else of_all_heads)

    trunk.run_block = run  # type: ignore[method-assign,assignment]


def _between(
    rows: Rows,
    add_between: Callable[[Between, torch.Tensor, TokenBatch], torch.Tensor],
    between: Between,
    x_RD: torch.Tensor,
    batch: TokenBatch,
) -> torch.Tensor:
    """Compute what a family adds between attention and feed-forward part for all tokens, on every rank."""
    return rows.own(add_between(between, rows.all_again(x_RD), batch))


def _norm_of_width(
    rows: Rows, y_TD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """LayerNorm over the width of the model, of which each rank has the numbers of its own heads.

    The mean and then the mean square are summed over the ranks: two numbers for each token, where gathering the
    vectors would send D.
    """
    with torch.autocast(y_TD.device.type, enabled=False):
        width = y_TD.shape[1] * rows.size
        y_TD, weight_D = y_TD.float(), weight_D.float()
        centred_TD = y_TD - rows.sum_of_parts(y_TD.sum(1, keepdim=True)) / width
        variance_T1 = rows.sum_of_parts(centred_TD.square().sum(1, keepdim=True)) / width
        normed_TD = centred_TD * torch.rsqrt(variance_T1 + eps) * weight_D
        return normed_TD if bias_D is None else normed_TD + bias_D
