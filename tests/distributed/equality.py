"""What the ranks of the equality tests do: gradients of one step and losses of five, many layouts in one start."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import work
from conftest import RECIPE, write_subset
from packed_weights import unpacked
from ranks import patch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from esmshard.batch import TokenBatch
from esmshard.data.batching.loader import Examples
from esmshard.data.batching.packing import StepPlan, assign
from esmshard.data.splits.recipe_splits import open_split
from esmshard.model import attention, weights
from esmshard.model.config import ModelConfig
from esmshard.model.families import family_registry
from esmshard.model.families.esm2 import ESM2, EsmConfig
from esmshard.model.finetuner import FineTuner
from esmshard.parallel import tensor_parallel
from esmshard.parallel.layout import Layout
from esmshard.parallel.load import materialise
from esmshard.parallel.process_group import World, world
from esmshard.parallel.shard import DTYPES, groups, next_micro_batch, shard, trainable
from esmshard.planner import exchanged, numbers_of, parse
from esmshard.recipe.sections import Recipe
from esmshard.tasks.base import LossSum, Task, collate
from esmshard.tasks.contact import ContactTask
from esmshard.tasks.finetuned import tracks_of
from esmshard.train.optim import adamw, schedule, set_learning_rate
from esmshard.train.step import StepResult, train_step
from esmshard.vocab import MASK

CONFIG = EsmConfig(n_layers=3, dim=32, n_heads=4)
STEPS = 5
UNLABELLED = 5
"""The record of the tiny data set that has no coordinates."""

SHARES: dict[int, list[list[list[int]]]] = {
    1: [[[0, 1, 2, 3], [4, 6], [7, UNLABELLED]]],
    2: [[[0, 1, 2], [3, 4], [6, 7]], [[UNLABELLED]]],
    4: [[[0, 1, 2], [3]], [[4, 6]], [[UNLABELLED]], [[7]]],
}
"""The same eight records by world size, rank and micro-batch: uneven, and on a rank without any label."""


def written(directory: Path) -> Path:
    """A recipe on 24 training chains, one without coordinates; steps of about three records."""
    write_subset(directory, "train", "train", range(24), unresolved=UNLABELLED)
    write_subset(directory, "valid", "valid", range(5))
    text = RECIPE.replace("global_tokens: 400", "global_tokens: 150").replace("blocks: 1", "blocks: 0")
    (directory / "tiny.yaml").write_text(text.format(tokens_per_rank=66, out=directory / "run"))
    return directory / "tiny.yaml"


ALONE = World(0, 1, torch.device("cpu"), None)

Micro = tuple[TokenBatch, list[torch.Tensor], bool]


def config_of(recipe: Recipe) -> ModelConfig:
    """Three layers of an ESM-2; of another family the size that the recipe names."""
    config = family_registry.SIZES[recipe.model.name]
    return CONFIG if config.family == CONFIG.family else config


def build(recipe: Recipe, ranks: World | None, laid: Layout | None) -> tuple[FineTuner, Task]:
    """Trunk and contact head, sharded; or, without a layout, as plain as can be."""
    task, config, quantization = ContactTask(recipe.task, {}), config_of(recipe), recipe.model.quantize
    base = weights.fresh(config, 3)
    head = task.head(config)
    head.load_state_dict(work.rough_head(recipe, task, base))
    if laid is None or ranks is None:
        base = base if quantization is None else unpacked(base, quantization)
        model = FineTuner(weights.build(base, torch.device("cpu")), head)
        model.adapt(recipe.adapt, recipe.train.seed)
        rows_of = work.rough_rows(model, base, head)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(rows_of(name, slice(None)))
        return model.to(DTYPES["fp32"]).train(), task
    with torch.device("meta"):
        model = FineTuner(family_registry.build(config), task.head(config))
    model.adapt(recipe.adapt, recipe.train.seed, (), quantization)
    model.to(DTYPES["fp32"])
    shard(model, laid, ranks)
    materialise(model, work.rough_rows(model, base, head), laid, ranks)
    return model.train(), task


def plain(path: str, steps: int = STEPS) -> dict[str, Any]:
    """The reference: one process, no sharding, no checkpointing, records one by one."""
    recipe = work.load(path)
    model, task = build(recipe, None, None)
    data = open_split(recipe, "train", task.labels, tracks_of(recipe))
    total, count = torch.zeros(()), 0.0
    for n in [n for share in SHARES[4] for micro in share for n in micro]:
        batch, targets = collate(task, [data.get(n, 0)])
        part = task.loss(model(batch), targets)
        total, count = total + part.sum, count + float(part.count)
    (total / count).backward()
    found = {name: work.full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": float(total.detach()) / count, "gradients": found} | curve(
        recipe, model, task, ALONE, Layout(), steps
    )


@contextmanager
def double_precision() -> Iterator[None]:
    """Compute what a recipe computes in fp32 in fp64: some gradients are sums whose terms nearly cancel, and in fp32
    those of ESM3's LoRA are 3e-5 from the exact ones on one process, too.
    """
    DTYPES["fp32"] = torch.float64
    try:
        yield
    finally:
        DTYPES["fp32"] = torch.float32


def micro_batches(task: Task, data: Examples, share: Sequence[Sequence[int]], most: int) -> Iterator[Micro]:
    """A rank's micro-batches, and dummies up to as many as any rank has."""
    for n in range(most):
        is_dummy = n >= len(share)
        yield (*collate(task, [data.get(k, 0) for k in share[0 if is_dummy else n]]), is_dummy)


def gradients(recipe: Recipe, model: nn.Module, task: Task, ranks: World, laid: Layout, wrong: bool) -> dict[str, Any]:
    """Loss and gradients of the eight records. `wrong`: each rank divides by its own count, the classic mistake."""
    data = open_split(recipe, "train", task.labels, tracks_of(recipe))
    shares = SHARES[laid.data_size]
    own = shares[ranks.data_rank]
    batches = list(micro_batches(task, data, own, max(map(len, shares))))
    losses, count = 0.0, 0.0
    for n, (batch, targets, is_dummy) in enumerate(batches):
        part = task.loss(model(batch), targets)
        scale = 0.0 if is_dummy else 1.0
        divide = max(1.0, float(part.count)) * len(batches) * laid.data_size if wrong else 1.0
        next_micro_batch(model, laid, n + 1 == len(batches))
        (part.sum * scale / divide).backward()
        losses, count = losses + scale * float(part.sum.detach()), count + scale * float(part.count)
    total, everyone = (value / laid.together for value in ranks.sum([losses, count]))
    return {
        "loss": total / everyone,
        "count": count,
        "micro_batches": len(own),
        "gradients": {n: work.full(p.grad) / (1.0 if wrong else everyone) for n, p in trainable(model).items()},
    }


def curve(
    recipe: Recipe, model: nn.Module, task: Task, ranks: World, laid: Layout, steps: int = STEPS
) -> dict[str, Any]:
    """Losses and gradient norms of real steps, and how far they moved each weight."""
    optimizer = adamw(model, recipe.optim)
    before = {name: work.full(p) for name, p in model.named_parameters()}
    data = open_split(recipe, "train", task.labels, tracks_of(recipe))
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
    moved = {name: float(np.abs(work.full(p) - before[name]).max()) for name, p in model.named_parameters()}
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "moved": moved["trunk.embed_tokens.weight"],
        "all_moved": moved,
    }


def recipes(wanted: Sequence[tuple[str, Mapping[str, Any]]], steps: int, double: bool = False) -> list[dict[str, Any]]:
    """Gradients and losses of several recipes, each under a `parallel` section."""
    found = []
    with world(alone_too=True) as everyone, double_precision() if double else nullcontext():
        for path, settings in wanted:
            recipe = work.load(path)
            laid = work.laid_out(recipe, everyone, **settings)
            ranks = replace(everyone, together=laid.together)
            model, task = build(recipe, ranks, laid)
            result = gradients(recipe, model, task, ranks, laid, wrong=False)
            model.zero_grad()
            found.append(result | curve(recipe, model, task, ranks, laid, steps))
    return found


def mistaken(path: str, mistake: str) -> dict[str, Any]:
    """Loss and gradients with layers divided over both ranks, and a mistake."""
    if mistake == "norm of own heads":
        patch.setattr(tensor_parallel.DividedNorm, "forward", _norm_of_own_heads)
    elif mistake == "bias of every rank":
        patch.setattr(tensor_parallel, "_local_parts", lambda _, parameters: _local_parts((), parameters))
    else:
        undivided = lambda model, rows: setattr(tensor_parallel.trunk_of(model), "pack", rows)  # noqa: E731
        patch.setattr(tensor_parallel, "divide_tokens", undivided)
    recipe = work.load(path)
    with world() as everyone:
        laid = work.laid_out(recipe, everyone, tensor=2)
        ranks = replace(everyone, together=2)
        model, task = build(recipe, ranks, laid)
        return gradients(recipe, model, task, ranks, laid, wrong=False)


def _norm_of_own_heads(norm: nn.LayerNorm, y_TD: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(y_TD, y_TD.shape[1:], norm.weight, None, norm.eps)


def operations(path: str, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """How often the products with a bias, and the collectives among ranks of a layer, ran in one pass and its gradient.

    The products of a backward pass have no bias, so that those with one are of the forward pass or computed again.
    """
    recipe, found = work.load(path), {}
    with world(alone_too=True) as everyone:
        for name, settings in wanted.items():
            laid = work.laid_out(recipe, everyone, **settings)
            ranks = replace(everyone, together=laid.together)
            model, task = build(recipe, ranks, laid)
            data = open_split(recipe, "train", task.labels, tracks_of(recipe))
            batch, targets = collate(task, [data.get(0, 0)])
            with Counted(laid.together) as counted:
                task.loss(model(batch), targets).sum.backward()
            numbers = numbers_of(model, config_of(recipe))
            planned = exchanged(numbers, laid, parse("2xA100-40GB"), len(batch.tokens_T)).received
            found[name] = {**counted.calls, "planned bytes": planned}
    return found


def graphs(path: str, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, list[int]]:
    """The graphs of compiled layers after each of four packs of other lengths. Attention is one operation, as it
    is on a GPU; where ranks divide the tokens, it is between compiled parts.
    """
    patch.setattr(attention.TrunkBlock, "compile", _compile_eagerly)
    patch.setattr(attention, "attend", lambda q, k, v, batch: q + 2 * k + 3 * v + 1e-3 * batch.max_seqlen)
    recipe, found = work.load(path), {}
    with world() as everyone:
        for name, settings in wanted.items():
            torch._dynamo.reset()
            counters.clear()
            laid = work.laid_out(recipe, everyone, compile=True, **settings)
            model, task = build(recipe, replace(everyone, together=laid.together), laid)
            data = open_split(recipe, "train", task.labels, tracks_of(recipe))
            found[name] = []
            for records in ([0, 1], [2], [3, 4, 6], [7, 8]):
                batch, targets = collate(task, [data.get(n, 0) for n in records])
                task.loss(model(batch), targets).sum.backward()
                found[name].append(counters["stats"]["unique_graphs"])
    return found


class Counted(TorchDispatchMode):
    """Counts the operations that run. What activation checkpointing has kept does not run again."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.calls = ranks, Counter[str]()
        """By operation; under `bytes` what gathers and scatters brought from the ranks that compute layers together."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        self.calls[name] += 1
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            self.calls["bytes"] += max(args[0].nbytes, found.nbytes) * (self.ranks - 1) // self.ranks
        return found


_local_parts = tensor_parallel._local_parts


def cases(path: str, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Gradients and losses under each of several `parallel` sections. FSDP is used in a single process, too."""
    # Dynamo's tracing without a compiler behind it: the same calls in the same places, and seconds instead of minutes.
    patch.setattr(attention.TrunkBlock, "compile", _compile_eagerly)
    recipe, found = work.load(path), {}
    with world(alone_too=True) as everyone:
        for name, settings in wanted.items():
            laid = work.laid_out(recipe, everyone, **{k: v for k, v in settings.items() if k != "wrong"})
            ranks = replace(everyone, together=laid.together)
            model, task = build(recipe, ranks, laid)
            result = gradients(recipe, model, task, ranks, laid, wrong=bool(settings.get("wrong")))
            result |= {"groups": len(groups(model)), "group": laid.group}
            result["held"] = sum(p.to_local().numel() for p in trainable(model).values())
            if not settings.get("wrong"):
                model.zero_grad()
                result |= curve(recipe, model, task, ranks, laid)
            if settings.keys() == {"strategy"}:
                result["rows"] = masked_step(ranks, settings["strategy"])
            found[name] = result
    return found


_compile = attention.TrunkBlock.compile


def _compile_eagerly(block: attention.TrunkBlock, *, dynamic: bool) -> None:
    _compile(block, dynamic=dynamic, backend="eager")


class MaskedLM(nn.Module):
    """The trunk under its own LM head: the output of each record are the logits at its masked places."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = ESM2(CONFIG)
        self.trunk.contact_head.requires_grad_(False)

    @property
    def layers(self) -> nn.ModuleList:
        return self.trunk.layers

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        at_P = (batch.tokens_T == MASK).nonzero().flatten()
        logits_PV = self.trunk(batch, logits_at=at_P).logits_PV
        assert logits_PV is not None
        return logits_PV.float()


class MaskedLoss:
    """Cross-entropy, summed over masked places."""

    def loss(self, logits_PV: torch.Tensor, targets_P: torch.Tensor) -> LossSum:
        total = nn.functional.cross_entropy(logits_PV, targets_P, reduction="sum")
        return LossSum(total, torch.tensor(float(len(targets_P))))


def masked_step(ranks: World, strategy: str | None) -> np.ndarray:
    """Rows' largest change, [33]. `strategy` None: one plain process that takes every rank's batch."""
    base = weights.fresh(CONFIG, 3)
    if strategy is None:
        model, laid = MaskedLM(), Layout()
        model.trunk.load_state_dict(weights.build(base, torch.device("cpu")).state_dict())
    else:
        with torch.device("meta"):
            model = MaskedLM()
        laid = work.laid(ranks, strategy=strategy)
        shard(model, laid, ranks)
        materialise(model, lambda name, rows: base.rows(name.removeprefix("trunk."), rows), laid, ranks)
    optimizer = adamw(model, work.OPTIM)
    set_learning_rate(optimizer, 1.0)
    before = work.full(model.trunk.embed_tokens.weight)
    batches = [work.masked_batch(n) for n in (range(4) if strategy is None else SPREAD[ranks.size][ranks.rank])]
    train_step(model, MaskedLoss(), optimizer, batches, 1.0, ranks, laid)  # type: ignore[arg-type]
    for group in groups(model):
        group.reshard()
    moved: np.ndarray = np.abs(work.full(model.trunk.embed_tokens.weight) - before).max(1)
    return moved


SPREAD = {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]], 4: [[0], [1], [2], [3]]}
