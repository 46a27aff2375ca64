"""Lay a model out over the devices of a run: `shard` in place, then `materialise` its weights.

`model` needs `layers`, a ModuleList of blocks, and nothing else. Build it on the meta device: `materialise` then gives
each rank its own slices only. The optimizer is made after all this; one made before would hold the unsharded
parameters, and its steps would change nothing, without an error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from esmshard.parallel.mesh import World


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How, beside the strategy."""

    compute_dtype: torch.dtype = torch.float32
    """Of the arithmetic and of gathered weights. Kept weights, gradient sums and optimizer state are fp32."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the layer again."""
    compile: bool = False
    """Compile each layer in place, for all lengths at once."""


def shard(model: nn.Module, strategy: str, world: World, options: ShardOptions) -> None:
    """In place: activation checkpointing, compilation, precision; over several processes a strategy of STRATEGIES.

    On one device nothing is sharded: FSDP would change no number and cost time. Parameters stay plain tensors. The
    compute dtype is that of autocast, put around the model's own `forward`, so that training and validation share it.
    """
    layers, shared = model.layers, ties(model)
    assert isinstance(layers, nn.ModuleList), "a model to shard promises `layers`"
    if options.activation_checkpointing:
        for layer in layers:  # `forward` and not a wrapping module: names stay, and FSDP's hooks stay outside
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if options.compile:
        for layer in layers:  # in place: a module around it would change the names in checkpoints
            layer.compile(dynamic=True)
    if world.mesh is not None:
        STRATEGIES[strategy](model, world.mesh, options.compute_dtype)
    elif options.compute_dtype != torch.float32:
        model.forward = torch.autocast(world.device.type, options.compute_dtype)(model.forward)
    check_ties(model, shared)


def _fully_shard(model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, *, reshard_layers: bool) -> None:
    """FSDP2: each layer, then the root."""
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    assert isinstance(model.layers, nn.ModuleList)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_layers)
    # One group for all that is not a layer. Embedding and LM head share a tensor, so they must be together; the group
    # is needed at both ends of the pass, so it stays gathered in between.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in _groups(model):
        # Gradients are summed over ranks, not averaged: the loss is divided once, by its global count.
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        module.set_gradient_divide_factor(1.0)


Strategy = Callable[[nn.Module, DeviceMesh, torch.dtype], None]

STRATEGIES: dict[str, Strategy] = {
    "full_shard": partial(_fully_shard, reshard_layers=True),
    "shard_grad_op": partial(_fully_shard, reshard_layers=False),
}
"""Recipe name to function; each shards in place, over two or more processes. ZeRO 3 and ZeRO 2."""


def ties(model: nn.Module) -> list[list[str]]:
    """Names that mean one and the same parameter: for ESM-2 the embedding and the LM head's matrix."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def check_ties(model: nn.Module, expected: list[list[str]]) -> None:
    """Raise `AssertionError` if names that meant one parameter no longer do.

    That is what happens when they fall into two FSDP groups. Not every torch release notices by itself; each name then
    trains a copy of its own, or the last rank's rows are never updated.
    """
    lost = [names for names in expected if names not in ties(model)]
    assert not lost, f"{' and '.join(lost[0])} were shared and are now apart; keep them in one FSDP group"


def _tie(model: nn.Module, expected: list[list[str]]) -> None:
    """Make one parameter of each group of names again: `to_empty` gives every name of a plain module its own."""
    for first, *others in expected:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, parameter)


def _groups(model: nn.Module) -> list[FSDPModule]:
    """Modules that FSDP gathers as one; none on one device."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def materialise(model: nn.Module, tensor_of: Callable[[str], torch.Tensor], device: torch.device) -> None:
    """Give a model on the meta device, laid out by `shard`, its weights.

    Each rank reads every tensor once, one at a time, and keeps its own slice: the peak is one full tensor, and no rank
    sends anything to another. Strict: each name of the state dict, buffers too, is asked for, because `to_empty`
    leaves garbage in what is not set.

    Args:
        model: after `shard`.
        tensor_of: full tensor by name; the same on all ranks.
        device: of this rank.
    """
    shared = ties(model)
    model.to_empty(device=device)
    _tie(model, shared)
    with torch.no_grad():
        for name, target in model.state_dict().items():
            full = tensor_of(name).to(target.dtype)
            assert full.shape == target.shape, f"{name}: {list(full.shape)} for {list(target.shape)}"
            if isinstance(target, DTensor):
                mine = distribute_tensor(full.to(device), target.device_mesh, target.placements, src_data_rank=None)
                target.to_local().copy_(mine.to_local())
            else:
                target.copy_(full)
    check_ties(model, shared)


def reshard(model: nn.Module) -> None:
    """Put every group back into shards. After a forward pass without a backward one the root's is still gathered, and
    the module's parameters are then not those that the optimizer holds.
    """
    for module in _groups(model):
        module.reshard()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that learn, by name, shared ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
