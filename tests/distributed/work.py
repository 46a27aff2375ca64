"""What the ranks of the distributed tests do. Every rank returns plain numbers and arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from esmshard import recipe as recipes
from esmshard.checkpoint import sharded
from esmshard.data.packing import Plan, deal
from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.config import SIZES
from esmshard.model.esm2 import ESM2
from esmshard.parallel.mesh import World, world
from esmshard.parallel.shard import ShardOptions, materialise, shard, trainable
from esmshard.recipe import Recipe
from esmshard.tasks.contact import ContactTask
from esmshard.tasks.finetuner import FineTuner, new_head
from esmshard.tasks.protocol import Task, collate
from esmshard.train import finetune
from esmshard.train.job import open_split
from esmshard.train.optim import adamw, schedule, set_learning_rate, state_tensors
from esmshard.train.step import train_step

DEFAULTS = ShardOptions()


def load(path: str) -> Recipe:
    return recipes.load(Path(path))


def sharded_model(recipe: Recipe, ranks: World, options: ShardOptions = DEFAULTS) -> tuple[FineTuner, Task]:
    """As the main job builds it."""
    task = ContactTask(recipe.task)
    base = weights.fresh(SIZES[recipe.model.name], recipe.train.seed)
    with torch.device("meta"):
        model = FineTuner(ESM2(base.config), task.head(base.config))
    model.freeze_unused()
    shard(model, recipe.parallel.strategy, ranks, options)
    head = rough_head(recipe, task, base)
    materialise(
        model,
        lambda name: head[name[5:]] if name.startswith("head.") else base[name.removeprefix("trunk.")],
        ranks.device,
    )
    return model.train(), task


def plain_model(recipe: Recipe) -> tuple[FineTuner, Task]:
    """The same weights without any sharding."""
    task = ContactTask(recipe.task)
    base = weights.fresh(SIZES[recipe.model.name], recipe.train.seed)
    model = FineTuner(weights.build(base, torch.device("cpu")), task.head(base.config))
    model.head.load_state_dict(rough_head(recipe, task, base))
    model.freeze_unused()
    return model.train(), task


def rough_head(recipe: Recipe, task: Task, base: weights.Weights) -> dict[str, torch.Tensor]:
    """A new head with a large last layer: behind a tiny one all other gradients vanish, and any two are equal."""
    state = new_head(recipe, task, base).state_dict()
    return state | {"out.weight": torch.randn(state["out.weight"].shape, generator=torch.Generator().manual_seed(1))}


def full(tensor: torch.Tensor) -> np.ndarray:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().float().numpy().copy()


def plain_gradients(path: str, step: int) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of one step, one process, no sharding, no packing tricks: record by record."""
    recipe = load(path)
    model, task = plain_model(recipe)
    data = open_split(recipe, task, "train")
    epoch, records = Plan(data.tokens, recipe.batch.global_tokens, recipe.train.seed).step(step)
    total, count = torch.zeros(()), 0.0
    for n in records:
        batch, targets = collate(task, [data.get(int(n), epoch)])
        part = task.loss(model(batch), targets)
        total, count = total + part.sum, count + float(part.count)
    loss = total / count
    loss.backward()
    return float(loss.detach()), {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def gradients(path: str, step: int, checkpointing: bool, mean_of_means: bool) -> dict[str, Any]:
    """The same by the sharded model. `mean_of_means` is the classic mistake: each rank divides by its own count."""
    recipe = load(path)
    with world() as ranks:
        model, task = sharded_model(recipe, ranks, ShardOptions(activation_checkpointing=checkpointing))
        data = open_split(recipe, task, "train")
        epoch, records = Plan(data.tokens, recipe.batch.global_tokens, recipe.train.seed).step(step)
        most = int(recipe.batch.tokens_per_rank)
        micro = deal(records, data.tokens, most, ranks.rank, ranks.size)
        count, losses, passes = 0.0, 0.0, []
        model.layers[0].fc1.register_forward_hook(lambda *_: passes.append(1))
        for m in micro:
            batch, targets = collate(task, [data.get(n, epoch) for n in m.records])
            part = task.loss(model(batch), targets)
            scale = 0.0 if m.ghost else 1.0
            if mean_of_means:
                scale /= max(1.0, float(part.count)) * ranks.size * len(micro)
            (part.sum * scale).backward()
            count += 0.0 if m.ghost else float(part.count)
            losses += float(part.sum.detach()) * (0.0 if m.ghost else 1.0)
        total_loss, total_count = ranks.sum([losses, count])
        divide = 1.0 if mean_of_means else total_count
        return {
            "loss": total_loss / total_count,
            "gradients": {n: full(p.grad) / divide for n, p in trainable(model).items()},
            "counts": count,
            "micro_batches": len(micro),
            "passes": len(passes) / len(micro),
            "ghosts": sum(m.ghost for m in micro),
        }


def curve(path: str, steps: int) -> dict[str, Any]:
    """Losses of the real training step, and the embedding before and after."""
    recipe = load(path)
    with world() as ranks:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[recipe.parallel.precision]
        checkpointing = recipe.parallel.activation_checkpointing == "full"
        options = ShardOptions(compute_dtype=dtype, activation_checkpointing=checkpointing)
        model, task = sharded_model(recipe, ranks, options)
        optimizer = adamw(model, recipe.optim)
        data = open_split(recipe, task, "train")
        plan = Plan(data.tokens, recipe.batch.global_tokens, recipe.train.seed)
        before = full(model.trunk.embed_tokens.weight)
        losses, norms = [], []
        for step in range(steps):
            set_learning_rate(optimizer, schedule(step, steps, 0.1, "cosine"))
            epoch, records = plan.step(step)
            micro = deal(records, data.tokens, int(recipe.batch.tokens_per_rank), ranks.rank, ranks.size)
            batches = ((*collate(task, [data.get(n, epoch) for n in m.records]), m.ghost) for m in micro)
            result = train_step(model, task, optimizer, batches, recipe.optim.clip, ranks)
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
        data = open_split(recipe, task, "train")
        before = full(model.trunk.embed_tokens.weight)
        batch, targets = collate(task, [data.get(ranks.rank)])

        class Poison:
            def loss(self, outputs: Any, targets: Any) -> Any:
                part = task.loss(outputs, targets)
                scale = float("nan") if ranks.rank == ranks.size - 1 else 1.0
                return type(part)(part.sum * scale, part.count)

        result = train_step(model, Poison(), optimizer, [(batch, targets, False)], 1.0, ranks)  # type: ignore[arg-type]
        return {"skipped": result.skipped, "moved": float(np.abs(full(model.trunk.embed_tokens.weight) - before).max())}


def first_batch(path: str, broken: bool) -> str:
    """The main job as far as its first step, with own shares or the first rank's for all; what ended it."""

    def step_begins(*_: Any) -> None:
        raise InputError("the first step begins")

    finetune.train_step = step_begins
    if broken:
        finetune.deal = lambda records, lengths, most, rank, size: deal(records, lengths, most, 0, size)
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
            "config": {k: getattr(model.trunk.config, k) for k in ("n_layers", "dim", "n_heads", "token_dropout")},
            "baselines": {},
        }
        sharded.save(Path(directory), 7, tensors, state, keep=2)
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
            shard(model, "full_shard", ranks, ShardOptions())
        except (ValueError, AssertionError) as error:
            return str(error)
        return ""
