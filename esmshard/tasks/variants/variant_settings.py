"""The settings of task `variant`, its rules for the data section, and the size of its head. No torch."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from esmshard.recipe.data_section import DataSettings
from esmshard.recipe.section_base import Clash
from esmshard.recipe.task_section import TaskSettings
from esmshard.vocab import VOCAB_SIZE

if TYPE_CHECKING:
    from esmshard.model.config import EsmConfig


DEFAULTS: dict[str, Any] = {
    "table": None,
    "wild_type": None,
    "mutant": None,
    "offset": "auto",
    "unusable": "drop",
    "replicates": "mean",
    "transform": "none",
    "lower_is_better": (),
    "split": "position",
    "train_max": None,
    "train_share": 1.0,
}
"""Keys of the data section for this task alone, and their values by default."""


class VariantSettings(TaskSettings):
    """Measured values of variants of one protein: substitutions, one or several at a time (docs/variants.md)."""

    name: Literal["variant"]

    task: ClassVar[str] = "esmshard.tasks.variants.variant_task:VariantTask"
    data_keys: ClassVar[tuple[str, ...]] = ("target", *DEFAULTS)
    instead_of_crop: ClassVar[str] = "full or window"
    reads_table: ClassVar[bool] = True

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

    def no_probe(self) -> str | None:
        """Only a linear head is fitted."""
        return None if self.hidden == 0 else "probe fits a linear head; set task.hidden: 0"

    @property
    def wild_type_alone(self) -> bool:
        """With pool `wild_type`, where a variant is what changes of the wild type."""
        return self.pool == "wild_type"

    def suit(self, data: DataSettings) -> DataSettings:
        """With the defaults of the keys that only this task has."""
        if self.loss == "ranking" and data.transform == "log":
            raise Clash("transform", "log means nothing to task.loss ranking, which sees ranks; remove it")
        for key in ("table", "wild_type"):
            if getattr(data, key) is None:
                raise Clash(key, "this key is required")
        for key in ("train", "valid", "test", "clusters"):
            if getattr(data, key) is not None:
                reason = "is for the other tasks, and the recipe has variant, which divides data.table; remove it"
                raise Clash(key, reason)
        if data.long not in ("full", "window"):
            reason = f"{data.long} leaves variants out; choose full, or window for a part of a long protein"
            raise Clash("long", reason)
        data = data.model_copy(update={key: value for key, value in DEFAULTS.items() if getattr(data, key) is None})
        if data.split in ("mutations", "given") and data.folds is not None:
            reason = f"divides the table, and data.split {data.split} does so in another way; remove one of them"
            raise Clash("folds", reason)
        if data.split != "mutations" and data.train_max is not None:
            raise Clash("train_max", f"is for data.split mutations, and the recipe has {data.split}; remove it")
        if data.target and (foreign := set(data.lower_is_better or ()) - set(data.target)):
            raise Clash("lower_is_better", f"{min(foreign)} is no target; data.target names {', '.join(data.target)}")
        return data

    def head_parameters(self, config: "EsmConfig") -> int:
        """LayerNorm, one or two linear layers over what the head sees, letters, and the weight of the zero-shot score.
        The labels have yet to be read: one target is counted.
        """
        d, h = config.dim, self.hidden
        pool, seen = self.pool, d
        if pool in ("wild_type", "sites"):
            seen = d * (1 + (pool == "sites")) + 2 * VOCAB_SIZE + 20 * self.zero_shot
        first = (seen + 1) * h + h + 1 if h else seen + 1
        return 2 * d + first + int(self.zero_shot)

    def head_bytes(self, tokens: int) -> int:
        """A record has one vector. The wild type that goes with a micro-batch is the planner's."""
        return 0
