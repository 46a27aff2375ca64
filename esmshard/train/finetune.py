"""The main job, from the recipe to the evaluated model. Read it top to bottom."""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from esmshard import recipe as recipes
from esmshard.batch import TokenBatch
from esmshard.checkpoint import sharded
from esmshard.checkpoint.consolidate import consolidate
from esmshard.data.loader import Examples, digests
from esmshard.data.packing import MicroBatch, Plan, deal
from esmshard.errors import UsageError
from esmshard.model.esm2 import ESM2
from esmshard.parallel import health
from esmshard.parallel import plan as memory
from esmshard.parallel.mesh import World, world
from esmshard.parallel.shard import ShardOptions, materialise, shard
from esmshard.progress import Progress, rate, say
from esmshard.recipe import Recipe
from esmshard.tasks.finetuner import FineTuner, new_head
from esmshard.tasks.protocol import Task, collate
from esmshard.train import evaluate
from esmshard.train.job import RUN_FILES, Job, check_out, leakage_notices, prepare, provenance, versions
from esmshard.train.metrics import mean
from esmshard.train.optim import adamw, schedule, set_learning_rate, state_tensors
from esmshard.train.step import too_many_skipped, train_step

BASELINE_RECORDS = 2000
"""Training records, evenly spread, that the baselines learn from: enough for a histogram, and seconds at any size."""

# A resumed run may differ in these: where and how it runs, not what it computes.
_FREE = ("out", "data.test", "checkpoint.", "train.eval_every", "batch.tokens_per_rank", "parallel.strategy")


def run(recipe: Recipe, resume: str | None = None, overwrite: bool = False) -> Path | None:
    """Fine-tune in this process and those that were launched with it, then write the results.

    Args:
        recipe: checked; its `out` is the run's directory.
        resume: `auto` goes on from the newest good checkpoint of `out` if there is one, a path from that run or
            checkpoint; None starts anew.
        overwrite: remove what an earlier run left in `out`.

    Returns:
        The run's directory on the first rank, whose work it is to consolidate and evaluate; None on the others.

    Raises:
        InputError: for any mistake in recipe or data, on all ranks.
    """
    with world() as ranks:
        job = ranks.agree(lambda: prepare(recipe, ranks.size))
        start = ranks.from_first(lambda: _starting_point(job, resume, overwrite, ranks.device))
        _train(job, start, ranks)
        if not ranks.is_first:
            return None
    torch.set_num_threads(os.cpu_count() or 1)  # the other ranks are leaving
    model = consolidate(job.out, job.out / "model", overwrite=True, warn=say)
    say(f"model in {model}; scoring {len(job.test)} test records")
    print(evaluate.report(str(model), job.test, job.out, warn=say), flush=True)
    return job.out


def _train(job: Job, start: Path | None, ranks: World) -> None:
    """Model, shards, optimizer, loop, checkpoints."""
    recipe, task, weights, out = job.recipe, job.task, job.weights, job.out

    # Shapes first, then shards, then values: of several ranks none ever holds the whole model.
    with torch.device("meta"):
        model = FineTuner(ESM2(weights.config), task.head(weights.config))
    model.freeze_unused()
    precision, dtype = _precision(recipe, ranks.device)
    checkpointing = recipe.parallel.activation_checkpointing == "full"
    options = ShardOptions(compute_dtype=dtype, activation_checkpointing=checkpointing, compile=recipe.parallel.compile)
    shard(model, recipe.parallel.strategy, ranks, options)
    head = new_head(recipe, task, weights).state_dict()
    materialise(
        model,
        lambda name: head[name[5:]] if name.startswith("head.") else weights[name.removeprefix("trunk.")],
        ranks.device,
    )
    model.train()
    optimizer = adamw(model, recipe.optim)
    done = 0
    saved = sharded.read_state(start) if start is not None else None
    if start is not None and saved is not None:
        sharded.load(start, state_tensors(model, optimizer))
        done = int(saved["step"])

    # What was resolved on this machine goes into the recipe that lies beside the results.
    tokens_per_rank = _tokens_per_rank(job, saved, precision, ranks)
    resolved = _resolved(recipe, tokens_per_rank, precision)
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
    with Progress("step", recipe.train.steps, done=done, show=ranks.is_first) as progress:
        for step in range(done, recipe.train.steps):
            began = time.monotonic()
            share = schedule(step, recipe.train.steps, recipe.optim.warmup, recipe.optim.schedule)
            set_learning_rate(optimizer, share)
            epoch, records = plan.step(step)
            mine = deal(records, job.train.tokens, tokens_per_rank, ranks.rank, ranks.size)
            result = train_step(
                model, task, optimizer, _batches(task, job.train, mine, epoch), recipe.optim.clip, ranks
            )
            skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
            too_many_skipped(skipped_in_a_row, step + 1)
            speed, peak = result.residues / (time.monotonic() - began), _peak_memory(ranks.device)
            line = {
                "step": step + 1,
                "epoch": epoch,
                "loss": result.loss,
                "lr": share * recipe.optim.lr,
                "grad_norm": result.grad_norm,
                "records": len(records),
                "residues": result.residues,
                "residues_per_s": speed,
                "peak_memory_bytes": peak,
                "skipped": result.skipped,
            }
            last = step + 1 == recipe.train.steps
            _append(out, line, ranks)
            if last or (step + 1) % recipe.train.eval_every == 0:
                loss, rows = evaluate.validate(model, task, job.valid, tokens_per_rank, ranks)
                means = {metric: mean([row[metric] for row in rows]) for metric in task.columns}
                _append(out, {"step": step + 1, "split": "valid", "loss": loss, **means}, ranks)
                validation = f"  valid {task.columns[0]} {means[task.columns[0]]:.3f}"
            if last or (step + 1) % recipe.checkpoint.every == 0:
                tensors = state_tensors(model, optimizer)
                sharded.save(out / "checkpoints", step + 1, tensors, state, recipe.checkpoint.keep)
            progress.update(
                step + 1, f"loss {result.loss:.4f}  {rate(speed)} residues/s  {peak / 2**20:.0f} MiB{validation}"
            )


def _batches(
    task: Task, data: Examples, mine: Sequence[MicroBatch], epoch: int
) -> Iterator[tuple[TokenBatch, list[torch.Tensor], bool]]:
    for micro in mine:
        batch, targets = collate(task, [data.get(n, epoch) for n in micro.records])
        yield batch, targets, micro.ghost


def _starting_point(job: Job, resume: str | None, overwrite: bool, device: torch.device) -> Path | None:
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
    now = _resolved(job.recipe, job.recipe.batch.tokens_per_rank, _precision(job.recipe, device)[0])
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
        known = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in line.items()}  # JSON has no NaN
        with open(out / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(known) + "\n")


def _resolved(recipe: Recipe, tokens_per_rank: int | str, precision: str) -> Recipe:
    batch = recipe.batch.model_copy(update={"tokens_per_rank": tokens_per_rank})
    parallel = recipe.parallel.model_copy(update={"precision": precision})
    return recipe.model_copy(update={"batch": batch, "parallel": parallel})


def _precision(recipe: Recipe, device: torch.device) -> tuple[str, torch.dtype]:
    name = recipe.parallel.precision
    if name == "auto":
        ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        name = "bf16" if ampere else "fp32"
    return name, {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def _tokens_per_rank(job: Job, saved: Mapping[str, Any] | None, precision: str, ranks: World) -> int:
    """As the recipe says; for `auto` what the run began with, else what fits on the rank with the least memory."""
    asked = job.recipe.batch.tokens_per_rank
    if isinstance(asked, int):
        return asked
    if saved is not None:  # other micro-batches would add up gradients in another order
        return int(saved["recipe"]["batch"]["tokens_per_rank"])
    config, longest = job.weights.config, int(job.train.tokens.max())
    checkpointing = job.recipe.parallel.activation_checkpointing == "full"
    per_token = memory.activation_bytes_per_token(config.n_layers, config.dim, checkpointing, precision == "bf16")
    per_token += -(-job.task.head_bytes(longest) // longest)
    free = memory.free_bytes(ranks.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    share = -(-job.recipe.batch.global_tokens // ranks.size)
    state = memory.state_bytes(config.n_parameters, ranks.size)
    return int(ranks.min(memory.tokens_that_fit(free, state, per_token, longest, share)))


def _peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on the GPU, or that this process held in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
