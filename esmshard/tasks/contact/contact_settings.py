"""The settings of task `contact`, and the size of its heads. No torch."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from esmshard.recipe.task_section import TaskSettings

if TYPE_CHECKING:
    from esmshard.model.config import EsmConfig


MAX_SEPARATION = 64
"""Separations from here on share one embedding."""
DILATIONS = (1, 2, 4)
"""Of the first convolution of each block, in turn."""
MAPS = 8
"""Mixtures of attention maps that the network of head `both` sees, besides the attention head's logits."""
KEPT_PAIRS = 256**2
"""Of maps of more pairs, blocks are computed again in the backward pass."""


class ContactSettings(TaskSettings):
    """Which pairs of residues touch: Cb-Cb under 8 A (Ca for glycine), six or more residues apart."""

    name: Literal["contact"]

    task: ClassVar[str] = "esmshard.tasks.contact.contact_task:ContactTask"
    may_crop: ClassVar[bool] = True
    predicts_contacts: ClassVar[bool] = True

    head: Literal["attention", "pairwise", "both"] = "pairwise"
    """`attention`: a regression over the attention maps of all layers, as ESM's own (Rao et al. 2021), from which it
    starts where the model has one; `pairwise`: products of representations, then a small dilated 2-D network; `both`:
    that network over products and attention maps."""
    channels: int = Field(32, ge=4, le=512)
    """Channels of the pair representation, of `pairwise` and `both`."""
    blocks: int = Field(4, ge=0, le=64)
    """Residual 3x3 convolution blocks of `pairwise` and `both`, their dilation cycling through 1, 2, 4."""

    def no_probe(self) -> str | None:
        """Only a regression is fitted."""
        return (
            None
            if self.head == "attention"
            else "probe fits a regression over attention maps; set task.head: attention"
        )

    def head_parameters(self, config: "EsmConfig") -> int:
        """Regression over attention maps and their mixtures; LayerNorm, two projections, separations, two norms and two
        3x3 convolutions a block, and the last layer.
        """
        c, n_maps, head = self.channels, config.n_layers * config.n_heads, self.head
        if head == "attention":
            return n_maps + 1
        block = 2 * 2 * c + 2 * 9 * c * c + c
        network = 2 * config.dim + 2 * (config.dim * c + c) + (MAX_SEPARATION + 1) * c
        network += self.blocks * block + c + 1
        return network if head == "pairwise" else network + n_maps + 1 + MAPS * n_maps + (MAPS + 1) * c

    def head_bytes(self, tokens: int) -> int:
        """Pair maps: six for each block, four besides; of a large map one for each block and those of one block; and
        whole maps of one number a pair. Queries and keys are the model's own.
        """
        attended = {"attention": 4, "pairwise": 0, "both": 4 * (MAPS + 1)}[self.head]
        blocks, maps = self.blocks, 0
        if self.head != "attention":
            maps = 4 + (6 * blocks if tokens**2 <= KEPT_PAIRS else blocks + 6 * min(blocks, 1))
        return 4 * tokens**2 * (self.channels * maps + attended + 2)
