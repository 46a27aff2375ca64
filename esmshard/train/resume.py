"""The start of a run: from the first step, or from a checkpoint of the same recipe and data."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from esmshard.checkpoint import manifest, sharded
from esmshard.errors import InputError, UsageError
from esmshard.io.paths import replace_json, replace_text, size_text
from esmshard.model import weights
from esmshard.parallel.launch import TRIAL
from esmshard.parallel.process_group import World
from esmshard.progress import say
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe
from esmshard.train.inputs import RUN_FILES, RunInputs, notices, provenance, versions
from esmshard.train.run_dir import METRICS
from esmshard.train.tracking import TRACKED

# A resumed run may have other values of these settings. They do not change what a training step computes.
_FREE = (
    *("out", "data.test", "checkpoint.", "train.eval_every", "train.early_stop", "batch.tokens_per_rank", "track"),
    *("parallel.strategy", "parallel.start_timeout", "parallel.step_timeout", "parallel.accumulate"),
    *("parallel.group_size", "parallel.activation_checkpointing", "parallel.cpu_offload"),
    *("parallel.tensor", "parallel.context"),
)


def starting_point(job: RunInputs, resume: str | None) -> Path | None:
    """Return the checkpoint to continue from. For a new run, remove RUN_FILES from `job.out` and return None.

    The rank that holds the lock of `job.out` calls this. Checkpoints in `job.out` with more steps than the returned one
    are renamed. For arguments and errors see `check_start`.
    """
    directory = job.out / "checkpoints"
    if resume is not None:
        manifest.sweep(directory)
    start = check_start(job, resume)
    if start is None:
        # A run that was killed before its first checkpoint begins again, and METRICS counts the time it used.
        for path in (job.out / name for name in RUN_FILES if resume != "auto" or name not in (METRICS, *TRACKED)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    elif start.parent.resolve() == directory.resolve():
        for later in manifest.named(directory):
            if (manifest.step_of(later) or 0) > (manifest.step_of(start) or 0):
                aside = manifest.set_aside(later, "damaged" if resume == "auto" else "abandoned")
                say(f"{later}: set aside as {aside.name}, because the run goes on from {start.name}")
    return start


def check_start(job: RunInputs, resume: str | None) -> Path | None:
    """Return the checkpoint from which a run continues; None for a new start. No file is changed.

    `resume` is `auto`, the path of a run or checkpoint, or None. Call `check_out` first.

    Raises:
        InputError: every checkpoint is damaged, or the base model has changed.
        UsageError: the checkpoint has another recipe or other data, or `job.out` has a model but no checkpoint.
    """
    if resume is None:
        return None
    start = (
        manifest.newest_good(job.out / "checkpoints", say) if resume == "auto" else manifest.locate(Path(resume), say)
    )
    if start is None and (job.out / "model").exists():
        raise UsageError(f"{job.out}: holds a model but no checkpoint to go on from; pass --overwrite to start again")
    if start is None:
        return None
    state = sharded.read_state(start)
    then, now = Recipe.model_validate(state["recipe"]), resolved(job, job.recipe.batch.tokens_per_rank)
    changed = recipe_file.differences(then, now)
    free = (*_FREE, "train.steps ") if job.steps > (then.train.steps or job.steps) else _FREE
    changed = [line for line in changed if not line.startswith(free)]
    # The order of the records, and the crops of long records, depend on the tokens of all records.
    if state["data"]["train"]["tokens_sha256"] != provenance(job)["train"]["tokens_sha256"]:
        changed.append(f"data.train ({job.train.path} holds other sequences or tracks than it did)")
    if changed:
        raise UsageError(
            f"{start}: was written under another recipe: {'; '.join(changed)}; go on with the old values, or start "
            "again with --overwrite or out=DIR. docs/checkpoints.md lists the keys that may change"
        )
    if state.get("base"):
        weights.check(weights.identity(job.weights, job.recipe.model.name), state["base"], str(start))
    return start


def history(saved: Mapping[str, Any] | None, steps: int, device: torch.device) -> list[dict[str, Any]]:
    """Return an entry for the start of a run, and one for each change in its planned `steps` or its kind of device.

    `after` is the number of steps done before the change. `saved` is the `state.json` of the checkpoint to continue
    from, or None for a new run. `steps` and `device` are the present values.

    >>> history({"step": 30, "history": [{"after": 0, "steps": 30, "device": "cpu"}]}, 60, torch.device("cpu"))
    [{'after': 0, 'steps': 30, 'device': 'cpu'}, {'after': 30, 'steps': 60, 'device': 'cpu'}]
    """
    before: list[dict[str, Any]] = saved["history"] if saved else []
    now = {"after": saved["step"] if saved else 0, "steps": steps, "device": device.type}
    is_same = before and (before[-1]["steps"], before[-1]["device"]) == (steps, device.type)
    return before if is_same else [*before, now]


def resolved(job: RunInputs, tokens_per_rank: int | str) -> Recipe:
    """Return the recipe that is saved with a run: `auto` and `epochs` are replaced by the values used in the run."""
    batch = job.recipe.batch.model_copy(update={"tokens_per_rank": tokens_per_rank})
    parallel = job.recipe.parallel.model_copy(update={"precision": job.layout.precision})
    train = job.recipe.train.model_copy(update={"steps": job.steps or None, "epochs": None})
    return job.recipe.model_copy(update={"batch": batch, "parallel": parallel, "train": train})


def describe_run(job: RunInputs, recipe: Recipe, done: int, ranks: World, history: Sequence[Mapping[str, Any]]) -> None:
    """Write `recipe.yaml` and `versions.json`, and print notices on data and weights.

    One rank calls this, after `done` optimizer steps. A trial prints no notices, because its sweep has printed them.
    """
    replace_text(job.out / "recipe.yaml", recipe_file.dump(recipe))
    facts = {**versions(job.recipe, ranks.device), "processes": ranks.size, "data": provenance(job)}
    replace_json(job.out / "versions.json", facts | {"history": history})
    for notice in notices(job, leakage=not done) if TRIAL not in os.environ else ():
        say(notice)
    if not done:
        return
    say(f"going on after step {done} of {job.steps}")
    if len(devices := dict.fromkeys(start["device"] for start in history)) > 1:
        say(f"computed on {', then '.join(devices)}: the numbers of two kinds of device agree up to rounding only")
    before, now = history[-2:][0], history[-1]
    if now["after"] == done and before["steps"] != job.steps:
        say(
            f"train.steps was {before['steps']} and is {job.steps}: from here on the learning rate follows the "
            f"{recipe.optim.schedule} schedule of {job.steps} steps"
        )


def check_room(directory: Path, needed: int) -> None:
    """Raise `InputError` if the disk of `directory` has no room for a checkpoint of `needed` bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise InputError(
            f"{directory}: a checkpoint takes {size_text(needed)}, and {size_text(free)} are free; make room, or "
            "choose another place with out=DIR"
        )
