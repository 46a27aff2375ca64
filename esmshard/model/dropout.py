"""Dropout that is the same on any number of processes, since it depends on the record and not on the rank.

torch's own dropout draws numbers from the state of a process, in the order in which records come. Here each number of a
mask is a hash of (draw of the record, layer, place in the record, column), computed on the device without a state. The
mask is the same however a step is divided, resumed or, under activation checkpointing, computed again.

`esmshard.batch` explains the letters of tensor names; R is the number of rows of the masked tensor.
"""

import torch
from torch import nn

from esmshard.batch import TokenBatch

_PLACE, _LAYER, _COLUMN = 0x27D4EB2F, 0x165667B1, 0x61C88647
"""Odd factors that separate neighbouring numbers before they are hashed."""
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32
"""Factors of the hash, as int32."""


class RecordDropout(nn.Module):
    """Sets a share of all numbers to zero in training and scales the others up. In evaluation it does nothing.

    Args:
        share: share that is set to zero, from 0 to below 1.
        layer: number of this dropout layer among those of a head. Each layer has its own draws.
    """

    def __init__(self, share: float, layer: int = 0) -> None:
        super().__init__()
        self.share, self.layer = share, layer

    def forward(self, x_RF: torch.Tensor, draw_R: torch.Tensor | None) -> torch.Tensor:
        """Map x [R, F] to [R, F].

        Args:
            x_RF: numbers of any floating type.
            draw_R: int32 [R], from `of_tokens`, `of_changes` or `TokenBatch.draw_N`. It may be None in evaluation only.
        """
        if not self.training or not self.share:
            return x_RF
        if draw_R is None:
            raise ValueError("dropout needs the draws of the records; make the batch with `collate`, for an epoch")
        row_R = _hashed(draw_R + ((self.layer * _LAYER + 2**31) % 2**32 - 2**31))  # an int32
        column_F = torch.arange(x_RF.shape[1], dtype=torch.int32, device=x_RF.device) * _COLUMN
        left_out_RF = _hashed(row_R[:, None] + column_F) < int(self.share * 2**32) - 2**31
        return (x_RF / (1 - self.share)).masked_fill(left_out_RF, 0.0)


def of_tokens(batch: TokenBatch) -> torch.Tensor | None:
    """Return the draw of each token, int32 [T], from its record and place; None for a batch without draws."""
    if batch.draw_N is None:
        return None
    counts_N = batch.cu_seqlens.diff().long()
    # With output_size the host does not wait for the device.
    record_T = torch.repeat_interleave(counts_N, output_size=batch.bounds[-1])
    return batch.draw_N[record_T] + batch.position_T.int() * _PLACE


def of_changes(batch: TokenBatch) -> torch.Tensor | None:
    """Return the draw of each changed residue of variants, int32 [M], from the variant and the residue's place."""
    if batch.draw_N is None:
        return None
    assert batch.changes_4M is not None
    record_M, _, _, wild_M = batch.changes_4M
    return batch.draw_N[record_M] + batch.position_T[wild_M].int() * _PLACE


def _hashed(h: torch.Tensor) -> torch.Tensor:
    """Apply the finaliser `lowbias32` of Wellons (github.com/skeeto/hash-prospector), in place. int32 wraps around."""
    for shift, factor in ((16, _FIRST), (15, _SECOND)):
        h = h.bitwise_xor_((h >> shift) & (2 ** (32 - shift) - 1)).mul_(factor)
    return h.bitwise_xor_((h >> 16) & 0xFFFF)
