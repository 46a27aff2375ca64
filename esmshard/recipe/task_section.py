"""The `task` section of a recipe: the base of the settings of all tasks.

The settings of a task are in the module of the task, in `esmshard/tasks/` or in another installed package.
`esmshard.tasks.registry` imports them when a recipe is read, and not before: they import torch.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Union

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from esmshard.recipe.data_section import OPTIONAL, DataSettings
from esmshard.recipe.section_base import Clash, Settings, listed
from esmshard.tasks import registry


class TaskSettings(Settings):
    """The settings of one task, and facts about the task for the rest of the program. Each default is the safe
    choice.
    """

    name: str

    data_keys: ClassVar[tuple[str, ...]] = ()
    """The keys of OPTIONAL that the task reads from the data section. Its recipes may not have the others."""
    may_crop: ClassVar[bool] = False
    """Whether the label of a protein is also right for a random part of it. If not, `data.long: crop` is refused, and
    `full` is the default."""
    instead_of_crop: ClassVar[str] = "full or skip"
    """The values of `data.long` that the message about a refused `crop` proposes."""
    reads_table: ClassVar[bool] = False
    """Whether the data are one table of measured variants of one protein (`data.table`), which is cross-validated
    unless `data.folds` is set. For subclasses of `VariantSettings` only."""
    trains_lm_head: ClassVar[bool] = False
    """Whether the head is the language model's own, so that the LM head is trained and used."""
    pairs: ClassVar[bool] = False
    """Whether a record is two chains, `A:B`, which the model reads as two sequences."""
    predicts_contacts: ClassVar[bool] = False
    """Whether predictions are maps of contact probabilities, which are drawn beside the true contacts."""

    @property
    def wild_type_alone(self) -> bool:
        """Whether one forward pass of the wild type serves all variants of a table."""
        return False

    def no_probe(self) -> str | None:
        """Return why `adapt.method: probe` cannot be used with these settings; None if it can."""
        return f"probe is not offered by task {self.name}; choose full, lora or head"

    def suit(self, data: DataSettings) -> DataSettings:
        """Return the data section with the defaults of this task.

        Raises:
            Clash: if a key contradicts the task, or is missing.
        """
        if data.train is None:
            raise Clash("train", "this key is required")
        return data.model_copy(update={key: data.train for key in ("valid", "test") if getattr(data, key) is None})

    def head_bytes(self, tokens: int, n_logits: int) -> int:
        """Estimate the bytes that the head keeps for the backward pass of a record of this many tokens, in fp32.

        Args:
            tokens: of the record.
            n_logits: columns of the logits of the language model, of which a head may keep some.
        """
        return 0


def suiting(data: DataSettings, task: TaskSettings) -> DataSettings:
    """Return the data section with the defaults of a task.

    Raises:
        Clash: if the task does not read a key, or if a key is missing.
    """
    for key in OPTIONAL:
        if getattr(data, key) is not None and key not in task.data_keys:
            owners = [name for name, settings in sections().items() if key in settings.data_keys]
            raise Clash(key, f"is for task {listed(owners)}, and the recipe has {task.name}; remove it")
    if not task.may_crop and data.long == "crop":
        if "long" in data.model_fields_set:
            reason = f"crop may remove the cause of the label of a protein; choose {task.instead_of_crop}"
            raise Clash("long", reason)
        data = data.model_copy(update={"long": "full"})
    data = task.suit(data)
    if data.folds is not None and "fold" not in data.model_fields_set:
        raise Clash(
            "folds",
            f"makes {data.folds} parts, and a run is tested on one of them; to train all {data.folds} runs, remove it "
            f"and pass --folds {data.folds}; to train one, add data.fold, from 0 to {data.folds - 1}",
        )
    return data


def sections() -> Mapping[str, type[TaskSettings]]:
    """Return the settings of all registered tasks, by the name of the task."""
    return registry.registered().settings


class _AnyRegistered:
    """Makes pydantic choose the settings by `name` among all registered tasks."""

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        every = tuple(sections().values())
        choice = handler.generate_schema(Annotated[Union[every], Field(discriminator="name")])  # noqa: UP007
        return core_schema.no_info_before_validator_function(_usable, choice)


def _usable(section: Any) -> Any:
    """Refuse a registered task that cannot be used, with the reason."""
    name = section.get("name") if isinstance(section, dict) else None
    if isinstance(name, str) and name in registry.registered().unusable:
        raise Clash("name", registry.registered().unusable[name])
    return section


AnyTask = Annotated[TaskSettings, _AnyRegistered()]
"""The settings of one of the registered tasks."""
