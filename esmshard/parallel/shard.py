"""Divides a model over the devices of a run, in place.

A model is made in this order, and `shard` does the steps in brackets:

    build on the meta device -> [tensor or context parallelism -> checkpointing -> compile -> FSDP of each layer
    -> FSDP of the root] -> `load.materialise` -> optimizer

`model` must have `layers`, a ModuleList of blocks. FSDP gathers the parameters of each block together. All parameters
outside blocks form one group, the root, because embedding and LM head share a tensor.
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
    """Set up activation checkpointing, compilation and precision, and FSDP2 if there is a process group.

    On one device nothing is sharded, because FSDP would take time without changing results. Parameters stay plain
    tensors. With and without FSDP, layers and root compute with copies of their fp32 parameters in `layout.precision`.
    The residual stream has this type too, and gradients are summed in fp32. Autocast would keep the residual stream in
    fp32, so losses on one device would differ from losses on several ranks.

    Args:
        model: the model, preferably on the meta device, so that `materialise` loads only each rank's part.
        layout: the layout of the recipe for this number of ranks.
        world: the ranks.

    Raises:
        UsageError: if the model has no `layers`, or the layout needs another number of ranks, a process group, or a
            model of esmshard.
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
        # FSDP also shards over the ranks of a context group, so this group needs a separate mesh.
        sizes, names = (layout.data_size, layout.context), ("data", context_parallel.DIMENSION)
        of_context = _named_mesh(mesh.device_type, sizes, names, world.step_timeout)
        context_parallel.split(model, of_context[context_parallel.DIMENSION])
    checkpointed = _checkpointing(model, layout)
    # Replace `forward`, because a wrapping module would change names of parameters. FSDP's hooks must stay outside.
    for layer, wrapped in zip(layers, wrappers, strict=True):
        if not layout.compile:
            layer.forward = checkpointed(wrapped(layer.forward))
        elif layout.context == 1:  # The compiler gets plain tensors, and recomputes without a call of Python code.
            layer.forward = checkpointed(layer.forward)
            layer.compile(dynamic=True)
            layer.forward = wrapped(layer.forward)
        else:  # Attention to gathered keys is not compiled, and a compiled checkpoint must be compiled as a whole.
            layer.compile(dynamic=True)
            layer.forward = checkpointed(layer.forward)
    if mesh is not None:
        _fully_shard(model, layers, layout, mesh, world)
    elif layout.precision != "fp32":
        model.forward = computing_with(model, partial(_in_precision, layout, model), model.forward)
    check_ties(model, shared)


def _in_precision(layout: Layout, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return copies of a layer's parameters, or of a model's parameters outside its layers, in `layout.precision`."""
    of_layers = {id(p) for p in getattr(module, "layers", nn.ModuleList()).parameters()}
    return {name: p.to(DTYPES[layout.precision]) for name, p in parameters.items() if id(p) not in of_layers}


def _checkpointing(model: nn.Module, layout: Layout) -> Wrapper:
    """Return the function that wraps a layer's `forward(x_TD, ...)` in activation checkpointing."""
    if layout.activation_checkpointing == "none":
        return lambda forward: forward
    context: dict[str, Any] = {}
    if layout.activation_checkpointing == "selective":
        products = kept_products(trunk_of(model).config.matrices, layout.tensor)
        # In a `partial`, the compiler would treat the numbers as variables.
        context["context_fn"] = lambda: _selective(products)
    return partial(_checkpointed, context)


def _checkpointed(context: dict[str, Any], forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function like `forward(x_TD, ...)` that the backward pass computes again.

    The compiler begins with the first Python frame outside torch. For a `partial`, this frame would be inside the
    checkpoint, where the compiler is switched off, so nothing would be compiled, without a warning. If an argument of
    the checkpoint changes (in torch 2.11 even the ids in a batch), the function is compiled again. So `again` reads all
    arguments except `x_TD` from the enclosing function, where they may change.
    """

    def run(x_TD: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        def again(x_TD: torch.Tensor) -> torch.Tensor:
            return forward(x_TD, *others, **options)

        output: torch.Tensor = checkpoint(again, x_TD, use_reentrant=False, **context)
        return output

    return run


def _mesh(ranks: DeviceMesh, layout: Layout, seconds: int) -> DeviceMesh:
    """Return the mesh of all ranks with the dimensions (shard), or (replicate, shard) for several copies of the model.
    With tensor parallelism, `tensor` is one more dimension at the end.
    """
    if layout.replicas == layout.tensor == 1:
        return ranks
    sizes = {"replicate": layout.replicas, "shard": layout.group, tensor_parallel.DIMENSION: layout.tensor}
    names = _data_dimensions(layout) + ((tensor_parallel.DIMENSION,) if layout.tensor > 1 else ())
    return _named_mesh(ranks.device_type, tuple(sizes[name] for name in names), names, seconds)


def _named_mesh(device: str, sizes: tuple[int, ...], names: tuple[str, ...], seconds: int) -> DeviceMesh:
    """Return a mesh of all ranks whose process groups have the time-out `seconds`. Groups of `init_device_mesh` have
    the default time-out of the backend, and would wait half an hour for a stuck rank.
    """
    timeout = timedelta(seconds=seconds + (NCCL_GRACE if device == "cuda" else 0))
    mesh = torch.arange(dist.get_world_size()).view(sizes)
    groups = []
    for dimension, size in enumerate(sizes):
        for ranks in mesh.movedim(dimension, -1).reshape(-1, size).tolist():
            group = dist.new_group(ranks, timeout=timeout)  # every rank creates every group
            if dist.get_rank() in ranks:
                groups.append(group)
    return DeviceMesh.from_group(groups, device, mesh, mesh_dim_names=names)


def _data_dimensions(layout: Layout) -> tuple[str, ...]:
    """Return the dimensions of the mesh over which FSDP shards and replicates parameters."""
    return ("shard",) if layout.replicas == 1 else ("replicate", "shard")


def _fully_shard(model: nn.Module, layers: nn.ModuleList, layout: Layout, mesh: DeviceMesh, world: World) -> None:
    """Apply FSDP: shard layers over the ranks that compute the same part of a layer, and the root over a whole copy."""
    of_root = mesh
    if layout.tensor > 1:
        mesh, sizes = mesh[*_data_dimensions(layout)], (layout.replicas, layout.group * layout.tensor)
        assert world.mesh is not None
        of_root = world.mesh
        if layout.replicas > 1:
            of_root = _named_mesh(mesh.device_type, sizes, ("replicate", "shard"), world.step_timeout)
    # Inputs are not cast, because activations already have this precision and coordinates of a batch must stay fp32.
    mixed = MixedPrecisionPolicy(
        param_dtype=DTYPES[layout.precision], reduce_dtype=DTYPES[layout.reduce_dtype], cast_forward_inputs=False
    )
    pinned = mesh.device_type == "cuda"  # without a GPU, pinning memory raises an error
    offload = CPUOffloadPolicy(pin_memory=pinned) if layout.cpu_offload else OffloadPolicy()
    group = partial(fully_shard, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    for layer in layers:
        group(layer, reshard_after_forward=layout.frees_layers)
    model.register_forward_hook(_without_views)
    # The root stays gathered, because it is needed at the beginning and at the end of a pass.
    group(model, mesh=of_root, reshard_after_forward=False)
    for module in groups(model):
        # Gradients are summed over ranks, because the loss is divided once, by its global count.
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        module.set_gradient_divide_factor(1.0)


def _without_views(_module: nn.Module, _given: object, outputs: Any) -> Any:
    """Return copies of the outputs of a model, which may be views of one tensor.

    FSDP adds hooks to the outputs, which gather weights for the backward pass. An in-place operation on a view would
    remove such a hook, so torch 2.13 warns about each view. The copies take little memory compared with a layer.
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
    """Return the contexts of a layer's forward pass and of its recomputation. `kept_products` made `products`."""
    # torch 2.11 calls `keep` for each operation in both contexts, later releases only in the first context.
    left = {again: Counter(products) for again in (False, True)}

    def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Keep the results whose recomputation takes the most time for each byte of memory."""
        kept = operation in _KEPT or operation.name().split(".")[0] in _KEPT_NAMES
        if operation in _PRODUCTS:
            shape = tuple(args[-1].shape)
            kept = left[context.is_recompute][shape] > 0
            left[context.is_recompute][shape] -= 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep)  # type: ignore[no-untyped-call]


def next_micro_batch(model: nn.Module, layout: Layout, last: bool) -> None:
    """Tell FSDP before each backward pass whether the pass is the last of a step.

    With `accumulate: sharded`, each pass reduces and scatters the gradients among the ranks of a copy of the model. The
    last pass then sums them over the copies. With `unsharded`, gradients stay on each rank until the last pass.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(last)
    if layout.accumulate == "unsharded":
        model.set_requires_gradient_sync(last)
    elif layout.replicas > 1:
        model.set_requires_all_reduce(last)


def groups(model: nn.Module) -> list[FSDPModule]:
    """Return the modules whose parameters FSDP gathers together. The list is empty without FSDP."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free all gathered parameters, so that each rank again has only its shards.

    After a forward pass without a backward pass, the root is still gathered. Its parameters are then not the parameters
    that the optimizer updates.
    """
    for module in groups(model):
        module.reshard()


IDLE = encode("G" * 62)
"""The input of a rank that has nothing to compute. It has 64 tokens, so groups of ranks can divide them."""


@contextmanager
def shared_calls(model: nn.Module, ranks: World) -> Iterator[None]:
    """A `with` block in which each rank may call a sharded model or its trunk any number of times, without gradients.

    Every rank must take part in each forward pass of a sharded model, because each pass gathers the parts of all ranks.
    But ranks need different numbers of passes: some baselines call the model once for a record, others twenty times.
    So a rank that has nothing left to compute joins the passes of the other ranks with a few tokens.

    On each rank, the block ends when all ranks have reached its end. Ranks that compute layers together must make the
    same calls. Every call runs all layers.

    Args:
        model: a model that `shard` has divided, whose `forward(batch, substitute)` calls `substitute`.
        ranks: the ranks. Their time-out limits how long a rank waits for the other ranks.
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
        """Call the trunk inside a call of the model, because only a call of the model gathers the root's parameters."""
        return call(*args, **options) if inside else model(args[0], lambda: call(*args, **options))

    # FSDP gathers parameters in a hook. All ranks must know of the pass before this hook runs.
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
    """From now on, free the gathered weights of each layer after its forward pass, for any strategy of the layout."""
    for layer in model.layers:  # type: ignore[union-attr]
        for group in groups(layer):
            group.set_reshard_after_forward(True, recurse=False)
    reshard(model)


def ties(model: nn.Module) -> list[list[str]]:
    """Return a list of names for each parameter with several names, such as the embedding and LM head of ESM-2."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def check_ties(model: nn.Module, expected: list[list[str]]) -> None:
    """Raise `AssertionError` if the names in one of the lists `expected` no longer share a parameter.

    This happens if the names belong to two FSDP groups, and not every release of torch raises an error. Each name then
    has a separate copy, or the last rank's rows are never updated.
    """
    lost = [names for names in expected if names not in ties(model)]
    assert not lost, f"{' and '.join(lost[0])} were shared and are now apart; keep them in one FSDP group"


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name. A shared parameter has only its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copies(tensor: torch.Tensor) -> int:
    """Return how many ranks have the same part of a tensor, including this rank."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = (tensor.device_mesh.size(n) for n, placed in enumerate(tensor.placements) if placed.is_replicate())
    return math.prod(sizes)
