"""What the ranks of the tests with coordinates and structure tokens do."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import work
from torch import nn

from esmshard.batch import TokenBatch, pack
from esmshard.model import weights
from esmshard.model.families import family_registry
from esmshard.model.families.family_registry import SIZES
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.parallel.layout import Layout
from esmshard.parallel.load import materialise
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import groups, shard
from esmshard.recipe.sections import AdaptSettings
from esmshard.tasks.base import LossSum
from esmshard.train.optim import adamw, set_learning_rate
from esmshard.train.step import train_step
from esmshard.vocab import CLS, EOS, MASK

TRACKS = ("coordinates", "structure_tokens")
SHARES = {1: [[[0, 1], [2], [3]]], 2: [[[0, 1], [2]], [[3]]]}
"""The same four proteins by world size, rank and micro-batch. Of protein 3 no structure is known."""
STEPS = 4

Micro = tuple[TokenBatch, torch.Tensor, bool]


class Loss:
    """The cross-entropy of all places, as a sum."""

    def loss(self, outputs: list[torch.Tensor], targets: torch.Tensor) -> LossSum:
        total = nn.functional.cross_entropy(torch.cat(outputs), targets, reduction="sum")
        return LossSum(total, torch.tensor(float(len(targets))))


def protein(n: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Tokens with a mask, coordinates and structure tokens of protein n."""
    numbers = np.random.default_rng(n)
    tokens = np.concatenate([[CLS], numbers.integers(4, 24, 20 + 7 * n), [EOS]]).astype(np.uint8)
    tokens[3] = MASK
    alpha = 100 * n + 2.2 * numbers.standard_normal((len(tokens), 1, 3)).cumsum(0)
    coordinates = (alpha + numbers.standard_normal((len(tokens), 3, 3))).astype(np.float32)
    codes = numbers.integers(0, 4096, len(tokens))
    unknown = [*range(len(tokens))] if n == 3 else [0, 5, -1]
    coordinates[unknown], codes[unknown] = np.nan, 4096
    return tokens, {"coordinates": coordinates, "structure_tokens": codes}


def micro_batch(proteins: list[int], is_dummy: bool = False) -> Micro:
    tokens, tracks = zip(*map(protein, proteins), strict=True)
    batch = pack(tokens, logits_at=[np.arange(len(one)) for one in tokens], tracks=tracks)
    return batch, batch.tokens_T.clamp(max=23), is_dummy


def built(ranks: World | None, laid: Layout) -> FineTuner:
    """The smallest ESM3, all of which learns that learns with these tracks; with a rough output of geometric attention,
    behind which no gradient vanishes.
    """
    base = weights.fresh(SIZES["esm3_nano"], 3)
    with torch.device("meta"):
        model = FineTuner(family_registry.build(base.config), LanguageModelHead())
    model.adapt(AdaptSettings(), 0, TRACKS)
    read = model.rows_of(base, model.head)

    def rows_of(name: str, rows: slice) -> torch.Tensor:
        return read(name, rows) * (8 if "geom_attn" in name and name.endswith("proj.weight") else 1)

    if ranks is not None:
        shard(model, laid, ranks)
        materialise(model, rows_of, laid, ranks)
    else:
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(rows_of(name, slice(None)))
    return model.train()


def steps(model: FineTuner, ranks: World, laid: Layout) -> dict[str, Any]:
    """Losses and gradient norms of some steps, and the parameters after them."""
    optimizer = adamw(model, work.OPTIM)
    seen: list[torch.dtype] = []
    model.trunk.geom_attn.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1].dtype))  # type: ignore[union-attr,operator]
    results = []
    share = SHARES[ranks.data_size][ranks.data_rank]
    most = max(map(len, SHARES[ranks.data_size]))
    for _ in range(STEPS):
        set_learning_rate(optimizer, 0.3)
        batches = [micro_batch(share[n] if n < len(share) else share[0], n >= len(share)) for n in range(most)]
        results.append(train_step(model, Loss(), optimizer, batches, 1.0, ranks, laid))  # type: ignore[arg-type]
    for group in groups(model):
        group.reshard()
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "weights": {name: work.full(parameter) for name, parameter in model.named_parameters()},
        "coordinates": {str(dtype) for dtype in seen},
    }


def plain() -> dict[str, Any]:
    """The reference: one process, no sharding, no checkpointing."""
    laid = Layout()
    return steps(built(None, laid), World(0, 1, torch.device("cpu"), None), laid)


def cases(wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same under each of several `parallel` sections."""
    found = {}
    with world(alone_too=True) as ranks:
        for name, settings in wanted.items():
            laid = work.laid(ranks, **settings)
            found[name] = steps(built(ranks, laid), replace(ranks, together=laid.together), laid)
    return found
