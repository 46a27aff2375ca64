"""Opens fine-tuned models with their task heads, and builds the model before training from a recipe."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from esmshard.data.tracks import TrackFile, track_files
from esmshard.devices import DeviceName, chosen_device
from esmshard.errors import InputError, UsageError, reading
from esmshard.io.paths import found_place, read_json
from esmshard.model import weights
from esmshard.model.families.family_registry import SIZES, family_of
from esmshard.model.finetuner import FineTuner
from esmshard.model.weights import Weights
from esmshard.recipe.sections import Recipe, listed
from esmshard.tasks.base import Task
from esmshard.tasks.registry import new_task, settings_of


@dataclass(frozen=True)
class FineTuned:
    """A fine-tuned model with its task head, opened from a directory that `consolidate` wrote."""

    model: FineTuner
    task: Task
    about: Mapping[str, Any]  # the content of the file `esmshard.json` in the model's directory


def load_finetuned(model: str, device: DeviceName = None) -> FineTuned:
    """Open the model and its task head from a directory that `consolidate` wrote, in evaluation mode. Raises
    `InputError` if the model has no fine-tuned head, and `UsageError` for an unknown device.
    """
    computing, path = chosen_device(device), weights.directory(model) / "esmshard.json"
    opened = weights.read(model)
    about: dict[str, Any] = read_json(path) if path.is_file() else {}
    if "recipe" not in about:
        raise InputError(f"{model}: has no fine-tuned head (no esmshard.json); fine-tune it first, then consolidate")
    with reading(str(path), "consolidate the run again"):
        if base := about["recipe"].get("model"):
            base["name"] = found_place(base["name"], path.parent)
        task = new_task(settings_of(about["recipe"]["task"]), about.get("facts", {}))
        head = task.head(opened.config)
    tensors = opened.head_state()
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in head.state_dict().items()}:
        raise InputError(f"{model}: its head does not fit the task in esmshard.json; consolidate the run again")
    head.load_state_dict(tensors)
    weights.report_altered(opened.files)
    return FineTuned(FineTuner(weights.build(opened, computing), head.to(computing)).eval(), task, about)


def load_base(recipe: Recipe, task: Task, device: DeviceName = None) -> FineTuner:
    """Build the model before training: the initial weights, and a new head from the recipe's seed."""
    opened, computing = initial_weights(recipe), chosen_device(device)
    head, _ = new_head(recipe, task, opened)
    return FineTuner(weights.build(opened, computing), head.to(computing)).eval()


def initial_weights(recipe: Recipe) -> Weights:
    """Open the weights from which training starts, with chains joined as `data.join` says. Raises `InputError` if
    `init` does not fit `model.name`, and `UsageError` if the model cannot join chains this way.
    """
    name = recipe.model.name
    if recipe.init == "random":
        config = SIZES[name] if name in SIZES else weights.read(name).config
        opened = weights.fresh(config, recipe.train.seed)
    else:
        opened = weights.read(name)
    return weights.joining(opened, recipe.data.join.over(opened.config.chains), f"data.join: {recipe.model.name}")


def tracks_of(recipe: Recipe) -> list[TrackFile]:
    """Return the track files that a recipe names. Raises `UsageError` if its model cannot read one of the tracks."""
    if not recipe.data.tracks:
        return []
    config = initial_weights(recipe).config
    takes = family_of(config).tracks_of(config)
    files = track_files(recipe.data.tracks, takes, recipe.model.name, "data.tracks.")
    if recipe.task.reads_table and (instead := [file.track.name for file in files if file.track.replaces_residues]):
        raise UsageError(
            f"data.tracks.{instead[0]}: {recipe.model.name} reads this track in place of the amino acids, so all "
            "variants of a protein would be the same to the model; leave the track out"
        )
    return files


def without_tracks(model: str, given: Collection[str]) -> list[str]:
    """Return one sentence if a model was fine-tuned with tracks that are not in `given`, otherwise an empty list."""
    try:
        recipe = read_json(weights.place(model) / "esmshard.json")["recipe"]
        missing = [name for name in recipe["data"].get("tracks") or {} if name not in given]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # The model is not fine-tuned, or it is broken: then `weights.read` raises the error.
    if not missing:
        return []
    options = " ".join(f"--track {name}=PATH" for name in missing)
    return [
        f"{model}: was fine-tuned with the track{'s' if len(missing) > 1 else ''} {listed(missing)}, which it is not "
        f"given, so its test scores do not hold for these predictions; pass {options}"
    ]


def new_head(recipe: Recipe, task: Task, opened: Weights) -> tuple[nn.Module, str | None]:
    """Return a new head, whose random values follow from the recipe's seed, and the result of `start_values`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        head = task.head(opened.config)
    return head, start_values(task, head, opened)


def start_values(task: Task, head: nn.Module, opened: Weights) -> str | None:
    """Set the values of a new head. Return a sentence about copied values, or None.

    If `opened` has a head for the same task and the same targets or classes, with tensors of the same shapes, this old
    head is copied. Otherwise the new head's method `start`, if it has one, may copy values of the language model.
    """
    start = getattr(head, "start", lambda weights: None)
    if not opened.head or not head.state_dict():
        return start(opened)  # type: ignore[no-any-return]
    about = weights.record_of(opened.files)
    name = task.settings.name
    old_name = about["recipe"]["task"]["name"] if about else name
    facts = about.get("facts", {}) if about else task.facts
    if old_name != name:
        difference = f"of task {old_name}"
    elif any(facts.get(key) != task.facts.get(key) for key in ("targets", "classes")):
        difference = "for other classes or targets"
    elif {n: r.shape for n, r in opened.head.items()} != {n: t.shape for n, t in head.state_dict().items()}:
        difference = "of another kind or size"
    else:
        head.load_state_dict(opened.head_state())
        scaled = any(facts.get(key) != task.facts.get(key) for key in ("mean", "std"))
        more = "; its training labels had another mean or deviation, so its outputs start shifted or scaled"
        return f"the head goes on from the {name} head of {opened.source}{more if scaled else ''}"
    return f"{opened.source}: its head is {difference} and is left out; {start(opened) or 'the head is new'}"
