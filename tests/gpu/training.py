"""The main job up to its steps, piece by piece, so that a test can look between them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from shared import alone

from esmshard.batch import TokenBatch
from esmshard.data.batching.packing import StepPlan, assign
from esmshard.model.families.esm2 import ESM2
from esmshard.model.finetuner import FineTuner
from esmshard.parallel.load import materialise
from esmshard.parallel.process_group import World
from esmshard.parallel.shard import local, shard, trainable
from esmshard.recipe.sections import Recipe
from esmshard.tasks.base import collate
from esmshard.tasks.finetuned import new_head
from esmshard.train.evaluate import validate
from esmshard.train.inputs import RunInputs, prepare
from esmshard.train.optim import adamw, schedule, set_learning_rate
from esmshard.train.step import LossScale, StepResult, train_step


@dataclass
class Training:
    """A run that has been set up on a device."""

    job: RunInputs
    model: FineTuner
    optimizer: torch.optim.Optimizer
    ranks: World
    scale: LossScale | None

    def batches(self, step: int) -> Iterator[tuple[TokenBatch, list[torch.Tensor], bool]]:
        """The micro-batches of a step."""
        job = self.job
        plan = StepPlan(job.train.tokens, job.recipe.batch.global_tokens, job.recipe.train.seed)
        epoch, records = plan.step(step)
        most = job.recipe.batch.tokens_per_rank
        assert isinstance(most, int)
        for micro in assign(records, job.train.tokens, most, 0, 1):
            yield (*collate(job.task, [job.train.get(n, epoch) for n in micro.records]), micro.is_dummy)

    def step(self, number: int) -> StepResult:
        """Take a step, counted from 0."""
        optim = self.job.recipe.optim
        set_learning_rate(self.optimizer, schedule(number, self.job.steps, optim.warmup, optim.schedule))
        return train_step(
            self.model, self.job.task, self.optimizer, self.batches(number), optim.clip, self.ranks, self.job.layout,
            scale=self.scale,
        )  # fmt: skip

    def gradients(self) -> dict[str, torch.Tensor]:
        """Those of the last step, clipped."""
        found = {name: p.grad for name, p in trainable(self.model).items()}
        return {name: local(grad).detach().cpu().clone() for name, grad in found.items() if grad is not None}

    def weights(self) -> dict[str, torch.Tensor]:
        """What learns, as it is now."""
        return {name: local(p).detach().cpu().clone() for name, p in trainable(self.model).items()}

    def run(self, steps: int) -> tuple[dict[str, torch.Tensor], list[float], float]:
        """Gradients of the first step, losses of all, and the loss on the validation split after them."""
        losses, gradients = [], {}
        for step in range(steps):
            result = self.step(step)
            assert not result.skipped
            losses.append(result.loss)
            gradients = gradients or self.gradients()
        found = validate(self.model, self.job.task, self.job.valid, 10_000, self.ranks)
        assert found is not None
        assert len(found[1]) == len(self.job.valid)
        return gradients, losses, found[0]


def set_up(recipe: Recipe, device: torch.device, ranks: World | None = None, layout: Any = None) -> Training:
    """As the main job does, with FSDP over `ranks` that have a process group, and under `layout` if it is given."""
    ranks = ranks or alone(device)
    job = prepare(recipe, 1, 1, device)
    if layout is not None:
        job = RunInputs(**{**vars(job), "layout": layout})
    with torch.device("meta"):
        model = FineTuner(ESM2(job.weights.config), job.task.head(job.weights.config))
    model.adapt(recipe.adapt, recipe.train.seed)
    shard(model, job.layout, ranks)
    head, _ = new_head(recipe, job.task, job.weights)
    materialise(model, model.rows_of(job.weights, head), job.layout, ranks)
    model.train()
    # Losses are sums over the residues of a micro-batch: a larger scale would overflow in its first steps.
    scale = LossScale(16.0) if job.layout.precision == "fp16" else None
    return Training(job, model, adamw(model, recipe.optim), ranks, scale)
