"""Divides a model over the devices of a run, in place.

A model is made in this order, and the function `shard` does the steps in brackets:

    build on the meta device -> [tensor or context parallelism -> checkpointing -> compile -> FSDP of each layer
    -> FSDP of the root] -> `load.materialise` -> optimizer

The model must have the attribute `layers`, a ModuleList of blocks. FSDP gathers the parameters of each block together.
FSDP also gathers all parameters outside blocks together, because embedding and LM head share a tensor. The model itself
is FSDP's root module, and these parameters are called the root.
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

    Without a process group, nothing is sharded, and parameters stay plain tensors. With and without FSDP, the model
    computes with copies of its fp32 parameters in `layout.precision`. The residual stream has this precision too.
    Autocast would keep the residual stream in fp32, so losses on one device would differ from losses on several ranks.

    Args:
        model: the model, preferably on the meta device, so that `load.materialise` loads only each rank's part.
        layout: the layout of the recipe for this number of ranks.
        world: the ranks of the run.

    Raises:
        UsageError: if the model has no ModuleList `layers`, or the layout needs another number of ranks, a process
            group, or a model of esmshard.
    """
    layers, shared = getattr(model, "layers", None), ties(model)
    if not isinstance(layers, nn.ModuleList):
        raise UsageError(
            f"{type(model).__name__} has no ModuleList `layers`; add it as a property, as docs/python.md does"
        )
    if layout.world_size != world.size:
        raise UsageError(
            f"Layout: is for {layout.world_size} ranks, and {world.size} are here; pass world_size={world.size}"
        )
    if layout.cpu_offload and world.mesh is None:
        raise UsageError("Layout: cpu_offload in one process needs a process group; call world(alone_too=True)")
    has_trunk = any(isinstance(module, Trunk) for module in model.modules())
    if not has_trunk and (layout.together > 1 or layout.activation_checkpointing == "selective"):
        raise UsageError(
            "Layout: tensor, context and activation_checkpointing='selective' are for esmshard's own models; leave "
            "them out, or take activation_checkpointing='full'"
        )
    mesh = None if world.mesh is None else _mesh(world.mesh, layout, world.step_timeout)
    wrappers: list[Wrapper] = [lambda forward: forward] * len(layers)
    if mesh is not None and layout.tensor > 1:
        wrappers = tensor_parallel.split(model, mesh[tensor_parallel.DIMENSION])
    if mesh is None and layout.precision != "fp32":
        wrappers = [partial(computing_with, layer, partial(_in_precision, layout, layer)) for layer in layers]
    if mesh is not None and layout.context > 1:
        # FSDP also shards weights over the ranks that divide tokens. So dividing tokens needs a separate mesh.
        sizes, names = (layout.data_size, layout.context), ("data", context_parallel.DIMENSION)
        of_context = _named_mesh(mesh.device_type, sizes, names, world.step_timeout)
        context_parallel.split(model, of_context[context_parallel.DIMENSION])
    checkpointed = _checkpointing(model, layout)
    # This replaces `forward`, because a module around the layer would change the names of parameters. FSDP's hooks must
    # stay outside the new `forward`.
    for layer, wrapped in zip(layers, wrappers, strict=True):
        if not layout.compile:
            layer.forward = checkpointed(wrapped(layer.forward))
        elif layout.context == 1:  # The compiler gets plain tensors, and compiles the checkpoint too.
            layer.forward = checkpointed(layer.forward)
            layer.compile(dynamic=True)
            layer.forward = wrapped(layer.forward)
        else:  # Attention to gathered keys cannot be compiled, so the checkpoint stays outside the compiled layer.
            layer.compile(dynamic=True)
            layer.forward = checkpointed(layer.forward)
    if mesh is not None:
        _fully_shard(model, layers, layout, mesh, world)
    elif layout.precision != "fp32":
        model.forward = computing_with(model, partial(_in_precision, layout, model), model.forward)
    check_ties(model, shared)


def _in_precision(layout: Layout, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return copies, in `layout.precision`, of the parameters of a layer, or of a model's parameters outside layers."""
    of_layers = {id(p) for p in getattr(module, "layers", nn.ModuleList()).parameters()}
    return {name: p.to(DTYPES[layout.precision]) for name, p in parameters.items() if id(p) not in of_layers}


def _checkpointing(model: nn.Module, layout: Layout) -> Wrapper:
    """Return a function that adds activation checkpointing to the method `forward(x_TD, ...)` of a layer."""
    if layout.activation_checkpointing == "none":
        return lambda forward: forward
    context: dict[str, Any] = {}
    if layout.activation_checkpointing == "selective":
        products = kept_products(trunk_of(model).config.matrices, layout.tensor)
        # This is a lambda, because the compiler would treat the numbers in a `partial` as variables.
        context["context_fn"] = lambda: _selective(products)
    return partial(_checkpointed, context)


def _checkpointed(context: dict[str, Any], forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function like `forward(x_TD, ...)` that the backward pass computes again, to save memory.

    The compiler begins with the first Python frame outside torch. If the result were a `partial`, this frame would be
    inside the checkpoint, where the compiler is switched off, so nothing would be compiled. If an argument of the
    checkpoint changes (in torch 2.11 even the ids in a batch), the function is compiled again. So the inner function
    `again` has only the argument `x_TD`, and reads the other arguments from the enclosing function.
    """

    def run(x_TD: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        def again(x_TD: torch.Tensor) -> torch.Tensor:
            return forward(x_TD, *others, **options)

        output: torch.Tensor = checkpoint(again, x_TD, use_reentrant=False, **context)
        return output

    return run


def _mesh(ranks: DeviceMesh, layout: Layout, seconds: int) -> DeviceMesh:
    """Return the device mesh of all ranks. Its dimensions are (shard), or (replicate, shard) for several copies of the
    model. With tensor parallelism, `tensor` is one more dimension at the end.
    """
    if layout.replicas == layout.tensor == 1:
        return ranks
    sizes = {"replicate": layout.replicas, "shard": layout.group, tensor_parallel.DIMENSION: layout.tensor}
    names = _data_dimensions(layout) + ((tensor_parallel.DIMENSION,) if layout.tensor > 1 else ())
    return _named_mesh(ranks.device_type, tuple(sizes[name] for name in names), names, seconds)


def _named_mesh(device: str, sizes: tuple[int, ...], names: tuple[str, ...], seconds: int) -> DeviceMesh:
    """Return a device mesh of all ranks. Its process groups have the time-out `seconds`. The process groups of torch's
    `init_device_mesh` have a default time-out, and would wait half an hour for a stuck rank.
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
    """Apply FSDP. Shard layers over the ranks that compute the same part of a layer, and the other parameters over all
    ranks of a copy of the model.
    """
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
    """Return copies of the outputs of a model. The outputs themselves may be torch views (slices) of one tensor.

    FSDP adds hooks to the outputs, and the hooks gather weights for the backward pass. An in-place operation on a view
    would remove its hook, so torch 2.13 warns about each view. The copies take little memory compared with a layer.
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
    """Return torch's contexts for a checkpointed layer and its recomputation. `kept_products` returned `products`."""
    # torch 2.11 calls `keep` for each operation in both contexts, later releases only in the first context.
    left = {again: Counter(products) for again in (False, True)}

    def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Keep the result of an operation if its recomputation takes much time for each byte of its memory."""
        kept = operation in _KEPT or operation.name().split(".")[0] in _KEPT_NAMES
        if operation in _PRODUCTS:
            shape = tuple(args[-1].shape)
            kept = left[context.is_recompute][shape] > 0
            left[context.is_recompute][shape] -= 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep)  # type: ignore[no-untyped-call]


def next_micro_batch(model: nn.Module, layout: Layout, last: bool) -> None:
    """Tell FSDP, before each backward pass, whether the pass is the last backward pass of a training step.

    With `accumulate: sharded`, each pass reduces and scatters the gradients among the ranks of a copy of the model. The
    last pass also sums gradients over the copies. With `unsharded`, gradients stay on each rank until the last pass.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(last)
    if layout.accumulate == "unsharded":
        model.set_requires_gradient_sync(last)
    elif layout.replicas > 1:
        model.set_requires_all_reduce(last)


def groups(model: nn.Module) -> list[FSDPModule]:
    """Return the modules whose parameters FSDP gathers together: layers and model. Without FSDP, the list is empty."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free all gathered parameters, so that each rank again has only its shards.

    After a forward pass without a backward pass, the parameters outside layers are still gathered copies, which the
    optimizer does not update.
    """
    for module in groups(model):
        module.reshard()


IDLE = encode("G" * 62)
"""The model's input on a rank that has nothing to compute: 64 tokens, which several ranks can divide among them."""


@contextmanager
def shared_calls(model: nn.Module, ranks: World) -> Iterator[None]:
    """A `with` block in which each rank may call a sharded model or its trunk any number of times, without gradients.

    Every rank must take part in each forward pass of a sharded model, because each pass gathers the parts of all ranks.
    But ranks need different numbers of passes: some baselines call the model once for a record, others twenty times.
    So a rank that has nothing left to compute joins the passes of the other ranks with a few tokens.

    On each rank, the block ends when all ranks have reached the end of the block. Ranks that compute layers together
    must make the same calls. Every call runs all layers.

    Args:
        model: a model that `shard` has divided. Its method `forward(batch, substitute)` must call `substitute`.
        ranks: the ranks of the run. The time-out `ranks.timeout` limits how long a rank waits for the other ranks.
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
        """Call the trunk inside a call of the model: only the model's call gathers the parameters outside layers."""
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
    """From now on, free each layer's gathered weights after the layer's forward pass, whatever the strategy says."""
    for layer in model.layers:  # type: ignore[union-attr]
        for group in groups(layer):
            group.set_reshard_after_forward(True, recurse=False)
    reshard(model)


def ties(model: nn.Module) -> list[list[str]]:
    """Return a list of names for each parameter that has several names, such as ESM-2's embedding and LM head."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def check_ties(model: nn.Module, expected: list[list[str]]) -> None:
    """Raise `AssertionError` if the names in one of the lists `expected` no longer share a parameter.

    Names stop sharing a parameter if FSDP gathers them in two modules; not every release of torch raises an error. Each
    name then has a separate copy, or the last rank's rows are never updated.
    """
    lost = [names for names in expected if names not in ties(model)]
    assert not lost, f"{' and '.join(lost[0])} were shared and are now apart; keep them in one FSDP group"


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name. A parameter with several names is listed only under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copies(tensor: torch.Tensor) -> int:
    """Return how many ranks, including this rank, have the same part of a tensor as this rank."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = (tensor.device_mesh.size(n) for n, placed in enumerate(tensor.placements) if placed.is_replicate())
    return math.prod(sizes)
