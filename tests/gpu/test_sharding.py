"""FSDP2 in a world of one, with a real process group (NCCL, in a rehearsal gloo), against the plain model."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import loaded
from shared import apart, size
from torch.distributed.tensor import DTensor
from training import Training, set_up

from esmshard.devices import exact_convolutions
from esmshard.parallel.layout import STRATEGIES, Layout, layout
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import groups, local, trainable
from esmshard.recipe.sections import ParallelSettings, Recipe
from esmshard.train.optim import state_tensors

pytestmark = pytest.mark.gpu

STEPS = size(3, 2)


@pytest.fixture(scope="module")
def ranks(device: torch.device) -> Iterator[World]:
    """The only rank, in a process group of its own."""
    with world(alone_too=True) as one, exact_convolutions(device):
        assert one.mesh is not None
        assert one.device.type == device.type
        assert one.sum([1.5, 2.0]) == [1.5, 2.0]
        assert one.gather({"rank": one.rank}) == [{"rank": 0}]
        yield one


def laid(**given: Any) -> Layout:
    """A recipe's `parallel` section in a world of one, and what such a world has no keys for."""
    keys = {key: value for key, value in given.items() if key in ParallelSettings.model_fields}
    settings = ParallelSettings.model_validate({"precision": "fp32"} | keys)
    assert settings.precision != "auto"
    others = {key: value for key, value in given.items() if key not in keys}
    return dataclasses.replace(layout(settings, 1, 1, settings.precision), **others)


@dataclasses.dataclass
class Found:
    """What some steps came to."""

    gradients: dict[str, torch.Tensor]
    losses: list[float]
    weights: dict[str, torch.Tensor]
    validation: float


def trained(training: Training) -> Found:
    """Gradients of the first step, losses of all, weights and validation after them."""
    gradients, losses, validation = training.run(STEPS)
    state_tensors(training.model, training.optimizer)  # puts the parameters back into shards
    return Found(gradients, losses, training.weights(), validation)


_plain: dict[str, Found] = {}


def plain(recipe: Recipe, device: torch.device) -> Found:
    """The same on the same device without FSDP, in fp32."""
    name = recipe.task.name
    if name not in _plain:
        _plain[name] = trained(set_up(recipe, device))
    return _plain[name]


LAYOUTS: dict[str, dict[str, Any]] = {
    **{name: {"strategy": name} for name in STRATEGIES},
    "full checkpointing": {"activation_checkpointing": "full"},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "offload": {"cpu_offload": True},
    "offload, checkpointing": {"cpu_offload": True, "activation_checkpointing": "full"},
    "unsharded accumulation": {"accumulate": "unsharded"},
    "bf16": {"precision": "bf16"},
    "bf16, reduced in bf16": {"precision": "bf16", "reduce_dtype": "bf16"},
    "bf16, selective checkpointing": {"precision": "bf16", "activation_checkpointing": "selective"},
    "bf16, offload": {"precision": "bf16", "cpu_offload": True, "activation_checkpointing": "full"},
}


CONTACT = ("full_shard", "shard_grad_op", "selective checkpointing", "offload", "bf16", "bf16, offload")
"""Layouts for which a head of convolutions and attention maps is looked at, too."""
VARIANT = ("full_shard", "offload", "bf16")
"""The same of a head with a parameter that is made of an array: it lies on the host while others have no memory yet."""


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *(("mlm", name) for name in LAYOUTS),
        *(("contact-both", name) for name in CONTACT),
        *(("variant-sites", name) for name in VARIANT),
    ],
)
def test_a_sharded_step_is_that_of_the_plain_model(
    device: torch.device, varlen: None, ranks: World, tmp_path: Path, case: str, name: str
) -> None:
    recipe, how = loaded(tmp_path, case), laid(**LAYOUTS[name])
    training = set_up(recipe, device, ranks, how)
    assert len(groups(training.model)) == training.job.weights.config.n_layers + 1
    found, expected = trained(training), plain(recipe, device)
    if how.cpu_offload:
        shards = [local(p) for p in trainable(training.model).values()]
        state = next(iter(training.optimizer.state.values()))
        assert {tensor.device.type for tensor in [*shards, *state.values()]} == {"cpu"}
        # There is nothing to pin memory for without a GPU.
        assert device.type == "cpu" or all(shard.is_pinned() for shard in shards)
    assert all(isinstance(p, DTensor) for p in trainable(training.model).values())
    assert training.model.trunk.lm_head.weight is training.model.trunk.embed_tokens.weight
    # In fp32 the order of sums differs; in bf16 each number is rounded, LayerNorms too.
    exact = how.precision == "fp32"
    assert apart(found.gradients, expected.gradients) <= (1e-5 if exact else 1e-1)
    for mine, other in zip([*found.losses, found.validation], [*expected.losses, expected.validation], strict=True):
        assert abs(mine - other) <= (1e-5 if exact else 3e-2) * max(1.0, abs(other))
    if exact:
        assert apart(found.weights, expected.weights) <= 1e-4
