"""A model that is never in memory as a whole: its layers take turns in the room of one."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from esmshard.model.config import EsmConfig
from esmshard.model.esm2 import ESM2
from esmshard.model.export import Source, few
from esmshard.model.layouts import TIED


def streamed(
    config: EsmConfig, source: Source, seen: Callable[[str, torch.Tensor], None] = lambda name, tensor: None
) -> ESM2:
    """An `ESM2` on the CPU, in fp32 and for evaluation, which reads each layer when its turn comes.

    Every forward pass reads all layers anew; embedding, LM head and contact regression are read now.

    Args:
        config: of the model.
        source: reads tensors by name; never asked for the tied `lm_head.weight`.
        seen: called with each tensor as it was read.
    """
    with torch.device("meta"):
        model = ESM2(config)
    # One block in all places, and not a new one each time: room that is given back in pieces is not used again.
    block = model.layers[0]
    model.layers = nn.ModuleList([block] * config.n_layers)
    model.to_empty(device="cpu")
    model.tie_weights()
    others = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("layers.")}
    del others[TIED]
    _fill(others, source, seen)

    def next_layer(block: nn.Module, inputs: tuple[object, ...]) -> None:
        _fill({f"layers.{inputs[2]}.{name}": tensor for name, tensor in block.state_dict().items()}, source, seen)

    block.register_forward_pre_hook(next_layer)
    return model.eval()


def _fill(room: Mapping[str, torch.Tensor], source: Source, seen: Callable[[str, torch.Tensor], None]) -> None:
    """Copy values to where they are used: a matrix product may round otherwise where its factors lie otherwise."""
    for names in few({name: tensor.shape for name, tensor in room.items()}):
        tensors = dict(source(names))
        with torch.no_grad():
            for name in names:
                tensor = tensors.pop(name)
                seen(name, tensor)
                room[name].copy_(tensor)
