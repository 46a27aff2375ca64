"""A model of each family, and all that a model says of a pack, for comparisons."""

import torch

from esmshard.batch import TokenBatch
from esmshard.model import weights
from esmshard.model.config import ModelConfig
from esmshard.model.families.family import Family
from esmshard.model.families.family_registry import n_parameters
from esmshard.model.trunk import Trunk


def everything(model: Trunk, batch: TokenBatch) -> list[torch.Tensor]:
    """The representations [T, D] of every layer; and, at last, the logits [T, V] of every token."""
    layers = range(model.config.n_layers + 1)
    with torch.no_grad():
        out = model(batch, layers=layers, logits_at=torch.arange(batch.bounds[-1]))
    assert out.logits_PV is not None
    return [*(out.representations[layer] for layer in layers), out.logits_PV]


def smallest(family: Family) -> ModelConfig:
    return min(family.sizes.values(), key=n_parameters)


def perturbed(config: ModelConfig) -> Trunk:
    """A model with every parameter off its initial value."""
    model = weights.build(weights.fresh(config, 0), torch.device("cpu")).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model
