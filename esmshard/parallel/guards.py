"""What goes wrong in silence when a model is sharded, made loud: each mistake here trains on, and learns nothing.

Mistakes of the program raise `AssertionError`. That ranks read different weights is a mistake of the set-up, and raises
`InputError`.
"""

from collections.abc import Mapping

import torch
from torch import nn

from esmshard.errors import InputError
from esmshard.parallel.mesh import World


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


def check_buffers(model: nn.Module) -> None:
    """Raise `AssertionError` if a buffer is in no state dict: `to_empty` leaves garbage in it, and nothing sets it."""
    kept = model.state_dict().keys()
    lost = [name for name, _ in model.named_buffers() if name not in kept]
    assert not lost, f"{lost[0]} is a buffer that no checkpoint holds; register it with persistent=True"


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `AssertionError` if an optimizer holds tensors that are not the model's parameters.

    One that was made before `shard` or `materialise` does: its steps change nothing that is ever used, without an
    error.
    """
    current = {id(p) for p in model.parameters()}
    strangers = sum(id(p) not in current for group in optimizer.param_groups for p in group["params"])
    assert not strangers, f"{strangers} tensors of the optimizer are no parameters of the model; make it after sharding"


def check_same_weights(world: World, marks: Mapping[str, int]) -> None:
    """Raise `InputError`, on all ranks alike, if ranks read different weights.

    FSDP does not look: each rank keeps its own slices of whatever it read, and the model becomes a patchwork.

    Args:
        world: the ranks that share a model.
        marks: a checksum by name of something that every rank read of each tensor.
    """
    everyone = world.gather(dict(marks))
    for rank, theirs in enumerate(everyone):
        differing = [name for name, mark in everyone[0].items() if theirs.get(name) != mark]
        if differing:
            error = InputError(
                f"ranks 0 and {rank} start from different weights (first: {differing[0]}, {len(differing)} in all); "
                "give every machine the same model files and the same versions of esmshard and torch"
            )
            error.shared = True
            raise error
