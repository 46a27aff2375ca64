"""What the ranks of the distributed tests do. Every rank returns plain numbers and arrays."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import patch

from esmshard.batch import TokenBatch, pack
from esmshard.checkpoint import sharded
from esmshard.data.batching.packing import StepPlan, assign
from esmshard.data.splits.recipe_splits import open_split
from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.families.esm2 import ESM2
from esmshard.model.families.family_registry import SIZES
from esmshard.model.finetuner import FineTuner
from esmshard.parallel.layout import Layout, layout
from esmshard.parallel.load import RowsOf, materialise
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import shard
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import OptimSettings, ParallelSettings, Recipe
from esmshard.tasks.base import Task, collate
from esmshard.tasks.contact import ContactTask
from esmshard.tasks.finetuned import new_head
from esmshard.train import finetune, loop
from esmshard.train.optim import adamw, schedule, set_learning_rate, state_tensors
from esmshard.train.step import train_step
from esmshard.vocab import CLS, EOS, MASK


def load(path: str) -> Recipe:
    return recipe_file.load(Path(path))


def laid(ranks: World, **settings: Any) -> Layout:
    """A `parallel` section in fp32, two processes a machine, or as many as share a layer."""
    parallel = ParallelSettings.model_validate({"precision": "fp32"} | settings)
    assert parallel.precision != "auto"
    per_machine = max(2, parallel.tensor, parallel.context)
    return layout(parallel, ranks.size, min(per_machine, ranks.size), parallel.precision)


def laid_out(recipe: Recipe, ranks: World, **changes: Any) -> Layout:
    """What the recipe's `parallel` section means, with some changes."""
    return laid(ranks, **(recipe.parallel.model_dump(exclude_defaults=True) | changes))


OPTIM = OptimSettings(lr=1e-3, head_lr=1e-3)  # type: ignore[call-arg]


def masked_batch(n: int) -> tuple[TokenBatch, torch.Tensor, bool]:
    """Batch n of four, each of n + 1 sequences with some residues masked; the last has no mask and no label."""
    generator = np.random.default_rng(n)
    sequences = [generator.integers(4, 24, 10 + 3 * k + n) for k in range(n + 1)]
    tokens = [np.concatenate([[CLS], s, [EOS]]).astype(np.uint8) for s in sequences]
    targets: list[int] = []
    for sequence in tokens if n < 3 else []:
        targets += [int(t) for t in sequence[2:8:3]]
        sequence[2:8:3] = MASK
    return pack(tokens), torch.tensor(targets, dtype=torch.int64), False


def sharded_model(recipe: Recipe, ranks: World, laid_: Layout | None = None) -> tuple[FineTuner, Task]:
    """As the main job builds it."""
    laid_ = laid_ or laid_out(recipe, ranks)
    task = ContactTask(recipe.task, {})
    base = weights.fresh(SIZES[recipe.model.name], recipe.train.seed)
    with torch.device("meta"):
        model = FineTuner(ESM2(base.config), task.head(base.config))
    model.adapt(recipe.adapt, recipe.train.seed)
    shard(model, laid_, ranks)
    head = task.head(base.config)
    head.load_state_dict(rough_head(recipe, task, base))
    materialise(model, rough_rows(model, base, head), laid_, ranks)
    return model.train(), task


def rough_head(recipe: Recipe, task: Task, base: weights.Weights) -> dict[str, torch.Tensor]:
    """A new head with a large last layer: behind a tiny one all other gradients vanish, and any two are equal."""
    state = new_head(recipe, task, base)[0].state_dict()
    last = [name for name in state if name.endswith(("out.weight", "regression.weight"))]
    return state | {name: torch.randn(state[name].shape, generator=torch.Generator().manual_seed(1)) for name in last}


def rough_rows(model: FineTuner, base: weights.Weights, head: torch.nn.Module) -> RowsOf:
    """`model.rows_of` with a large B for each LoRA: behind zeros all gradients of A vanish."""
    read = model.rows_of(base, head)

    def rows_of(name: str, rows: slice) -> torch.Tensor:
        if not name.endswith("lora_B.weight"):
            return read(name, rows)
        generator = torch.Generator().manual_seed(len(name) + ord(name[len("trunk.layers.")]))
        return torch.randn(read(name, slice(None)).shape, generator=generator)[rows]

    return rows_of


def full(tensor: torch.Tensor) -> np.ndarray:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().float().numpy().copy()


def curve(path: str, steps: int) -> dict[str, Any]:
    """Losses of the real training step, and the embedding before and after."""
    recipe = load(path)
    with world() as ranks:
        how = laid_out(recipe, ranks)
        model, task = sharded_model(recipe, ranks, how)
        optimizer = adamw(model, recipe.optim)
        data = open_split(recipe, "train", task.labels)
        plan = StepPlan(data.tokens, recipe.batch.global_tokens, recipe.train.seed)
        before = full(model.trunk.embed_tokens.weight)
        losses, norms = [], []
        for step in range(steps):
            set_learning_rate(optimizer, schedule(step, steps, 0.1, "cosine"))
            epoch, records = plan.step(step)
            micro = assign(records, data.tokens, int(recipe.batch.tokens_per_rank), ranks.rank, ranks.size)
            batches = ((*collate(task, [data.get(n, epoch) for n in m.records]), m.is_dummy) for m in micro)
            result = train_step(model, task, optimizer, batches, recipe.optim.clip, ranks, how)
            losses.append(result.loss)
            norms.append(result.grad_norm)
        tensors = state_tensors(model, optimizer)
        return {
            "losses": losses,
            "norms": norms,
            "moved": np.abs(full(tensors["model.trunk.embed_tokens.weight"]) - before).max(1),
            "tied": model.trunk.lm_head.weight is model.trunk.embed_tokens.weight,
            "names": sorted(tensors),
            "inv_freq": full(tensors["model.trunk.layers.0.self_attn.rot_emb.inv_freq"]),
            "kept_dtypes": sorted({str(t.dtype) for n, t in tensors.items() if n.startswith("model.")}),
        }


def poisoned(path: str) -> dict[str, Any]:
    """One rank's gradient is NaN: no rank may change its weights."""
    recipe = load(path)
    with world() as ranks:
        model, task = sharded_model(recipe, ranks)
        optimizer = adamw(model, recipe.optim)
        set_learning_rate(optimizer, 1.0)
        data = open_split(recipe, "train", task.labels)
        before = full(model.trunk.embed_tokens.weight)
        batch, targets = collate(task, [data.get(ranks.rank)])

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

    patch.setattr(loop, "train_step", step_begins)
    if broken == "the first share for all":
        patch.setattr(
            loop, "assign", lambda records, lengths, most, rank, size: assign(records, lengths, most, 0, size)
        )
    if broken == "a share for each":
        own = int(os.environ["RANK"])
        patch.setattr(loop, "assign", lambda records, lengths, most, rank, size: assign(records, lengths, most, own, 2))
    try:
        finetune.run(load(path))
    except InputError as error:
        return f"{'on all ranks' if error.shared else 'here'}: {error}"
    return "trained"


def save(path: str, directory: str, marker: float) -> list[str]:
    """Save a model whose every tensor was raised by `marker`; the names in the checkpoint."""
    recipe = load(path)
    with world() as ranks:
        model, _ = sharded_model(recipe, ranks)
        optimizer = adamw(model, recipe.optim)
        tensors = state_tensors(model, optimizer)
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.add_(marker)
        state = {
            "recipe": recipe.model_dump(mode="json"),
            "config": model.trunk.config.recorded(),
            "facts": {},
        }
        sharded.write(Path(directory), 7, tensors, state, keep=2)
        return sorted(tensors)


def restore(path: str, directory: str) -> dict[str, np.ndarray]:
    """All tensors after loading into a model of another seed."""
    recipe = load(path)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 99})})
    with world() as ranks:
        model, _ = sharded_model(recipe, ranks)
        optimizer = adamw(model, recipe.optim)
        tensors = state_tensors(model, optimizer)
        sharded.load(Path(directory), tensors)
        return {name: full(tensor) for name, tensor in tensors.items()}


class TiedAcrossGroups(torch.nn.Module):
    """The root's matrix is that of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
        self.head = torch.nn.Linear(8, 8)
        self.head.weight = self.layers[1].weight


def split_tie(device: str) -> str:
    """Shard a model whose tied weight falls into two groups; the message of whoever notices."""
    with world() as ranks:
        with torch.device(device):
            model = TiedAcrossGroups()
        try:
            shard(model, laid(ranks), ranks)
        except (ValueError, AssertionError) as error:
            return str(error)
        return ""
