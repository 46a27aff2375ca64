"""One optimizer step. The result does not depend on the number of ranks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from esmshard.batch import TokenBatch
from esmshard.errors import InputError
from esmshard.parallel.layout import Layout
from esmshard.parallel.process_group import World
from esmshard.parallel.shard import copies, local, next_micro_batch
from esmshard.parallel.watch import Watch
from esmshard.tasks.base import Task

MAX_SKIPPED = 10
"""The run stops with an error after so many steps in a row with a loss or gradient that is not finite."""


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step, over all ranks."""

    loss: float
    grad_norm: float
    """The norm of the gradients of all ranks before clipping."""
    residues: int
    skipped: bool
    """Whether no rank changed its weights, because the loss or a gradient was not finite or no record had a target."""
    ranks: list[list[float]]
    """The result of `Watch.numbers` on each rank; an empty list for each rank without a `Watch`."""
    asked: int
    """The number of the reason to stop, if any rank was asked to stop; otherwise 0."""


@dataclass
class LossScale:
    """The scale that keeps fp16 gradients in range. The loss is multiplied by `value`, and the gradients are divided by
    `value`.

    The scale changes as in torch's `GradScaler`. An overflow makes the gradient norm over all ranks non-finite, so all
    ranks skip the step and change the scale together.
    """

    value: float = 2.0**16
    good_steps: int = 0
    """How many steps without an overflow followed the last change of the scale."""

    def update(self, overflow: bool) -> None:
        """Halve the scale after an overflow. Double the scale after 2,000 steps in a row without an overflow."""
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
    """Compute the gradients of all micro-batches of all ranks, and take one clipped AdamW step.

    Args:
        model: the model, laid out over the ranks.
        task: the task, which computes the loss.
        optimizer: the optimizer over the shards, with its learning rates set.
        micro_batches: for each micro-batch, the batch, its targets, and whether it is a dummy that fills up this rank.
            Every rank has the same number of micro-batches.
        clip: the maximum norm of the gradients.
        world: the ranks that take the step together.
        layout: the layout of the model over the ranks.
        scale: the scale of the loss; None except in fp16. After an overflow the step is skipped and the scale halved.
        watch: the object that measures the times of the step. The ranks exchange these times with the other numbers.
        asked: the reason if this rank was asked to stop; otherwise 0. The ranks exchange this number, too.

    Losses are summed, and FSDP sums gradients over ranks. Both sums are divided once, by the number of targets on all
    ranks, so the result does not depend on how records are assigned to ranks and micro-batches. The host waits for the
    device once a step, for losses, counts and gradient norms. The host adds these numbers in double precision, which
    Apple's GPUs lack, and one small exchange brings them to all ranks.
    """
    optimizer.zero_grad(set_to_none=True)
    parts, residues = [], 0
    # The next micro-batch is prepared before the current micro-batch is computed.
    for micro_batch, following in pairwise(chain(watch.data(micro_batches) if watch else micro_batches, [None])):
        assert micro_batch is not None
        batch, targets, is_dummy = micro_batch
        part = task.loss(model(batch.to(world.device)), targets)
        weight = 0.0 if is_dummy else 1.0
        next_micro_batch(model, layout, following is None)
        torch.autograd.backward(part.sum * weight * (scale.value if scale else 1.0))
        parts.append(torch.stack([part.sum.detach(), part.count]) * weight)
        residues += 0 if is_dummy else batch.n_residues

    # If several ranks hold copies of the same part of a gradient, this part is counted once in the norm.
    by_holders: dict[int, list[torch.Tensor]] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        by_holders.setdefault(copies(parameter.grad), []).append(local(parameter.grad))
    norms = torch.stack([get_total_norm(gradients) for gradients in by_holders.values()])
    if watch is not None:
        watch.wait_for_device()
    loss_sum, count = torch.stack(parts).cpu().double().sum(0).tolist()
    square = sum(norm**2 / holders for norm, holders in zip(norms.cpu().double().tolist(), by_holders, strict=True))
    numbers = [square, asked, loss_sum, count, residues]
    rows = world.rows([*numbers, *(watch.numbers() if watch else [])])
    total_square, reason = sum(row[0] for row in rows), int(max(row[1] for row in rows))
    # Ranks that compute the same records together (`layout.together`) have the same losses.
    total_loss, total_count, total_residues = (sum(row[k] for row in rows[:: layout.together]) for k in (2, 3, 4))
    divisor = max(total_count, 1) * (scale.value if scale else 1.0)
    norm = math.sqrt(total_square) / divisor
    skipped = total_count == 0 or not math.isfinite(norm) or not math.isfinite(total_loss)
    if not skipped:
        for gradient in (gradient for gradients in by_holders.values() for gradient in gradients):
            gradient.mul_(min(1.0, clip / (norm + 1e-6)) / divisor)
        optimizer.step()
    if scale is not None:
        scale.update(not math.isfinite(norm))
    loss = total_loss / total_count if total_count else math.nan
    return StepResult(loss, norm, int(total_residues), skipped, [row[len(numbers) :] for row in rows], reason)


def too_many_skipped(in_a_row: int, step: int) -> None:
    """Raise `InputError` after MAX_SKIPPED skipped steps in a row, since further steps would not change the model."""
    if in_a_row >= MAX_SKIPPED:
        error = InputError(
            f"step {step}: loss or gradient was not finite {in_a_row} times in a row; start again with a lower "
            "optim.lr (out=DIR or --overwrite), or go on from an earlier checkpoint (--resume PATH)"
        )
        error.shared = True  # all ranks skip the same steps
        raise error
