"""What the `parallel` section of a recipe means for so many processes, and what it cannot mean."""

from typing import Any

import pytest
import torch

from esmshard.errors import UsageError
from esmshard.model.families.family_registry import SIZES
from esmshard.parallel.layout import STRATEGIES, Layout, kept_products, layout
from esmshard.parallel.process_group import precision_on
from esmshard.recipe.sections import ParallelSettings


def laid(world_size: int, per_machine: int = 4, **settings: Any) -> Layout:
    return layout(ParallelSettings.model_validate(settings), world_size, per_machine, "fp32")


def test_groups() -> None:
    cases: list[tuple[dict[str, Any], int, int]] = [
        ({"strategy": "full_shard"}, 3, 3),
        ({"strategy": "shard_grad_op"}, 8, 8),
        ({"strategy": "no_shard"}, 8, 1),
        ({"strategy": "hybrid_shard"}, 8, 4),
        ({"strategy": "hybrid_shard", "group_size": 2}, 8, 2),
        *(({"strategy": name, "group_size": 3 if name == "hybrid_shard" else None}, 1, 1) for name in STRATEGIES),
    ]
    for settings, world_size, group in cases:
        found = laid(world_size, **settings)
        assert (found.world_size, found.group, found.replicas) == (world_size, group, world_size // group)
        assert found.frees_layers == (settings["strategy"] != "shard_grad_op")


def test_a_layout_has_the_group_that_its_strategy_means() -> None:
    """A library's user writes `Layout` without the recipe's section. A strategy that is ignored would cost the memory
    of a whole copy on each rank.
    """
    known = ("full_shard", "shard_grad_op", "no_shard")
    assert [Layout(strategy=name, world_size=8).group for name in known] == [8, 8, 1]
    assert Layout(world_size=8, tensor=2).group == Layout(strategy="hybrid_shard", world_size=8, group=4).group == 4
    for strategy, group in (("full_shard", 1), ("no_shard", 8), ("hybrid_shard", 0), ("hybrid_shard", 3), ("ddp", 0)):
        with pytest.raises(UsageError, match=strategy):
            Layout(strategy=strategy, world_size=8, group=group)


def test_ranks_that_work_together() -> None:
    """FSDP divides over every N-th rank beside tensor parallelism, and over all ranks beside context parallelism."""
    cases: list[tuple[dict[str, Any], int, int, int]] = [
        ({"tensor": 2}, 4, 4, 1),
        ({"tensor": 4, "strategy": "no_shard"}, 2, 1, 2),
        ({"tensor": 2, "strategy": "hybrid_shard"}, 4, 2, 2),
        ({"context": 2}, 4, 8, 1),
        ({"context": 4, "strategy": "hybrid_shard"}, 2, 4, 2),
    ]
    for settings, data_size, group, replicas in cases:
        found = laid(8, **settings)
        assert (found.data_size, found.group, found.replicas) == (data_size, group, replicas)
        assert found.together == 8 // data_size
        assert found.replicas * found.group * found.tensor == 8


def test_what_cannot_be() -> None:
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"strategy": "hybrid_shard", "group_size": 3}, 8, "groups of 3"),
        ({"strategy": "hybrid_shard"}, 4, "groups of 4"),
        ({"strategy": "full_shard", "group_size": 2}, 4, "parallel.group_size"),
        ({"tensor": 3}, 8, "parallel.tensor"),
        ({"tensor": 2, "context": 2}, 8, "parallel.context"),
        ({"cpu_offload": True, "accumulate": "unsharded"}, 4, "parallel.accumulate"),
    ]
    for settings, world_size, token in cases:
        with pytest.raises(UsageError, match=token):
            laid(world_size, **settings)


def test_the_products_that_selective_checkpointing_keeps() -> None:
    """q, k and v; `out` on a rank of its own; fc1, of which a gated layer has two."""
    assert kept_products(SIZES["nano"].matrices, 1) == {(32, 32): 4, (32, 128): 1}
    assert kept_products(SIZES["esmc_nano"].matrices, 2) == {(32, 16): 3, (32, 128): 2}


def test_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert precision_on(cpu, "auto") == "fp32"
    assert precision_on(cpu, "bf16") == "bf16"
    with pytest.raises(UsageError, match=r"parallel\.precision"):
        precision_on(cpu, "fp16")
    for capability, expected in {(8, 0): "bf16", (7, 5): "fp16", (7, 0): "fp16", (6, 1): "fp32"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert precision_on(gpu, "auto") == expected
    assert precision_on(gpu, "fp16") == "fp16"
    assert precision_on(torch.device("mps"), "auto") == "fp32"
