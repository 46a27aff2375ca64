"""The main job, from the recipe to the evaluated model. Read it top to bottom."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import TokenBatch
from esmshard.checkpoint import card, manifest, sharded
from esmshard.checkpoint.consolidate import consolidate
from esmshard.checkpoint.saver import Saver
from esmshard.data.loader import SEEN, Examples, digests
from esmshard.data.packing import MicroBatch, Plan, deal
from esmshard.errors import InputError
from esmshard.model import origin, recorded
from esmshard.model.convolutions import exact_convolutions
from esmshard.model.esm2 import ESM2
from esmshard.model.files import read_json
from esmshard.model.weights import default_device
from esmshard.parallel import allowed, health, worker
from esmshard.parallel import plan as memory
from esmshard.parallel.cost import training_flops
from esmshard.parallel.guards import check_optimizer
from esmshard.parallel.load import materialise
from esmshard.parallel.mesh import World, processes_per_machine, world
from esmshard.parallel.preemption import Preempted, Preemption, reason
from esmshard.parallel.profile import Profile
from esmshard.parallel.segments import expandable_segments
from esmshard.parallel.shard import shard
from esmshard.parallel.stuck import Control, recorder_settings
from esmshard.parallel.watch import Watch, peak_flops
from esmshard.progress import Progress, rate, say
from esmshard.settings import Recipe
from esmshard.tasks import head_of
from esmshard.tasks.finetuner import FineTuner, load_base, new_head
from esmshard.tasks.protocol import Task, collate
from esmshard.train import evaluate
from esmshard.train.attempt import Attempt
from esmshard.train.fitting import (
    RESERVED,
    choose_tokens_per_rank,
    largest_fitting,
    out_of_memory_in_evaluation,
    out_of_memory_in_steps,
    out_of_memory_of_model,
)
from esmshard.train.job import Job, check_out, leakage_notices, prepare, provenance, versions
from esmshard.train.optim import adamw, schedule, set_learning_rate, state_tensors
from esmshard.train.start import check_room, describe_run, resolved, starting_point
from esmshard.train.step import LossScale, too_many_skipped, train_step
from esmshard.train.tracking import Tracking


def run(
    recipe: Recipe,
    resume: str | None = None,
    overwrite: bool = False,
    profile: int = 0,
    *,
    trust: bool = False,
    started: float | None = None,
) -> Path | None:
    """Fine-tune in this process and those that were launched with it, then write the results.

    Args:
        recipe: checked; its `out` is the run's directory.
        resume: `auto` goes on from the newest good checkpoint of `out` if there is one, a path from that run or
            checkpoint; None starts anew.
        overwrite: remove what an earlier run left in `out`.
        profile: steps to record with torch's profiler.
        trust: go on from a checkpoint that another user wrote.
        started: when the command was, in seconds since 1970; now by default.

    Returns:
        The run's directory on the first rank, whose work it is to consolidate and evaluate; None on the others.

    Raises:
        InputError: for any mistake in recipe or data, on all ranks.
        Preempted: on all ranks, after a signal or a time limit; what was done is saved.
    """
    wait, dumps = recipe.parallel, Path(recipe.out) / "flight_recorder"
    recorder = {name: os.environ.get(name, value) for name, value in recorder_settings(dumps).items()}
    out, started = Path(recipe.out), started or time.time()
    with (
        worker.environment(recorder),
        Preemption() as preemption,
        Tracking(out, recipe.track) as tracking,
        Attempt(out, started) as attempt,
    ):
        try:
            with (
                world(wait.start_timeout, alone_too=recipe.parallel.cpu_offload) as ranks,
                Control(
                    ranks, start_timeout=wait.start_timeout, step_timeout=wait.step_timeout, dumps=dumps
                ) as control,
                exact_convolutions(ranks.device),
                expandable_segments(ranks.device),
                out_of_memory_of_model(ranks.device),
            ):
                job = ranks.agree(lambda: prepare(recipe, ranks.size, processes_per_machine(ranks.size), ranks.device))
                ranks.from_first(lambda: check_out(out, resume, overwrite))
                ranks.agree(lambda: attempt.open(ranks.is_first, job.steps))
                start = ranks.from_first(lambda: starting_point(job, resume, trust))
                _train(job, start, ranks, control, preemption, attempt, tracking, profile)
                if not ranks.is_first:
                    return None
        except InputError as error:
            if error.transient and preemption.asked:  # another rank heard of it first, and had nothing to save
                raise Preempted(f"stopped by {reason(preemption.asked)}; go on with --resume auto") from None
            raise
        if worker.SHARED_CORES in os.environ:  # the other ranks are leaving
            torch.set_num_threads(allowed.cores())
        attempt.tell("running", "consolidating and evaluating")
        with out_of_memory_in_evaluation(recipe, default_device()):
            _evaluate(job, trust)
    say(attempt.summary())  # the attempt has ended: the test is in its time, as in the report's
    return out


def _evaluate(job: Job, trust: bool) -> None:
    """Baselines, the model as one directory, its scores on the test split, and its card. In the first process."""
    recipe, out = job.recipe, job.out
    say(f"fitting the baselines, then scoring {len(job.test)} test records")
    evaluate.fit_baselines(job.task, job.train, load_base(recipe, job.task), out / evaluate.BASELINES)
    evaluate.keep_seen(job.task, job.train, job.valid, out / SEEN)
    best = keeps_best(recipe) and manifest.pointed(out / "checkpoints", "BEST") is not None
    how: dict[str, Any] = {"best": best, "trust": trust, "new_head": head_of}
    model = consolidate(out, out / "model", overwrite=True, warn=say, **how)
    say(f"model in {model}")
    print(evaluate.report(str(model), job.test, out, warn=say, leakage=leakage_notices(job)), flush=True)
    card.write(model, read_json(model / "esmshard.json"), read_json(out / "evaluation.json"))


def _train(
    job: Job,
    start: Path | None,
    ranks: World,
    control: Control,
    preemption: Preemption,
    attempt: Attempt,
    tracking: Tracking,
    profile: int,
) -> None:
    """Model, shards, optimizer, loop, checkpoints."""
    recipe, task, weights, out = job.recipe, job.task, job.weights, job.out

    # Shapes first, then shards, then values: of several ranks none ever holds the whole model.
    with torch.device("meta"):
        model = FineTuner(ESM2(weights.config), task.head(weights.config))
    model.adapt(recipe.adapt, recipe.train.seed)
    shard(model, job.layout, ranks)
    saved = sharded.read_state(start) if start is not None else None
    adapted = recipe.adapt.method != "full"  # then a checkpoint holds what learns, and names the base that does not
    # Before the model has memory of its own, for the planner counts that too.
    numbers = memory.of_model(model, weights.config.dim, weights.config.n_heads)
    free = memory.free_bytes(ranks.device, processes_per_machine(ranks.size))
    fitting = partial(largest_fitting, job, numbers, int(ranks.min(RESERVED * free)), ranks)
    tokens_per_rank, longest = choose_tokens_per_rank(job, saved, fitting, ranks), int(job.train.tokens.max())
    at_once = max(longest, min(tokens_per_rank, -(-recipe.batch.global_tokens // ranks.size)))
    control.note("reading weights")
    head, told = new_head(recipe, task, weights)
    if told and start is None and ranks.is_first:
        say(told)
    with recorded.compared(weights.files if ranks.is_first else [], say):
        materialise(model, model.rows_of(weights, head), job.layout, ranks)
    if recipe.adapt.method == "probe" and start is None:
        say(f"fitting the head on {len(job.train)} training records")
        every = range(len(job.train))
        task.probe(model.eval().head, [job.train.get(n) for n in every], model, recipe.train.seed)
    model.train()
    optimizer = adamw(model, recipe.optim)
    check_optimizer(model, optimizer)
    scale = LossScale() if job.layout.precision == "fp16" else None
    tensors = state_tensors(model, optimizer, trained_only=adapted)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    ranks.from_first(lambda: check_room(out / "checkpoints", needed, recipe.checkpoint.keep))
    done, skipped_in_a_row, best, stale = 0, 0, None, 0
    if start is not None and saved is not None:
        sharded.load(start, tensors)
        done, skipped_in_a_row = int(saved["step"]), saved["skipped_in_a_row"]
        best, stale = saved["best"], saved["stale"]
        scale = LossScale(**saved["loss_scale"]) if scale else None

    # What was resolved on this machine goes into the recipe that lies beside the results.
    full_recipe = resolved(job, tokens_per_rank)
    state: dict[str, Any] = {
        "recipe": full_recipe.model_dump(mode="json"),
        "config": asdict(weights.config),
        "world_size": ranks.size,
        "versions": versions(),
        "data": provenance(job),
        "facts": dict(task.facts),
        "unlearned": [part for part in weights.unlearned if part != "lm_head" or not model.asks_logits],
        "base": None,
    }
    if ranks.is_first:
        if adapted:
            state["base"] = saved["base"] if saved else origin.identity(weights, recipe.model.name)
        describe_run(job, full_recipe, done, ranks)
        attempt.begin(done, saved is None or saved["validated"])
        tracking.begin(done)

    # Every rank plans the same records for a step and takes its own share of them.
    plan = Plan(job.train.tokens, recipe.batch.global_tokens, recipe.train.seed)
    epoch, records = plan.step(done)
    mine = deal(records, job.train.tokens, tokens_per_rank, ranks.rank, ranks.size)
    health.check_first_batch(ranks, lambda: digests(job.train, mine, epoch))
    if ranks.is_first and (alone := health.started_apart(ranks, os.environ)):
        say(alone)
    validation = ""
    watch = Watch(model, ranks, control, peak_flops(ranks.device, job.layout.precision))
    saver = Saver(out / "checkpoints", recipe.checkpoint.keep, _in_background(recipe, ranks.device))

    def save(step: int, *, validated: bool, is_best: bool) -> None:
        control.note("saving a checkpoint")
        attempt.check()
        began = time.perf_counter()
        now = {"loss_scale": asdict(scale) if scale else None, "skipped_in_a_row": skipped_in_a_row}
        now |= {"best": best, "stale": stale}
        tensors = state_tensors(model, optimizer, trained_only=adapted)
        saver.save(step, tensors, state | now | {"validated": validated}, is_best)
        attempt.write(event="checkpoint", step=step, stall_s=round(time.perf_counter() - began, 4))
        attempt.tell("running", "training")

    def asked_anywhere() -> int:
        return int(max(row[0] for row in ranks.rows([preemption.asked])))

    def validate(step: int) -> bool | None:
        """Whether it is the best so far. None if the run was asked to stop before it was through."""
        nonlocal best, stale, validation
        control.note("validating")
        scored = evaluate.validate(model, task, job.valid, tokens_per_rank, ranks, asked_anywhere)
        if scored is None:
            return None
        loss, rows = scored
        metrics = task.summary(rows)
        attempt.write(step=step, split="valid", loss=loss, **{metric: metrics[metric] for metric in task.columns})
        headline, value = task.columns[0], metrics[task.columns[0]]
        validation = f"  valid {headline} {value:.3f}"
        sign = -1 if task.lower_is_better else 1
        if not sign * value > (sign * best["value"] if best else -math.inf):
            stale += 1
            return False
        best, stale = {"step": step, "metric": headline, "value": value}, 0
        return True

    def enough() -> bool:
        return recipe.train.early_stop is not None and stale >= recipe.train.early_stop

    with (
        preemption.noted(),
        out_of_memory_in_steps(
            at_once,
            longest,
            job.layout.activation_checkpointing,
            fitting,
            saved=lambda: manifest.pointed(out / "checkpoints", "LATEST") is not None,
        ),
        saver,
        Progress("step", job.steps, done=done, show=ranks.is_first) as progress,
        Profile(ranks, profile, job.steps - done, out / "profile") as recording,
    ):
        if start is not None and saved is not None and not saved["validated"]:  # there was no time for it any more
            found = validate(done)
            if found is None:
                why = reason(asked_anywhere())
                raise Preempted(f"stopped by {why} after step {done}, which is saved; go on with --resume auto")
            if found and keeps_best(recipe) and ranks.is_first:
                manifest.point(out / "checkpoints", "BEST", start.name)
        if not job.steps and start is None:  # a probe
            found = validate(0)
            save(0, validated=found is not None, is_best=bool(found) and keeps_best(recipe))
        for step in range(done, job.steps):
            if enough():
                if ranks.is_first:
                    since = f"that of step {best['step']}" if best else "undefined"
                    say(f"stopped after step {step}: {stale} validations in a row were no better than {since}")
                break
            share = schedule(step, job.steps, recipe.optim.warmup, recipe.optim.schedule)
            set_learning_rate(optimizer, share)
            epoch, records = plan.step(step)
            mine = deal(records, job.train.tokens, tokens_per_rank, ranks.rank, ranks.size)
            watch.begin_step(step + 1, *_work(mine, job.train.tokens, numbers))
            batches = _batches(task, job.train, mine, epoch)
            attempt.check()
            result = train_step(
                model,
                task,
                optimizer,
                batches,
                recipe.optim.clip,
                ranks,
                job.layout,
                scale=scale,
                watch=watch,
                asked=preemption.asked,
            )
            report = watch.report(result.ranks)
            for warning in report.warnings if ranks.is_first else ():
                say(warning)
            if (table := recording.step_done()) is not None and ranks.is_first:
                say(f"{table}\ntraces in {out / 'profile'}")
            finding_scale = scale is not None and scale.value > 1  # fp16 starts with overflows
            skipped_in_a_row = skipped_in_a_row + 1 if result.skipped and not finding_scale else 0
            too_many_skipped(skipped_in_a_row, step + 1)
            line = {
                "step": step + 1,
                "epoch": epoch,
                "loss": result.loss,
                "lr": share * recipe.optim.lr,
                "grad_norm": result.grad_norm,
                "records": len(records),
                "residues": result.residues,
                "skipped": result.skipped,
                **report.line,
            }
            attempt.step_done(line)
            last = step + 1 == job.steps
            asked, found, due = result.asked, None, last or (step + 1) % job.eval_every == 0
            if due and not asked:  # a run that was asked to stop saves, and validates when it goes on
                found = validate(step + 1)
                asked = asked_anywhere() if found is None else 0
            is_best = bool(found) and keeps_best(recipe)
            if last or is_best or asked or enough() or (step + 1) % recipe.checkpoint.every == 0:
                save(step + 1, validated=not due or found is not None, is_best=is_best)
            if asked:
                saver.finish()
                raise Preempted(
                    f"stopped by {reason(asked)} after step {step + 1} of {job.steps}, which is saved; go on "
                    "with --resume auto"
                )
            speed, held = report.line["residues_per_s"], (report.line["peak_memory_bytes"] or 0) / 2**20
            progress.update(step + 1, f"loss {result.loss:.4f}  {rate(speed)} residues/s  {held:.0f} MiB{validation}")
        saver.finish()


def keeps_best(recipe: Recipe) -> bool:
    """Whether the checkpoint of the best validation is kept, and is the result of the run."""
    return recipe.checkpoint.keep_best or recipe.train.early_stop is not None


def _in_background(recipe: Recipe, device: torch.device) -> bool:
    """Whether to save while training goes on. With GPUs the host's memory has room for the copy; a CPU shares it."""
    wanted = recipe.checkpoint.async_save
    return device.type == "cuda" if wanted == "auto" else wanted


def _work(
    mine: Sequence[MicroBatch], tokens_N: npt.NDArray[np.integer[Any]], numbers: memory.ModelNumbers
) -> tuple[int, float]:
    """Residues of this rank's share of a step, and the FLOPs of the model's forward and backward pass over them."""
    own_N = tokens_N[[n for micro in mine if not micro.ghost for n in micro.records]].astype(np.int64)
    tokens = int(own_N.sum())
    attended = float((own_N**2).sum()) / max(tokens, 1)
    return tokens - 2 * len(own_N), tokens * training_flops(numbers, attended)


def _batches(
    task: Task, data: Examples, mine: Sequence[MicroBatch], epoch: int
) -> Iterator[tuple[TokenBatch, list[torch.Tensor], bool]]:
    for micro in mine:
        batch, targets = collate(task, [data.get(n, epoch) for n in micro.records])
        yield batch, targets, micro.ghost
