"""The main job, from the recipe to the evaluated model. Read it top to bottom."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esmshard import recipe as recipes
from esmshard.batch import TokenBatch
from esmshard.checkpoint import sharded
from esmshard.checkpoint.consolidate import consolidate
from esmshard.data.loader import Examples, digests
from esmshard.data.packing import MicroBatch, Plan, deal
from esmshard.errors import InputError, UsageError
from esmshard.model.esm2 import ESM2
from esmshard.parallel import health
from esmshard.parallel import plan as memory
from esmshard.parallel.cost import forward_flops
from esmshard.parallel.guards import check_optimizer
from esmshard.parallel.load import materialise
from esmshard.parallel.mesh import World, processes_per_machine, world
from esmshard.parallel.profile import Profile
from esmshard.parallel.shard import shard
from esmshard.parallel.stuck import Control, recorder_settings
from esmshard.parallel.watch import Watch, peak_flops
from esmshard.progress import Progress, rate, say
from esmshard.settings import Recipe
from esmshard.tasks.finetuner import FineTuner, new_head
from esmshard.tasks.numbers import HEADS
from esmshard.tasks.protocol import Task, collate
from esmshard.train import evaluate
from esmshard.train.job import RUN_FILES, Job, check_out, leakage_notices, prepare, provenance, versions
from esmshard.train.metrics import mean
from esmshard.train.optim import adamw, schedule, set_learning_rate, state_tensors
from esmshard.train.planning import head_bytes
from esmshard.train.step import LossScale, too_many_skipped, train_step

BASELINE_RECORDS = 2000
"""Training records, evenly spread, that the baselines learn from: enough for a histogram, and seconds at any size."""

RESERVED = 0.9
"""Of the free memory, what a run plans to use. The rest is for the gaps of allocators, and other programs."""

# A resumed run may differ in these: where and how it runs, not what it computes.
_FREE = (
    *("out", "data.test", "checkpoint.", "train.eval_every", "batch.tokens_per_rank", "parallel.strategy"),
    *("parallel.group_size", "parallel.layers", "parallel.last_layer", "parallel.root", "parallel.prefetch"),
    *("parallel.activation_checkpointing", "parallel.cpu_offload", "parallel.accumulate"),
    *("parallel.start_timeout", "parallel.step_timeout"),
)


def run(recipe: Recipe, resume: str | None = None, overwrite: bool = False, profile: int = 0) -> Path | None:
    """Fine-tune in this process and those that were launched with it, then write the results.

    Args:
        recipe: checked; its `out` is the run's directory.
        resume: `auto` goes on from the newest good checkpoint of `out` if there is one, a path from that run or
            checkpoint; None starts anew.
        overwrite: remove what an earlier run left in `out`.
        profile: steps to record with torch's profiler.

    Returns:
        The run's directory on the first rank, whose work it is to consolidate and evaluate; None on the others.

    Raises:
        InputError: for any mistake in recipe or data, on all ranks.
    """
    wait, dumps = recipe.parallel, Path(recipe.out) / "flight_recorder"
    for name, value in recorder_settings(dumps).items():
        os.environ.setdefault(name, value)
    with (
        world(wait.start_timeout, alone_too=recipe.parallel.cpu_offload) as ranks,
        Control(ranks, start_timeout=wait.start_timeout, step_timeout=wait.step_timeout, dumps=dumps) as control,
    ):
        job = ranks.agree(lambda: prepare(recipe, ranks.size, processes_per_machine(ranks.size), ranks.device))
        start = ranks.from_first(lambda: _starting_point(job, resume, overwrite))
        _train(job, start, ranks, control, profile)
        if not ranks.is_first:
            return None
    torch.set_num_threads(os.cpu_count() or 1)  # the other ranks are leaving
    model = consolidate(job.out, job.out / "model", overwrite=True, warn=say)
    say(f"model in {model}; scoring {len(job.test)} test records")
    print(evaluate.report(str(model), job.test, job.out, warn=say), flush=True)
    return job.out


def _train(job: Job, start: Path | None, ranks: World, control: Control, profile: int) -> None:
    """Model, shards, optimizer, loop, checkpoints."""
    recipe, task, weights, out = job.recipe, job.task, job.weights, job.out

    # Shapes first, then shards, then values: of several ranks none ever holds the whole model.
    with torch.device("meta"):
        model = FineTuner(ESM2(weights.config), task.head(weights.config))
    model.freeze_unused()
    shard(model, job.layout, ranks)
    saved = sharded.read_state(start) if start is not None else None
    tokens_per_rank = _tokens_per_rank(job, model, saved, ranks)
    control.note("reading weights")
    materialise(model, model.rows_of(weights, new_head(recipe, task, weights)), job.layout, ranks)
    model.train()
    optimizer = adamw(model, recipe.optim)
    check_optimizer(model, optimizer)
    scale = LossScale() if job.layout.precision == "fp16" else None
    done = 0
    if start is not None and saved is not None:
        sharded.load(start, state_tensors(model, optimizer))
        done = int(saved["step"])
        scale = LossScale(**saved["loss_scale"]) if scale else None

    # What was resolved on this machine goes into the recipe that lies beside the results.
    resolved = _resolved(recipe, tokens_per_rank, job.layout.precision)
    state: dict[str, Any] = {
        "recipe": resolved.model_dump(mode="json"),
        "config": asdict(weights.config),
        "world_size": ranks.size,
        "versions": versions(),
        "data": provenance(job),
        "baselines": {},
    }
    if ranks.is_first:
        some = range(0, len(job.train), -(-len(job.train) // BASELINE_RECORDS))
        state["baselines"] = dict(task.baselines([task.targets(job.train.get(n)) for n in some]))
        _open_run(job, resolved, done, ranks)

    # Every rank plans the same records for a step and takes its own share of them.
    plan = Plan(job.train.tokens, recipe.batch.global_tokens, recipe.train.seed)
    epoch, records = plan.step(done)
    mine = deal(records, job.train.tokens, tokens_per_rank, ranks.rank, ranks.size)
    health.check_first_batch(ranks, lambda: digests(job.train, mine, epoch))
    if ranks.is_first and (alone := health.started_apart(ranks, os.environ)):
        say(alone)
    skipped_in_a_row, validation = 0, ""
    numbers = memory.of_model(model, weights.config.dim, weights.config.n_heads)
    watch = Watch(model, ranks, control, peak_flops(ranks.device, job.layout.precision))
    with (
        _out_of_memory(tokens_per_rank, int(job.train.tokens.max())),
        Progress("step", recipe.train.steps, done=done, show=ranks.is_first) as progress,
        Profile(ranks, profile, recipe.train.steps - done, out / "profile") as recording,
    ):
        for step in range(done, recipe.train.steps):
            share = schedule(step, recipe.train.steps, recipe.optim.warmup, recipe.optim.schedule)
            set_learning_rate(optimizer, share)
            epoch, records = plan.step(step)
            mine = deal(records, job.train.tokens, tokens_per_rank, ranks.rank, ranks.size)
            watch.begin_step(step + 1, *_work(mine, job.train.tokens, numbers))
            batches = _batches(task, job.train, mine, epoch)
            result = train_step(
                model, task, optimizer, batches, recipe.optim.clip, ranks, job.layout, scale=scale, watch=watch
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
            last = step + 1 == recipe.train.steps
            _append(out, line, ranks)
            if last or (step + 1) % recipe.train.eval_every == 0:
                control.note("validating")
                loss, rows = evaluate.validate(model, task, job.valid, tokens_per_rank, ranks)
                means = {metric: mean([row[metric] for row in rows]) for metric in task.columns}
                _append(out, {"step": step + 1, "split": "valid", "loss": loss, **means}, ranks)
                validation = f"  valid {task.columns[0]} {means[task.columns[0]]:.3f}"
            if last or (step + 1) % recipe.checkpoint.every == 0:
                control.note("saving a checkpoint")
                tensors = state_tensors(model, optimizer)
                state["loss_scale"] = asdict(scale) if scale else None
                sharded.save(out / "checkpoints", step + 1, tensors, state, recipe.checkpoint.keep)
            speed, held = report.line["residues_per_s"], (report.line["peak_memory_bytes"] or 0) / 2**20
            progress.update(step + 1, f"loss {result.loss:.4f}  {rate(speed)} residues/s  {held:.0f} MiB{validation}")


@contextmanager
def _out_of_memory(tokens_per_rank: int, longest: int) -> Iterator[None]:
    """A GPU's out-of-memory error as one sentence, with a number that is likely to fit."""
    try:
        yield
    except torch.OutOfMemoryError:
        less = max(longest, 3 * tokens_per_rank // 4)
        mend = f"set batch.tokens_per_rank={less}, or " if less < tokens_per_rank else "lower data.max_length, or set "
        raise InputError(
            f"out of memory: micro-batches of {tokens_per_rank} tokens do not fit; {mend}"
            "parallel.activation_checkpointing=full, and go on with --resume auto"
        ) from None


def _work(
    mine: Sequence[MicroBatch], tokens_N: npt.NDArray[np.integer[Any]], numbers: memory.ModelNumbers
) -> tuple[int, float]:
    """Residues of this rank's share of a step, and the FLOPs of the model's forward and backward pass over them."""
    own_N = tokens_N[[n for micro in mine if not micro.ghost for n in micro.records]].astype(np.int64)
    tokens = int(own_N.sum())
    attended = float((own_N**2).sum()) / max(tokens, 1)
    return tokens - 2 * len(own_N), 3 * tokens * forward_flops(numbers, attended)


def _batches(
    task: Task, data: Examples, mine: Sequence[MicroBatch], epoch: int
) -> Iterator[tuple[TokenBatch, list[torch.Tensor], bool]]:
    for micro in mine:
        batch, targets = collate(task, [data.get(n, epoch) for n in micro.records])
        yield batch, targets, micro.ghost


def _starting_point(job: Job, resume: str | None, overwrite: bool) -> Path | None:
    """The checkpoint to go on from; None for a new run, whose directory is then free of an old one's files."""
    check_out(job.out, resume, overwrite)
    start = None
    if resume == "auto":
        start = sharded.newest_good(job.out / "checkpoints", say)
    elif resume is not None:
        start = sharded.locate(Path(resume), say)
    if start is None and not overwrite and (job.out / "model").exists():
        raise UsageError(f"{job.out}: holds a model but no checkpoint to go on from; pass --overwrite to start again")
    if start is None:
        for name in RUN_FILES:
            path = job.out / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return None
    state = sharded.read_state(start)
    now = _resolved(job.recipe, job.recipe.batch.tokens_per_rank, job.layout.precision)
    changed = recipes.differences(Recipe.model_validate(state["recipe"]), now)
    changed = [line for line in changed if not line.startswith(_FREE)]
    before, here = state["data"]["train"]["tokens_sha256"], provenance(job)["train"]["tokens_sha256"]
    if before != here:  # the order of records and the crops follow from them
        changed.append(f"data.train ({job.train.path} holds other sequences than it did)")
    if changed:
        raise UsageError(
            f"{start}: was written under another recipe: {'; '.join(changed)}; go on with the old values, or start "
            "again with --overwrite or out=DIR"
        )
    return start


def _open_run(job: Job, resolved: Recipe, done: int, ranks: World) -> None:
    """Directory, resolved recipe and versions of a run; notices about its data and weights."""
    out = job.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "recipe.yaml").write_text(recipes.dump(resolved), encoding="utf-8")
    facts = {**versions(), "device": str(ranks.device), "processes": ranks.size, "data": provenance(job)}
    (out / "versions.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    metrics = out / "metrics.jsonl"
    if metrics.is_file():  # lines of steps after the checkpoint will be written again
        lines = [line for line in metrics.read_text(encoding="utf-8").splitlines() if _step_of(line) <= done]
        metrics.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    for split in (job.train, job.valid, job.test):
        for notice in split.notices:
            say(f"{split.path}: {notice}")
    for notice in [*job.weights.notices, *([] if done else leakage_notices(job))]:
        say(notice)
    if done:
        say(f"going on after step {done} of {job.recipe.train.steps}")


def _step_of(line: str) -> float:
    """Step of a line of metrics.jsonl; a line cut off by a crash counts as later than any."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _append(out: Path, line: Mapping[str, Any], ranks: World) -> None:
    if ranks.is_first:
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}  # as in JSON
        with open(out / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(known) + "\n")


def _resolved(recipe: Recipe, tokens_per_rank: int | str, precision: str) -> Recipe:
    batch = recipe.batch.model_copy(update={"tokens_per_rank": tokens_per_rank})
    parallel = recipe.parallel.model_copy(update={"precision": precision})
    return recipe.model_copy(update={"batch": batch, "parallel": parallel})


def _tokens_per_rank(job: Job, model: FineTuner, saved: Mapping[str, Any] | None, ranks: World) -> int:
    """As the recipe says; for `auto` what the run began with, else what fits on the rank with the least memory.

    Called before the model has memory of its own, for the planner counts that too.
    """
    asked = job.recipe.batch.tokens_per_rank
    if isinstance(asked, int):
        return asked
    if saved is not None:  # other micro-batches would add up gradients in another order
        return int(saved["recipe"]["batch"]["tokens_per_rank"])
    config, lengths = job.weights.config, job.train.tokens
    longest = int(lengths.max())
    room = RESERVED * memory.free_bytes(ranks.device, processes_per_machine(ranks.size))
    fitting = memory.largest_micro_batch(
        memory.of_model(model, config.dim, config.n_heads),
        job.layout,
        int(ranks.min(room)),
        head_bytes(HEADS[job.recipe.task.name](job.recipe.task), lengths, job.layout),
        _kernels(ranks.device, job.layout.precision),
        longest=longest,
        share=-(-job.recipe.batch.global_tokens // ranks.size),
        padding=longest / float(lengths.mean()),
    )
    if not fitting and ranks.is_first:
        say(
            f"the longest training record, {longest} tokens, may not fit into memory; lower data.max_length, set "
            "parallel.activation_checkpointing=full, or see `esmshard plan`"
        )
    return max(fitting, longest)


def _kernels(device: torch.device, precision: str) -> memory.Device:
    """Which attention runs, in the planner's words; as `attend` in `esmshard.model.attention` chooses it."""
    if device.type == "cpu":
        return "cpu"
    packed = device.type == "cuda" and precision != "fp32" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "cuda" if packed else "cuda-padded"
