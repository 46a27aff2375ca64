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


def test_types_are_what_embedding_and_attention_want(batch: TokenBatch) -> None:
    types = (batch.tokens_T.dtype, batch.position_T.dtype, batch.cu_seqlens.dtype)
    assert types == (torch.int64, torch.int64, torch.int32)
    assert all(type(b) is int for b in batch.bounds)


def test_lengths_count_residues_only(batch: TokenBatch) -> None:
    assert len(batch) == 3
    assert batch.lengths == [2, 1, 3]
    assert batch.n_residues == 6


def test_residues_are_views_without_cls_and_eos(batch: TokenBatch) -> None:
    assert [r.tolist() for r in batch.residues(batch.tokens_T)] == [[20, 15], [11], [5, 6, 7]]
    x_TD = torch.arange(24.0).reshape(12, 2)
    parts = batch.residues(x_TD)
    assert [p.tolist() for p in parts] == [[[2, 3], [4, 5]], [[10, 11]], [[16, 17], [18, 19], [20, 21]]]
    parts[1].zero_()
    assert x_TD[5].tolist() == [0, 0]
    assert x_TD.count_nonzero() == 21


def test_another_device_gets_the_tensors_and_everything_else(batch: TokenBatch) -> None:
    moved = batch.to(torch.device("meta"))
    for mine, theirs in (
        (batch.tokens_T, moved.tokens_T),
        (batch.position_T, moved.position_T),
        (batch.cu_seqlens, moved.cu_seqlens),
    ):
        assert theirs.device.type == "meta"
        assert (theirs.dtype, theirs.shape) == (mine.dtype, mine.shape)
    assert (moved.max_seqlen, moved.record_ids, moved.bounds) == (batch.max_seqlen, batch.record_ids, batch.bounds)
    same = batch.to(torch.device("cpu"))
    assert torch.equal(same.tokens_T, batch.tokens_T)
    assert torch.equal(same.position_T, batch.position_T)
    assert torch.equal(same.cu_seqlens, batch.cu_seqlens)


def test_records_are_numbered_where_they_have_no_ids() -> None:
    assert pack([encode("M"), encode("K")]).record_ids == ("0", "1")


def test_no_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        pack([])


@pytest.mark.parametrize("tokens", [[], [0, 2], [20, 15, 2], [0, 20, 15], [2, 20, 0]])
def test_what_is_not_cls_residues_eos_is_refused_by_its_number(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="sequence 1 of the batch is not <cls> residues <eos>"):
        pack([encode("MK"), np.array(tokens, dtype=np.uint8)])


def test_ids_and_sequences_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="ids for 1 of 2"):
        pack([encode("MK"), encode("T")], ["a"])
