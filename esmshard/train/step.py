"""One optimizer step, the same mathematics on any number of ranks."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.errors import InputError
from esmshard.parallel.layout import Layout
from esmshard.parallel.mesh import World
from esmshard.parallel.shard import local, next_micro_batch
from esmshard.parallel.watch import Watch
from esmshard.tasks.protocol import Task

T = TypeVar("T")

MAX_SKIPPED = 10
"""Steps in a row with a non-finite loss or gradient before the run gives up."""


@dataclass(frozen=True)
class StepResult:
    """Over all ranks."""

    loss: float
    grad_norm: float
    """Before clipping."""
    residues: int
    skipped: bool
    """The loss or a gradient was not finite, so no rank changed its weights."""
    ranks: list[list[float]]
    """`Watch.numbers` of each rank; empty if nobody watched."""
    asked: int
    """Not 0 if any rank was asked to stop."""


@dataclass
class LossScale:
    """Keeps fp16 gradients in range: the loss is multiplied by `value` before the backward pass, gradients are divided.

    As torch's `GradScaler` moves it. That one looks for overflows rank by rank; here the norm over all ranks, which is
    known anyway, tells, so that all ranks skip and change the scale together.
    """

    value: float = 2.0**16
    good_steps: int = 0
    """In a row, since the scale changed."""

    def update(self, overflow: bool) -> None:
        """Halve it after an overflow, double it after 2,000 good steps."""
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps == 2000:
            self.value, self.good_steps = self.value * 2, 0


def train_step(
    model: nn.Module,
    task: Task,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[tuple[TokenBatch, list[torch.Tensor], bool]],
    clip: float,
    world: World,
    layout: Layout,
    *,
    scale: LossScale | None = None,
    watch: Watch | None = None,
    asked: int = 0,
) -> StepResult:
    """Gradients of all micro-batches of all ranks, one clipped AdamW step.

    Args:
        model: laid out over the ranks.
        task: whose loss it is.
        optimizer: over the shards, its learning rates set.
        micro_batches: (batch, targets, is a ghost): the same number of them on every rank.
        clip: longest allowed gradient.
        world: the ranks that take the step together.
        layout: how the model lies over them.
        scale: of the loss, in fp16 only. An overflow skips the step, and halves it.
        watch: times the step; its numbers travel with the step's own.
        asked: not 0 if this rank was asked to stop. That travels with them too, so that all hear of it at once.

    Losses are added up unscaled, and FSDP sums gradients over ranks; both are divided once, by the global count. So it
    makes no difference how the records were dealt to ranks and micro-batches. The host waits for the device once a
    step, for losses, counts and gradient norms; they are added up there in double precision, which Apple's GPUs lack.
    One small all-reduce carries them over the ranks.
    """
    optimizer.zero_grad(set_to_none=True)
    parts, residues = [], 0
    for (batch, targets, ghost), last in _with_last(watch.data(micro_batches) if watch else micro_batches):
        part = task.loss(model(batch.to(world.device)), targets)
        weight = 0.0 if ghost else 1.0
        next_micro_batch(model, layout, last)
        torch.autograd.backward(part.sum * weight * (scale.value if scale else 1.0))
        parts.append(torch.stack([part.sum.detach(), part.count]) * weight)
        residues += 0 if ghost else batch.n_residues

    gradients = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norms = torch.stack(torch._foreach_norm(gradients))
    if watch is not None:
        watch.wait_for_device()
    loss_sum, count = torch.stack(parts).cpu().double().sum(0).tolist()
    square = norms.cpu().double().square().sum().item()
    # Every copy of the model has the same gradients: their squares are counted once.
    own = [loss_sum, count, square / layout.replicas, residues, asked]
    rows = world.rows([*own, *(watch.numbers() if watch else [])])
    columns = list(zip(*rows, strict=True))
    total_loss, total_count, total_square, total_residues = (sum(column) for column in columns[:4])
    divisor = max(total_count, 1) * (scale.value if scale else 1.0)
    norm = math.sqrt(total_square) / divisor
    skipped = total_count == 0 or not math.isfinite(norm) or not math.isfinite(total_loss)
    if not skipped:
        torch._foreach_mul_(gradients, min(1.0, clip / (norm + 1e-6)) / divisor)
        optimizer.step()
    if scale is not None:
        scale.update(not math.isfinite(norm))
    loss = total_loss / total_count if total_count else math.nan
    numbers = [row[len(own) :] for row in rows]
    return StepResult(loss, norm, int(total_residues), skipped, numbers, int(max(columns[4])))


def _with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether none comes after it. The next one is made before this one is given."""
    waiting = iter(items)
    item = next(waiting, None)
    while item is not None:
        following = next(waiting, None)
        yield item, following is None
        item = following


def too_many_skipped(in_a_row: int, step: int) -> None:
    """End the run when steps keep failing: going on would burn the allocation on a model that does not move."""
    if in_a_row >= MAX_SKIPPED:
        error = InputError(
            f"step {step}: loss or gradient was not finite {in_a_row} times in a row; start again with a lower "
            "optim.lr (out=DIR or --overwrite), or go on from an earlier checkpoint (--resume PATH)"
        )
        error.shared = True  # all ranks skip the same steps
        raise error
