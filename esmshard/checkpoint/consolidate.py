"""The conversion of a run's checkpoint, or of a model in another file format, to a model directory.

The conversion runs in one process without a GPU. Memory holds the tensors of one output file at a time.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from esmshard import __version__
from esmshard.checkpoint import card, manifest, sharded
from esmshard.data.batching.loader import SEEN
from esmshard.errors import InputError, UsageError, reading, writing
from esmshard.io.paths import check_replaced, found_place, replace_json, settle, shared_place, whole_directory
from esmshard.model import adapters, export, hub, weights
from esmshard.model.config import ModelConfig
from esmshard.model.export import DTYPES, MAX_FILE_BYTES, Source
from esmshard.model.families.family import AuthorsFile
from esmshard.model.families.family_registry import SIZES, family_of, recorded_config
from esmshard.model.lora import lora_names, merged
from esmshard.model.weight_reader import read_json
from esmshard.recipe.recipe_file import for_others
from esmshard.recipe.sections import AdaptSettings
from esmshard.tasks import registry

FORMAT, ADAPTER_FORMAT, VERSION = "esmshard-model", "esmshard-adapter", 1

_NO_ROOM = "nothing was written: make room, or choose another place with -o, and consolidate again"
BASELINES = "baselines.npz"
"""The file with the fitted parameters of the baselines. `esmshard evaluate` reads it from the model directory."""


@dataclass(frozen=True)
class Opened:
    """An opened model, with the facts that `consolidate` writes next to the weights."""

    config: ModelConfig
    sizes: Mapping[str, torch.Size]
    """The shape of each tensor by name. Names of the task head begin with `head.`. Tied tensors have one entry."""
    read: Source
    unlearned: Sequence[str]
    """The parts of the model (`lm_head`, `contact_head`) that were never trained, or that the weight files lack."""
    about: dict[str, Any]
    """The content of `esmshard.json`. It has no entry `recipe` if another program trained the model."""
    evaluation: Mapping[str, Any] | None
    """The content of `evaluation.json` for these weights; None if they were not scored."""
    directory: Path
    """The directory that contains the files BASELINES and SEEN, if they exist."""


def consolidate(
    source: Path | str,
    out: Path,
    *,
    to: str | None = None,
    dtype: str = "fp32",
    overwrite: bool = False,
    best: bool = False,
    adapter: bool = False,
    base: str | None = None,
    warn: Callable[[str], None] = lambda message: None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Convert a checkpoint or a model to a model directory. For a run, its newest undamaged checkpoint is converted.

    If the checkpoint has only the trained part of the model, the base model is read, too. A LoRA is added to the
    weights of the base model.

    Args:
        source: a run directory, a checkpoint directory, or any model that `esmshard.model.weights.read` reads.
        out: the directory to create, or with `overwrite` to replace. It gets this name only after it is complete.
        to: `hf` for a directory that `transformers` reads, or the keyword of a file format that the code of the model's
            authors reads. By default a directory that esmshard reads, and that `transformers` reads, too, if
            `transformers` has the model family (ESM-2, ESM-C, ...).
        dtype: the type of the written weights: fp32, bf16 or fp16. Rotary frequencies stay fp32.
        overwrite: replace `out` if it is a model directory.
        best: take the run's checkpoint with the best validation score.
        adapter: write only the trained part of a LoRA run, in fp32: an adapter for PEFT, `head.safetensors` and
            `esmshard.json`. The base model is not read.
        base: the path of the base model, if it was moved since the run began. With `adapter`, the name that
            PEFT's configuration gives to the base model.
        warn: is called with a sentence for everything that is skipped, missing or altered.
        max_file_bytes: the size in bytes above which weights are split over several files with an index.

    Raises:
        InputError: there is no undamaged checkpoint, the checkpoint's tensors do not fit its recipe, the base model is
            missing or has other weights, or a weight is not finite or too large for `dtype`.
        UsageError: `out` exists (without `overwrite`) or contains `source`, or an option does not apply to `source`.
    """
    for leftover in settle(out):
        warn(leftover)
    _check_out(out, source, overwrite)
    is_model = _is_model(source)
    if is_model and (best or adapter or base is not None):
        raise UsageError(f"{source}: is a model and not a run; omit --best, --adapter and --base")
    if adapter:
        checkpoint = _open_checkpoint(Path(source), warn, best)
        with writing(out, _NO_ROOM), whole_directory(out) as work:
            digests = write_adapter(work, checkpoint, base, out)
            _finish(work, out, _described(checkpoint.state) | {"format": ADAPTER_FORMAT}, digests, checkpoint.run)
        return out
    opened = _open_model(source, warn) if is_model else _open_run(Path(source), warn, best, base)
    kind = _target(to, opened.config)
    # A directory omits untrained parts, so that their use raises an error. Authors' code needs complete models.
    left_out = tuple(f"{part}." for part in opened.unlearned) if kind is None else kind.lacks
    for part in opened.unlearned:
        if f"{part}." not in left_out:
            warn(f"{source}: its {part} never learned, so its output is random")
    sizes = {name: size for name, size in opened.sizes.items() if not name.startswith(left_out)}
    with writing(out, _NO_ROOM), whole_directory(out) as work:
        try:
            parts = opened.config, sizes, opened.read, DTYPES[dtype]
            if kind is None:
                digests = export.write_transformers(work, *parts, max_file_bytes)
            else:
                digests = export.write_pickle(kind.path(work, out.name, opened.config), kind, *parts)
        except FloatingPointError as error:
            raise InputError(f"{source}: {error}") from None
        about = _finish(work, out, opened.about | {"dtype": dtype}, digests, opened.directory if kind is None else None)
        if "recipe" in about:
            card.write(work, about, opened.evaluation)
    return out


def _finish(
    work: Path, out: Path, about: Mapping[str, Any], digests: Mapping[str, str], run: Path | None
) -> dict[str, Any]:
    """Write `esmshard.json`, without paths of this machine, to `work`. Return the content of this file. Also copy
    BASELINES and SEEN from `run` to `work`. `out` is the final path of `work`.
    """
    shared = dict(about) | weights.record(digests)
    if "recipe" in shared:
        shared["recipe"] = for_others(shared["recipe"], out)
    if shared.get("base"):
        shared["base"] = shared["base"] | {"name": shared_place(shared["base"]["name"], out)}
    if "data" in shared:
        shared["data"] = {
            split: facts | ({"path": Path(facts["path"]).name} if "path" in facts else {})
            for split, facts in shared["data"].items()
        }
    replace_json(work / weights.ABOUT, shared)
    for name in (BASELINES, SEEN):
        if run is not None and (run / name).is_file():
            shutil.copyfile(run / name, work / name)
    return shared


def _target(to: str | None, config: ModelConfig) -> AuthorsFile | None:
    """Return the file format that `to` names, or None for a directory. Raise `UsageError` if `to` is unknown."""
    family = family_of(config)
    if to is None or (to == "hf" and family.model_class):
        return None
    if to in family.pickles:
        return family.pickles[to]
    known = [*(["hf"] if family.model_class else []), *family.pickles]
    raise UsageError(
        f"--to {to}: {family.title} models can be written as {', '.join(known)}, or without --to as a directory that "
        "all commands of esmshard read"
    )


def _check_out(out: Path, source: Path | str, overwrite: bool) -> None:
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise UsageError(f"{out}: exists already; choose another directory or pass --overwrite")
    if Path(source).exists() and Path(source).resolve().is_relative_to(out.resolve()):
        raise UsageError(f"{out}: contains the model that is to be converted; choose another directory")
    weight_files = ("*.safetensors", "model.safetensors.index.json", "*.pt", "*.pth", BASELINES, SEEN)
    check_replaced(out, [*weight_files, *hub.SMALL], marker=weights.ABOUT)


def _is_model(source: Path | str) -> bool:
    path = Path(source).expanduser()
    is_name = not path.exists() and (str(source) in SIZES or hub.is_name(str(source)))
    return is_name or path.is_file() or (path / "config.json").is_file() or adapters.is_adapter(path)


def _open_model(source: Path | str, warn: Callable[[str], None]) -> Opened:
    model = weights.read(str(source))
    head = {f"head.{name}": reader.shape for name, reader in model.head.items()}
    sizes = weights.stored_shapes(model.config) | head
    path = weights.directory(source)
    directory = path.parent if path.suffix == ".safetensors" else path
    record = directory / weights.ABOUT
    with reading(str(record), "get the model again, or remove this file"):  # another program may have written it
        about = read_json(record) if record.is_file() else {}
        about |= {"format": FORMAT, "version": VERSION}  # the `esmshard.json` of an adapter has another format
        if "recipe" in about:
            about["recipe"]["task"]["name"], about["recipe"]["model"]
        for named in (about.get("recipe", {}).get("model"), about.get("base")):
            if named:  # a recorded name is relative to the model's directory
                named["name"] = found_place(named["name"], directory)
    evaluation, altered = _evaluation(directory.parent), weights.altered(model.files)
    for notice in (*model.notices, *([altered] if altered else [])):
        warn(notice)
    if altered or (evaluation is not None and evaluation.get("weights_sha256") != about.get("weights_sha256")):
        evaluation = None
    return Opened(model.config, sizes, model.__getitem__, model.absent, about, evaluation, directory)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint of a run."""

    path: Path
    state: Mapping[str, Any]
    sizes: Mapping[str, torch.Size]
    """The shape of each tensor by name. Names are as in `Opened.sizes`. A LoRA's tensors are included."""
    read: Source

    @property
    def run(self) -> Path:
        """The directory of the run that wrote this checkpoint."""
        return self.path.parent.parent


def _open_checkpoint(source: Path, warn: Callable[[str], None], best: bool) -> Checkpoint:
    checkpoint = manifest.locate(source, warn, prefer_best=best)
    sizes, read = sharded.reader(checkpoint)
    keys = {key.removeprefix("model.").removeprefix("trunk."): key for key in sizes if key.startswith("model.")}
    state = sharded.read_state(checkpoint)
    if missing := [key for key in ("config", "recipe", "facts") if key not in state]:
        raise InputError(
            f"{checkpoint}: has no {', '.join(missing)}, so your own training loop wrote it; write its model with "
            "esmshard.write_transformers, as examples/contrastive.py does at its end"
        )
    tied = weights.tied(recorded_config(state["config"]))
    sizes = {name: sizes[key] for name, key in keys.items() if name not in tied}
    return Checkpoint(checkpoint, state, sizes, lambda name: read(keys[name]))


def _open_run(source: Path, warn: Callable[[str], None], best: bool, base: str | None) -> Opened:
    opened = _open_checkpoint(source, warn, best)
    checkpoint, state, sizes, read = opened.path, opened.state, opened.sizes, opened.read
    config = recorded_config(state["config"])
    if state.get("base"):
        sizes, read = on_base(opened, base)
    elif base is not None:
        raise UsageError(f"{checkpoint}: has a complete model, so it needs no base model; omit --base")
    wanted = weights.stored_shapes(config)
    wanted |= {name: size for name, size in sizes.items() if name.startswith("head.")}
    if wrong := sorted(name for name in wanted.keys() | sizes.keys() if wanted.get(name) != sizes.get(name)):
        raise InputError(
            f"{checkpoint}: {weights.some(wrong)}: do not fit the model of its recipe; use another checkpoint"
        )
    about = _described(state)
    if (read_both := _with_regression(state, sizes, read)) is not None:
        read = read_both
        about |= {"contact_regression": "head"}
        about["unlearned"] = [part for part in state["unlearned"] if part != "contact_head"]
    evaluation = _evaluation(opened.run)
    if evaluation is not None:
        scored, saved = opened.run / "evaluation.json", checkpoint / "state.json"
        if evaluation.get("step") != about["step"] or scored.stat().st_mtime < saved.stat().st_mtime:
            evaluation = None
    return Opened(config, sizes, read, about.get("unlearned", ()), about, evaluation, opened.run)


def _described(state: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("step", "recipe", "facts", "config", "data", "world_size", "versions", "unlearned", "base", "history")
    about = {"format": FORMAT, "version": VERSION, "esmshard": __version__}
    return about | {key: state[key] for key in keys if key in state}


def _evaluation(run: Path) -> dict[str, Any] | None:
    try:
        evaluation = read_json(run / "evaluation.json")
    except (OSError, ValueError):
        return None
    return evaluation if isinstance(evaluation, dict) else None


def on_base(checkpoint: Checkpoint, base: str | None = None) -> tuple[dict[str, torch.Size], Source]:
    """Join a checkpoint, which has only the trained part of a model, with the base model.

    Returns the shape of each tensor by name, and a function that reads one tensor and adds its LoRA. Tied tensors have
    one entry. `base` is the path of the base model; by default the path in the checkpoint. Raises `InputError` if the
    base model is missing, has other weights or lacks a tensor.
    """
    state, sizes = checkpoint.state, checkpoint.sizes
    config = recorded_config(state["config"])
    settings = AdaptSettings.model_validate(state["recipe"]["adapt"])
    whole = weights.stored_shapes(config)
    whole |= {name: size for name, size in sizes.items() if name.startswith("head.")}
    if strange := sorted(sizes.keys() - {part for name in whole for part in (name, *lora_names(name))}):
        raise InputError(f"{checkpoint.path}: {weights.some(strange)}: not in its base model; use another checkpoint")
    recorded, scale = state["base"], settings.lora[1] / settings.lora[0] if settings.method == "lora" else 0.0
    if recorded["seed"] is not None:
        model = weights.fresh(recorded_config(recorded["config"]), recorded["seed"])
    else:
        name = base or recorded["name"]
        try:
            model = weights.read(name)
        except InputError as error:
            raise InputError(
                f"{error}; {checkpoint.path} needs this base model: give its present path with --base"
            ) from None
        weights.check(weights.identity(model, name), recorded, str(checkpoint.path))

    def read_whole(name: str) -> torch.Tensor:
        lora = {part: checkpoint.read(part) for part in lora_names(name) if part in sizes}
        return merged(name, {name: checkpoint.read(name) if name in sizes else model[name], **lora}, scale)

    return whole, read_whole


def write_adapter(
    directory: Path, checkpoint: Checkpoint, base: str | None = None, out: Path | None = None
) -> dict[str, str]:
    """Write a checkpoint as a PEFT adapter and a task head. Return the sha256 of each weight file by file name.

    The base model is not read. `base` is the name of the base model in the adapter; by default the path in the
    checkpoint, made relative to `out`. `out` is the final path of `directory`, if that will be renamed. Raises
    `UsageError` for a checkpoint without a LoRA.
    """
    config = recorded_config(checkpoint.state["config"])
    settings = AdaptSettings.model_validate(checkpoint.state["recipe"].get("adapt", {}))
    if settings.method != "lora":
        raise UsageError(f"{checkpoint.path}: has no LoRA (adapt.method is {settings.method}); omit --adapter")
    rank, alpha, targets = settings.lora
    name = base or shared_place(checkpoint.state["base"]["name"], out or directory)
    written = adapters.adapter_config(name, config, rank, alpha, targets, str(settings.bias))
    try:
        tensors = {part: export.cast(part, checkpoint.read(part), torch.float32) for part in sorted(checkpoint.sizes)}
    except FloatingPointError as error:
        raise InputError(f"{checkpoint.path}: {error}") from None
    return adapters.write_adapter(directory, written, config, targets, tensors)


def _with_regression(state: Mapping[str, Any], sizes: Mapping[str, torch.Size], read: Source) -> Source | None:
    """Return a function like `read`, except that it takes the tensors of the contact regression from the task head.

    Returns None if the task head is not a regression over attention maps, or if the contact regression was trained.
    """
    prefix = "contact_head.regression."
    in_head = {name: name.replace(prefix, "head.regression.") for name in sizes if name.startswith(prefix)}
    predicts_contacts = registry.traits(state["recipe"]["task"]["name"]).predicts_contacts
    head = {name: size for name, size in sizes.items() if name.startswith("head.")}
    is_regression = predicts_contacts and head == {in_head[name]: sizes[name] for name in in_head}
    if not is_regression or "contact_head" not in state.get("unlearned", ()):
        return None
    return lambda name: read(in_head.get(name, name))
