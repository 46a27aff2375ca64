"""What can be learned. A task is one file here, one line in TASKS and one recipe."""

from collections.abc import Callable

from esmshard.recipe import TaskSettings
from esmshard.tasks.contact import ContactTask
from esmshard.tasks.protocol import Task

TASKS: dict[str, Callable[[TaskSettings], Task]] = {
    "contact": ContactTask,
}
