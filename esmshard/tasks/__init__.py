"""What can be learned. A task is one file here, one line in TASKS, one in `numbers.HEADS`, and one recipe."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from esmshard.task_settings import TaskSettings

if TYPE_CHECKING:
    from torch import nn

    from esmshard.model.config import EsmConfig
    from esmshard.tasks.protocol import Facts, Task

# Each imports torch, which planning does without.


def _contact(settings: Any, facts: "Facts") -> "Task":
    from esmshard.tasks.contact import ContactTask

    return ContactTask(settings, facts)


def _mlm(settings: Any, facts: "Facts") -> "Task":
    from esmshard.tasks.mlm import MlmTask

    return MlmTask(settings, facts)


def _residue(settings: Any, facts: "Facts") -> "Task":
    from esmshard.tasks.residue import ResidueTask

    return ResidueTask(settings, facts)


def _sequence(settings: Any, facts: "Facts") -> "Task":
    from esmshard.tasks.sequence import SequenceTask

    return SequenceTask(settings, facts)


def _variant(settings: Any, facts: "Facts") -> "Task":
    from esmshard.tasks.variant import VariantTask

    return VariantTask(settings, facts)


TASKS: "dict[str, Callable[[Any, Facts], Task]]" = {
    "contact": _contact,
    "mlm": _mlm,
    "residue": _residue,
    "sequence": _sequence,
    "variant": _variant,
}


def head_of(settings: TaskSettings, facts: "Facts", config: "EsmConfig") -> "nn.Module":
    """A new head of a task, on a model of these numbers."""
    return TASKS[settings.name](settings, facts).head(config)
