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
"""The run fails after this number of steps in a row with a loss or gradient that is not finite."""


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step, over all ranks."""

    loss: float
    grad_norm: float
    """The norm of the gradients of all ranks, before clipping."""
    residues: int
    skipped: bool
    """Whether the weights are unchanged, because the loss or a gradient is not finite or no record has a target."""
    ranks: list[list[float]]
    """The result of `Watch.numbers` on each rank; an empty list without a `Watch`."""
    asked: int
    """The number of the signal that asks a rank to stop; 0 if no rank is asked."""


@dataclass
class LossScale:
    """The factor that keeps fp16 gradients in range: the loss is multiplied and the gradients are divided by `value`.

    The scale changes as in torch's `GradScaler`. After an overflow, the gradient norm is non-finite on all ranks, so
    all ranks skip the step and change the scale together.
    """

    value: float = 2.0**16
    good_steps: int = 0
    """The number of steps without an overflow since the last change of the scale."""

    def update(self, overflow: bool) -> None:
        """Halve the scale after an overflow, and double it after 2,000 steps in a row without an overflow."""
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
    """Compute the gradients of all micro-batches on all ranks, and take one step of AdamW with clipped gradients.

    A micro-batch is a batch, its targets and whether it is a dummy. Dummies give each rank the same number of
    micro-batches. `clip` is the maximum norm of the gradients. `scale` is None except in fp16. `asked` is the number
    of the signal that asks this rank to stop, or 0. The ranks exchange `asked` and the times that `watch` measures.

    Losses are summed, and FSDP sums gradients over ranks. Both sums are divided once, by the number of targets on all
    ranks, so the result does not depend on how records are assigned to ranks and micro-batches. Once in each step,
    the host waits for losses, counts and gradient norms. The host adds them in double precision, which Apple's GPUs
    lack.
    """
    optimizer.zero_grad(set_to_none=True)
    parts, residues = [], 0
    # `pairwise` prepares the next micro-batch before the current one is computed.
    for micro_batch, following in pairwise(chain(watch.data(micro_batches) if watch else micro_batches, [None])):
        assert micro_batch is not None
        batch, targets, is_dummy = micro_batch
        part = task.loss(model(batch.to(world.device)), targets)
        weight = 0.0 if is_dummy else 1.0
        next_micro_batch(model, layout, following is None)
        torch.autograd.backward(part.sum * weight * (scale.value if scale else 1.0))
        parts.append(torch.stack([part.sum.detach(), part.count]) * weight)
        residues += 0 if is_dummy else batch.n_residues

    # If several ranks have copies of a part of a gradient, the norm counts this part once.
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
    """Raise `InputError` if `in_a_row`, the number of skipped steps in a row up to `step`, is MAX_SKIPPED or more."""
    if in_a_row >= MAX_SKIPPED:
        error = InputError(
            f"step {step}: loss or gradient was not finite {in_a_row} times in a row; start again with a lower "
            "optim.lr (out=DIR or --overwrite), or continue from an earlier checkpoint (--resume PATH)"
        )
        error.shared = True  # all ranks skip the same steps
        raise error
