"""Lay a model out over the devices of a run, in place.

The whole order, of which `shard` is the middle:

    build on the meta device -> checkpointing -> compile -> each layer -> root -> `load.materialise` -> optimizer

`model` needs `layers`, a ModuleList of blocks, and nothing else. Each block is a group that FSDP gathers as one; all
that is not a block is one more, the root: embedding and LM head share a tensor, and a tensor has one group.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from esmshard.parallel.guards import check_ties, ties
from esmshard.parallel.layout import Layout
from esmshard.parallel.mesh import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(model: nn.Module, layout: Layout, world: World) -> None:
    """Activation checkpointing, compilation, precision; and, where there is a process group, FSDP2.

    On one device nothing is sharded: FSDP would change no number and cost time. Parameters stay plain tensors. The
    compute dtype is that of autocast, put around the model's own `forward`, so that training and validation share it.

    Args:
        model: best on the meta device; `materialise` then gives each rank its own slices only.
        layout: of the recipe, for as many ranks as there are.
        world: these ranks.
    """
    layers, shared = model.layers, ties(model)
    assert isinstance(layers, nn.ModuleList), "a model to shard promises `layers`"
    assert layout.world_size == world.size, "a layout for another number of ranks"
    if layout.activation_checkpointing != "none":
        context: dict[str, Any] = {}
        if layout.activation_checkpointing == "selective":
            context["context_fn"] = partial(create_selective_checkpoint_contexts, _keep)
        for layer in layers:  # `forward` and not a wrapping module: names stay, and FSDP's hooks stay outside
            layer.forward = _checkpointed(layer.forward, context)
    if layout.compile:
        for layer in layers:  # in place: a module around it would change the names in checkpoints
            layer.compile(dynamic=True)
    if world.mesh is not None:
        _fully_shard(model, layers, layout, _mesh(world.mesh, layout))
    elif layout.precision != "fp32":
        model.forward = torch.autocast(world.device.type, DTYPES[layout.precision])(model.forward)
    check_ties(model, shared)


def _checkpointed(forward: Callable[..., torch.Tensor], context: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """The same `forward(x_TD, ...)`, computed again in the backward pass.

    It is written for the compiler too. That begins with the first frame of Python which is not torch's own: of a
    `partial` it would be one within the checkpoint, which the compiler is kept out of, so that nothing would be
    compiled, without a word. And what is passed through the checkpoint has to be the same each time, with torch 2.11
    down to the ids in a batch, or it is compiled anew; what `again` only looks at does not.
    """

    def run(x_TD: torch.Tensor, *others: Any) -> torch.Tensor:
        def again(x_TD: torch.Tensor) -> torch.Tensor:
            return forward(x_TD, *others)

        found: torch.Tensor = checkpoint(again, x_TD, use_reentrant=False, **context)
        return found

    return run


def _mesh(ranks: DeviceMesh, layout: Layout) -> DeviceMesh:
    """One dimension for one copy of the model; for several (replicate, shard), neighbours sharing a copy."""
    if layout.replicas == 1:
        return ranks
    return init_device_mesh(ranks.device_type, (layout.replicas, layout.group), mesh_dim_names=("replicate", "shard"))


def _fully_shard(model: nn.Module, layers: nn.ModuleList, layout: Layout, mesh: DeviceMesh) -> None:
    mixed = MixedPrecisionPolicy(param_dtype=DTYPES[layout.precision], reduce_dtype=DTYPES[layout.reduce_dtype])
    pinned = mesh.device_type == "cuda"  # without a GPU there is nothing to pin memory for, and asking raises
    offload = CPUOffloadPolicy(pin_memory=pinned) if layout.cpu_offload else OffloadPolicy()
    group = partial(fully_shard, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    for layer in layers[:-1]:
        group(layer, reshard_after_forward=layout.free_layers)
    group(layers[-1], reshard_after_forward=layout.free_last)
    model.forward = _without_views(model.forward)
    group(model, reshard_after_forward=layout.free_root)
    _prefetch(model, layers, layout)
    for module in groups(model):
        # Gradients are summed over ranks, not averaged: the loss is divided once, by its global count.
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        module.set_gradient_divide_factor(1.0)


def _without_views(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same `forward`, whose list of outputs has tensors of their own in place of parts of one tensor.

    FSDP hangs the gathering of weights for the backward pass on the outputs. On a view an operation in place would
    drop it, so that torch 2.13 warns of each of them. Outputs are small: to copy them is little beside a layer.
    """

    def run(*args: Any, **options: Any) -> Any:
        found = forward(*args, **options)
        if not isinstance(found, list):
            return found
        return [one.clone() if one.requires_grad and one._is_view() else one for one in found]

    return run


def _prefetch(model: nn.Module, layers: nn.ModuleList, layout: Layout) -> None:
    """Ask for weights further ahead than FSDP does by itself (forward: as the host runs ahead; backward: one layer).

    Each step costs the memory of one gathered layer. It pays where the host is slow to launch, or layers are uneven.
    """
    blocks: list[Any] = list(layers)
    assert isinstance(model, FSDPModule)
    if ahead := layout.prefetch_forward:
        model.set_modules_to_forward_prefetch(blocks[:ahead])
        for n, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[n + 1 : n + 1 + ahead])
    if (ahead := layout.prefetch_backward) > 1:
        model.set_modules_to_backward_prefetch(blocks[: -ahead - 1 : -1])
        for n, block in enumerate(blocks):
            block.set_modules_to_backward_prefetch(blocks[max(0, n - ahead) : n][::-1])


_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_KEPT = _PRODUCTS | {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
_KEPT_NAMES = {"torch_attn::_varlen_attn"}  # registered when `varlen_attn` is first used


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What selective checkpointing keeps: what costs the most to compute again for the bytes that it takes.

    Not the product that narrows, a block's last one: no gradient needs its output, and nothing after it is computed
    again. Nor the two of a LoRA, which cost next to nothing.
    """
    kept = operation in _KEPT or operation.name().split(".")[0] in _KEPT_NAMES
    if operation in _PRODUCTS:
        inner, outer = args[-1].shape
        kept = inner <= outer <= 4 * inner
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def next_micro_batch(model: nn.Module, layout: Layout, last: bool) -> None:
    """Say before a backward pass whether it is the last one of a step. Without FSDP there is nothing to say.

    `sharded` reduces and scatters gradients in each pass, and adds them up over the copies in the last one only.
    `unsharded` leaves them on each rank until the last one.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(last)
    if layout.accumulate == "unsharded":
        model.set_requires_gradient_sync(last)
    elif layout.replicas > 1:
        model.set_requires_all_reduce(last)


def groups(model: nn.Module) -> list[FSDPModule]:
    """Modules that FSDP gathers as one; none on one device."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Put every group back into shards. After a forward pass without a backward one the root's is still gathered, and
    the module's parameters are then not those that the optimizer holds.
    """
    for module in groups(model):
        module.reshard()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that learn, by name, shared ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
