"""The registry of tasks: those of this package in TASKS, and those that other installed packages register. No torch.

A task is registered by its settings, a subclass of `esmshard.recipe.task_section.TaskSettings`, as `module:Class`. The
settings name the class of the task itself, which is imported when it is needed. Another package registers its tasks as
entry points of the group `esmshard.tasks` (docs/own-task.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from esmshard.errors import InputError

if TYPE_CHECKING:
    from esmshard.recipe.task_section import TaskSettings
    from esmshard.tasks.base import Facts, Task

GROUP = "esmshard.tasks"
TASKS = {
    "contact": "esmshard.tasks.contact.contact_settings:ContactSettings",
    "mlm": "esmshard.tasks.mlm_settings:MlmSettings",
    "pair": "esmshard.tasks.labelled.pair_settings:PairSettings",
    "residue": "esmshard.tasks.labelled.residue_settings:ResidueSettings",
    "sequence": "esmshard.tasks.labelled.sequence_settings:SequenceSettings",
    "variant": "esmshard.tasks.variants.variant_settings:VariantSettings",
}
"""The settings of each task of this package, by its name in recipes."""


class UnknownTask(InputError):
    """A model of a task that no installed package registers, or that cannot be used here."""


@dataclass(frozen=True)
class Registered:
    """The settings of all tasks that can be used, and why the others cannot."""

    settings: "Mapping[str, type[TaskSettings]]"
    unusable: Mapping[str, str]
    """A sentence for each name."""


@cache
def registered() -> Registered:
    """Import the settings of every registered task: first those of this package, then others by name.

    A task of another package that cannot be used disturbs no other task: it is refused where a recipe or a model names
    it.
    """
    found: dict[str, type[TaskSettings]] = {name: _load(value) for name, value in TASKS.items()}
    unusable: dict[str, str] = {}
    owner = dict.fromkeys(TASKS, "esmshard itself")
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
        if entry.name in owner:
            unusable[entry.name] = (
                f"task {entry.name} is registered by {owner[entry.name]} and by {package}; uninstall {package}, or "
                "give its task another name"
            )
            continue
        owner[entry.name] = package
        try:
            found[entry.name] = _checked(entry.name, _load(entry.value))
        except Exception as error:  # whatever a module of others raises when it is imported
            reason = " ".join(str(error).split())
            unusable[entry.name] = (
                f"task {entry.name} of {package} cannot be imported from {entry.value} ({type(error).__name__}: "
                f"{reason}); correct or reinstall {package}"
            )
    usable = {name: settings for name, settings in found.items() if name not in unusable}
    return Registered(usable, unusable)


def traits(name: object) -> "type[TaskSettings]":
    """Return the settings class of a task that a file names. For a name that nothing registers here it is the base
    class, whose traits are the cautious ones.
    """
    from esmshard.recipe.task_section import TaskSettings

    return registered().settings.get(str(name), TaskSettings)


def settings_of(section: Any) -> "TaskSettings":
    """Return the settings in the task section of a recorded recipe.

    Raises:
        InputError: no installed package has the task, or what has it cannot be used.
        ValueError: the section does not fit the task.
    """
    name = section["name"]
    known = registered()
    if name in known.unusable:
        raise UnknownTask(known.unusable[name])
    if name not in known.settings:
        raise UnknownTask(
            f"no installed package registers the task {name}; install the one that the model was trained with"
        )
    return known.settings[name].model_validate(section)


def new_task(settings: "TaskSettings", facts: "Facts") -> "Task":
    """Make the task of some settings, with the facts of its training labels."""
    made: Task = _load(settings.task)(settings, facts)
    return made


def _load(place: str) -> Any:
    """Import the class that `module:Class` names."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _checked(name: str, found: Any) -> Any:
    """Refuse what cannot be the settings of a task of that name."""
    from esmshard.recipe.task_section import TaskSettings

    if not (isinstance(found, type) and issubclass(found, TaskSettings)):
        raise TypeError("it is no subclass of esmshard.recipe.task_section.TaskSettings")
    if getattr(found.model_fields["name"].annotation, "__args__", None) != (name,):
        raise TypeError(f'its field `name` must be annotated Literal["{name}"]')
    if ":" not in found.task:
        raise TypeError("its `task` does not name a class as module:Class")
    return found
