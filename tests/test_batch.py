"""Packed batches."""

import numpy as np
import pytest
import torch

from esmshard.batch import pack
from esmshard.vocab import encode


def test_sequences_lie_end_to_end() -> None:
    batch = pack([encode("MK"), encode("T"), encode("AGV")], ["a", "b", "c"])
    assert batch.tokens_T.tolist() == [0, 20, 15, 2, 0, 11, 2, 0, 5, 6, 7, 2]
    assert batch.cu_seqlens.tolist() == list(batch.bounds) == [0, 4, 7, 12]
    types = (batch.tokens_T.dtype, batch.position_T.dtype, batch.cu_seqlens.dtype)
    assert types == (torch.int64, torch.int64, torch.int32)
    assert (len(batch), batch.lengths, batch.n_residues, batch.max_seqlen) == (3, [2, 1, 3], 6, 5)
    assert [r.tolist() for r in batch.residues(batch.tokens_T)] == [[20, 15], [11], [5, 6, 7]]
    moved = pack([encode("MK")], tracks=[{"3di": np.zeros(4, np.uint8)}]).to(torch.device("meta"))
    assert {x.device.type for x in (moved.tokens_T, moved.position_T, moved.cu_seqlens, moved.tracks["3di"])} == {
        "meta"
    }


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        pack([])
    with pytest.raises(ValueError, match="1 ids for 2 sequences"):
        pack([encode("M"), encode("K")], ["a"])
    for other in ([], [0, 2], [20, 15, 2], [0, 20, 15], [2, 20, 0]):
        with pytest.raises(ValueError, match="sequence 1 of the batch"):
            pack([encode("M"), np.array(other, dtype=np.uint8)])
