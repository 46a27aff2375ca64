"""The settings of task `sequence`, and the size of its head. No torch."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from esmshard.recipe.task_section import TaskSettings
from esmshard.tasks.labelled.class_balance import OUTPUTS, for_classes

if TYPE_CHECKING:
    from esmshard.model.config import ModelConfig


class SequenceSettings(TaskSettings):
    """Numbers, a class or several classes for a whole protein."""

    name: Literal["sequence"]

    task: ClassVar[str] = "esmshard.tasks.labelled.sequence:SequenceTask"
    data_keys: ClassVar[tuple[str, ...]] = ("labels", "target", "sequence_column", "id_column")

    kind: Literal["number", "class", "multilabel"] = "number"
    """`number` is for one or several numbers, `class` for one of several classes, `multilabel` for any of them."""
    loss: Literal["mse", "huber"] | None = Field(None, validate_default=True)
    """The loss for numbers, by default `mse`. `huber` counts errors over one standard deviation linearly, for data with
    outliers. Classes have cross-entropy, and no such key."""
    balance: float = Field(0.0, ge=0, le=1)
    """The weight of a class in the loss is its frequency to the power of minus this number. For `multilabel`, the
    weight of the proteins with a label is the odds of this label to the power of minus this number. With 0 all proteins
    count the same. Not for numbers."""
    hidden: int | None = Field(None, ge=0, le=8192)
    """The width of the head's hidden layer; 0 for a linear head. The default is the width of the model."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """The share of the inputs of the head and of its hidden layer that dropout sets to 0 in training."""

    @field_validator("loss")
    @classmethod
    def _of_numbers(cls, loss: str | None, info: ValidationInfo) -> str | None:
        kind = info.data.get("kind")
        if loss is not None and kind in ("class", "multilabel"):
            raise ValueError(f"{loss} is for kind number, and the recipe has {kind}; remove it")
        return loss or ("mse" if kind == "number" else None)

    @field_validator("balance")
    @classmethod
    def _of_classes(cls, balance: float, info: ValidationInfo) -> float:
        return for_classes(balance, info)

    def no_probe(self) -> str | None:
        """A probe can fit a linear head only."""
        return None if self.hidden == 0 else "probe fits a linear head; set task.hidden: 0"

    def head_parameters(self, config: "ModelConfig") -> int:
        """Count LayerNorm and one or two linear layers. Labels are not read yet: OUTPUTS are counted, or one for
        numbers.
        """
        d, h = config.dim, config.dim if self.hidden is None else self.hidden
        outputs = 1 if self.kind == "number" else OUTPUTS
        return 2 * d + ((d + 1) * h if h else 0) + ((h or d) + 1) * outputs

    def head_bytes(self, tokens: int, n_logits: int) -> int:
        """Return 0: a record has one vector only."""
        return 0
