"""Models with the head of a task: opened from a consolidated directory, or made as a recipe says."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from esmshard.data.tracks import TrackFile, track_files
from esmshard.devices import DeviceName, chosen_device
from esmshard.errors import InputError, reading
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
    """A consolidated model with its task head."""

    model: FineTuner
    task: Task
    about: Mapping[str, Any]
    """`esmshard.json`."""


def load_finetuned(model: str, device: DeviceName = None) -> FineTuned:
    """Open a model directory that `consolidate` wrote, head included, in evaluation mode.

    Raises `InputError` for a model without a fine-tuned head, and `UsageError` for a device that is not there.
    """
    computing, path = chosen_device(device), weights.directory(model) / "esmshard.json"
    found = weights.read(model)
    about: dict[str, Any] = read_json(path) if path.is_file() else {}
    if "recipe" not in about:  # such as a converted model
        raise InputError(f"{model}: has no fine-tuned head (no esmshard.json); fine-tune it first, then consolidate")
    with reading(str(path), "consolidate the run again"):
        if base := about["recipe"].get("model"):
            base["name"] = found_place(base["name"], path.parent)
        task = new_task(settings_of(about["recipe"]["task"]), about.get("facts", {}))
        head = task.head(found.config)
    tensors = found.head_state()
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in head.state_dict().items()}:
        raise InputError(f"{model}: its head does not fit the task in esmshard.json; consolidate the run again")
    head.load_state_dict(tensors)
    weights.report_altered(found.files)
    return FineTuned(_assemble(found, head, computing), task, about)


def load_base(recipe: Recipe, task: Task, device: DeviceName = None) -> FineTuner:
    """Open the model as it was before the first step of a run: its base weights under a new head of the same seed."""
    found = initial_weights(recipe)
    return _assemble(found, new_head(recipe, task, found)[0], chosen_device(device))


def initial_weights(recipe: Recipe) -> Weights:
    """Open the weights that a recipe starts from, which read several chains as the recipe says.

    Raises:
        InputError: `init` does not go with `model.name`.
        UsageError: the model cannot read several chains so.
    """
    name = recipe.model.name
    if recipe.init == "random":
        config = SIZES[name] if name in SIZES else weights.read(name).config
        found = weights.fresh(config, recipe.train.seed)
    else:
        found = weights.read(name)
    return weights.joining(found, recipe.data.join.over(found.config.chains), f"data.join: {recipe.model.name}")


def tracks_of(recipe: Recipe) -> list[TrackFile]:
    """Return the tracks that a recipe names. `UsageError` if its model does not take one of them.

    The model is looked at only if there are any.
    """
    if not recipe.data.tracks:
        return []
    takes = family_of(initial_weights(recipe).config).tracks
    return track_files(recipe.data.tracks, takes, recipe.model.name, "data.tracks.")


def without_tracks(model: str, given: Collection[str]) -> list[str]:
    """Return a sentence if a model was fine-tuned with tracks that it is not given now.

    Args:
        model: a model, fine-tuned or not.
        given: the names of the tracks that it gets.
    """
    try:
        recipe = read_json(weights.place(model) / "esmshard.json")["recipe"]
        missing = [name for name in recipe["data"].get("tracks") or {} if name not in given]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # It is no fine-tuned model, or whoever opens it says what is wrong with it.
    if not missing:
        return []
    options = " ".join(f"--track {name}=PATH" for name in missing)
    plural = "s" if len(missing) > 1 else ""
    return [
        f"{model}: was fine-tuned with the track{plural} {listed(missing)}, which it is not given, so that its test "
        f"does not say how good it is here; pass {options}"
    ]


def new_head(recipe: Recipe, task: Task, found: Weights) -> tuple[nn.Module, str | None]:
    """Make a new head, drawn from the recipe's seed whatever the random state is. Also return a sentence about its
    start values, if the model has some.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        head = task.head(found.config)
    return head, start_values(task, head, found)


def start_values(task: Task, head: nn.Module, found: Weights) -> str | None:
    """Give a new head the values of the head in `found`, if the two mean the same, else those that the language model
    has for it. Return a sentence about them, or about a head that is left out.
    """
    start = getattr(head, "start", lambda weights: None)
    if not found.head or not head.state_dict():
        return start(found)  # type: ignore[no-any-return]
    about = weights.record_of(found.files)
    of_task = about["recipe"]["task"]["name"] if about else task.settings.name
    facts = about.get("facts", {}) if about else task.facts
    name, shapes = task.settings.name, {name: tensor.shape for name, tensor in head.state_dict().items()}
    same = of_task == name and all(facts.get(key) == task.facts.get(key) for key in ("targets", "classes"))
    if not same:
        other = f"of task {of_task}" if of_task != name else "for other classes or targets"
    elif {name: reader.shape for name, reader in found.head.items()} != shapes:
        other = "of another kind or size"
    else:
        head.load_state_dict(found.head_state())
        scaled = any(facts.get(key) != task.facts.get(key) for key in ("mean", "std"))
        more = "; its training labels had another mean or deviation, so its first outputs are shifted or scaled"
        return f"the head goes on from the {name} head of {found.source}{more if scaled else ''}"
    return f"{found.source}: its head is {other} and is left out; {start(found) or 'the head is new'}"


def _assemble(found: Weights, head: nn.Module, device: torch.device) -> FineTuner:
    return FineTuner(weights.build(found, device), head.to(device)).eval()
