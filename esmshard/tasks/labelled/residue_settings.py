"""The settings of task `residue`, and the size of its head. No torch."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from esmshard.recipe.task_section import TaskSettings
from esmshard.tasks.labelled.class_balance import OUTPUTS, for_classes

if TYPE_CHECKING:
    from esmshard.model.config import EsmConfig


KERNEL = 7
"""Residues that the head's convolution sees."""


class ResidueSettings(TaskSettings):
    """A class or a number for each residue."""

    name: Literal["residue"]

    task: ClassVar[str] = "esmshard.tasks.labelled.residue:ResidueTask"
    data_keys: ClassVar[tuple[str, ...]] = ("labels", "target", "id_column", "mask")
    may_crop: ClassVar[bool] = True

    kind: Literal["class", "number"] = "class"
    """What a label is: a letter, or a number."""
    classes: tuple[str, ...] | None = Field(None, strict=False)
    """Letters of each class, several of which may be one: [HGI, EB, STC] are the three states of secondary structure.
    Each letter of the training labels is a class by default."""
    balance: float = Field(0.0, ge=0, le=1)
    """Weight of a class in the loss: its frequency to the power of minus this. 0 counts residues alike, 1 classes. For
    labels of which one is rare. Not for numbers."""
    hidden: int = Field(0, ge=0, le=8192)
    """Channels of a convolution over 7 residues before the last layer; 0 for a linear head."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the inputs of the head, and of its hidden layer, that are dropped in training."""

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
            raise ValueError("has one class only, of which nothing can be learned; name two or more")
        return classes

    @field_validator("balance")
    @classmethod
    def _of_classes(cls, balance: float, info: ValidationInfo) -> float:
        return for_classes(balance, info)

    def no_probe(self) -> str | None:
        """Only a linear head is fitted."""
        return None if self.hidden == 0 else "probe fits a linear head; set task.hidden: 0"

    def head_parameters(self, config: "EsmConfig") -> int:
        """LayerNorm, convolution, last layer. Labels are yet to be read: without `classes`, OUTPUTS are counted."""
        d, h = config.dim, self.hidden
        outputs = 1 if self.kind == "number" else len(self.classes or range(OUTPUTS))
        return 2 * d + (KERNEL * d * h + h if h else 0) + ((h or d) + 1) * outputs

    def head_bytes(self, tokens: int) -> int:
        """Before and after gelu, and all records laid end to end; what is as wide as the model is little beside its
        layers. Probabilities of the classes.
        """
        return 4 * tokens * (3 * self.hidden + 2 * OUTPUTS)
