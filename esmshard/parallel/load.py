"""Give a sharded model on the meta device its weights: each rank reads its own rows, and nobody sends anything.

The most that a rank holds is its share of the model and its rows of one tensor.
"""

import zlib
from collections.abc import Callable, Set

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from esmshard.parallel.guards import check_buffers, check_same_weights, check_ties, ties
from esmshard.parallel.layout import Layout
from esmshard.parallel.mesh import World
from esmshard.parallel.shard import local

RowsOf = Callable[[str, slice], torch.Tensor]
"""Rows of a tensor by name; the same on all ranks."""


def materialise(model: nn.Module, rows_of: RowsOf, layout: Layout, world: World) -> None:
    """Fill a model laid out by `shard`. Strict: each name of the state dict, buffers too, is asked for.

    Args:
        model: on the meta device.
        rows_of: reads weights. Of each tensor a rank asks for the first row, which all ranks compare, and for its own.
        layout: as given to `shard`.
        world: the ranks.

    Raises:
        InputError: on all ranks alike, if a tensor cannot be read on one, or ranks read different weights.
    """
    shared = ties(model)
    check_buffers(model)
    model.to_empty(device=torch.device("cpu") if layout.cpu_offload else world.device)
    if layout.cpu_offload:  # parameters only: FSDP copies gathered weights to the device, and no buffers
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to(world.device))
    _tie(model, shared)
    doubles = {name for _, *others in shared for name in others}
    check_same_weights(world, world.agree(lambda: _fill(model, rows_of, doubles)))
    check_ties(model, shared)


@torch.no_grad()
def _fill(model: nn.Module, rows_of: RowsOf, doubles: Set[str]) -> dict[str, int]:
    """Copy every tensor in; a checksum of the first row of each, by name."""
    marks: dict[str, int] = {}
    for name, target in model.state_dict().items():
        if name in doubles:
            continue
        first = rows_of(name, slice(0, 1)).float().contiguous()
        marks[name] = zlib.crc32(first.view(torch.uint8).numpy().data)
        rows, own = own_rows(target), local(target)
        if rows.start < rows.stop:  # of few rows the last ranks have none
            mine = rows_of(name, rows)
            assert mine.shape == own.shape, f"{name}: {list(mine.shape)} for {list(own.shape)}"
            own.copy_(mine)
    return marks


def own_rows(tensor: torch.Tensor) -> slice:
    """The rows of a whole tensor that this rank keeps.

    FSDP2 cuts the first dimension as `torch.chunk` does: equal parts, the last ones shorter or empty. 33 rows on four
    ranks are 9, 9, 9 and 6.
    """
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor))
    start, stop = 0, len(tensor)
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "weights are cut along their first dimension"
            mesh = tensor.device_mesh
            chunk = -(-(stop - start) // mesh.size(dimension))
            begin = start + chunk * mesh.get_local_rank(dimension)
            start, stop = min(begin, stop), min(begin + chunk, stop)
        else:
            assert placement.is_replicate(), f"a weight cannot be {placement}"
    return slice(start, stop)


def _tie(model: nn.Module, expected: list[list[str]]) -> None:
    """Make one parameter of each group of names again: `to_empty` gives every name of a plain module its own."""
    for first, *others in expected:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, parameter)
