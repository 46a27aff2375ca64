"""What can be learned. A task is one file here, one line in TASKS, one in `numbers.HEADS`, and one recipe."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from esmshard.settings import TaskSettings

if TYPE_CHECKING:
    from torch import nn

    from esmshard.model.config import EsmConfig
    from esmshard.tasks.protocol import Task


def _contact(settings: TaskSettings) -> "Task":
    from esmshard.tasks.contact import ContactTask  # torch, which planning does without

    return ContactTask(settings)


TASKS: dict[str, Callable[[TaskSettings], "Task"]] = {
    "contact": _contact,
}


def head_of(settings: TaskSettings, config: "EsmConfig") -> "nn.Module":
    """A new head of a task, on a model of these numbers."""
    return TASKS[settings.name](settings).head(config)
