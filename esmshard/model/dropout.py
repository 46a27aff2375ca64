"""Dropout that is the same on any number of processes: what it leaves out follows from the record, not from the rank.

torch's own dropout draws numbers from the state of a process, in the order in which records happen to come there.
Here each number of a mask is a hash of (draw of the record, layer, place in the record, column), computed on the device
without a state: however a step is divided, resumed or computed again for the sake of memory, the mask is the same.

Letters of tensor names: see `esmshard.batch`; R stands for the rows of whatever is masked.
"""

import torch
from torch import nn

from esmshard.batch import TokenBatch

_PLACE, _LAYER, _COLUMN = 0x27D4EB2F, 0x165667B1, 0x61C88647
"""Odd factors that keep the numbers of neighbours apart before they are hashed."""
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32
"""Of the hash, as int32."""


class RecordDropout(nn.Module):
    """Sets a share of all numbers to zero while training, and scales the others up; does nothing in evaluation.

    Args:
        share: that is left out, from 0 to below 1.
        layer: number of this one among those of a head. Each draws for itself.
    """

    def __init__(self, share: float, layer: int = 0) -> None:
        super().__init__()
        self.share, self.layer = share, layer

    def forward(self, x_RF: torch.Tensor, draw_R: torch.Tensor | None) -> torch.Tensor:
        """[R, F] to [R, F].

        Args:
            x_RF: of any floating type.
            draw_R: int32 [R], from `of_tokens`, `of_changes` or `TokenBatch.draw_N`. May be None in evaluation only.
        """
        if not self.training or not self.share:
            return x_RF
        if draw_R is None:
            raise ValueError("dropout needs the draws of the records; make the batch with `collate`, for an epoch")
        row_R = _hashed(draw_R + _wrapped(self.layer * _LAYER))
        column_F = torch.arange(x_RF.shape[1], dtype=torch.int32, device=x_RF.device) * _COLUMN
        left_out_RF = _hashed(row_R[:, None] + column_F) < int(self.share * 2**32) - 2**31
        return (x_RF / (1 - self.share)).masked_fill(left_out_RF, 0.0)


def of_tokens(batch: TokenBatch) -> torch.Tensor | None:
    """The draw of each token, int32 [T]: of its record and its place there. None for a batch without draws."""
    if batch.draw_N is None:
        return None
    counts_N = batch.cu_seqlens.diff().long()
    record_T = torch.repeat_interleave(counts_N, output_size=batch.bounds[-1])  # the size given, no host waits for it
    return batch.draw_N[record_T] + batch.position_T.int() * _PLACE


def of_changes(batch: TokenBatch) -> torch.Tensor | None:
    """The draw of each changed residue of variants, int32 [M]: of the variant, and of the residue's place."""
    if batch.draw_N is None:
        return None
    assert batch.changes_4M is not None
    record_M, _, _, wild_M = batch.changes_4M
    return batch.draw_N[record_M] + batch.position_T[wild_M].int() * _PLACE


def _hashed(h: torch.Tensor) -> torch.Tensor:
    """The finaliser `lowbias32` of Wellons (github.com/skeeto/hash-prospector), in place. int32 wraps around."""
    for shift, factor in ((16, _FIRST), (15, _SECOND)):
        h = h.bitwise_xor_((h >> shift) & (2 ** (32 - shift) - 1)).mul_(factor)
    return h.bitwise_xor_((h >> 16) & 0xFFFF)


def _wrapped(number: int) -> int:
    """As an int32."""
    return (number + 2**31) % 2**32 - 2**31
