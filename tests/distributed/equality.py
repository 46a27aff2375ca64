"""What the ranks of the equality tests do: gradients of one step and losses of several, many layouts in one start."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import work
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from work import UNLABELLED, build

from esmshard.batch import TokenBatch
from esmshard.data.batching.packing import StepPlan, assign
from esmshard.model import attention
from esmshard.model.families.family_registry import SIZES
from esmshard.parallel import tensor_parallel
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import DTYPES, groups, local, next_micro_batch, trainable
from esmshard.planner import exchanged, numbers_of, parse
from esmshard.recipe.sections import Recipe
from esmshard.tasks.base import Task, collate
from esmshard.train.optim import adamw, schedule, set_learning_rate
from esmshard.train.step import StepResult, train_step

STEPS = 2
SHARES: dict[int, list[list[list[int]]]] = {
    1: [[[0, 1, 2, 3], [4, 6], [7, UNLABELLED]]],
    2: [[[0, 1, 2], [3, 4], [6, 7]], [[UNLABELLED]]],
    3: [[[0, 1, 2, 3]], [[4, 6], [7]], [[UNLABELLED]]],
    4: [[[0, 1, 2], [3]], [[4, 6]], [[UNLABELLED]], [[7]]],
}
"""The same eight records by world size, rank and micro-batch: uneven, and on a rank without any label."""
ALONE = World(0, 1, torch.device("cpu"), None)


def plain(path: str, steps: int = STEPS) -> dict[str, Any]:
    """The reference: one process, no sharding, no checkpointing, records one by one."""
    recipe = work.load(path)
    model, task = build(recipe, None, None)
    data = work.examples(recipe, task)
    total, count = torch.zeros(()), 0.0
    for n in [n for share in SHARES[4] for micro in share for n in micro]:
        batch, targets = collate(task, [data.get(n, 0)])
        part = task.loss(model(batch), targets)
        total, count = total + part.sum, count + float(part.count)
    (total / count).backward()
    gradients = {name: work.full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": float(total.detach()) / count, "gradients": gradients} | curve(
        recipe, model, task, ALONE, Layout(), steps
    )


@contextmanager
def double_precision() -> Iterator[None]:
    """Compute in fp64 what a recipe computes in fp32: in fp32, gradients of ESM3's LoRA have errors of 3e-5."""
    DTYPES["fp32"] = torch.float64
    try:
        yield
    finally:
        DTYPES["fp32"] = torch.float32


def gradients(recipe: Recipe, model: nn.Module, task: Task, ranks: World, laid: Layout, wrong: bool) -> dict[str, Any]:
    """Loss and gradients of the eight records. `wrong`: each rank divides by its own count, the classic mistake."""
    data, shares = work.examples(recipe, task), SHARES[laid.data_size]
    share, most = shares[ranks.data_rank], max(map(len, shares))
    losses, count = 0.0, 0.0
    for n in range(most):
        batch, targets = collate(task, [data.get(k, 0) for k in share[n if n < len(share) else 0]])
        part = task.loss(model(batch), targets)
        scale = float(n < len(share))  # 0 for a dummy
        divide = max(1.0, float(part.count)) * most * laid.data_size if wrong else 1.0
        next_micro_batch(model, laid, n + 1 == most)
        (part.sum * scale / divide).backward()
        losses, count = losses + scale * float(part.sum.detach()), count + scale * float(part.count)
    total, everyone = (value / laid.together for value in ranks.sum([losses, count]))
    return {
        "loss": total / everyone,
        "count": count,
        "gradients": {n: work.full(p.grad) / (1.0 if wrong else everyone) for n, p in trainable(model).items()},
    }


def curve(recipe: Recipe, model: nn.Module, task: Task, ranks: World, laid: Layout, steps: int) -> dict[str, Any]:
    """Losses and gradient norms of real steps, and how far they moved each weight."""
    optimizer = adamw(model, recipe.optim)
    before = {name: work.full(p) for name, p in model.named_parameters()}
    data = work.examples(recipe, task)
    plan = StepPlan(data.tokens, recipe.batch.global_tokens, recipe.train.seed)
    results: list[StepResult] = []
    for step in range(steps):
        set_learning_rate(optimizer, schedule(step, steps, 0.1, "cosine"))
        epoch, records = plan.step(step)
        micro = assign(records, data.tokens, int(recipe.batch.tokens_per_rank), ranks.data_rank, ranks.data_size)
        batches = ((*collate(task, [data.get(n, epoch) for n in m.records]), m.is_dummy) for m in micro)
        results.append(train_step(model, task, optimizer, batches, recipe.optim.clip, ranks, laid))
    for group in groups(model):
        group.reshard()
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "moved": {name: float(np.abs(work.full(p) - before[name]).max()) for name, p in model.named_parameters()},
    }


def cases(
    wanted: Sequence[tuple[str, Mapping[str, Any]]], steps: int = STEPS, double: bool = False, fsdp: bool = True
) -> list[dict[str, Any]]:
    """Gradients and losses of recipes, each under a `parallel` section. By default a single process uses FSDP, too."""
    # Dynamo's tracing without a compiler behind it: the same calls in the same places, and seconds instead of minutes.
    attention.TrunkBlock.compile = _compile_eagerly  # type: ignore[method-assign]
    results = []
    with world(alone_too=fsdp) as everyone, double_precision() if double else nullcontext():
        for path, settings in wanted:
            recipe, wrong = work.load(path), bool(settings.get("wrong"))
            laid = work.laid_out(recipe, everyone, **{k: v for k, v in settings.items() if k != "wrong"})
            ranks = replace(everyone, together=laid.together)
            model, task = build(recipe, ranks, laid)
            seen = _dtypes_of_coordinates(model)
            result = gradients(recipe, model, task, ranks, laid, wrong)
            result |= {"groups": len(groups(model)), "group": laid.group, "coordinates": seen}
            result["held"] = sum(local(p).numel() for p in trainable(model).values())
            result["dtypes"] = {str(p.dtype) for p in model.parameters()}
            if not wrong:
                model.zero_grad()
                result |= curve(recipe, model, task, ranks, laid, steps)
            results.append(result)
    return results


_compile = attention.TrunkBlock.compile


def _compile_eagerly(block: attention.TrunkBlock, *, dynamic: bool) -> None:
    _compile(block, dynamic=dynamic, backend="eager")


def _dtypes_of_coordinates(model: nn.Module) -> set[str]:
    seen = set[str]()
    for module in (module for name, module in model.named_modules() if name.endswith(".geom_attn")):
        module.register_forward_pre_hook(lambda _, given: seen.add(str(given[1].dtype)))
    return seen


def mistaken(paths: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Loss and gradients with layers divided over both ranks, by mistake."""
    mistakes: dict[str, tuple[Any, str, Any]] = {
        "norm of own heads": (tensor_parallel.DividedNorm, "forward", _norm_of_own_heads),
        "bias of every rank": (tensor_parallel, "_local_parts", lambda _, parameters: _local_parts((), parameters)),
        "gradients that count twice": (
            *(tensor_parallel, "divide_tokens"),
            lambda model, rows: setattr(tensor_parallel.trunk_of(model), "pack", rows),
        ),
    }
    results = {}
    with world() as everyone:
        for mistake, path in paths.items():
            recipe = work.load(path)
            laid = work.laid_out(recipe, everyone, tensor=2)
            ranks = replace(everyone, together=2)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(*mistakes[mistake])
                model, task = build(recipe, ranks, laid)
                results[mistake] = gradients(recipe, model, task, ranks, laid, wrong=False)
    return results


_local_parts = tensor_parallel._local_parts


def _norm_of_own_heads(norm: nn.LayerNorm, y_TD: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(y_TD, y_TD.shape[1:], norm.weight, None, norm.eps)


class Counted(TorchDispatchMode):
    """Counts the operations that run. What activation checkpointing has kept does not run again."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.calls = ranks, Counter[str]()
        """By operation; under `bytes` what gathers and scatters brought from the ranks that compute layers together."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        self.calls[name] += 1
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            self.calls["bytes"] += max(args[0].nbytes, output.nbytes) * (self.ranks - 1) // self.ranks
        return output


def operations(wanted: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, int]]:
    """How often the products with a bias, and the collectives among ranks of a layer, ran in one pass and its gradient.

    The products of a backward pass have no bias, so that those with one are of the forward pass or computed again.
    """
    results = []
    with world(alone_too=True) as everyone:
        for path, settings in wanted:
            recipe = work.load(path)
            laid = work.laid_out(recipe, everyone, **settings)
            model, task = build(recipe, replace(everyone, together=laid.together), laid)
            batch, targets = collate(task, [work.examples(recipe, task).get(0, 0)])
            with Counted(laid.together) as counted:
                task.loss(model(batch), targets).sum.backward()
            numbers = numbers_of(model, SIZES[recipe.model.name])
            planned = exchanged(numbers, laid, parse("2xA100-40GB"), len(batch.tokens_T)).received
            results.append({**counted.calls, "planned bytes": planned})
    return results


def graphs(path: str, wanted: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], float]]:
    """The graphs of compiled layers after each of three packs, and how far the gradients are from other layers'.

    Attention is one operation, as on a GPU; where ranks divide the tokens, it is between compiled parts.
    """

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        return q + 2 * k + 3 * v + 1e-3 * batch.max_seqlen

    attention.TrunkBlock.compile, attention.attend = _compile_eagerly, attend  # type: ignore[method-assign,assignment]
    recipe, results = work.load(path), []
    with world() as everyone:
        for settings in wanted:
            torch._dynamo.reset()
            counters.clear()
            laid = work.laid_out(recipe, everyone, compile=True, **settings)
            ranks = replace(everyone, together=laid.together)
            model, task = build(recipe, ranks, laid)
            plain_model, _ = build(recipe, ranks, replace(laid, compile=False))
            data, counts = work.examples(recipe, task), []
            for records in ([0, 1], [2], [3, 4, 6]):
                batch, targets = collate(task, [data.get(n, 0) for n in records])
                for one in (model, plain_model):
                    task.loss(one(batch), targets).sum.backward()
                counts.append(counters["stats"]["unique_graphs"])
            pairs = zip(model.parameters(), plain_model.parameters(), strict=True)
            grads = [
                (work.full(a.grad), work.full(b.grad)) for a, b in pairs if a.grad is not None and b.grad is not None
            ]
            largest = max(float(np.abs(b).max()) for _, b in grads)
            results.append((counts, max(float(np.abs(a - b).max()) for a, b in grads) / largest))
    return results
