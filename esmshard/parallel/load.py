"""Loads weights into a sharded model on the meta device. Each rank reads only its own rows from the file, so no rank
needs memory for the complete model.
"""

import zlib
from collections.abc import Callable, Set

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from esmshard.errors import InputError
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import World
from esmshard.parallel.shard import check_ties, local, reshard, ties
from esmshard.parallel.tensor_parallel import DIMENSION

RowsOf = Callable[[str, slice], torch.Tensor]
"""A function that reads rows of the tensor with the given name. All ranks must get the same values."""


def materialise(model: nn.Module, rows_of: RowsOf, layout: Layout, world: World) -> None:
    """Load the weights of a model on the meta device that the function `shard` has divided with the same `layout`.

    `rows_of` reads rows of each tensor in the state dict, including buffers. Raises `InputError` on all ranks if one
    rank cannot read a tensor, or if ranks read different weights.
    """
    shared, state = ties(model), model.state_dict()
    lost = [name for name, _ in model.named_buffers() if name not in state]
    assert not lost, f"{lost[0]} is a buffer that no checkpoint contains; register it with persistent=True"
    model.to_empty(device=torch.device("cpu") if layout.cpu_offload else world.device)
    if layout.cpu_offload:  # FSDP copies gathered weights to the device, but not buffers
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to(world.device))
    for first, *others in shared:  # without FSDP, `to_empty` gives each name a separate parameter
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    doubles = {name for _, *others in shared for name in others}
    # FSDP does not check that all ranks read the same weights. So the ranks compare the first row of each tensor.
    marks = world.gather(world.agree(lambda: fill(model, rows_of, doubles)))
    for rank, theirs in enumerate(marks):
        if differing := [name for name, mark in marks[0].items() if theirs.get(name) != mark]:
            error = InputError(
                f"ranks 0 and {rank} start from different weights (first: {differing[0]}, {len(differing)} in all); "
                "give every machine the same model files and the same versions of esmshard and torch"
            )
            error.shared = True
            raise error
    check_ties(model, shared)


def refill(model: nn.Module, rows_of: RowsOf, world: World) -> None:
    """Undo the training of the parameters and the head, because baselines use the model with its initial values.

    The arguments are those of the function `materialise`.

    Raises `InputError` on all ranks if one rank cannot read a tensor.
    """
    reshard(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = {name for name in model.state_dict() if name not in trained and not name.startswith("head.")}
    kept |= {name for _, *others in ties(model) for name in others}
    world.agree(lambda: fill(model, rows_of, kept))


@torch.no_grad()
def fill(model: nn.Module, rows_of: RowsOf, left_out: Set[str]) -> dict[str, int]:
    """Copy all tensors except `left_out` into the model. Return a checksum of each tensor's first row, by name."""
    marks: dict[str, int] = {}
    for name, target in model.state_dict().items():
        if name in left_out:
            continue
        first = rows_of(name, slice(0, 1)).float().contiguous()
        marks[name] = zlib.crc32(first.view(torch.uint8).numpy().data)
        (rows, columns), part = local_slices(target), local(target)
        if part.numel():  # if a tensor has few rows, the last ranks have no row of this tensor
            values = rows_of(name, rows)
            values = values if columns is None else values[:, columns]
            assert values.shape == part.shape, f"{name}: {list(values.shape)} for {list(part.shape)}"
            part.copy_(values)
    return marks


def local_slices(tensor: torch.Tensor) -> tuple[slice, slice | None]:
    """Return which rows and which columns of a tensor this rank has, as two slices. None stands for all columns.

    FSDP2 divides rows like `torch.chunk`: into equal parts, but the last parts may be shorter or empty. So four ranks
    have 9, 9, 9 and 6 of 33 rows. Tensor parallelism first divides rows or columns. FSDP then divides the rows of each
    part.
    """
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor)), None
    mesh, rows, columns = tensor.device_mesh, slice(0, len(tensor)), None
    names = mesh.mesh_dim_names or ()
    for dimension in sorted(range(mesh.ndim), key=lambda n: names[n] != DIMENSION):
        placement = tensor.placements[dimension]
        if not hasattr(placement, "dim"):
            assert placement.is_replicate(), f"a weight cannot be {placement}"
            continue
        assert placement.dim == 0 or names[dimension] == DIMENSION, "FSDP cuts weights along their first dimension"
        size, rank = mesh.size(dimension), mesh.get_local_rank(dimension)
        if placement.dim == 0:
            rows = _chunk(rows, size, rank)
        else:
            columns = _chunk(slice(0, tensor.shape[1]), size, rank)
    return rows, columns


def _chunk(whole: slice, parts: int, part: int) -> slice:
    """Divide a slice into `parts` slices like `torch.chunk`, and return the slice with the index `part`."""
    each = -(-(whole.stop - whole.start) // parts)
    begin = whole.start + each * part
    return slice(min(begin, whole.stop), min(begin + each, whole.stop))
