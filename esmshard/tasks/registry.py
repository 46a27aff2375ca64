"""Registers the tasks of this package and of other installed packages.

A task is registered as `module:Class`, a subclass of `esmshard.tasks.base.Task`. Its module is imported when a recipe
is read. Other packages register tasks as entry points of the group `esmshard.tasks` (docs/own-task.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from esmshard.errors import InputError

if TYPE_CHECKING:
    from esmshard.recipe.sections import TaskSettings
    from esmshard.tasks.base import Facts, Task

GROUP = "esmshard.tasks"
TASKS = {
    "contact": "esmshard.tasks.contact:ContactTask",
    "mlm": "esmshard.tasks.mlm:MlmTask",
    "pair": "esmshard.tasks.pair:PairTask",
    "residue": "esmshard.tasks.residue:ResidueTask",
    "sequence": "esmshard.tasks.sequence:SequenceTask",
    "variant": "esmshard.tasks.variants:VariantTask",
}
"""The tasks of this package as `module:Class`, by the name of the task in recipes."""


@dataclass(frozen=True)
class Registered:
    """All registered tasks: the usable tasks, and the reason why each other task cannot be used."""

    tasks: "Mapping[str, type[Task]]"
    unusable: Mapping[str, str]  # a sentence with the reason, by the name of the task

    @property
    def settings(self) -> "Mapping[str, type[TaskSettings]]":
        """The settings class of each task that can be used, by the name of the task."""
        return {name: task.Settings for name, task in self.tasks.items()}


@cache
def registered() -> Registered:
    """Import every registered task: first the tasks of this package, then the tasks of other packages, sorted by name.
    A task of another package that cannot be used raises an error only when a recipe or a model names it.
    """
    tasks: dict[str, type[Task]] = {name: _load(name, value) for name, value in TASKS.items()}
    unusable: dict[str, str] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
        if entry.name in tasks or entry.name in unusable:
            owner = "esmshard itself" if entry.name in TASKS else "another package"
            unusable[entry.name] = (
                f"task {entry.name} is registered by {owner} and by {package}; uninstall {package}, or give its task "
                "another name"
            )
            continue
        try:
            tasks[entry.name] = _load(entry.name, entry.value)
        except Exception as error:  # a module of another package may raise anything
            unusable[entry.name] = (
                f"task {entry.name} of {package} cannot be imported from {entry.value} ({type(error).__name__}: "
                f"{' '.join(str(error).split())}); correct or reinstall {package}"
            )
    return Registered({name: task for name, task in tasks.items() if name not in unusable}, unusable)


def traits(name: object) -> "type[TaskSettings]":
    """Return the settings class of the task `name`. For an unknown name, return the base class `TaskSettings`."""
    from esmshard.recipe.sections import TaskSettings

    return registered().settings.get(str(name), TaskSettings)


def settings_of(section: Any) -> "TaskSettings":
    """Convert the task section of a saved recipe to settings. Raises `InputError` if the section's key `name` names
    no usable task, and `ValueError` if the section does not fit the task.
    """
    name, known = section["name"], registered()
    if name not in known.tasks:
        missing = f"no installed package has the task {name}; install the package that the model was trained with"
        raise InputError(known.unusable.get(name, missing))
    return known.settings[name].model_validate(section)


def new_task(settings: "TaskSettings", facts: "Facts") -> "Task":
    """Make a task from its settings and the facts about its training labels."""
    return registered().tasks[settings.name](settings, facts)


def _load(name: str, place: str) -> Any:
    """Import the task class at `place`, such as `module:Class`. `TypeError` if its `Settings` does not fit `name`."""
    from esmshard.recipe.sections import TaskSettings

    module, _, attribute = place.partition(":")
    task = getattr(import_module(module), attribute)
    settings = getattr(task, "Settings", None)
    if not (isinstance(settings, type) and issubclass(settings, TaskSettings)):
        raise TypeError("its Settings must be a subclass of esmshard.recipe.sections.TaskSettings")
    if getattr(settings.model_fields["name"].annotation, "__args__", None) != (name,):
        raise TypeError(f'the field `name` of its Settings must be annotated Literal["{name}"]')
    return task
