"""The use of a sharded model after training: ranks score different records, and the base model takes its place.

Every forward pass of a sharded model is one of all ranks, because each gathers the parts of the others. Records are not
alike: one baseline calls the model once for a record, another one twenty times. So a rank that has nothing left to
compute takes part in the passes of the others with a few tokens of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from esmshard.batch import pack
from esmshard.parallel.load import RowsOf, fill
from esmshard.parallel.process_group import World
from esmshard.parallel.shard import groups, reshard
from esmshard.parallel.shared_tokens import trunk_of
from esmshard.parallel.tied_weights import ties
from esmshard.vocab import encode

IDLE = encode("G" * 62)
"""The tokens of a rank that has nothing to compute. Groups of ranks that compute a layer together divide them."""


@contextmanager
def shared_calls(model: nn.Module, ranks: World) -> Iterator[None]:
    """Let each rank call a model, or its trunk, as often as it needs to, without gradients.

    The block ends when the blocks of all ranks have ended. Ranks that compute a layer together must make the same
    calls. Every call runs all layers, so the trunk cannot be asked for layers before the last one alone.

    Args:
        model: a model that `shard` has divided, whose `forward(batch, instead)` calls `instead` if it is given.
        ranks: the ranks. A rank waits for the others as long as their time-out says.
    """
    trunk = trunk_of(model)
    plain: Callable[..., Any] = trunk.forward
    inside = idle = False

    def any_rank(works: bool) -> bool:
        return any(row[0] for row in ranks.rows([works]))

    def begin(*_: Any) -> None:
        nonlocal inside
        if not idle:
            any_rank(True)
        inside = True

    def end(*_: Any) -> None:
        nonlocal inside
        inside = False

    def through_model(*given: Any, **options: Any) -> Any:
        """Call the trunk as a part of the model, which gathers the parameters outside the layers."""
        if inside:
            return plain(*given, **options)
        return model(given[0], lambda: plain(*given, **options))

    # FSDP gathers in a hook of its own, and all ranks must know of the pass before.
    hooks = [
        model.register_forward_pre_hook(begin, prepend=True),
        model.register_forward_hook(end, always_call=True),
    ]
    trunk.forward, trunk.shared_on = through_model, ranks.device  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            yield
            idle = True
            while any_rank(False):
                trunk(pack([IDLE]).to(ranks.device))
    finally:
        trunk.forward, trunk.shared_on = plain, None  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


def free_layers(model: nn.Module) -> None:
    """Free the gathered weights of each layer after its forward pass, whatever the strategy of the training."""
    for layer in model.layers:  # type: ignore[union-attr]
        for group in groups(layer):
            group.set_reshard_after_forward(True, recurse=False)
    reshard(model)


def refill(model: nn.Module, rows_of: RowsOf, world: World) -> None:
    """Set all parameters that have learned to other values, such as those before training, in the same memory.

    Args:
        model: a model that `materialise` has filled.
        rows_of: see `materialise`.
        world: the ranks.

    Raises:
        InputError: on all ranks, if one rank cannot read a tensor.
    """
    reshard(model)
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = {name for name in model.state_dict() if name not in learned and not name.startswith("head.")}
    kept |= {name for _, *others in ties(model) for name in others}
    world.agree(lambda: fill(model, rows_of, kept))
