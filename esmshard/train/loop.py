"""Training: build the model over the ranks, load a checkpoint if there is one, loop over the steps, finish.

The state of an attempt and all code that changes the state are in this file.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import TokenBatch
from esmshard.checkpoint import manifest, sharded
from esmshard.checkpoint.sharded import Saver
from esmshard.data.batching.loader import Examples, digests
from esmshard.data.batching.packing import MicroBatch, StepPlan, assign
from esmshard.devices import is_out_of_memory
from esmshard.errors import InputError
from esmshard.model.attention import kernel_name
from esmshard.model.families import family_registry
from esmshard.model.finetuner import FineTuner
from esmshard.model.weights import identity, report_altered
from esmshard.parallel import launch
from esmshard.parallel.load import check_optimizer, materialise
from esmshard.parallel.preemption import Preempted, Preemption, reason
from esmshard.parallel.process_group import Precision, World, processes_per_machine
from esmshard.parallel.profiler import profiled
from esmshard.parallel.shard import DTYPES, shard
from esmshard.parallel.watch import Control, Watch, check_first_batch
from esmshard.planner import memory_model
from esmshard.planner.cost import data_sheet, training_flops
from esmshard.planner.plan import MicroBatches
from esmshard.progress import Progress, rate, say
from esmshard.recipe.sections import Recipe
from esmshard.tasks.base import Task, collate
from esmshard.tasks.finetuned import new_head
from esmshard.train import evaluate
from esmshard.train.inputs import RunInputs, provenance, versions
from esmshard.train.optim import adamw, schedule, set_learning_rate, state_tensors
from esmshard.train.resume import check_room, describe_run, extensions, kinds_of_device, resolved
from esmshard.train.run_dir import Attempt
from esmshard.train.step import LossScale, StepResult, too_many_skipped, train_step

RESERVED = 0.9
"""The share of the free memory that a run plans to use. The rest is for gaps of the allocator and for other programs.
"""


def train(
    job: RunInputs,
    start: Path | None,
    starting: World,
    ranks: World,
    control: Control,
    preemption: Preemption,
    attempt: Attempt,
    profile: int,
) -> FineTuner:
    """Train until the last step of the recipe, or until early stopping. All ranks call it together.

    Returns the trained model, without the memory of the optimizer.

    Args:
        job: the prepared run.
        start: the checkpoint to continue from; None for a new run.
        starting: all processes of the run, which wait for each other as long as the first read of weights may take.
        ranks: the same processes with the time-out of a step.
        control: the side channel over which each rank reports its activity.
        preemption: the requests to stop.
        attempt: the records of this attempt.
        profile: the number of steps to record with torch's profiler.

    Raises:
        Preempted: if the run was asked to stop. The work done until then is saved.
    """
    ranks = replace(ranks, together=job.layout.together)
    training = _build(job, start, replace(starting, together=job.layout.together), control, preemption, attempt)
    state = training.state
    if ranks.is_first:
        has_notices = launch.TRIAL not in os.environ  # the command of the sweep has printed them
        describe_run(job, training.full_recipe, state.step, ranks, training.facts, has_notices=has_notices)
        attempt.begin(state.step, training.is_validated)
    check_first_batch(training.ranks, training.digests_of_first_step)
    training.ranks = ranks  # from here on with the time-out of a step
    with (
        preemption.noted(),
        advice_if_out_of_memory(training.out_of_memory_advice),
        training.saver,
        Progress("step", job.steps, show=ranks.is_first) as progress,
        profiled(ranks, profile, job.steps - state.step, job.out / "profile") as recording,
    ):
        training.catch_up(start)
        for step in range(state.step, job.steps):
            if training.is_enough:
                training.say_enough()
                break
            line = training.step(step, recording)
            training.validate_and_save(step + 1)
            speed, held = line["residues_per_s"], (line["peak_memory_bytes"] or 0) / 2**20
            words = f"loss {line['loss']:.4f}  {rate(speed)} residues/s  {held:.0f} MiB{state.validation}"
            progress.update(step + 1, words)
        training.saver.finish()
    training.model.zero_grad(set_to_none=True)
    return training.model


@dataclass
class TrainState:
    """The values that change from step to step. A checkpoint stores them beside the tensors."""

    step: int = 0
    """The number of optimizer steps done."""
    skipped_in_a_row: int = 0
    """The number of latest steps in a row that changed no weight, because gradients were not finite."""
    best: dict[str, Any] | None = None
    """Step, metric and value of the best validation so far."""
    stale: int = 0
    """The number of validations since the best one."""
    scale: LossScale | None = None
    """The scale of the loss, in fp16 only."""
    validation: str = ""
    """The last validation in a few words, for the progress line. It is not part of a checkpoint."""
    asked: int = 0
    """The reason to stop that all ranks agreed on after the last step; 0 if there is none."""
    of_validation: Mapping[str, Any] = field(default_factory=dict)
    """The facts of the last validation (`Task.learn_from_validation`). A checkpoint stores them with those of the task.
    """

    def saved(self) -> dict[str, Any]:
        """Return the part that a checkpoint stores."""
        scale = asdict(self.scale) if self.scale else None
        return {
            "loss_scale": scale,
            "skipped_in_a_row": self.skipped_in_a_row,
            "best": self.best,
            "stale": self.stale,
        }


@dataclass
class Training:
    """One attempt at a run: the model over the ranks, its optimizer, and all that a step needs."""

    job: RunInputs
    ranks: World
    control: Control
    preemption: Preemption
    attempt: Attempt
    model: FineTuner
    optimizer: torch.optim.AdamW
    numbers: memory_model.ModelNumbers
    largest_fitting: Callable[[], int]
    """Returns the largest micro-batch, in tokens, that fits into memory, for the message after an out-of-memory error.
    """
    tokens_per_rank: int
    full_recipe: Recipe
    """The recipe with the values that were chosen on this machine."""
    facts: dict[str, Any]
    """The part of a checkpoint that no step changes: recipe, versions, data."""
    is_validated: bool
    """Whether the validation of the loaded checkpoint was done before the run stopped."""
    state: TrainState
    watch: Watch
    saver: Saver
    plan: StepPlan

    def out_of_memory_advice(self) -> str:
        """Return what to change after an out-of-memory error of a step: a number of tokens that fits, if there is one.

        These are changes that `--resume auto` accepts: settings that change the computed result may not change once
        there is a checkpoint.
        """
        recipe, longest = self.job.recipe, int(self.job.train.tokens.max())
        tokens = max(longest, min(self.tokens_per_rank, -(-recipe.batch.global_tokens // self.ranks.data_size)))
        fits = self.largest_fitting()
        less = max(longest, min(3 * tokens // 4, fits))
        ways = [f"batch.tokens_per_rank={less}"] if fits > 0 and less < tokens else []
        if self.job.layout.activation_checkpointing != "full":
            ways.append("parallel.activation_checkpointing=full")
        fix = f"set {', or '.join(ways or ['parallel.cpu_offload=true'])}, and go on with --resume auto"
        if not ways:
            fix = f"share the model among more GPUs (--nproc), or {fix}; or start again with a lower data.max_length"
        return f"micro-batches of {tokens} tokens do not fit; {fix}"

    def share_of(self, step: int) -> tuple[int, int, list[MicroBatch]]:
        """Return epoch, number of records and this rank's micro-batches of a step. All ranks plan the same records."""
        epoch, records = self.plan.step(step)
        tokens_N = self.job.train.tokens
        return (
            epoch,
            len(records),
            assign(records, tokens_N, self.tokens_per_rank, self.ranks.data_rank, self.ranks.data_size),
        )

    def digests_of_first_step(self) -> dict[bytes, str]:
        """Return the digests of the records of this rank's first step, with their ids."""
        epoch, _, mine = self.share_of(self.state.step)
        return digests(self.job.train, mine, epoch)

    def catch_up(self, start: Path | None) -> None:
        """Do the validation that a stopped run had not done. Validate and save a probe, which takes no steps."""
        state, recipe = self.state, self.job.recipe
        if start is not None and not self.is_validated:
            found = self.validate(state.step)
            if found is None:
                why = reason(self._asked_anywhere())
                raise Preempted(f"stopped by {why} after step {state.step}, which is saved; go on with --resume auto")
            if found and recipe.keeps_best and self.ranks.is_first:
                manifest.point(self.job.out / "checkpoints", "BEST", start.name)
        if not self.job.steps and start is None:
            found = self.validate(0)
            self.save(0, validated=found is not None, is_best=bool(found) and recipe.keeps_best)

    @property
    def is_enough(self) -> bool:
        """Whether early stopping ends the run at this step."""
        patience = self.job.recipe.train.early_stop
        return patience is not None and self.state.stale >= patience

    def say_enough(self) -> None:
        """Print why the run stops before its last step."""
        state = self.state
        if self.ranks.is_first:
            since = f"that of step {state.best['step']}" if state.best else "undefined"
            say(f"stopped after step {state.step}: {state.stale} validations in a row were no better than {since}")

    def step(self, step: int, recording: Callable[[], str | None]) -> dict[str, Any]:
        """Take one optimizer step, record it, and return its line of metrics.jsonl.

        Args:
            step: the number of the step, counted from 0.
            recording: ends a step for torch's profiler, see `profiled`.
        """
        job, recipe, ranks, state = self.job, self.job.recipe, self.ranks, self.state
        share = schedule(step, job.steps, recipe.optim.warmup, recipe.optim.schedule)
        set_learning_rate(self.optimizer, share)
        epoch, records, mine = self.share_of(step)
        self.watch.begin_step(step + 1, *_work(mine, job.train.tokens, self.numbers))
        self.attempt.check()
        result: StepResult = train_step(
            self.model,
            job.task,
            self.optimizer,
            _batches(job.task, job.train, mine, epoch),
            recipe.optim.clip,
            ranks,
            job.layout,
            scale=state.scale,
            watch=self.watch,
            asked=self.preemption.asked,
        )
        measured, warnings = self.watch.report(result.ranks)
        for warning in warnings if ranks.is_first else ():
            say(warning)
        if (table := recording()) is not None and ranks.is_first:
            say(f"{table}\ntraces of all ranks in {job.out / 'profile'}")
        # in fp16 the first steps may overflow until the scale fits
        finding_scale = state.scale is not None and state.scale.value > 1
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if result.skipped and not finding_scale else 0
        too_many_skipped(state.skipped_in_a_row, step + 1)
        line = {
            "step": step + 1,
            "epoch": epoch,
            "loss": result.loss,
            "lr": share * recipe.optim.lr,
            "grad_norm": result.grad_norm,
            "records": records,
            "residues": result.residues,
            "skipped": result.skipped,
            **measured,
        }
        self.attempt.step_done(line)
        state.step, state.asked = step + 1, result.asked
        return line

    def validate_and_save(self, step: int) -> None:
        """Validate and save after a step where either is due, and stop if the run was asked to stop.

        Raises:
            Preempted: if the run was asked to stop. This step is saved.
        """
        job, recipe, state = self.job, self.job.recipe, self.state
        found, last = None, step == job.steps
        due = last or step % job.eval_every == 0
        if due and not state.asked:  # a run that was asked to stop only saves; it validates when it continues
            found = self.validate(step)
            state.asked = self._asked_anywhere() if found is None else 0
        is_best = bool(found) and recipe.keeps_best
        if last or is_best or state.asked or self.is_enough or step % recipe.checkpoint.every == 0:
            self.save(step, validated=not due or found is not None, is_best=is_best)
        if state.asked:
            self.saver.finish()
            raise Preempted(
                f"stopped by {reason(state.asked)} after step {step} of {job.steps}, which is saved; go on "
                "with --resume auto"
            )

    def validate(self, step: int) -> bool | None:
        """Score the validation split. Return whether the score is the best so far, or None if the run was asked to
        stop.
        """
        self.control.note("validating")
        task, state = self.job.task, self.state
        scored = evaluate.validate(
            self.model, task, self.job.valid, self.tokens_per_rank, self.ranks, self._asked_anywhere
        )
        if scored is None:
            return None
        loss, rows = scored
        metrics, state.of_validation = task.summary(rows), task.learn_from_validation(rows)
        values = {metric: metrics[metric] for metric in task.columns if metric in metrics}
        self.attempt.write(step=step, split="valid", loss=loss, **values)
        headline, value = task.columns[0], metrics[task.columns[0]]
        state.validation = f"  valid {headline} {value:.3f}"
        sign = -1 if task.lower_is_better else 1
        if not sign * value > (sign * state.best["value"] if state.best else -math.inf):
            state.stale += 1
            return False
        state.best, state.stale = {"step": step, "metric": headline, "value": value}, 0
        return True

    def save(self, step: int, *, validated: bool, is_best: bool) -> None:
        """Write a checkpoint.

        Args:
            step: the number of optimizer steps done.
            validated: whether the validation that is due at this step, if any, is done.
            is_best: whether this validation is the best one so far.
        """
        self.control.note("saving a checkpoint")
        self.attempt.check()
        began = time.perf_counter()
        tensors = state_tensors(self.model, self.optimizer, trained_only=self.job.recipe.adapt.method != "full")
        facts = {**self.facts["facts"], **self.state.of_validation}
        self.saver.save(
            step, tensors, self.facts | self.state.saved() | {"validated": validated, "facts": facts}, is_best
        )
        self.attempt.write(event="checkpoint", step=step, stall_s=round(time.perf_counter() - began, 4))
        self.attempt.report("running", "training")

    def _asked_anywhere(self) -> int:
        return int(max(row[0] for row in self.ranks.rows([self.preemption.asked])))


@contextmanager
def advice_if_out_of_memory(advice: Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error into an `InputError` with this advice. Other errors are raised unchanged."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(f"out of memory: {advice()}") from None


def _build(
    job: RunInputs,
    start: Path | None,
    ranks: World,
    control: Control,
    preemption: Preemption,
    attempt: Attempt,
) -> Training:
    """Lay the model out over the ranks, fill it with weights or a checkpoint, and create the optimizer."""
    recipe, task, weights = job.recipe, job.task, job.weights
    # First shapes, then shards, then values: where there are several ranks, none ever holds the whole model.
    with torch.device("meta"):
        model = FineTuner(family_registry.build(weights.config), task.head(weights.config))
    tracks, quantization = recipe.data.tracks or (), recipe.model.quantize
    model.adapt(recipe.adapt, recipe.train.seed, tracks, quantization)
    numbers = memory_model.numbers_of(model, weights.config, tracks=tracks, quantization=quantization)
    shard(model, job.layout, ranks)
    saved = sharded.read_state(start) if start is not None else None
    # This comes before the model has memory of its own, because the planner counts the model's memory too.
    free = memory_model.free_bytes(ranks.device, processes_per_machine(ranks.size))
    fitting = partial(largest_fitting, job, numbers, int(ranks.min(RESERVED * free)), ranks)
    tokens_per_rank = choose_tokens_per_rank(job, saved, fitting, ranks)
    _fill(job, model, start, ranks, control)
    optimizer = adamw(model, recipe.optim)
    check_optimizer(model, optimizer)
    state = TrainState(scale=LossScale() if job.layout.precision == "fp16" else None)
    tensors = state_tensors(model, optimizer, trained_only=recipe.adapt.method != "full")
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    ranks.from_first(lambda: check_room(job.out / "checkpoints", needed))
    if start is not None and saved is not None:
        sharded.load(start, tensors)
        state.step, state.skipped_in_a_row = int(saved["step"]), saved["skipped_in_a_row"]
        state.best, state.stale = saved["best"], saved["stale"]
        state.of_validation = {key: value for key, value in saved["facts"].items() if key not in task.facts}
        state.scale = LossScale(**saved["loss_scale"]) if state.scale else None
    full_recipe = resolved(job, tokens_per_rank)
    return Training(
        job=job,
        ranks=ranks,
        control=control,
        preemption=preemption,
        attempt=attempt,
        model=model,
        optimizer=optimizer,
        numbers=numbers,
        largest_fitting=fitting,
        tokens_per_rank=tokens_per_rank,
        full_recipe=full_recipe,
        facts=_facts(job, full_recipe, model, saved, ranks),
        is_validated=saved is None or saved["validated"],
        state=state,
        watch=Watch(ranks, control, _peak(ranks.device, job.layout.precision)),
        saver=Saver(
            job.out / "checkpoints", recipe.checkpoint.keep, _in_background(recipe, ranks.device), ranks.step_timeout
        ),
        plan=StepPlan(job.train.tokens, recipe.batch.global_tokens, recipe.train.seed),
    )


def _fill(job: RunInputs, model: FineTuner, start: Path | None, ranks: World, control: Control) -> None:
    """Read the base model's weights into the shards, and fit the head of a probe."""
    recipe, task, weights = job.recipe, job.task, job.weights
    control.note("reading weights")
    head, message = new_head(recipe, task, weights)
    if message and start is None and ranks.is_first:
        say(message)
    if ranks.is_first:
        report_altered(weights.files)
    materialise(model, model.rows_of(weights, head), job.layout, ranks)
    if recipe.adapt.method == "probe" and start is None:
        say(f"fitting the head on {len(job.train)} training records")
        every = range(len(job.train))
        task.probe(model.eval().head, [job.train.get(n) for n in every], model, recipe.train.seed)
    model.train()


def _facts(
    job: RunInputs, full_recipe: Recipe, model: FineTuner, saved: dict[str, Any] | None, ranks: World
) -> dict[str, Any]:
    """Return the part of a checkpoint that no step changes."""
    weights = job.weights
    facts: dict[str, Any] = {
        "recipe": full_recipe.model_dump(mode="json"),
        "config": weights.config.recorded(),
        "world_size": ranks.size,
        "versions": versions(job.recipe, ranks.device),
        "devices": kinds_of_device(saved, ranks.device),
        "data": provenance(job),
        "facts": dict(job.task.facts),
        "unlearned": [part for part in weights.unlearned if part != "lm_head" or not model.asks_logits],
        "base": None,
    }
    if longer := extensions(saved, job.steps):
        facts["extended"] = longer
    if ranks.is_first and job.recipe.adapt.method != "full":
        # The checkpoint then holds only what is trained, and names the base model.
        facts["base"] = saved["base"] if saved else identity(weights, job.recipe.model.name)
    return facts


def _peak(device: torch.device, precision: str) -> float | None:
    sheet = data_sheet(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if sheet is None else sheet.flops(precision)


def _in_background(recipe: Recipe, device: torch.device) -> bool:
    """Whether to save while training continues. On a GPU machine the host has memory for a copy; a CPU run has not."""
    wanted = recipe.checkpoint.async_save
    return device.type == "cuda" if wanted == "auto" else wanted


def _work(
    mine: Sequence[MicroBatch], tokens_N: npt.NDArray[np.integer[Any]], numbers: memory_model.ModelNumbers
) -> tuple[int, float]:
    """Return the residues of this rank's share of a step, and the FLOPs of the forward and backward pass over them."""
    own_N = tokens_N[[n for micro in mine if not micro.is_dummy for n in micro.records]].astype(np.int64)
    tokens = int(own_N.sum())
    attended = float((own_N**2).sum()) / max(tokens, 1)
    return tokens - 2 * len(own_N), tokens * training_flops(numbers, attended)


def _batches(
    task: Task, data: Examples, mine: Sequence[MicroBatch], epoch: int
) -> Iterator[tuple[TokenBatch, list[torch.Tensor], bool]]:
    for micro in mine:
        batch, targets = collate(task, [data.get(n, epoch) for n in micro.records])
        yield batch, targets, micro.is_dummy


def choose_tokens_per_rank(
    job: RunInputs, saved: Mapping[str, Any] | None, fitting: Callable[[], int], ranks: World
) -> int:
    """Return the recipe's number; for `auto` what fits (`largest_fitting`), or the checkpoint's number where the run
    goes on in the layout that it had.

    A step has the same records in any micro-batches, but gradients are summed in another order, so that numbers agree
    up to rounding.

    Args:
        job: the run.
        saved: `state.json` of the checkpoint that the run goes on from; None for a new run.
        fitting: see `largest_fitting`.
        ranks: all processes of the run.
    """
    asked = job.recipe.batch.tokens_per_rank
    if isinstance(asked, int):
        return asked
    if saved is not None and _layout_of(saved) == [ranks.size, _gpu(ranks.device), _memory_keys(job.recipe)]:
        return int(saved["recipe"]["batch"]["tokens_per_rank"])
    longest, fits = int(job.train.tokens.max()), fitting()
    if not fits and ranks.is_first:
        say(
            f"the longest training record, {longest} tokens, may not fit into memory; lower data.max_length, set "
            "parallel.activation_checkpointing=full, or see `esmshard plan`"
        )
    return max(fits, longest)


def _layout_of(saved: Mapping[str, Any]) -> list[Any]:
    """Return what decided on the memory of each rank of the run that wrote a checkpoint."""
    return [saved["world_size"], saved["versions"].get("gpu"), _memory_keys(Recipe.model_validate(saved["recipe"]))]


def _gpu(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _memory_keys(recipe: Recipe) -> dict[str, Any]:
    """Return the keys of `parallel` that decide on memory. Time-outs do not; the precision may not change."""
    return recipe.parallel.model_dump(exclude={"start_timeout", "step_timeout", "precision"})


def largest_fitting(job: RunInputs, numbers: memory_model.ModelNumbers, room: int, ranks: World) -> int:
    """Return the largest `batch.tokens_per_rank` that fits, as the planner says; 0 if the longest record does not fit.

    Args:
        job: the run, with its training records and layout.
        numbers: the sizes of the model with its head.
        room: bytes that may be planned with, weights included, on the rank with the least memory.
        ranks: the ranks over which a step is divided.
    """
    device = planner_device(ranks.device, job.layout.precision)
    return MicroBatches(job.recipe, job.train, numbers, job.layout, device).largest(room)


def planner_device(device: torch.device, precision: Precision) -> memory_model.Device:
    """Return the planner's name of the attention kernel that runs."""
    kernels: dict[str, memory_model.Device] = {"slices": "cpu", "varlen": "cuda", "padded": "cuda-padded"}
    return kernels[kernel_name(device, DTYPES[precision])]
