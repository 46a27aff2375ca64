"""The settings of task `residue`, and the size of its head. No torch."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from esmshard.recipe.task_section import TaskSettings
from esmshard.tasks.labelled.class_balance import OUTPUTS, for_classes

if TYPE_CHECKING:
    from esmshard.model.config import ModelConfig


KERNEL = 7
"""The width of the head's convolution in residues."""


class ResidueSettings(TaskSettings):
    """A class or a number for each residue."""

    name: Literal["residue"]

    task: ClassVar[str] = "esmshard.tasks.labelled.residue:ResidueTask"
    data_keys: ClassVar[tuple[str, ...]] = ("labels", "target", "sequence_column", "id_column", "mask")
    may_crop: ClassVar[bool] = True

    kind: Literal["class", "number"] = "class"
    """Whether a label is a letter or a number."""
    classes: tuple[str, ...] | None = Field(None, strict=False)
    """The letters of each class. Several letters may be one class: [HGI, EB, STC] are the three states of secondary
    structure. By default each letter of the training labels is a class."""
    balance: float = Field(0.0, ge=0, le=1)
    """The weight of a class in the loss is its frequency to the power of minus this number. With 0 all residues count
    the same, with 1 all classes. This is for labels with a rare class. Not for numbers."""
    hidden: int = Field(0, ge=0, le=8192)
    """The channels of a convolution over 7 residues before the last layer; 0 for a linear head."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """The share of the inputs of the head and of its hidden layer that dropout sets to 0 in training."""

    @field_validator("classes")
    @classmethod
    def _groups(cls, classes: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        if classes is None:
            return None
        if info.data.get("kind") == "number":
            raise ValueError("is for kind class; remove it")
        letters = "".join(classes)
        if not (letters.isascii() and letters.isprintable()) or " " in letters or "" in classes:
            raise ValueError("names each class by its letters in ASCII, as in [HGI, EB, STC]")
        twice = [letter for place, letter in enumerate(letters) if letter in letters[:place]]
        if twice:
            raise ValueError(f"has the letter {twice[0]} twice; a letter belongs to one class")
        if len(classes) < 2:
            raise ValueError("has one class only, so that there is nothing to learn; name two or more")
        return classes

    @field_validator("balance")
    @classmethod
    def _of_classes(cls, balance: float, info: ValidationInfo) -> float:
        return for_classes(balance, info)

    def no_probe(self) -> str | None:
        """A probe can fit a linear head only."""
        return None if self.hidden == 0 else "probe fits a linear head; set task.hidden: 0"

    def head_parameters(self, config: "ModelConfig") -> int:
        """Count LayerNorm, convolution and last layer. Labels are not read yet: without `classes`, OUTPUTS are
        counted.
        """
        d, h = config.dim, self.hidden
        outputs = 1 if self.kind == "number" else len(self.classes or range(OUTPUTS))
        return 2 * d + (KERNEL * d * h + h if h else 0) + ((h or d) + 1) * outputs

    def head_bytes(self, tokens: int, n_logits: int) -> int:
        """Count the hidden layer before and after gelu, a copy of it with all records end to end, and the probabilities
        of the classes. Tensors as wide as the model are small compared with its layers.
        """
        return 4 * tokens * (3 * self.hidden + 2 * OUTPUTS)
