"""The settings of task `variant`, its rules for the data section, and the size of its head. No torch."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from esmshard.recipe.data_section import DataSettings
from esmshard.recipe.section_base import Clash
from esmshard.recipe.task_section import TaskSettings
from esmshard.vocab import VOCAB_SIZE

if TYPE_CHECKING:
    from esmshard.model.config import ModelConfig


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
"""The keys of the data section that only this task reads, with their defaults."""


class VariantSettings(TaskSettings):
    """Measured values of variants of one protein with one or several substitutions (docs/variants.md)."""

    name: Literal["variant"]

    task: ClassVar[str] = "esmshard.tasks.variants.variant_task:VariantTask"
    data_keys: ClassVar[tuple[str, ...]] = ("target", *DEFAULTS)
    instead_of_crop: ClassVar[str] = "full or window"
    reads_table: ClassVar[bool] = True

    pool: Literal["wild_type", "sites", "difference", "mean"] = "wild_type"
    """The input of the head. `wild_type`: the wild type's representation at each mutated residue, and both letters; one
    forward pass of the wild type serves all variants of a step. `sites`: in addition, the difference between the
    representations of variant and wild type at this residue, which takes a forward pass for each variant. `difference`:
    this difference alone. `mean`: the mean over all residues of the variant."""
    zero_shot: bool = True
    """Add the language model's zero-shot score, log p(mutant) - log p(wild type) at the mutated residues in the wild
    type (Meier et al. 2021), with a trained weight. `wild_type` and `sites` also get all 20 probabilities at these
    residues. This needs a model with a trained LM head."""
    loss: Literal["mse", "huber", "ranking"] = "mse"
    """`huber` counts errors over one standard deviation linearly; `ranking` uses the order of the measured values and
    not their distances."""
    hidden: int = Field(64, ge=0, le=8192)
    """The width of the head's hidden layer; 0 for a linear head."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """The share of the inputs of the head and of its hidden layer that dropout sets to 0 in training."""

    def no_probe(self) -> str | None:
        """A probe can fit a linear head only."""
        return None if self.hidden == 0 else "probe fits a linear head; set task.hidden: 0"

    @property
    def wild_type_alone(self) -> bool:
        """Whether the pool is `wild_type`."""
        return self.pool == "wild_type"

    def suit(self, data: DataSettings) -> DataSettings:
        """Return the data section with the defaults of the keys that only this task reads."""
        if self.loss == "ranking" and data.transform == "log":
            raise Clash("transform", "log has no effect on task.loss ranking, which uses ranks; remove it")
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

    def head_parameters(self, config: "ModelConfig") -> int:
        """Count LayerNorm, one or two linear layers over the input of the head, letters, and the weight of the
        zero-shot score. Labels are not read yet: one target is counted.
        """
        d, h = config.dim, self.hidden
        pool, seen = self.pool, d
        if pool in ("wild_type", "sites"):
            seen = d * (1 + (pool == "sites")) + 2 * VOCAB_SIZE + 20 * self.zero_shot
        first = (seen + 1) * h + h + 1 if h else seen + 1
        return 2 * d + first + int(self.zero_shot)

    def head_bytes(self, tokens: int, n_logits: int) -> int:
        """Return 0: a record has one vector only. The planner counts the wild type of a micro-batch."""
        return 0
