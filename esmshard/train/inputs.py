"""The inputs of a run. The files that the recipe names are opened and checked before weights are read."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esmshard.data.batching.loader import SEEN, Examples
from esmshard.data.batching.packing import StepPlan
from esmshard.data.mutations import parse_name
from esmshard.data.splits.leakage import ComparedRecords, check, pair_notices, variant_notices
from esmshard.data.splits.recipe_splits import in_tokens, joined, open_split
from esmshard.data.splits.variant_records import table_facts, table_text
from esmshard.errors import InputError, UsageError
from esmshard.io.store import linker_of
from esmshard.io.tables import counted
from esmshard.model import lora, weights
from esmshard.model.families import family_registry
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.model.weights import Weights
from esmshard.parallel.layout import Layout, check_tensor, layout
from esmshard.parallel.process_group import precision_on
from esmshard.recipe.sections import Recipe
from esmshard.tasks.base import Task
from esmshard.tasks.finetuned import initial_weights, new_head, tracks_of
from esmshard.tasks.registry import new_task
from esmshard.train.evaluate import seen_before, sequence_hashes
from esmshard.train.run_dir import LOCK, holder, read_status
from esmshard.train.tracking import TRACKED, check_installed

RUN_FILES = (
    *("recipe.yaml", "versions.json", "metrics.jsonl", "evaluation.json", "per_protein.csv", "baselines.npz"),
    SEEN,
    *("status.json", "checkpoints", "model", "figures", "profile", "flight_recorder", "report.html"),
    *TRACKED,
)
"""The files and directories that a run writes. `--overwrite` removes only these."""

NOTICES_PRINTED = "ESMSHARD_NOTICES_PRINTED"
"""A command with several runs, such as with `--seeds`, sets this environment variable after the first run. The other
runs then do not print the notices on the data again."""


@dataclass(frozen=True)
class RunInputs:
    """The opened and checked inputs of one fine-tuning run."""

    recipe: Recipe
    task: Task
    """The task, after it has read the training labels."""
    train: Examples
    valid: Examples
    test: Examples
    weights: Weights
    """The opened weight files of the base model. Their tensors are not read yet."""
    layout: Layout
    steps: int
    """The number of optimizer steps; 0 for a probe."""
    eval_every: int
    """The number of steps between two validations."""
    out: Path


def prepare(recipe: Recipe, processes: int, per_machine: int, device: torch.device) -> RunInputs:
    """Open and check all files that a recipe names. Raise every error that can be detected before training.

    `processes` processes train together, `per_machine` of them on each machine. All have a device like `device`.
    """
    check_installed(recipe.track)
    if recipe.model.quantize is not None:
        lora.check_quantization(device)
    probe = recipe.adapt.method == "probe"
    precision = "fp32" if probe else precision_on(device, recipe.parallel.precision)  # scikit-learn fits in fp32
    laid_out = layout(recipe.parallel, processes, per_machine, precision)
    if probe and (processes > 1 or recipe.parallel.cpu_offload):
        raise UsageError("adapt.method probe: one process fits the head; use --nproc 1 without parallel.cpu_offload")
    as_written = recipe
    recipe, task, (train, valid, test) = _open_splits(as_written, laid_out.data_size)
    base = initial_weights(recipe)  # after all data checks, because a download may take long
    quantize, config = recipe.model.quantize, base.config
    check_tensor(laid_out.tensor, n_heads=config.n_heads, ffn_width=config.ffn_width, quantized=quantize is not None)
    if any(linker_of(split.store.manifest) is not None for split in (train, valid, test)):
        recipe, task, (train, valid, test) = _open_splits(joined(as_written, config.chains), laid_out.data_size)
    steps = 0 if probe else recipe.train.steps or 400
    per_epoch = StepPlan(train.tokens, recipe.batch.global_tokens, recipe.train.seed).steps_per_epoch
    if recipe.train.epochs is not None and not probe:
        steps = max(1, round(recipe.train.epochs * per_epoch))
    eval_every = per_epoch if recipe.train.eval_every == "epoch" else recipe.train.eval_every
    with torch.device("meta"):  # `adapt` raises if the model lacks a part, before any weight is read
        model = FineTuner(family_registry.build(config), task.head(config))
        model.adapt(recipe.adapt, recipe.train.seed, recipe.data.tracks or (), quantize)
    if steps and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"adapt.method {recipe.adapt.method}: leaves nothing to train; set adapt.method=lora, or full")
    new_head(recipe, task, base)  # raises if the starting weights of the task head are missing
    return RunInputs(recipe, task, train, valid, test, base, laid_out, steps, eval_every, Path(recipe.out))


def _open_splits(recipe: Recipe, processes: int) -> tuple[Recipe, Task, tuple[Examples, Examples, Examples]]:
    """Open and check the train, valid and test splits. `processes` is the number of ranks with different records.

    Returns the recipe with `batch.global_tokens` set, the task with the facts from the training labels, and the splits.
    """
    task = new_task(recipe.task, {})
    tracks = tracks_of(recipe)
    train = open_split(recipe, "train", task.labels, tracks)
    task = task.learn(train)
    valid, test = (open_split(recipe, name, task.labels, tracks) for name in ("valid", "test"))
    for split in (train, valid):
        if len(split) < processes:
            raise InputError(
                f"{split.path}: {split.name} has {len(split)} record{'s' if len(split) > 1 else ''}, fewer than the "
                f"{processes} processes; use --nproc {len(split)} or less"
            )
    most, longest = recipe.batch.tokens_per_rank, int(train.tokens.max())
    if isinstance(most, int) and most < longest:
        raise InputError(
            f"{train.path}: the longest training record has {longest} tokens, but batch.tokens_per_rank is {most}; "
            "raise it, or lower data.max_length"
        )
    return in_tokens(recipe, train), task, (train, valid, test)


def check_out(out: Path, resume: str | None, overwrite: bool) -> None:
    """Raise `UsageError` if a run may not write to the directory `out`. No file is changed.

    Unless `overwrite` is true or the run resumes in `out`, the directory must be new or empty. If it contains files of
    RUN_FILES, it must also contain the `status.json` or lock of a run. If `resume` is a path, it must exist.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: is a file; choose another directory with out=DIR")
    is_resumed = resume == "auto"
    if resume is not None and not is_resumed:
        if not Path(resume).is_dir():
            raise UsageError(f"--resume {resume}: no such directory; give a run directory, a checkpoint, auto or never")
        is_resumed = Path(resume).resolve().is_relative_to(out.resolve())
    if not is_resumed and not overwrite and out.is_dir() and any(path.name != LOCK for path in out.iterdir()):
        raise UsageError(f"{out}: exists already; pass --resume auto to go on, --overwrite to start again, or out=DIR")
    names = [name for name in RUN_FILES if os.path.lexists(out / name)]
    if names and holder(out) is None and read_status(out) is None:
        raise UsageError(
            f"{out}: contains {', '.join(names)}, which esmshard did not write; choose another directory with out=DIR"
        )


def describe(job: RunInputs, processes: int) -> str:
    """Return the text that `--dry-run` prints about a run with `processes` processes."""
    recipe, config = job.recipe, job.weights.config
    total = int(job.train.tokens.sum())
    per_epoch = StepPlan(job.train.tokens, recipe.batch.global_tokens, recipe.train.seed).steps_per_epoch
    layout = f"{processes} processes, {recipe.parallel.strategy}" if processes > 1 else "1 process, not sharded"
    splits = ", ".join(f"{s.name} {len(s)}" for s in (job.train, job.valid, job.test))
    of_table = table_text(table_facts(recipe.data)) if recipe.task.reads_table else []
    return "\n".join(
        [
            f"task      {recipe.task.name}",
            f"model     {recipe.model.name}: {config.n_layers} layers, dim {config.dim}, {config.n_heads} heads, "
            f"{family_registry.n_parameters(config):,} parameters ({job.weights.source})",
            *of_table,
            f"records   {splits}",
            f"step      about {total / per_epoch:,.0f} tokens in {len(job.train) / per_epoch:.0f} records, {layout}",
            f"training  {job.steps} steps, {job.steps / per_epoch:.1f} epochs",
            f"out       {job.out}{' (exists already)' if job.out.exists() else ''}",
        ]
    )


def versions(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Return package versions and facts about the machine and the device for the file `versions.json`."""
    packages = ["esmshard", "torch", "numpy", "safetensors", "scikit-learn", "biopython"]
    packages += ["bitsandbytes"] if recipe.model.quantize is not None else []
    facts: dict[str, Any] = {name: version(name) for name in packages}
    facts |= {"python": platform.python_version(), "platform": platform.platform()}
    if device.type == "cuda":
        facts |= {"cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name(device)}
    return facts | {"device": str(device)}


def provenance(job: RunInputs) -> dict[str, Any]:
    """Return facts about each split by name: path, size, sha256 of residues and tracks, and notices on changed data."""
    return {
        split.name: {
            "path": str(split.path),
            "records": len(split),
            "residues": split.store.manifest["residues"],
            "tokens_sha256": split.digest,
            "notices": list(split.notices),
        }
        for split in (job.train, job.valid, job.test)
    }


def leakage_notices(job: RunInputs) -> list[str]:
    """Return notices on validation and test records that are equal or similar to training records, and on test records
    that the starting model was trained on. If there are many records, only a sample is compared.
    """
    try:
        splits = (job.train, job.valid, job.test)
        train, valid, test = (ComparedRecords(len(split), split.whole, split.id) for split in splits)
        if job.recipe.task.reads_table:
            names = [split.id(n) for split in splits for n in range(len(split))]  # such as A24G:V30L, or WT
            parsed = map(parse_name, names)
            positions = [frozenset((protein, m.position) for m in mutations) for protein, mutations in parsed]
            first = np.cumsum([0, *map(len, splits)])
            sets = {split.name: np.arange(first[k], first[k + 1]) for k, split in enumerate(splits)}
            shared = variant_notices(names, positions, sets)
        elif job.recipe.task.pairs:
            shared = pair_notices(train, {"valid": valid, "test": test}, most=20_000_000)
        else:
            shared = check(train, {"valid": valid, "test": test}, most=20_000_000).notices()
        trained_on = weights.record_of(job.weights.files).get("data", {})
        if trained_on.get("train", {}).get("tokens_sha256") == job.train.digest != job.test.digest:
            return shared  # the starting model was trained on the same training set
        return shared + seen_before(str(job.weights.source), trained_on, None, job.test)[0]
    except Exception as error:  # a failed comparison must not end the run
        return [f"leakage: could not be checked ({error})"]


def seen_in_training(job: RunInputs) -> int:
    """Count the test records whose sequence is in the training set; all if the starting model was trained on them."""
    before = weights.record_of(job.weights.files).get("data", {})
    if job.test.digest == before.get("train", {}).get("tokens_sha256"):
        return len(job.test)
    return int(np.isin(sequence_hashes(job.test), sequence_hashes(job.train)).sum())


def notices(job: RunInputs, *, leakage: bool = True) -> list[str]:
    """Return notices on changed or omitted data and on the weights. With `leakage`, add `leakage_notices`."""
    data_notices: list[str] = []
    for split in (job.train, job.valid, job.test):
        for notice in split.notices if NOTICES_PRINTED not in os.environ else ():
            data_notices.append(notice if notice.startswith((f"{split.path}:", "/")) else f"{split.path}: {notice}")
    if longer := int((job.train.tokens > job.recipe.batch.global_tokens).sum()) if job.steps else 0:
        data_notices.append(
            f"{job.train.path}: {counted(longer, 'record')} longer than batch.global_tokens "
            f"({job.recipe.batch.global_tokens:,}): each of them is the only record in its step"
        )
    with torch.device("meta"):
        uses_lm_head = isinstance(job.task.head(job.weights.config), LanguageModelHead)
    lacking = job.weights.lacking("lm_head") if uses_lm_head else []
    shared = leakage_notices(job) if leakage else []
    return [*dict.fromkeys(data_notices), *lacking, *job.weights.notices, *shared]
