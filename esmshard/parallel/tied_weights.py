"""Checks for mistakes of sharding that cause no error by themselves: training would continue and learn nothing.

Mistakes of the program raise `AssertionError`. Ranks that read different weights are a mistake of the set-up and raise
`InputError`.
"""

from collections.abc import Mapping

import torch
from torch import nn

from esmshard.errors import InputError
from esmshard.parallel.process_group import World


def ties(model: nn.Module) -> list[list[str]]:
    """Return groups of names that mean the same parameter: for ESM-2 the embedding and the LM head's matrix."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def check_ties(model: nn.Module, expected: list[list[str]]) -> None:
    """Raise `AssertionError` if names that meant one parameter no longer do.

    This happens when the names belong to two FSDP groups. Not every release of torch raises an error for this. Each
    name then trains a copy of its own, or the last rank's rows are never updated.
    """
    lost = [names for names in expected if names not in ties(model)]
    assert not lost, f"{' and '.join(lost[0])} were shared and are now apart; keep them in one FSDP group"


def check_buffers(model: nn.Module) -> None:
    """Raise `AssertionError` if a buffer is in no state dict: `to_empty` leaves it uninitialised."""
    kept = model.state_dict().keys()
    lost = [name for name, _ in model.named_buffers() if name not in kept]
    assert not lost, f"{lost[0]} is a buffer that no checkpoint holds; register it with persistent=True"


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `AssertionError` if an optimizer holds tensors that are not the model's parameters.

    This happens when the optimizer is created before `shard` or `materialise`: its steps then change no used tensor,
    without an error.
    """
    current = {id(p) for p in model.parameters()}
    strangers = sum(id(p) not in current for group in optimizer.param_groups for p in group["params"])
    assert not strangers, f"{strangers} tensors of the optimizer are no parameters of the model; make it after sharding"


def check_same_weights(world: World, marks: Mapping[str, int]) -> None:
    """Raise `InputError`, on all ranks, if ranks read different weights.

    FSDP does not check this: each rank keeps its own slices of the weights that it read, and the model becomes a
    mixture.

    Args:
        world: the ranks that share a model.
        marks: a checksum by name of data that every rank read of each tensor.
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
