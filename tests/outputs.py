"""A model of each family, and all that a model says of a pack, for comparisons."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch, pack
from esmshard.model import weights
from esmshard.model.config import ModelConfig
from esmshard.model.contacts import predict_contacts
from esmshard.model.families.family import Family
from esmshard.model.families.family_registry import n_parameters
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.model.trunk import Trunk
from esmshard.vocab import encode


def everything(model: Trunk, batch: TokenBatch) -> list[torch.Tensor]:
    """The representations [T, D] of every layer; and, at last, the logits [T, V] of every token.

    A model without an LM head has the last representation once more in place of the logits. Where no token may attend
    to `<cls>`, the rows of `<cls>` have no meaning, and are zeros.
    """
    layers, config = range(model.config.n_layers + 1), model.config
    at = None if config.only_represents else torch.arange(batch.bounds[-1])
    with torch.no_grad():
        out = model(batch, layers=layers, logits_at=at)
    found = [out.representations[layer] for layer in layers]
    if not config.has_cls:
        found = [x_TD.index_fill(0, batch.cu_seqlens[:-1].long(), 0.0) for x_TD in found]
    return [*found, found[-1] if out.logits_PV is None else out.logits_PV]


def maps(model: Trunk, batch: TokenBatch) -> list[torch.Tensor]:
    """The contact map of each sequence, or its representations if the model has no contact regression."""
    if model.config.only_represents:
        return list(everything(model, batch)[-1].split(batch.token_counts))
    with torch.no_grad():
        return predict_contacts(model, batch)


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


class Residues(nn.Module):
    """A task head for models without an LM head: the representations of the residues in place of logits."""

    def forward(self, x_TD: torch.Tensor, batch: TokenBatch) -> list[torch.Tensor]:
        return batch.residues(x_TD)


def head_of(config: ModelConfig) -> nn.Module:
    return Residues() if config.only_represents else LanguageModelHead()


def learned(model: FineTuner, texts: Sequence[str]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits of all residues, with a head of `head_of`, and all gradients of a loss."""
    batch = pack([encode(text) for text in texts], logits_at=[np.arange(1, len(text) + 1) for text in texts])
    no_logits = {"logits_at_P": None} if model.trunk.config.only_represents else {}
    logits_PV = torch.cat(list(model(replace(batch, **no_logits))))
    F.cross_entropy(logits_PV, batch.tokens_T[batch.logits_at_P].clamp(4, 23)).backward()
    return logits_PV, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
