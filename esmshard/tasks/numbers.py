"""What the heads of the tasks take, for planning. No torch: a plan is there before torch would be imported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from esmshard.settings import TaskSettings

MAX_SEPARATION = 64
"""Contact head: separations from here on share one embedding."""


class HeadNumbers(Protocol):
    """The size of one task's head."""

    def parameters(self, dim: int) -> int:
        """Of a head on a trunk of that width; all of them learn."""
        ...

    def head_bytes(self, tokens: int) -> int:
        """Estimate of what the head keeps of a record of that many tokens for the backward pass, in fp32."""
        ...


@dataclass(frozen=True)
class ContactNumbers:
    """See `esmshard.tasks.contact.PairwiseHead`."""

    settings: TaskSettings

    def parameters(self, dim: int) -> int:
        """LayerNorm, two projections, separations; two norms and two 3x3 convolutions a block; the last layer."""
        c = self.settings.channels
        block = 2 * 2 * c + 2 * 9 * c * c + c
        return 2 * dim + 2 * (dim * c + c) + (MAX_SEPARATION + 1) * c + self.settings.blocks * block + c + 1

    def head_bytes(self, tokens: int) -> int:
        """Pair maps: about six for each block, four besides."""
        return 4 * tokens**2 * self.settings.channels * (6 * self.settings.blocks + 4)


HEADS: dict[str, Callable[[TaskSettings], HeadNumbers]] = {
    "contact": ContactNumbers,
}
"""By the names of TASKS."""
