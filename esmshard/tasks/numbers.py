"""What the heads of the tasks take, for planning. No torch: a plan is there before torch would be imported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from esmshard.model.config import EsmConfig
from esmshard.task_settings import (
    ContactSettings,
    MlmSettings,
    ResidueSettings,
    SequenceSettings,
    VariantSettings,
)
from esmshard.vocab import VOCAB_SIZE

MAX_SEPARATION = 64
"""Contact head: separations from here on share one embedding."""
DILATIONS = (1, 2, 4)
"""Contact head: of the first convolution of each block, in turn."""
MAPS = 8
"""Contact head `both`: mixtures of attention maps that its network sees, besides the attention head's logits."""
KEPT_PAIRS = 256**2
"""Contact head: of maps of more pairs, blocks are computed again in the backward pass."""
KERNEL = 7
"""Residue head: residues that its convolution sees."""
OUTPUTS = 8
"""Residue and sequence heads: classes that are reckoned with before the labels are read."""


class HeadNumbers(Protocol):
    """The size of one task's head."""

    def parameters(self, config: EsmConfig) -> int:
        """Of a head on a model of these numbers; all of them learn."""
        ...

    def head_bytes(self, tokens: int) -> int:
        """Estimate of what the head keeps of a record of that many tokens for the backward pass, in fp32."""
        ...


@dataclass(frozen=True)
class ContactNumbers:
    """See `esmshard.tasks.contact_heads`."""

    settings: ContactSettings

    def parameters(self, config: EsmConfig) -> int:
        """Regression over attention maps and their mixtures; LayerNorm, two projections, separations, two norms and two
        3x3 convolutions a block, and the last layer.
        """
        c, n_maps, head = self.settings.channels, config.n_layers * config.n_heads, self.settings.head
        if head == "attention":
            return n_maps + 1
        block = 2 * 2 * c + 2 * 9 * c * c + c
        network = 2 * config.dim + 2 * (config.dim * c + c) + (MAX_SEPARATION + 1) * c
        network += self.settings.blocks * block + c + 1
        return network if head == "pairwise" else network + n_maps + 1 + MAPS * n_maps + (MAPS + 1) * c

    def head_bytes(self, tokens: int) -> int:
        """Pair maps: six for each block, four besides; of a large map one for each block and those of one block; and
        whole maps of one number a pair. Queries and keys are the model's own.
        """
        attended = {"attention": 4, "pairwise": 0, "both": 4 * (MAPS + 1)}[self.settings.head]
        blocks, maps = self.settings.blocks, 0
        if self.settings.head != "attention":
            maps = 4 + (6 * blocks if tokens**2 <= KEPT_PAIRS else blocks + 6 * min(blocks, 1))
        return 4 * tokens**2 * (self.settings.channels * maps + attended + 2)


@dataclass(frozen=True)
class MlmNumbers:
    """The head is the language model's own."""

    settings: MlmSettings

    def parameters(self, config: EsmConfig) -> int:
        """None besides the model's."""
        return 0

    def head_bytes(self, tokens: int) -> int:
        """Logits, their log-softmax and its gradient at the places asked for; what is as wide as the model is little
        beside its layers.
        """
        return round(4 * 3 * 33 * self.settings.mask * tokens)


@dataclass(frozen=True)
class ResidueNumbers:
    """See `esmshard.tasks.residue.ResidueHead`."""

    settings: ResidueSettings

    def parameters(self, config: EsmConfig) -> int:
        """LayerNorm, convolution, last layer. Labels are yet to be read: without `classes`, OUTPUTS are counted."""
        d, h = config.dim, self.settings.hidden
        outputs = 1 if self.settings.kind == "number" else len(self.settings.classes or range(OUTPUTS))
        return 2 * d + (KERNEL * d * h + h if h else 0) + ((h or d) + 1) * outputs

    def head_bytes(self, tokens: int) -> int:
        """Before and after gelu, and all records laid end to end; what is as wide as the model is little beside its
        layers. Probabilities of the classes.
        """
        return 4 * tokens * (3 * self.settings.hidden + 2 * OUTPUTS)


@dataclass(frozen=True)
class SequenceNumbers:
    """See `esmshard.tasks.sequence.SequenceHead`."""

    settings: SequenceSettings

    def parameters(self, config: EsmConfig) -> int:
        """LayerNorm, one or two linear layers. The labels have yet to be read: OUTPUTS are counted, of numbers one."""
        d, h = config.dim, config.dim if self.settings.hidden is None else self.settings.hidden
        outputs = 1 if self.settings.kind == "number" else OUTPUTS
        return 2 * d + ((d + 1) * h if h else 0) + ((h or d) + 1) * outputs

    def head_bytes(self, tokens: int) -> int:
        """A record has one vector."""
        return 0


@dataclass(frozen=True)
class VariantNumbers:
    """See `esmshard.tasks.variant_head.VariantHead`."""

    settings: VariantSettings

    def parameters(self, config: EsmConfig) -> int:
        """LayerNorm, one or two linear layers over what the head sees, letters, and the weight of the zero-shot score.
        The labels have yet to be read: one target is counted.
        """
        d, h = config.dim, self.settings.hidden
        pool, seen = self.settings.pool, d
        if pool in ("wild_type", "sites"):
            seen = d * (1 + (pool == "sites")) + 2 * VOCAB_SIZE + 20 * self.settings.zero_shot
        first = (seen + 1) * h + h + 1 if h else seen + 1
        return 2 * d + first + int(self.settings.zero_shot)

    def head_bytes(self, tokens: int) -> int:
        """A record has one vector. The wild type that goes with a micro-batch is the planner's."""
        return 0


HEADS: dict[str, Callable[[Any], HeadNumbers]] = {
    "contact": ContactNumbers,
    "mlm": MlmNumbers,
    "residue": ResidueNumbers,
    "sequence": SequenceNumbers,
    "variant": VariantNumbers,
}
"""By the names of TASKS."""
