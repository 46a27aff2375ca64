"""Divides a model over the devices of a run, in place.

Do these steps in this order. The function `shard` does the steps in brackets:

    build on the meta device -> [tensor or context parallelism -> checkpointing -> compile -> FSDP of each layer
    -> FSDP of the root] -> `load.materialise` -> optimizer

The model must have the attribute `layers`, a ModuleList. FSDP gathers the parameters of each layer together. FSDP also
gathers all parameters outside layers together, because embedding and LM head share a tensor. The parameters outside
layers are called the root.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from esmshard.batch import pack
from esmshard.errors import UsageError
from esmshard.model.trunk import Trunk
from esmshard.parallel import context_parallel, tensor_parallel
from esmshard.parallel.layout import Layout, kept_products
from esmshard.parallel.process_group import NCCL_GRACE, World
from esmshard.parallel.tensor_parallel import Wrapper, computing_with, trunk_of
from esmshard.vocab import encode

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(model: nn.Module, layout: Layout, world: World) -> None:
    """Set up activation checkpointing, compilation and precision of a model, and FSDP2 if there is a process group.

    With and without FSDP, the model computes with copies of its fp32 parameters in `layout.precision`, and the residual
    stream has this precision too. Autocast would keep the residual stream in fp32, so losses on one device would differ
    from losses on several ranks. A model on the meta device needs memory only when `load.materialise` loads it.

    Raises:
        UsageError: the model has no ModuleList `layers`, or the layout needs a model of esmshard, a process group, or
            another number of ranks than `world` has.
    """
    layers, shared = getattr(model, "layers", None), ties(model)
    if not isinstance(layers, nn.ModuleList):
        raise UsageError(
            f"{type(model).__name__} has no ModuleList `layers`; add a property `layers` as in docs/python.md"
        )
    if layout.world_size != world.size:
        raise UsageError(
            f"Layout: has world_size={layout.world_size}, but the run has {world.size} ranks; pass "
            f"world_size={world.size}"
        )
    if layout.cpu_offload and world.mesh is None:
        raise UsageError("Layout: cpu_offload in one process needs a process group; call world(alone_too=True)")
    has_trunk = any(isinstance(module, Trunk) for module in model.modules())
    if not has_trunk and (layout.together > 1 or layout.activation_checkpointing == "selective"):
        raise UsageError(
            "Layout: tensor, context and activation_checkpointing='selective' are for models of esmshard only; remove "
            "them, or use activation_checkpointing='full'"
        )
    mesh = None if world.mesh is None else _mesh(world.mesh, layout, world.step_timeout)
    wrappers: list[Wrapper] = [lambda forward: forward] * len(layers)
    if mesh is not None and layout.tensor > 1:
        wrappers = tensor_parallel.split(model, mesh[tensor_parallel.DIMENSION])
    if mesh is None and layout.precision != "fp32":
        wrappers = [partial(computing_with, layer, partial(_in_precision, layout, layer)) for layer in layers]
    if mesh is not None and layout.context > 1:
        # FSDP also shards weights over the ranks that divide tokens, so context parallelism needs a separate mesh.
        sizes, names = (layout.data_size, layout.context), ("data", context_parallel.DIMENSION)
        of_context = _named_mesh(mesh.device_type, sizes, names, world.step_timeout)
        context_parallel.split(model, of_context[context_parallel.DIMENSION])
    checkpointed = _checkpointing(model, layout)
    # Replace `forward`, because a module around the layer would change the names of parameters.
    for layer, wrapped in zip(layers, wrappers, strict=True):
        if not layout.compile:
            layer.forward = checkpointed(wrapped(layer.forward))
        elif layout.together == 1:  # the compiler gets plain tensors, and compiles the checkpoint too
            layer.forward = checkpointed(layer.forward)
            layer.compile(dynamic=True)
            layer.forward = wrapped(layer.forward)
        else:  # communication inside a layer cannot be compiled, so the checkpoint stays outside the compiled layer
            layer.compile(dynamic=True)
            layer.forward = checkpointed(wrapped(layer.forward))
    if mesh is not None:
        _fully_shard(model, layers, layout, mesh, world)
    elif layout.precision != "fp32":
        model.forward = computing_with(model, partial(_in_precision, layout, model), model.forward)
    check_ties(model, shared)


def _in_precision(layout: Layout, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Copy the parameters of a layer, or the parameters of a model outside its layers, to `layout.precision`."""
    of_layers = {id(p) for p in getattr(module, "layers", nn.ModuleList()).parameters()}
    return {name: p.to(DTYPES[layout.precision]) for name, p in parameters.items() if id(p) not in of_layers}


def _checkpointing(model: nn.Module, layout: Layout) -> Wrapper:
    """Return a function that adds activation checkpointing to a layer's method `forward(x_TD, ...)`."""
    if layout.activation_checkpointing == "none":
        return lambda forward: forward
    context: dict[str, Any] = {}
    if layout.activation_checkpointing == "selective":
        products = kept_products(trunk_of(model).config.matrices, layout.tensor)
        # In a `partial`, the compiler would treat the numbers as variables.
        context["context_fn"] = lambda: _selective(products)
    return partial(_checkpointed, context)


def _checkpointed(context: dict[str, Any], forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function like `forward(x_TD, ...)` that the backward pass computes again, to save memory.

    `context` has options of torch's `checkpoint`. The result must not be a `partial`, because torch would not compile
    it. The inner function `again` has only one argument, because torch 2.11 would compile it anew for each new value of
    other arguments.
    """

    def run(x_TD: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        def again(x_TD: torch.Tensor) -> torch.Tensor:
            return forward(x_TD, *others, **options)

        output: torch.Tensor = checkpoint(again, x_TD, use_reentrant=False, **context)
        return output

    return run


def _mesh(ranks: DeviceMesh, layout: Layout, seconds: int) -> DeviceMesh:
    """Return the device mesh of all ranks with the dimensions (shard), or (replicate, shard) for several model copies.

    With tensor parallelism, `tensor` is the last dimension. The process groups have the time-out `seconds`.
    """
    if layout.replicas == layout.tensor == 1:
        return ranks
    sizes = {"replicate": layout.replicas, "shard": layout.group, tensor_parallel.DIMENSION: layout.tensor}
    names = _data_dimensions(layout) + ((tensor_parallel.DIMENSION,) if layout.tensor > 1 else ())
    return _named_mesh(ranks.device_type, tuple(sizes[name] for name in names), names, seconds)


def _named_mesh(device: str, sizes: tuple[int, ...], names: tuple[str, ...], seconds: int) -> DeviceMesh:
    """Return a device mesh of all ranks, whose process groups have the time-out `seconds`.

    With torch's `init_device_mesh`, the process groups would wait half an hour for a stuck rank.
    """
    timeout = timedelta(seconds=seconds + (NCCL_GRACE if device == "cuda" else 0))
    mesh = torch.arange(dist.get_world_size()).view(sizes)
    groups = []
    for dimension, size in enumerate(sizes):
        for ranks in mesh.movedim(dimension, -1).reshape(-1, size).tolist():
            group = dist.new_group(ranks, timeout=timeout)  # torch requires that every rank creates every group
            if dist.get_rank() in ranks:
                groups.append(group)
    return DeviceMesh.from_group(groups, device, mesh, mesh_dim_names=names)


def _data_dimensions(layout: Layout) -> tuple[str, ...]:
    """Return the names of the mesh dimensions over which FSDP replicates and shards parameters."""
    return ("shard",) if layout.replicas == 1 else ("replicate", "shard")


def _fully_shard(model: nn.Module, layers: nn.ModuleList, layout: Layout, mesh: DeviceMesh, world: World) -> None:
    """Shard each layer over the ranks that compute the same part of it, and the root over all ranks of a model copy."""
    of_root = mesh
    if layout.tensor > 1:
        mesh, sizes = mesh[*_data_dimensions(layout)], (layout.replicas, layout.group * layout.tensor)
        assert world.mesh is not None
        of_root = world.mesh
        if layout.replicas > 1:
            of_root = _named_mesh(mesh.device_type, sizes, ("replicate", "shard"), world.step_timeout)
    # Inputs are not cast: activations already have this precision, and the coordinates in a batch must stay fp32.
    mixed = MixedPrecisionPolicy(
        param_dtype=DTYPES[layout.precision], reduce_dtype=DTYPES[layout.reduce_dtype], cast_forward_inputs=False
    )
    pinned = mesh.device_type == "cuda"  # without a GPU, pinning memory raises an error
    offload = CPUOffloadPolicy(pin_memory=pinned) if layout.cpu_offload else OffloadPolicy()
    group = partial(fully_shard, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    for layer in layers:
        group(layer, reshard_after_forward=layout.frees_layers)
    model.register_forward_hook(_without_views)
    # The root's parameters stay gathered, because a pass needs them at its beginning and at its end.
    group(model, mesh=of_root, reshard_after_forward=False)
    for module in groups(model):
        # Gradients are summed over ranks, not averaged, because the loss is already divided by the global count.
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before a sum
        module.set_gradient_divide_factor(1.0)


def _without_views(_module: nn.Module, _given: object, outputs: Any) -> Any:
    """Copy a model's outputs, which may be views (slices) of one tensor.

    FSDP adds hooks to the outputs, and torch 2.13 warns about a hook on a view.
    """
    return [x.clone() if x.requires_grad else x for x in outputs] if isinstance(outputs, list) else outputs


_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_KEPT = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
_KEPT_NAMES = {
    "torch_attn::_varlen_attn",  # registered at the first use of `varlen_attn`
    "_c10d_functional::reduce_scatter_tensor",  # the sum over ranks in a layer with tensor parallelism
}


def _selective(products: Mapping[tuple[int, int], int]) -> Any:
    """Return two context managers, for a layer's forward pass and its recomputation. See `kept_products`."""
    # torch 2.11 calls `keep` for each operation in both contexts, later releases only in the first context.
    left = {again: Counter(products) for again in (False, True)}

    def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operation in _KEPT or operation.name().split(".")[0] in _KEPT_NAMES
        if operation in _PRODUCTS:
            shape = tuple(args[-1].shape)
            kept = left[context.is_recompute][shape] > 0
            left[context.is_recompute][shape] -= 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep)  # type: ignore[no-untyped-call]


def next_micro_batch(model: nn.Module, layout: Layout, last: bool) -> None:
    """Tell FSDP, before each backward pass, whether it is the last backward pass of a training step.

    With `accumulate: sharded`, each pass reduces and scatters the gradients among the ranks of a model copy, and the
    last pass sums them over the copies. With `unsharded`, gradients stay on each rank until the last pass.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(last)
    if layout.accumulate == "unsharded":
        model.set_requires_gradient_sync(last)
    elif layout.replicas > 1:
        model.set_requires_all_reduce(last)


def groups(model: nn.Module) -> list[FSDPModule]:
    """Return the modules to which FSDP was applied: the layers and the model. Without FSDP, the list is empty."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free all gathered parameters, so that each rank has only its shards.

    After a forward pass without a backward pass, the parameters of the root module are still gathered. An optimizer
    changes only the shards, so the next forward pass would compute with old values.
    """
    for module in groups(model):
        module.reshard()


IDLE = encode("G" * 62)
"""The model's input on a rank that has nothing to compute: 64 tokens, so that several ranks can divide them."""


@contextmanager
def shared_calls(model: nn.Module, ranks: World) -> Iterator[None]:
    """Let each rank call a sharded model or its trunk any number of times, without gradients, in a `with` block.

    Every rank must take part in each forward pass of a sharded model, because each pass gathers the parts of all ranks.
    So a rank that has reached the end of the block joins the passes of the other ranks with a few tokens. The block
    ends when all ranks have reached its end. Ranks that compute layers together must make the same calls. The model's
    method `forward(batch, substitute)` must call `substitute`.
    """
    trunk, inside, idle = trunk_of(model), False, False

    def any_rank(works: bool) -> bool:
        return any(row[0] for row in ranks.rows([works]))

    def begin(*_: Any) -> None:
        nonlocal inside
        inside = True
        if not idle:
            any_rank(True)

    def end(*_: Any) -> None:
        nonlocal inside
        inside = False

    def through_model(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call the trunk inside a call of the model, because only the model's call gathers the root."""
        return call(*args, **options) if inside else model(args[0], lambda: call(*args, **options))

    # FSDP gathers parameters in a hook. All ranks must know of a forward pass before this hook runs.
    hooks = [
        model.register_forward_pre_hook(begin, prepend=True),
        model.register_forward_hook(end, always_call=True),
    ]
    trunk.called_through, trunk.shared_on = through_model, ranks.device
    try:
        with torch.no_grad():
            yield
            idle = True
            while any_rank(False):
                trunk(pack([IDLE]).to(ranks.device))
    finally:
        trunk.called_through = trunk.shared_on = None
        for hook in hooks:
            hook.remove()


def free_layers(model: nn.Module) -> None:
    """Free each layer's gathered weights after its forward pass from now on, for every strategy."""
    for layer in model.layers:  # type: ignore[union-attr]
        for group in groups(layer):
            group.set_reshard_after_forward(True, recurse=False)
    reshard(model)


def ties(model: nn.Module) -> list[list[str]]:
    """Return the lists of names that share one parameter, such as the names of ESM-2's embedding and LM head."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def check_ties(model: nn.Module, expected: list[list[str]]) -> None:
    """Raise `AssertionError` if the names in a list of `expected` no longer share a parameter.

    This happens if FSDP gathers the parameter in two modules, once under each name. Some releases of torch then raise
    no error, but each name has a separate copy, or the last rank's rows are never updated.
    """
    lost = [names for names in expected if names not in ties(model)]
    assert not lost, f"{' and '.join(lost[0])} no longer share a parameter; keep them in one FSDP module"


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name. A parameter with several names is listed under its first name only."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copies(tensor: torch.Tensor) -> int:
    """Return how many ranks, including this rank, have the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = (tensor.device_mesh.size(n) for n, placed in enumerate(tensor.placements) if placed.is_replicate())
    return math.prod(sizes)
