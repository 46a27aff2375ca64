"""One optimizer step, the same mathematics on any number of ranks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.errors import InputError
from esmshard.parallel.mesh import World
from esmshard.parallel.shard import local
from esmshard.tasks.protocol import Task

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


def train_step(
    model: nn.Module,
    task: Task,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[tuple[TokenBatch, list[torch.Tensor], bool]],
    clip: float,
    world: World,
) -> StepResult:
    """Gradients of all micro-batches of all ranks, one clipped AdamW step.

    Args:
        model: laid out over the ranks.
        task: whose loss it is.
        optimizer: over the shards, its learning rates set.
        micro_batches: (batch, targets, is a ghost): the same number of them on every rank.
        clip: longest allowed gradient.
        world: the ranks that take the step together.

    Losses are added up unscaled, and FSDP sums gradients over ranks; both are divided once, by the global count. So it
    makes no difference how the records were dealt to ranks and micro-batches. The host waits for the device once a
    step, for losses, counts and gradient norms; they are added up there in double precision, which Apple's GPUs lack.
    One small all-reduce carries them over the ranks.
    """
    optimizer.zero_grad(set_to_none=True)
    parts, residues = [], 0
    for batch, targets, ghost in micro_batches:
        part = task.loss(model(batch.to(world.device)), targets)
        weight = 0.0 if ghost else 1.0
        torch.autograd.backward(part.sum * weight)
        parts.append(torch.stack([part.sum.detach(), part.count]) * weight)
        residues += 0 if ghost else batch.n_residues

    gradients = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norms = torch.stack(torch._foreach_norm(gradients))
    loss_sum, count = torch.stack(parts).cpu().double().sum(0).tolist()
    square = norms.cpu().double().square().sum().item()
    total_loss, total_count, total_square, total_residues = world.sum([loss_sum, count, square, residues])
    norm = math.sqrt(total_square) / max(total_count, 1)
    skipped = total_count == 0 or not math.isfinite(norm) or not math.isfinite(total_loss)
    if not skipped:
        torch._foreach_mul_(gradients, min(1.0, clip / (norm + 1e-6)) / total_count)
        optimizer.step()
    loss = total_loss / total_count if total_count else math.nan
    return StepResult(loss, norm, int(total_residues), skipped)


def too_many_skipped(in_a_row: int, step: int) -> None:
    """End the run when steps keep failing: going on would burn the allocation on a model that does not move."""
    if in_a_row >= MAX_SKIPPED:
        raise InputError(
            f"step {step}: loss or gradient was not finite {in_a_row} times in a row; lower optim.lr, or resume from "
            "an earlier checkpoint"
        )
