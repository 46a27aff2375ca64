"""A model that is never in memory as a whole: all layers use the memory of one layer in turn."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from esmshard.model.config import ModelConfig
from esmshard.model.families import family_registry
from esmshard.model.trunk import Trunk
from esmshard.model.weights.export import Source, few


def streamed(
    config: ModelConfig, source: Source, seen: Callable[[str, torch.Tensor], None] = lambda name, tensor: None
) -> Trunk:
    """Make a model on the CPU, in fp32 and for evaluation, which reads each layer just before it runs.

    Every forward pass reads all layers again; embedding, LM head and contact regression are read once, now.

    Args:
        config: architecture of the model.
        source: reads tensors by name. Tied tensors are requested once.
        seen: called with each tensor after it was read.
    """
    with torch.device("meta"):
        model = family_registry.build(config)
    # All places share one block: memory that is freed in pieces would not be used again for new blocks.
    block = model.layers[0]
    model.layers = nn.ModuleList([block] * config.n_layers)
    model.to_empty(device="cpu")
    model.tie_weights()
    stored = (item for item in model.state_dict().items() if item[0] not in model.tied)
    others = {name: tensor for name, tensor in stored if not name.startswith("layers.")}
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
