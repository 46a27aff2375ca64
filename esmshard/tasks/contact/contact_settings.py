"""The settings of task `contact`, and the size of its heads. No torch."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from esmshard.recipe.task_section import TaskSettings

if TYPE_CHECKING:
    from esmshard.model.config import ModelConfig


MAX_SEPARATION = 64
"""Separations from this number on share one embedding."""
DILATIONS = (1, 2, 4)
"""The dilation of the first convolution of a block; the blocks cycle through these values."""
MAPS = 8
"""The number of mixtures of attention maps that the network of head `both` gets, besides the attention head's
logits."""
KEPT_PAIRS = 256**2
"""For maps with more pairs, blocks are computed again in the backward pass."""


class ContactSettings(TaskSettings):
    """Contacts: pairs of residues with Cb-Cb under 8 A (Ca for glycine), six or more residues apart."""

    name: Literal["contact"]

    task: ClassVar[str] = "esmshard.tasks.contact.contact_task:ContactTask"
    may_crop: ClassVar[bool] = True
    predicts_contacts: ClassVar[bool] = True

    head: Literal["attention", "pairwise", "both"] = "pairwise"
    """`attention` is a regression over the attention maps of all layers, as in ESM (Rao et al. 2021). It starts from
    the regression of the model if there is one. `pairwise` is a small dilated 2-D network over products of
    representations. `both` is this network over products and attention maps."""
    channels: int = Field(32, ge=4, le=512)
    """The channels of the pair representation, for `pairwise` and `both`."""
    blocks: int = Field(4, ge=0, le=64)
    """The number of residual blocks of 3x3 convolutions, for `pairwise` and `both`. Their dilation cycles through 1, 2,
    4."""

    def no_probe(self) -> str | None:
        """A probe can fit a regression only."""
        return (
            None
            if self.head == "attention"
            else "probe fits a regression over attention maps; set task.head: attention"
        )

    def head_parameters(self, config: "ModelConfig") -> int:
        """Count the regression over attention maps and their mixtures; and LayerNorm, two projections, separations, two
        norms and two 3x3 convolutions for each block, and the last layer.
        """
        c, n_maps, head = self.channels, config.n_layers * config.n_heads, self.head
        if head == "attention":
            return n_maps + 1
        block = 2 * 2 * c + 2 * 9 * c * c + c
        network = 2 * config.dim + 2 * (config.dim * c + c) + (MAX_SEPARATION + 1) * c
        network += self.blocks * block + c + 1
        return network if head == "pairwise" else network + n_maps + 1 + MAPS * n_maps + (MAPS + 1) * c

    def head_bytes(self, tokens: int, n_logits: int) -> int:
        """Count pair maps: six for each block and four others. Of a large map, one is kept for each block, and those of
        one block are computed again. The last maps have one number for each pair. Queries and keys belong to the model.
        """
        attended = {"attention": 4, "pairwise": 0, "both": 4 * (MAPS + 1)}[self.head]
        blocks, maps = self.blocks, 0
        if self.head != "attention":
            maps = 4 + (6 * blocks if tokens**2 <= KEPT_PAIRS else blocks + 6 * min(blocks, 1))
        return 4 * tokens**2 * (self.channels * maps + attended + 2)
