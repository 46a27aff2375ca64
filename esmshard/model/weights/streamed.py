"""A model that is never in memory as a whole: all layers use the memory of one layer in turn."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from esmshard.model.config import EsmConfig
from esmshard.model.trunk import ESM2
from esmshard.model.weights.export import Source, few
from esmshard.model.weights.key_maps import TIED


def streamed(
    config: EsmConfig, source: Source, seen: Callable[[str, torch.Tensor], None] = lambda name, tensor: None
) -> ESM2:
    """Make an `ESM2` on the CPU, in fp32 and for evaluation, which reads each layer just before it runs.

    Every forward pass reads all layers again; embedding, LM head and contact regression are read once, now.

    Args:
        config: architecture of the model.
        source: reads tensors by name. The tied `lm_head.weight` is never requested.
        seen: called with each tensor after it was read.
    """
    with torch.device("meta"):
        model = ESM2(config)
    # All places share one block: memory that is freed in pieces would not be used again for new blocks.
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
    """Copy values into the tensors that are used, since a matrix product may round differently for another memory
    layout.
    """
    for names in few({name: tensor.shape for name, tensor in room.items()}):
        tensors = dict(source(names))
        with torch.no_grad():
            for name in names:
                tensor = tensors.pop(name)
                seen(name, tensor)
                room[name].copy_(tensor)
