"""All that a model says of a pack, for comparisons."""

import torch

from esmshard.batch import TokenBatch
from esmshard.model.trunk import Trunk


def everything(model: Trunk, batch: TokenBatch) -> list[torch.Tensor]:
    """The representations [T, D] of every layer; and, at last, the logits [T, V] of every token."""
    layers = range(model.config.n_layers + 1)
    with torch.no_grad():
        out = model(batch, layers=layers, logits_at=torch.arange(batch.bounds[-1]))
    assert out.logits_PV is not None
    return [*(out.representations[layer] for layer in layers), out.logits_PV]
