"""The training loop. It divides the model over the ranks, loads a checkpoint if there is one, and takes the steps."""

import math
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

from esmshard import planner
from esmshard.checkpoint import manifest, sharded
from esmshard.checkpoint.sharded import Saver
from esmshard.data.batching.loader import digests
from esmshard.data.batching.packing import MicroBatch, StepPlan, assign, undivided
from esmshard.devices import is_out_of_memory
from esmshard.errors import InputError
from esmshard.model.attention import kernel_name
from esmshard.model.families import family_registry
from esmshard.model.finetuner import FineTuner
from esmshard.model.weights import identity, report_altered
from esmshard.parallel.load import materialise
from esmshard.parallel.preemption import Preempted, Preemption, reason
from esmshard.parallel.process_group import World, processes_per_machine
from esmshard.parallel.shard import DTYPES, shard
from esmshard.parallel.watch import Control, Watch, check_first_batch, profiled
from esmshard.planner import MicroBatches, data_sheet, training_flops
from esmshard.progress import Progress, rate, say
from esmshard.recipe.sections import Recipe
from esmshard.tasks.base import collate
from esmshard.tasks.finetuned import new_head
from esmshard.train import evaluate
from esmshard.train.inputs import RunInputs, provenance, versions
from esmshard.train.optim import adamw, schedule, set_learning_rate, state_tensors
from esmshard.train.resume import check_room, describe_run, history, resolved
from esmshard.train.run_dir import Attempt
from esmshard.train.step import LossScale, StepResult, too_many_skipped, train_step

USABLE = 0.9
"""The share of the free memory that a run plans to use. The rest is for other programs and gaps between tensors."""


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
    """Train until the last step of the recipe, or until early stopping. All ranks call this function together.

    Returns the trained model, and frees the memory of the optimizer. Raises `Preempted` if the run was asked to stop;
    all finished steps are then saved.

    `start` is the checkpoint to continue from, or None. `starting` and `ranks` are the same ranks: `starting` has the
    time-out for the start of a run, `ranks` that for a step. `profile` is the number of steps that torch's profiler
    records.
    """
    ranks = replace(ranks, together=job.layout.together)
    training = Training(job, start, replace(starting, together=job.layout.together), control, preemption, attempt)
    state = training.state
    if ranks.is_first:
        describe_run(job, training.recipe, state.step, ranks, training.facts["history"])
        attempt.begin(state.step, training.is_validated)
    epoch, _, mine = training.share_of(state.step)
    check_first_batch(training.ranks, lambda: digests(job.train, mine, epoch))
    training.ranks = ranks  # from here on, ranks wait up to the time-out of a step
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
                if ranks.is_first:
                    best = f"the best, after step {state.best['step']}" if state.best else "undefined"
                    say(f"stopped after step {step}: {state.stale} validations in a row were not better than {best}")
                break
            line = training.step(step, recording)
            training.validate_and_save(step + 1)
            speed, memory = rate(line["residues_per_s"]), (line["peak_memory_bytes"] or 0) / 2**20
            text = f"loss {line['loss']:.4f}  {speed} residues/s  {memory:.0f} MiB{state.validation}"
            progress.update(step + 1, text)
        training.saver.finish()
    training.model.zero_grad(set_to_none=True)
    return training.model


@dataclass
class TrainState:
    """The values that change from step to step. A checkpoint stores all of them except `validation` and `asked`."""

    step: int = 0
    """The number of optimizer steps done."""
    skipped_in_a_row: int = 0
    """How many of the latest steps in a row changed no weight, because the loss or a gradient was not finite."""
    best: dict[str, Any] | None = None
    """The step, metric and value of the best validation so far; None before the first validation with a value."""
    stale: int = 0
    """The number of validations since the best one, for early stopping."""
    scale: LossScale | None = None
    """The scale of the loss; None except in fp16."""
    validation: str = ""
    """The result of the last validation as a short text, for the progress line."""
    asked: int = 0
    """The number of the signal that asks the run to stop, the same on all ranks; 0 if the run goes on."""
    calibration: Mapping[str, Any] = field(default_factory=dict)
    """The result of `Task.calibrate` for the last validation. A checkpoint stores it among the facts of the task."""


class Training:
    """One attempt to train. It has the model, which the ranks share, its optimizer, and all else that a step needs.

    The function `train` passes its own arguments. As `ranks` it passes `starting`, with the time-out for the start.
    """

    def __init__(
        self,
        job: RunInputs,
        start: Path | None,
        ranks: World,
        control: Control,
        preemption: Preemption,
        attempt: Attempt,
    ) -> None:
        self.job, self.ranks, self.control, self.preemption, self.attempt = job, ranks, control, preemption, attempt
        recipe, weights, trained_only = job.recipe, job.weights, job.recipe.adapt.method != "full"
        # The model is divided before its weights are read, so a rank never holds more than its shards.
        with torch.device("meta"):
            self.model = FineTuner(family_registry.build(weights.config), job.task.head(weights.config))
        tracks, quantization = recipe.data.tracks or (), recipe.model.quantize
        self.model.adapt(recipe.adapt, recipe.train.seed, tracks, quantization)
        self.numbers = planner.numbers_of(self.model, weights.config, tracks=tracks, quantization=quantization)
        shard(self.model, job.layout, ranks)
        saved = sharded.read_state(start) if start is not None else None
        # Measured before the model uses memory, because the planner counts the model, too.
        free = planner.free_bytes(ranks.device, processes_per_machine(ranks.size))
        self.largest_fitting = partial(largest_fitting, job, self.numbers, int(ranks.min(USABLE * free)), ranks)
        self.tokens_per_rank = self._choose_tokens_per_rank(saved)
        self._fill(is_new=start is None)
        self.optimizer = adamw(self.model, recipe.optim)
        self.state = TrainState(scale=LossScale() if job.layout.precision == "fp16" else None)
        tensors = state_tensors(self.model, self.optimizer, trained_only=trained_only)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        ranks.from_first(lambda: check_room(job.out / "checkpoints", needed))
        if start is not None and saved is not None:
            sharded.load(start, tensors)
            state = self.state
            state.step, state.skipped_in_a_row = int(saved["step"]), saved["skipped_in_a_row"]
            state.best, state.stale = saved["best"], saved["stale"]
            state.calibration = {key: value for key, value in saved["facts"].items() if key not in job.task.facts}
            state.scale = LossScale(**saved["loss_scale"]) if state.scale else None
        self.is_validated = saved is not None and saved["validated"]
        """Whether the loaded checkpoint has the validation that was due at it. False for a new run."""
        self.recipe = resolved(job, self.tokens_per_rank)
        """The recipe of the run, with the values that were chosen on this machine."""
        self.facts: dict[str, Any] = {
            "recipe": self.recipe.model_dump(mode="json"),
            "config": weights.config.recorded(),
            "world_size": ranks.size,
            "versions": versions(recipe, ranks.device),
            "history": history(saved, job.steps, ranks.device),
            "data": provenance(job),
            "facts": dict(job.task.facts),
            "unlearned": [part for part in weights.unlearned if part != "lm_head" or not self.model.asks_logits],
            "base": None,
        }
        """The entries of a checkpoint's `state.json` that stay the same in all steps."""
        if ranks.is_first and trained_only:  # such a checkpoint has only the trained part, and names the base model
            self.facts["base"] = saved["base"] if saved else identity(weights, recipe.model.name)
        is_gpu, in_background = ranks.device.type == "cuda", recipe.checkpoint.async_save
        sheet = data_sheet(torch.cuda.get_device_name(ranks.device)) if is_gpu else None
        self.watch = Watch(ranks, control, None if sheet is None else sheet.flops(job.layout.precision))
        if in_background == "auto":  # with a GPU, the host has memory for a copy of the shards
            in_background = is_gpu
        self.saver = Saver(job.out / "checkpoints", recipe.checkpoint.keep, in_background, ranks.step_timeout)
        self.plan = StepPlan(job.train.tokens, recipe.batch.global_tokens, recipe.train.seed)

    def _choose_tokens_per_rank(self, saved: Mapping[str, Any] | None) -> int:
        """Return `batch.tokens_per_rank`, the maximum number of tokens in a micro-batch.

        For `auto`, return the number in the checkpoint (`saved` is its `state.json`) if the checkpoint has this
        run's number of ranks, GPU and settings in `parallel`. Otherwise return the largest number that fits into
        memory. Another number would change the order in which losses are summed, and so the results by rounding errors.
        """
        job, ranks = self.job, self.ranks
        asked = job.recipe.batch.tokens_per_rank
        if isinstance(asked, int):
            return asked
        if saved is not None:
            gpu = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else None
            keys = _memory_keys(Recipe.model_validate(saved["recipe"]))
            if [saved["world_size"], saved["versions"].get("gpu"), keys] == [ranks.size, gpu, _memory_keys(job.recipe)]:
                return int(saved["recipe"]["batch"]["tokens_per_rank"])
        longest, fits = int(job.train.tokens.max()), self.largest_fitting()
        if not fits and ranks.is_first:
            say(
                f"the longest training record, {longest} tokens, may not fit into memory; lower data.max_length, set "
                "parallel.activation_checkpointing=full, or see `esmshard plan`"
            )
        return max(fits, longest)

    def _fill(self, *, is_new: bool) -> None:
        """Read the base weights into the shards. If a new run (`is_new`) has a probe, fit the task head."""
        job, model, ranks = self.job, self.model, self.ranks
        self.control.note("reading weights")
        head, message = new_head(job.recipe, job.task, job.weights)
        if message and is_new and ranks.is_first:
            say(message)
        if ranks.is_first:
            report_altered(job.weights.files)
        materialise(model, model.rows_of(job.weights, head), job.layout, ranks)
        if job.recipe.adapt.method == "probe" and is_new:
            say(f"fitting the head on {len(job.train)} training records")
            examples = [job.train.get(n) for n in range(len(job.train))]
            job.task.probe(model.eval().head, examples, model, job.recipe.train.seed)
        model.train()

    def out_of_memory_advice(self) -> str:
        """Return advice for an out-of-memory error in a step. A user may resume the run with these settings."""
        recipe, longest = self.job.recipe, int(self.job.train.tokens.max())
        tokens = max(longest, min(self.tokens_per_rank, -(-recipe.batch.global_tokens // self.ranks.data_size)))
        fits = self.largest_fitting()
        fewer = max(longest, min(3 * tokens // 4, fits))
        divisible = not recipe.task.whole_steps
        settings = [f"batch.tokens_per_rank={fewer}"] if divisible and fits > 0 and fewer < tokens else []
        if self.job.layout.activation_checkpointing != "full":
            settings.append("parallel.activation_checkpointing=full")
        fix = f"set {', or '.join(settings or ['parallel.cpu_offload=true'])}, and go on with --resume auto"
        if not settings:
            fix = f"share the model among more GPUs (--nproc), or {fix}; or start again with a lower data.max_length"
        return f"micro-batches of {tokens} tokens do not fit; {fix}"

    def share_of(self, step: int) -> tuple[int, int, list[MicroBatch]]:
        """Return the epoch of a step, its number of records on all ranks, and the micro-batches of this rank."""
        epoch, records = self.plan.step(step)
        data_rank, data_size = self.ranks.data_rank, self.ranks.data_size
        if self.job.recipe.task.whole_steps:
            return epoch, len(records), undivided(records.tolist(), data_rank)
        mine = assign(records, self.job.train.tokens, self.tokens_per_rank, data_rank, data_size)
        return epoch, len(records), mine

    def catch_up(self, start: Path | None) -> None:
        """Do the validation that was due when the run stopped. Validate and save some new runs before the first step.

        These runs are probes, which take no steps, and runs whose start may be best (`TaskSettings.starts_useful`).
        Raises `Preempted` if the run is asked to stop.
        """
        state, recipe = self.state, self.job.recipe
        is_candidate = not self.job.steps or (recipe.task.starts_useful and recipe.keeps_best)
        if self.is_validated or (start is None and not is_candidate):
            return
        is_best = self.validate(state.step)
        if start is None:
            self.save(0, validated=is_best is not None, is_best=bool(is_best) and recipe.keeps_best)
        elif is_best and recipe.keeps_best and self.ranks.is_first:
            manifest.point(self.job.out / "checkpoints", "BEST", start.name)
        if is_best is None:
            self.saver.finish()
            why = reason(self._asked_anywhere())
            raise Preempted(f"stopped by {why} after step {state.step}, which is saved; go on with --resume auto")

    @property
    def is_enough(self) -> bool:
        """Whether early stopping ends the run now."""
        patience = self.job.recipe.train.early_stop
        return patience is not None and self.state.stale >= patience

    def step(self, step: int, recording: Callable[[], str | None]) -> dict[str, Any]:
        """Take step `step`, counted from 0. Return its line for metrics.jsonl. The profiler's function `recording` is
        called after the step; see `profiled`.
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
            ((*collate(job.task, [job.train.get(n, epoch) for n in m.records]), m.is_dummy) for m in mine),
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
        # In fp16 the first steps may overflow until the scale is small enough.
        is_scale_high = state.scale is not None and state.scale.value > 1
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if result.skipped and not is_scale_high else 0
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
        """Validate and save after a step, if due. If the run was asked to stop, save and raise `Preempted`."""
        job, recipe, state = self.job, self.job.recipe, self.state
        is_better, last = None, step == job.steps
        due = last or step % job.eval_every == 0
        if due and not state.asked:  # a stopped run validates when it continues
            is_better = self.validate(step)
            state.asked = self._asked_anywhere() if is_better is None else 0
        is_best = bool(is_better) and recipe.keeps_best
        if last or is_best or state.asked or self.is_enough or step % recipe.checkpoint.every == 0:
            self.save(step, validated=not due or is_better is not None, is_best=is_best)
        if state.asked:
            self.saver.finish()
            raise Preempted(
                f"stopped by {reason(state.asked)} after step {step} of {job.steps}, which is saved; go on "
                "with --resume auto"
            )

    def validate(self, step: int) -> bool | None:
        """Score the validation split. Return whether the headline metric is the best so far; None if asked to stop."""
        self.control.note("validating")
        task, state = self.job.task, self.state
        data, tokens = self.job.valid, self.tokens_per_rank
        scored = evaluate.validate(self.model, task, data, tokens, self.ranks, self._asked_anywhere)
        if scored is None:
            return None
        loss, rows = scored
        metrics, state.calibration = task.summary(rows), task.calibrate(rows)
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
        """Write a checkpoint after `step` steps. `validated` is false if a validation was due but not done."""
        self.control.note("saving a checkpoint")
        self.attempt.check()
        began, state = time.perf_counter(), self.state
        tensors = state_tensors(self.model, self.optimizer, trained_only=self.job.recipe.adapt.method != "full")
        changing = {
            "loss_scale": asdict(state.scale) if state.scale else None,
            "best": state.best,
            "skipped_in_a_row": state.skipped_in_a_row,
            "stale": state.stale,
            "validated": validated,
            "facts": {**self.facts["facts"], **state.calibration},
        }
        self.saver.save(step, tensors, self.facts | changing, is_best)
        self.attempt.write(event="checkpoint", step=step, stall_s=round(time.perf_counter() - began, 4))
        self.attempt.report("running", "training")

    def _asked_anywhere(self) -> int:
        return int(max(row[0] for row in self.ranks.rows([self.preemption.asked])))


@contextmanager
def advice_if_out_of_memory(advice: str | Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error in the `with` block into an `InputError` with `advice`. Leave other errors as is."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(f"out of memory: {advice if isinstance(advice, str) else advice()}") from None


def _work(
    mine: Sequence[MicroBatch], tokens_N: npt.NDArray[np.integer[Any]], numbers: planner.ModelNumbers
) -> tuple[int, float]:
    """Return the number of residues in this rank's micro-batches of a step (`mine`), and the FLOPs to train on them."""
    mine_N = tokens_N[[n for micro in mine if not micro.is_dummy for n in micro.records]].astype(np.int64)
    tokens = int(mine_N.sum())
    attended = float((mine_N**2).sum()) / max(tokens, 1)
    return tokens - 2 * len(mine_N), tokens * training_flops(numbers, attended)


def _memory_keys(recipe: Recipe) -> dict[str, Any]:
    """Return the settings in `parallel` that affect memory use, except the precision, which a run cannot change."""
    return recipe.parallel.model_dump(exclude={"start_timeout", "step_timeout", "precision"})


def largest_fitting(job: RunInputs, numbers: planner.ModelNumbers, room: int, ranks: World) -> int:
    """Return the largest `batch.tokens_per_rank` that fits into memory; 0 if the longest record does not fit.

    `room` is the memory, in bytes, that the rank with the least memory has for weights and all other tensors.
    """
    kernels: dict[str, planner.Device] = {"slices": "cpu", "varlen": "cuda", "padded": "cuda-padded"}
    device = kernels[kernel_name(ranks.device, DTYPES[job.layout.precision])]
    return MicroBatches(job.recipe, job.train, numbers, job.layout, device).largest(room)
