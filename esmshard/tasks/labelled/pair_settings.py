"""The settings of task `pair`, and the size of its head. No torch."""

from typing import TYPE_CHECKING, ClassVar, Literal

from esmshard.recipe.data_section import DataSettings, JoinSettings
from esmshard.recipe.section_base import Clash
from esmshard.tasks.labelled.class_balance import OUTPUTS
from esmshard.tasks.labelled.sequence_settings import SequenceSettings

if TYPE_CHECKING:
    from esmshard.model.config import ModelConfig

PARTS = 3
"""The number of vectors of the model's width that the head makes of two chains."""


class PairSettings(SequenceSettings):
    """Numbers, a class or several classes for two proteins together, whatever their order."""

    name: Literal["pair"]  # type: ignore[assignment]  # a task has one name

    task: ClassVar[str] = "esmshard.tasks.labelled.pair:PairTask"
    pairs: ClassVar[bool] = True

    def suit(self, data: DataSettings) -> DataSettings:
        """Refuse windows, which would be of one chain or of both, and linkers, as the chains are not joined."""
        if data.join != JoinSettings():  # type: ignore[call-arg]  # all keys have defaults
            raise Clash("join", "makes the chains of a record one sequence, and those of a pair stay two; remove it")
        if data.long == "window":
            raise Clash("long", "window cuts a record, and a pair has two chains; choose full, skip or error")
        return super().suit(data)

    def head_parameters(self, config: "ModelConfig") -> int:
        """Count LayerNorm and one or two linear layers, as `SequenceSettings` does."""
        d, h = config.dim, config.dim if self.hidden is None else self.hidden
        outputs = 1 if self.kind == "number" else OUTPUTS
        return 2 * d + ((PARTS * d + 1) * h if h else 0) + ((h or PARTS * d) + 1) * outputs
