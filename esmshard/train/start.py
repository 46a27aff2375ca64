"""Where a run starts: anew, or after a checkpoint of the same recipe and data."""

import json
import os
import shutil
from pathlib import Path

from esmshard import recipe as recipes
from esmshard.checkpoint import manifest, sharded
from esmshard.data.tables import counted
from esmshard.errors import InputError, UsageError, reading
from esmshard.model import origin
from esmshard.parallel.mesh import World
from esmshard.progress import say
from esmshard.settings import Recipe
from esmshard.train.attempt import METRICS
from esmshard.train.job import RUN_FILES, Job, leakage_notices, provenance, versions
from esmshard.train.status import replace_text
from esmshard.train.tracking import TRACKED

TOLD = "ESMSHARD_DATA_TOLD"
"""Environment variable of the runs of a cross-validation but the first, which has told what the data are like."""

# A resumed run may differ in these: where and how it runs, not what it computes.
_FREE = (
    *(
        "out",
        "data.test",
        "checkpoint.",
        "train.eval_every",
        "train.early_stop",
        "batch.tokens_per_rank",
        "parallel.strategy",
    ),
    *("parallel.group_size", "parallel.layers", "parallel.last_layer", "parallel.root", "parallel.prefetch"),
    *("parallel.activation_checkpointing", "parallel.cpu_offload", "parallel.accumulate"),
    *("parallel.start_timeout", "parallel.step_timeout", "track"),
)


def starting_point(job: Job, resume: str | None, trust: bool) -> Path | None:
    """The checkpoint to go on from; None for a new run, whose directory is then free of an old one's files.

    To call on one rank, which holds the directory. Checkpoints after the one that is taken are set aside: damaged ones,
    which the next save removes, and those that the user went back behind, which stay.

    Args:
        job: prepared; `check_out` has had its word.
        resume: `auto`, a path, or None to start anew.
        trust: take a checkpoint that another user wrote.

    Raises:
        InputError: if nothing can be gone on from.
        UsageError: if it was written under another recipe or other data.
    """
    directory = job.out / "checkpoints"
    if resume is not None:
        manifest.sweep(directory)
    start = check_start(job, resume, trust)
    if start is None:
        # A run that was killed before its first checkpoint goes on from nothing, but what it took is not forgotten.
        for name in set(RUN_FILES) - ({METRICS, *TRACKED} if resume == "auto" else set()):
            path = job.out / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return None
    if start.parent.resolve() == directory.resolve():
        for later in manifest.named(directory):
            if (manifest.step_of(later) or 0) > (manifest.step_of(start) or 0):
                aside = manifest.set_aside(later, "damaged" if resume == "auto" else "abandoned")
                say(f"{later}: set aside as {aside.name}, as the run goes on from {start.name}")
    return start


def check_start(job: Job, resume: str | None, trust: bool) -> Path | None:
    """The checkpoint that `starting_point` goes on from, which changes things on disk for it. Arguments and errors are
    the same.
    """
    start = None
    if resume == "auto":
        start = manifest.newest_good(job.out / "checkpoints", say, trust=trust)
        if start is None and (job.out / "model").exists():
            raise UsageError(
                f"{job.out}: holds a model but no checkpoint to go on from; pass --overwrite to start again"
            )
    elif resume is not None:
        start = manifest.locate(Path(resume), say, trust=trust)
    if start is not None:
        _check_same(job, start)
    return start


def _check_same(job: Job, start: Path) -> None:
    state = sharded.read_state(start)
    now = resolved(job, job.recipe.batch.tokens_per_rank)
    with reading(f"{start / 'state.json'}", "take another checkpoint, or start again with --overwrite"):
        changed = recipes.differences(Recipe.model_validate(state["recipe"]), now)
        before = state["data"]["train"]["tokens_sha256"]
    changed = [line for line in changed if not line.startswith(_FREE)]
    here = provenance(job)["train"]["tokens_sha256"]
    if before != here:  # the order of records and the crops follow from them
        changed.append(f"data.train ({job.train.path} holds other sequences than it did)")
    if changed:
        raise UsageError(
            f"{start}: was written under another recipe: {'; '.join(changed)}; go on with the old values, or start "
            "again with --overwrite or out=DIR"
        )
    if state.get("base"):
        origin.check(origin.identity(job.weights, job.recipe.model.name), state["base"], str(start))


def resolved(job: Job, tokens_per_rank: int | str) -> Recipe:
    """The recipe with what was found on this machine, as it lies beside the results."""
    batch = job.recipe.batch.model_copy(update={"tokens_per_rank": tokens_per_rank})
    parallel = job.recipe.parallel.model_copy(update={"precision": job.layout.precision})
    train = job.recipe.train.model_copy(update={"steps": job.steps or None, "epochs": None})
    return job.recipe.model_copy(update={"batch": batch, "parallel": parallel, "train": train})


def describe_run(job: Job, recipe: Recipe, done: int, ranks: World) -> None:
    """Write recipe and versions beside the results, and tell what is to be known of data and weights. One rank."""
    job.out.mkdir(parents=True, exist_ok=True)
    replace_text(job.out / "recipe.yaml", recipes.dump(recipe))
    facts = {**versions(), "device": str(ranks.device), "processes": ranks.size, "data": provenance(job)}
    replace_text(job.out / "versions.json", json.dumps(facts, indent=1) + "\n")
    for notice in notices(job, leakage=not done):
        say(notice)
    if done:
        say(f"going on after step {done} of {job.steps}")


def notices(job: Job, *, leakage: bool = True) -> list[str]:
    """What is to be known of data and weights: what was changed or left out, and what the splits share, if asked."""
    found: dict[str, None] = {}
    for split in (job.train, job.valid, job.test):
        for notice in split.notices if TOLD not in os.environ else ():
            found[notice if notice.startswith(f"{split.path}:") else f"{split.path}: {notice}"] = None
    longer = int((job.train.tokens > job.recipe.batch.global_tokens).sum()) if job.steps else 0
    if longer:
        found[
            f"{job.train.path}: {counted(longer, 'record')} longer than batch.global_tokens "
            f"({job.recipe.batch.global_tokens:,}): each has a step to itself, which is as large as the record"
        ] = None
    return [*found, *job.weights.notices, *(leakage_notices(job) if leakage else [])]


def check_room(directory: Path, needed: int, keep: int) -> None:
    """Whether the disk has room for checkpoints of so many bytes. `InputError` if not for one; a notice if not for all.

    While one is written, `keep` others lie there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    free, there = shutil.disk_usage(directory).free, len(manifest.complete(directory))
    gigabytes = f"{needed / 1e9:.3g} GB"
    if free < needed:
        raise InputError(
            f"{directory}: a checkpoint takes {gigabytes}, and {free / 1e9:.3g} GB are free; make room, or choose "
            "another place with out=DIR"
        )
    if free < (most := max(1, keep + 1 - there)) * needed:
        say(
            f"{directory}: {most} more checkpoints of {gigabytes} will lie here, and {free / 1e9:.3g} GB are free; "
            "make room, or lower checkpoint.keep"
        )
