"""What the ranks of the loading and guard tests do."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import work
from torch import nn

from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.families.esm2 import ESM2
from esmshard.model.families.family_registry import SIZES, build
from esmshard.parallel.layout import STRATEGIES, layout
from esmshard.parallel.load import RowsOf, local_slices, materialise
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import groups, local, shard
from esmshard.recipe.sections import ParallelSettings


def trunk(ranks: World, rows_of: RowsOf, **settings: Any) -> nn.Module:
    with torch.device("meta"):
        model = ESM2(SIZES["nano"])
    laid = work.laid(ranks, **settings)
    shard(model, laid, ranks)
    materialise(model, rows_of, laid, ranks)
    return model


def read_from(path: str) -> dict[str, dict[str, Any]]:
    """By strategy: numbers that this rank read out of a model file, those that it keeps, and what the model became."""
    found = {}
    with world() as ranks:
        for strategy in STRATEGIES:
            if strategy == "hybrid_shard" and ranks.size < 4:
                continue
            stored, asked = weights.read(path), []

            def rows_of(
                name: str, rows: slice, stored: weights.Weights = stored, asked: list[int] = asked
            ) -> torch.Tensor:
                tensor = stored.rows(name, rows)
                asked.append(tensor.numel())
                return tensor

            model = trunk(ranks, rows_of, strategy=strategy)
            held = sum(local(t).numel() for n, t in model.state_dict().items() if n != "lm_head.weight")
            whole = {name: work.full(tensor) for name, tensor in model.state_dict().items()}
            found[strategy] = {"read": sum(asked), "largest": max(asked), "held": held, "whole": whole}
    return found


def failing(kind: str, folder: str) -> list[str]:
    """What each rank is told when something is wrong with the weights of the last one; and that all go on after it."""
    said = []
    with world() as ranks:
        last = ranks.rank == ranks.size - 1
        base = weights.fresh(SIZES["nano"], 7 if kind == "seed" and last else 3)

        def rows_of(name: str, rows: slice) -> torch.Tensor:
            if kind == "unreadable" and last and name == "layers.1.fc1.weight":
                raise InputError(f"{Path(folder).name}: cannot be read")
            return base.rows(name, rows)

        for strategy in ("full_shard", "no_shard"):
            try:
                trunk(ranks, rows_of, strategy=strategy)
                said.append("nothing")
            except InputError as error:
                said.append(str(error))
        assert ranks.sum([1]) == [ranks.size], "the ranks are still together"
    return said


def offloaded() -> dict[str, Any]:
    """Where things lie under CPU offload (of a CPU), and the buffers' values."""
    base = weights.fresh(SIZES["nano"], 3)
    with world(alone_too=True) as ranks:
        model = trunk(ranks, base.rows, cpu_offload=True)
        rotary = [work.full(b) for n, b in model.named_buffers() if n.endswith("inv_freq")]
        return {
            "devices": {str(local(p).device) for p in model.parameters()},
            "buffers": len(rotary),
            "right": all(np.array_equal(b, base["layers.0.self_attn.rot_emb.inv_freq"].numpy()) for b in rotary),
        }


def as_one_of_many(name: str, size: int, settings: dict[str, Any], rank: int) -> dict[str, Any]:
    """What one of many ranks would hold. torch's fake process group plays the others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    with torch.device("meta"):
        model = build(SIZES[name])
    laid = layout(ParallelSettings.model_validate(settings), size, 8, "bf16")
    shard(model, laid, World(rank, size, torch.device("cpu"), mesh))
    state = model.state_dict()
    found = {
        "held": sum(local(p).numel() for p in model.parameters()),
        "embedding": local_slices(state["embed_tokens.weight"])[0],
        "fc1": local_slices(state[f"layers.{len(model.layers) - 1}.{'fc1' if 'esm2' in name else 'gate'}.weight"])[0],
        "groups": len(groups(model)),
    }
    torch.distributed.destroy_process_group()
    return found
