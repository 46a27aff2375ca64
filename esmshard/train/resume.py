"""The starting point of a run: a new start, or a checkpoint of the same recipe and data."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from esmshard.checkpoint import manifest, sharded
from esmshard.data.tables import counted
from esmshard.errors import InputError, UsageError, reading
from esmshard.files import replace_json, replace_text, size_text
from esmshard.model import weights
from esmshard.model.finetuner import LanguageModelHead
from esmshard.parallel.process_group import World
from esmshard.progress import say
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe
from esmshard.train.inputs import RUN_FILES, RunInputs, leakage_notices, provenance, versions
from esmshard.train.optim import schedule
from esmshard.train.run_dir import METRICS
from esmshard.train.tracking import TRACKED

NOTICES_PRINTED = "ESMSHARD_DATA_NOTICES_PRINTED"
"""An environment variable that is set for all runs of a cross-validation but the first, which prints the data notices.
"""

# A resumed run may differ in these settings: they change where and how it runs, not what it computes.
_FREE = (
    *("out", "data.test", "checkpoint.", "train.eval_every", "train.early_stop", "batch.tokens_per_rank", "track"),
    *("parallel.strategy", "parallel.start_timeout", "parallel.step_timeout", "parallel.accumulate"),
    *("parallel.group_size", "parallel.activation_checkpointing", "parallel.cpu_offload"),
    *("parallel.tensor", "parallel.context"),
)


def starting_point(job: RunInputs, resume: str | None) -> Path | None:
    """Return the checkpoint to continue from, or None for a new run, whose directory is then cleared of old files.

    Call this on one rank, which holds the directory. Checkpoints after the returned one are set aside: damaged ones,
    which the next save removes, and good ones that the user chose not to continue from, which stay.

    Args:
        job: the prepared run; `check_out` has been called.
        resume: `auto`, a path, or None for a new start.

    Raises:
        InputError: if there is no usable checkpoint.
        UsageError: if the checkpoint was written under another recipe or with other data.
    """
    directory = job.out / "checkpoints"
    if resume is not None:
        manifest.sweep(directory)
    start = check_start(job, resume)
    if start is None:
        # A run that was killed before its first checkpoint starts from the base model, but keeps the record of its
        # time.
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


def check_start(job: RunInputs, resume: str | None) -> Path | None:
    """Return the checkpoint that `starting_point` would return, without changing any file. Arguments and errors are the
    same.
    """
    start = None
    if resume == "auto":
        start = manifest.newest_good(job.out / "checkpoints", say)
        if start is None and (job.out / "model").exists():
            raise UsageError(
                f"{job.out}: holds a model but no checkpoint to go on from; pass --overwrite to start again"
            )
    elif resume is not None:
        start = manifest.locate(Path(resume), say)
    if start is not None:
        _check_same(job, start)
    return start


def _check_same(job: RunInputs, start: Path) -> None:
    state = sharded.read_state(start)
    now = resolved(job, job.recipe.batch.tokens_per_rank)
    with reading(f"{start / 'state.json'}", "take another checkpoint, or start again with --overwrite"):
        then = Recipe.model_validate(state["recipe"])
        changed = recipe_file.differences(then, Recipe.model_validate(now.as_written(model=False)))
        before = state["data"]["train"]["tokens_sha256"]
    changed = [line for line in changed if not line.startswith(_FREE)]
    if extensions(state, job.steps) != state.get("extended", []):
        changed = [line for line in changed if not line.startswith("train.steps ")]
    here = provenance(job)["train"]["tokens_sha256"]
    if before != here:  # the order of records and the crops depend on these values
        what = "sequences or tracks" if job.recipe.data.tracks else "sequences"
        changed.append(f"data.train ({job.train.path} holds other {what} than it did)")
    if changed:
        raise UsageError(
            f"{start}: was written under another recipe: {'; '.join(changed)}; go on with the old values, or start "
            "again with --overwrite or out=DIR. docs/checkpoints.md lists the keys that may change"
        )
    if state.get("base"):
        weights.check(weights.identity(job.weights, job.recipe.model.name), state["base"], str(start))


def extensions(saved: Mapping[str, Any] | None, steps: int) -> list[dict[str, int]]:
    """Return the changes of `train.steps` in the course of a run, with one more if it now has more steps than before.

    Args:
        saved: `state.json` of the checkpoint that the run goes on from; None for a new run.
        steps: the steps of the recipe now.

    >>> extensions({"step": 30, "recipe": {"train": {"steps": 30}}}, 60)
    [{'after': 30, 'steps_before': 30, 'steps': 60}]
    """
    if saved is None:
        return []
    earlier, before = saved.get("extended", []), saved["recipe"]["train"]["steps"]
    longer = before is not None and before < steps
    return [*earlier, {"after": saved["step"], "steps_before": before, "steps": steps}] if longer else earlier


def kinds_of_device(saved: Mapping[str, Any] | None, device: torch.device) -> list[str]:
    """Return the kinds of device on which a run was computed, in their order, such as `cuda` and then `cpu`.

    Args:
        saved: see `extensions`.
        device: the device on which the run goes on.
    """
    before: list[str] = [] if saved is None else saved.get("devices", [])  # Earlier releases did not record them.
    return before if before[-1:] == [device.type] else [*before, device.type]


def resolved(job: RunInputs, tokens_per_rank: int | str) -> Recipe:
    """Return the recipe with the values that were chosen on this machine, as it is saved beside the results."""
    batch = job.recipe.batch.model_copy(update={"tokens_per_rank": tokens_per_rank})
    parallel = job.recipe.parallel.model_copy(update={"precision": job.layout.precision})
    train = job.recipe.train.model_copy(update={"steps": job.steps or None, "epochs": None})
    return job.recipe.model_copy(update={"batch": batch, "parallel": parallel, "train": train})


def describe_run(
    job: RunInputs,
    recipe: Recipe,
    done: int,
    ranks: World,
    about: Mapping[str, Any] = {},  # only read
    *,
    has_notices: bool = True,
) -> None:
    """Write recipe and versions beside the results, and print notices on data and weights. One rank calls this.

    Args:
        job: the prepared run.
        recipe: the recipe with the values that were chosen on this machine.
        done: the number of optimizer steps done.
        ranks: all processes of the run.
        about: what its checkpoints say of the run: `extended` (see `extensions`) and `devices`.
        has_notices: whether notices are printed; those of a trial have been printed once for the sweep.
    """
    job.out.mkdir(parents=True, exist_ok=True)
    replace_text(job.out / "recipe.yaml", recipe_file.dump(recipe))
    facts = {**versions(job.recipe, ranks.device), "processes": ranks.size, "data": provenance(job)}
    extended: Sequence[Mapping[str, int]] = about.get("extended", ())
    if extended:
        facts["extended"] = extended
    if len(devices := about.get("devices", ())) > 1:
        facts["devices"] = devices
    replace_json(job.out / "versions.json", facts)
    for notice in notices(job, leakage=not done) if has_notices else ():
        say(notice)
    if done:
        say(f"going on after step {done} of {job.steps}")
        if len(devices) > 1:
            say(f"computed on {', then '.join(devices)}: the numbers of two kinds of device agree up to rounding only")
    if extended and extended[-1]["after"] == done:
        optim, before = recipe.optim, extended[-1]["steps_before"]
        last, first = (
            schedule(step, steps, optim.warmup, optim.schedule)
            for step, steps in ((done - 1, before), (done, job.steps))
        )
        say(
            f"train.steps was {before} and is {job.steps}: the learning rate now follows the {optim.schedule} schedule "
            f"of {job.steps} steps, and changes from {last:.0%} to {first:.0%} of its peak"
        )


def notices(job: RunInputs, *, leakage: bool = True) -> list[str]:
    """Return notices on data and weights: what was changed or left out and, if requested, what the splits share."""
    found: dict[str, None] = {}
    for split in (job.train, job.valid, job.test):
        for notice in split.notices if NOTICES_PRINTED not in os.environ else ():
            found[notice if notice.startswith(f"{split.path}:") else f"{split.path}: {notice}"] = None
    longer = int((job.train.tokens > job.recipe.batch.global_tokens).sum()) if job.steps else 0
    if longer:
        found[
            f"{job.train.path}: {counted(longer, 'record')} longer than batch.global_tokens "
            f"({job.recipe.batch.global_tokens:,}): each has a step to itself, which is as large as the record"
        ] = None
    with torch.device("meta"):
        uses_lm_head = isinstance(job.task.head(job.weights.config), LanguageModelHead)
    lacking = job.weights.lacking("lm_head") if uses_lm_head else []
    return [*found, *lacking, *job.weights.notices, *(leakage_notices(job) if leakage else [])]


def check_room(directory: Path, needed: int, keep: int) -> None:
    """Check that the disk has room for checkpoints of `needed` bytes. `InputError` if not for one; a notice if not for
    all.

    While one checkpoint is written, `keep` others exist.
    """
    directory.mkdir(parents=True, exist_ok=True)
    free, there = shutil.disk_usage(directory).free, len(manifest.complete(directory))
    if free < needed:
        raise InputError(
            f"{directory}: a checkpoint takes {size_text(needed)}, and {size_text(free)} are free; make room, or "
            "choose another place with out=DIR"
        )
    if free < (most := max(1, keep + 1 - there)) * needed:
        say(
            f"{directory}: {most} more checkpoints of {size_text(needed)} will lie here, and {size_text(free)} are "
            "free; make room, or lower checkpoint.keep"
        )
