"""The largest differences between two computations of one quantity, and whether they are within tolerance.

The criterion: logits and embeddings scale with the model. Inner layers of the starter reach 144, where neighbouring
fp32 numbers differ by 1.5e-5, so a bound of 1e-5 on the difference would depend on the size of the numbers. The largest
number of a layer is no good measure either: a few channels may be far larger than the others, and would hide errors in
the others. So the difference in each channel (a dimension of an embedding, a token of the logits) is divided by the
largest magnitude of the same channel. For a channel that is nearly zero, it is divided by the magnitude of the median
channel, since rounding errors of cancelled terms remain there. Contacts are probabilities, and their differences are
bounded directly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TOLERANCE = 1e-5
"""The bound for logits and embeddings relative to each channel, and for contacts in probability."""


@dataclass(frozen=True)
class Comparison:
    """The largest differences of one quantity, over all sequences."""

    against: str
    what: str
    """The quantity: `logits`, `embeddings`, `mean embeddings` or `contacts`."""
    layer: int | None
    """The layer of embeddings: 0 to the number of layers; None for other quantities."""
    absolute: float
    relative: float
    """The difference relative to the magnitude of the channel; for contacts, relative to the largest contact."""
    magnitude: float
    """The largest magnitude in the reference."""
    record: str
    """The id of the record with the largest absolute difference."""
    tolerance: float = TOLERANCE

    @property
    def passed(self) -> bool:
        """Whether the difference is within tolerance. NaN is not."""
        return (self.absolute if self.what == "contacts" else self.relative) <= self.tolerance


def difference(
    against: str,
    what: str,
    layer: int | None,
    pairs: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
    measure: Sequence[torch.Tensor] = (),
) -> Comparison:
    """Find the largest differences of one quantity.

    Args:
        against: as in `Comparison`.
        what: the quantity, as in `Comparison`.
        layer: the layer, as in `Comparison`.
        pairs: for each record its id, our values and the reference's, both [places, channels].
        measure: values that give the magnitudes of the channels; by default the reference's values.
    """
    off = torch.stack([(ours.double() - theirs.double()).abs().amax(0) for _, ours, theirs in pairs])
    measure = measure or [theirs for _, _, theirs in pairs]
    size = torch.stack([values.double().abs().amax(0) for values in measure]).amax(0)
    per_channel = off.amax(0)
    # If all values of a channel are zero on both sides, the difference is zero.
    relative = torch.where(per_channel == 0, 0.0, per_channel / size.clamp(min=float(size.median())))
    worst = int(off.amax(1).argmax())
    magnitude = float(size.max())
    return Comparison(against, what, layer, float(off.max()), float(relative.max()), magnitude, pairs[worst][0])
