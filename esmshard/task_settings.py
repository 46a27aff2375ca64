"""The `task` section of a recipe, of each task. No torch."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator


class Settings(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion, field docstrings in the schema."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def as_list(value: Any) -> Any:
    """Of a key that is a list of names: a single name is a list of one."""
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(as_list, json_schema_input_type=str | list[str])]
"""A list of names, or a single one."""


class ContactSettings(Settings):
    """Which pairs of residues touch: Cb-Cb under 8 A (Ca for glycine), six or more residues apart."""

    name: Literal["contact"]
    head: Literal["attention", "pairwise", "both"] = "pairwise"
    """`attention`: a regression over the attention maps of all layers, as ESM's own (Rao et al. 2021), from which it
    starts where the model has one; `pairwise`: products of representations, then a small dilated 2-D network; `both`:
    that network over products and attention maps."""
    channels: int = Field(32, ge=4, le=512)
    """Channels of the pair representation, of `pairwise` and `both`."""
    blocks: int = Field(4, ge=0, le=64)
    """Residual 3x3 convolution blocks of `pairwise` and `both`, their dilation cycling through 1, 2, 4."""


class MlmSettings(Settings):
    """Masked-language-model training on unlabelled sequences, to adapt a model to a family (docs/tasks.md)."""

    name: Literal["mlm"]
    mask: float = Field(0.15, gt=0, le=0.5)
    """Share of residues that are to be told: of these 80% are replaced by `<mask>`, 10% by a random one of the 20
    amino acids, and 10% left as they are."""


class ResidueSettings(Settings):
    """A class or a number for each residue."""

    name: Literal["residue"]
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
        return _for_classes(balance, info)


class SequenceSettings(Settings):
    """Numbers, a class or several classes for a whole protein."""

    name: Literal["sequence"]
    kind: Literal["number", "class", "multilabel"] = "number"
    """`number`: one or several; `class`: one of several; `multilabel`: any of several."""
    loss: Literal["mse", "huber"] = "mse"
    """Of numbers. `huber` counts errors over one standard deviation linearly, for data with outliers."""
    balance: float = Field(0.0, ge=0, le=1)
    """Weight of a class in the loss: its frequency to the power of minus this; of `multilabel`, weight of the proteins
    that have a label: the odds of having it, to the power of minus this. 0 counts proteins alike. Not for numbers."""
    hidden: int | None = Field(None, ge=0, le=8192)
    """Width of the head's hidden layer, 0 for a linear head; that of the model by default."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Share of the inputs of the head, and of its hidden layer, that are dropped in training."""

    @field_validator("loss")
    @classmethod
    def _of_numbers(cls, loss: str, info: ValidationInfo) -> str:
        kind = info.data.get("kind")
        if loss == "huber" and kind in ("class", "multilabel"):
            raise ValueError(f"huber is for kind number, and the recipe has {kind}; remove it")
        return loss

    @field_validator("balance")
    @classmethod
    def _of_classes(cls, balance: float, info: ValidationInfo) -> float:
        return _for_classes(balance, info)


class VariantSettings(Settings):
    """Measured values of variants of one protein: substitutions, one or several at a time (docs/variants.md)."""

    name: Literal["variant"]
    pool: Literal["wild_type", "sites", "difference", "mean"] = "wild_type"
    """What the head sees. `wild_type`: at each mutated residue the wild type's representation, and both letters; one
    pass of the wild type through the model serves all variants of a step. `sites`: beside these what the variant's own
    representation there differs by, for which each variant goes through the model; `difference`: that difference
    alone; `mean`: the mean over all residues of the variant."""
    zero_shot: bool = True
    """Add the language model's own score, log p(mutant) - log p(wild type) at the mutated residues in the wild type
    (Meier et al. 2021), with a weight that is learned; and let `wild_type` and `sites` see all 20 probabilities there.
    Needs a model with a trained LM head."""
    loss: Literal["mse", "huber", "ranking"] = "mse"
    """`huber` counts errors over one standard deviation linearly; `ranking` sees the order of the measured values and
    not their distances."""
    hidden: int = Field(64, ge=0, le=8192)
    """Width of the head's hidden layer; 0 for a linear head."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Share of the inputs of the head, and of its hidden layer, that are dropped in training."""


def _for_classes(balance: float, info: ValidationInfo) -> float:
    if balance and info.data.get("kind") == "number":
        raise ValueError("weighs classes, and the recipe has kind number; remove it")
    return balance


TaskSettings = Annotated[
    ContactSettings | MlmSettings | ResidueSettings | SequenceSettings | VariantSettings,
    Field(discriminator="name"),
]
"""What is learned, and the head that learns it."""
