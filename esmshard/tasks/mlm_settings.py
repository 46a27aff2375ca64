"""The settings of task `mlm`. No torch."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from esmshard.recipe.task_section import TaskSettings

if TYPE_CHECKING:
    from esmshard.model.config import ModelConfig


class MlmSettings(TaskSettings):
    """Masked-language-model training on unlabelled sequences, to adapt a model to a family (docs/tasks.md)."""

    name: Literal["mlm"]

    task: ClassVar[str] = "esmshard.tasks.mlm:MlmTask"
    may_crop: ClassVar[bool] = True
    trains_lm_head: ClassVar[bool] = True
    data_keys: ClassVar[tuple[str, ...]] = ("sequence_column",)

    mask: float = Field(0.15, gt=0, le=0.5)
    """The share of residues that the model predicts. 80% of them are replaced by `<mask>`, 10% by a random one of the
    20 amino acids, and 10% stay unchanged."""

    def no_probe(self) -> str | None:
        """A probe has no labels to fit."""
        return "probe has no meaning for task mlm, which has no labels; choose full, lora or head"

    def head_parameters(self, config: "ModelConfig") -> int:
        """Return 0: the head is the LM head of the model."""
        return 0

    def head_bytes(self, tokens: int, n_logits: int) -> int:
        """Count logits, their log-softmax and its gradient at the predicted residues. Tensors as wide as the model are
        small compared with its layers.
        """
        return round(4 * 3 * n_logits * self.mask * tokens)
