"""What the ranks of the distributed tests do. Every rank returns plain numbers and arrays."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packed_weights import unpacked

from esmshard.checkpoint import sharded
from esmshard.data.batching.loader import Examples
from esmshard.data.batching.packing import assign
from esmshard.data.splits.recipe_splits import open_split
from esmshard.data.tracks import in_batches, unknown_entry
from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.families.family_registry import SIZES, family_of
from esmshard.model.families.family_registry import build as new_trunk
from esmshard.model.finetuner import FineTuner
from esmshard.parallel.layout import Layout, layout
from esmshard.parallel.load import RowsOf, materialise
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import DTYPES, shard
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import ParallelSettings, Recipe
from esmshard.tasks.base import Task, collate
from esmshard.tasks.finetuned import new_head
from esmshard.tasks.registry import new_task
from esmshard.train import finetune, loop
from esmshard.train.optim import adamw, set_learning_rate, state_tensors
from esmshard.train.step import train_step

UNLABELLED = 5
"""The record of the tiny data set that has no coordinates."""


def load(path: str) -> Recipe:
    return recipe_file.load(Path(path))


def laid_out(recipe: Recipe, ranks: World, **changes: Any) -> Layout:
    """The recipe's `parallel` section with changes, for two processes a machine, or as many as share a layer."""
    settings = {"precision": "fp32", **recipe.parallel.model_dump(exclude_defaults=True), **changes}
    parallel = ParallelSettings.model_validate(settings)
    assert parallel.precision != "auto"
    per_machine = max(2, parallel.tensor, parallel.context)
    return layout(parallel, ranks.size, min(per_machine, ranks.size), parallel.precision)


class RandomTracks:
    """Coordinates and structure tokens of ESM3, which one record does not have."""

    def __init__(self, data: Examples, recipe: Recipe) -> None:
        self.tracks, self.lengths = family_of(SIZES[recipe.model.name]).tracks, data.store.lengths

    def get(self, n: int, part: Any) -> dict[str, np.ndarray]:
        numbers, length = np.random.default_rng(n), int(self.lengths[n])
        coordinates = 2.2 * numbers.standard_normal((length, 1, 3)).cumsum(0) + numbers.standard_normal((length, 3, 3))
        values = {"coordinates": coordinates, "structure_tokens": numbers.integers(0, 4096, length)}
        if n == UNLABELLED:
            values = {track.name: unknown_entry(track, length) for track in self.tracks}
        return {track.name: in_batches(track, values[track.name][part]) for track in self.tracks}


def examples(recipe: Recipe, task: Task) -> Examples:
    """The training records, for ESM3 with tracks."""
    data = open_split(recipe, "train", task.labels)
    if recipe.model.name == "esm3_nano":
        data.tracks = RandomTracks(data, recipe)  # type: ignore[assignment]
    return data


def build(recipe: Recipe, ranks: World | None, laid: Layout | None) -> tuple[FineTuner, Task]:
    """The model of a recipe, sharded; or, without a layout, as plain as can be."""
    task, config, quantization = new_task(recipe.task, {}), SIZES[recipe.model.name], recipe.model.quantize
    tracks = [track.name for track in family_of(config).tracks] if recipe.model.name == "esm3_nano" else []
    base = weights.fresh(config, recipe.train.seed)
    head = task.head(config)
    head.load_state_dict(rough_head(recipe, task, base))
    if laid is None or ranks is None:
        base = base if quantization is None else unpacked(base, quantization)
        model = FineTuner(weights.build(base, torch.device("cpu")), head)
        model.adapt(recipe.adapt, recipe.train.seed, tracks)
        rows_of = rough_rows(model, base, head)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(rows_of(name, slice(None)))
        return model.to(DTYPES["fp32"]).train(), task
    with torch.device("meta"):
        model = FineTuner(new_trunk(config), task.head(config))
    model.adapt(recipe.adapt, recipe.train.seed, tracks, quantization)
    model.to(DTYPES["fp32"])
    shard(model, laid, ranks)
    materialise(model, rough_rows(model, base, head), laid, ranks)
    return model.train(), task


def sharded_model(recipe: Recipe, ranks: World, laid: Layout | None = None) -> tuple[FineTuner, Task]:
    return build(recipe, ranks, laid or laid_out(recipe, ranks))


def rough_head(recipe: Recipe, task: Task, base: weights.Weights) -> dict[str, torch.Tensor]:
    """A new head with a large last layer: behind a tiny one all other gradients vanish, and any two are equal."""
    state = new_head(recipe, task, base)[0].state_dict()
    last = [name for name in state if name.endswith(("out.weight", "regression.weight"))]
    return state | {name: torch.randn(state[name].shape, generator=torch.Generator().manual_seed(1)) for name in last}


def rough_rows(model: FineTuner, base: weights.Weights, head: torch.nn.Module) -> RowsOf:
    """`model.rows_of` with a large B for each LoRA, and large geometric attention, so that no gradient vanishes."""
    read = model.rows_of(base, head)

    def rows_of(name: str, rows: slice) -> torch.Tensor:
        if not name.endswith("lora_B.weight"):
            return read(name, rows) * (8 if "geom_attn" in name and name.endswith("proj.weight") else 1)
        generator = torch.Generator().manual_seed(len(name) + ord(name[len("trunk.layers.")]))
        return torch.randn(read(name, slice(None)).shape, generator=generator)[rows]

    return rows_of


def full(tensor: torch.Tensor) -> np.ndarray:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().float().numpy().copy()


def poisoned(path: str) -> dict[str, Any]:
    """One rank's gradient is NaN: no rank may change its weights."""
    recipe = load(path)
    with world() as ranks:
        model, task = sharded_model(recipe, ranks)
        optimizer = adamw(model, recipe.optim)
        set_learning_rate(optimizer, 1.0)
        before = full(model.trunk.embed_tokens.weight)
        batch, targets = collate(task, [examples(recipe, task).get(ranks.rank)])

        class Poison:
            def loss(self, outputs: Any, targets: Any) -> Any:
                part = task.loss(outputs, targets)
                scale = float("nan") if ranks.rank == ranks.size - 1 else 1.0
                return type(part)(part.sum * scale, part.count)

        result = train_step(model, Poison(), optimizer, [(batch, targets, False)], 1.0, ranks, laid_out(recipe, ranks))  # type: ignore[arg-type]
        return {"skipped": result.skipped, "moved": float(np.abs(full(model.trunk.embed_tokens.weight) - before).max())}


def first_batch(path: str, broken: str) -> str:
    """The main job as far as its first step, with own shares or the first rank's for all; what ended it."""

    def step_begins(*_: Any, **__: Any) -> None:
        raise InputError("the first step begins")

    loop.train_step = step_begins  # type: ignore[assignment]
    own = int(os.environ["RANK"])
    if broken == "the first share for all":
        loop.assign = lambda records, lengths, most, rank, size: assign(records, lengths, most, 0, size)  # type: ignore[assignment]
    if broken == "a share for each":
        loop.assign = lambda records, lengths, most, rank, size: assign(records, lengths, most, own, 2)  # type: ignore[assignment]
    try:
        finetune.run(load(path))
    except InputError as error:
        return f"{'on all ranks' if error.shared else 'here'}: {error}"
    return "trained"


def save(path: str, directory: str, marker: float) -> None:
    """Save a model whose every tensor was raised by `marker`."""
    recipe = load(path)
    with world() as ranks:
        model, _ = sharded_model(recipe, ranks)
        tensors = state_tensors(model, adamw(model, recipe.optim))
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.add_(marker)
        state = {"recipe": recipe.model_dump(mode="json"), "config": model.trunk.config.recorded(), "facts": {}}
        sharded.write(Path(directory), 7, tensors, state, keep=2)


def restore(path: str, directory: str) -> dict[str, np.ndarray]:
    """All tensors after loading into a model of another seed."""
    recipe = load(path)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 99})})
    with world() as ranks:
        model, _ = sharded_model(recipe, ranks)
        tensors = state_tensors(model, adamw(model, recipe.optim))
        sharded.load(Path(directory), tensors)
        return {name: full(tensor) for name, tensor in tensors.items()}
