"""The `task` section of a recipe: the base of the settings of all tasks. No torch.

The settings of a task lie with the task, in `esmshard/tasks/` or in another installed package;
`esmshard.tasks.registry` knows where. They say what recipes, planner and commands need to know of a task before
anything heavy is imported.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Union

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from esmshard.recipe.data_section import OPTIONAL, DataSettings
from esmshard.recipe.section_base import Clash, Settings, listed
from esmshard.tasks import registry

if TYPE_CHECKING:
    from esmshard.model.config import EsmConfig


class TaskSettings(Settings):
    """Settings of one task, and what others need to know of that task. Each default is the safe choice."""

    name: str

    task: ClassVar[str] = ""
    """The subclass of `esmshard.tasks.base.Task`, as `module:Class`. It is imported when a model is trained or used."""
    data_keys: ClassVar[tuple[str, ...]] = ()
    """Which keys of OPTIONAL in the data section the task reads. The others are refused in its recipes."""
    may_crop: ClassVar[bool] = False
    """Whether a part of a protein, cut out at random, still has a right label. If not, `data.long: crop` is refused,
    and `full` is the default."""
    instead_of_crop: ClassVar[str] = "full or skip"
    """Values of `data.long` that the message about a refused `crop` proposes."""
    reads_table: ClassVar[bool] = False
    """Whether the data are one table of measured variants of one protein (`data.table`), which is cross-validated
    unless `data.folds` is set. For subclasses of `VariantSettings` only."""
    trains_lm_head: ClassVar[bool] = False
    """Whether the head is the language model's own, so that the LM head is trained and used."""
    predicts_contacts: ClassVar[bool] = False
    """Whether predictions are maps of contact probabilities, which are drawn beside the true contacts."""

    @property
    def wild_type_alone(self) -> bool:
        """Whether the wild type alone goes through the model, once for all variants of a table."""
        return False

    def no_probe(self) -> str | None:
        """Why `adapt.method: probe` cannot be used with these settings; None if it can."""
        return f"probe is not offered by task {self.name}; choose full, lora or head"

    def suit(self, data: DataSettings) -> DataSettings:
        """The data section with the defaults of this task.

        Raises:
            Clash: naming a key that does not go with the task, or that is missing.
        """
        for key in ("train", "valid", "test"):
            if getattr(data, key) is None:
                raise Clash(key, "this key is required")
        return data

    def head_parameters(self, config: "EsmConfig") -> int:
        """How many parameters the head has on a model of these numbers. All of them learn.

        The default counts the head that the task makes without facts of the labels; it imports torch.
        """
        return registry.new_task(self, {}).head_parameters(config)

    def head_bytes(self, tokens: int) -> int:
        """Estimate of what the head keeps of a record of that many tokens for the backward pass, in fp32."""
        return 0


def suiting(data: DataSettings, task: TaskSettings) -> DataSettings:
    """The data section with the defaults of a task. `Clash` for a key that the task does not read, or lacks."""
    for key in OPTIONAL:
        if getattr(data, key) is not None and key not in task.data_keys:
            owners = [name for name, settings in sections().items() if key in settings.data_keys]
            raise Clash(key, f"is for task {listed(owners)}, and the recipe has {task.name}; remove it")
    if not task.may_crop and data.long == "crop":
        if "long" in data.model_fields_set:
            reason = f"crop may cut away what the label of a protein comes from; choose {task.instead_of_crop}"
            raise Clash("long", reason)
        data = data.model_copy(update={"long": "full"})
    data = task.suit(data)
    if data.folds is not None and "fold" not in data.model_fields_set:
        raise Clash(
            "folds",
            f"makes {data.folds} parts, on one of which a run is tested; to train all {data.folds} runs remove it and "
            f"pass --folds {data.folds}, to train one add data.fold, from 0 to {data.folds - 1}",
        )
    return data


def sections() -> Mapping[str, type[TaskSettings]]:
    """What may stand under `task`, by its `name`."""
    return registry.registered().settings


class _AnyRegistered:
    """Makes pydantic choose among the settings of all registered tasks, by `name`."""

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        every = tuple(sections().values())
        choice = handler.generate_schema(Annotated[Union[every], Field(discriminator="name")])  # noqa: UP007
        return core_schema.no_info_before_validator_function(_usable, choice)


def _usable(section: Any) -> Any:
    """Refuse a task that is registered and cannot be used, with the reason."""
    name = section.get("name") if isinstance(section, dict) else None
    if isinstance(name, str) and name in registry.registered().unusable:
        raise Clash("name", registry.registered().unusable[name])
    return section


AnyTask = Annotated[TaskSettings, _AnyRegistered()]
"""The settings of one of the registered tasks."""
