"""Packed batches."""

import numpy as np
import pytest
import torch

from esmshard.batch import TokenBatch, pack
from esmshard.vocab import encode


@pytest.fixture
def batch() -> TokenBatch:
    return pack([encode("MK"), encode("T"), encode("AGV")], ["a", "b", "c"])


def test_sequences_lie_end_to_end(batch: TokenBatch) -> None:
    assert batch.tokens_T.tolist() == [0, 20, 15, 2, 0, 11, 2, 0, 5, 6, 7, 2]
    assert batch.position_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.cu_seqlens.tolist() == list(batch.bounds) == [0, 4, 7, 12]
    assert batch.max_seqlen == 5
    assert batch.record_ids == ("a", "b", "c")
    types = (batch.tokens_T.dtype, batch.position_T.dtype, batch.cu_seqlens.dtype)
    assert types == (torch.int64, torch.int64, torch.int32)
    assert all(type(b) is int for b in batch.bounds)
    assert (len(batch), batch.lengths, batch.n_residues) == (3, [2, 1, 3], 6)
    assert pack([encode("M"), encode("K")]).record_ids == ("0", "1")


def test_residues_are_views_without_cls_and_eos(batch: TokenBatch) -> None:
    assert [r.tolist() for r in batch.residues(batch.tokens_T)] == [[20, 15], [11], [5, 6, 7]]
    x_TD = torch.arange(24.0).reshape(12, 2)
    parts = batch.residues(x_TD)
    assert [p.tolist() for p in parts] == [[[2, 3], [4, 5]], [[10, 11]], [[16, 17], [18, 19], [20, 21]]]
    parts[1].zero_()
    assert x_TD[5].tolist() == [0, 0]
    assert x_TD.count_nonzero() == 21


def test_another_device_gets_the_tensors_and_everything_else(batch: TokenBatch) -> None:
    moved, same = (batch.to(torch.device(name)) for name in ("meta", "cpu"))
    for name in ("tokens_T", "position_T", "cu_seqlens"):
        mine, theirs = getattr(batch, name), getattr(moved, name)
        assert (theirs.device.type, theirs.dtype, theirs.shape) == ("meta", mine.dtype, mine.shape)
        assert torch.equal(getattr(same, name), mine)
    assert (moved.max_seqlen, moved.record_ids, moved.bounds) == (batch.max_seqlen, batch.record_ids, batch.bounds)


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        pack([])
    with pytest.raises(ValueError, match="1 ids for 2 sequences"):
        pack([encode("M"), encode("K")], ["a"])
    for other in ([], [0, 2], [20, 15, 2], [0, 20, 15], [2, 20, 0]):
        with pytest.raises(ValueError, match="sequence 1 of the batch"):
            pack([encode("M"), np.array(other, dtype=np.uint8)])
