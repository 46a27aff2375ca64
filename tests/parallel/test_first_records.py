"""Two ranks that would learn from the same records are stopped."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from esmshard.data.batching.loader import Example, digests
from esmshard.data.batching.packing import MicroBatch
from esmshard.errors import InputError
from esmshard.parallel.process_group import World
from esmshard.parallel.watch import check_first_batch

IDS = ("a", "b", "c", "twin1", "twin2", "e", "same", "same")
TOKENS = ([5], [6], [7], [8, 9], [8, 9], [10], [11], [11])
"""Record 4 is record 3 under another id, and records 6 and 7 are one record twice."""


def get(n: int, epoch: int | None = None) -> Example:
    assert epoch in (None, 7)
    if n == 1:
        raise InputError(f"record {n} is broken")
    return Example(IDS[n], np.array([0, *TOKENS[n], 2], np.uint8), {})


def stopped(*shares: list[MicroBatch]) -> str | None:
    """The error that every rank raises, or None."""
    data: Any = SimpleNamespace(get=get)
    known = [digests(data, share, 7) for share in shares]
    ranks: Any = SimpleNamespace(together=1, agree=lambda function: function(), gather=lambda value: known)
    try:
        check_first_batch(ranks, partial(digests, data, shares[0], 7))
    except InputError as error:
        return str(error) if error.shared else "each rank prints it"
    return None


def test_shares_may_not_overlap_and_dummies_count_for_nothing() -> None:
    two, dummy = MicroBatch((2,), False), MicroBatch((0,), True)
    for shares in (
        [[MicroBatch((0, 2), False)], [MicroBatch((3,), False)], [MicroBatch((4, 5), False)]],  # twins are two records
        [[MicroBatch((0,), False)], [dummy], [dummy]],
        [[two], [MicroBatch((3,), False), MicroBatch((2,), True)]],
    ):
        assert stopped(*shares) is None
    message = stopped([MicroBatch((5, 2), False)], [MicroBatch((5, 2), False)])
    assert str(message).startswith("ranks 0 and 1 would train on the same records (first: 'e')")
    assert stopped([MicroBatch((0,), False), two], [dummy, two]) is not None


def test_a_record_that_cannot_be_read_is_every_ranks_error() -> None:
    one, data = World(0, 1, torch.device("cpu"), None), SimpleNamespace(get=get)
    with pytest.raises(InputError, match="record 1 is broken") as caught:
        check_first_batch(one, partial(digests, data, [MicroBatch((0, 1), False)], 7))  # type: ignore[arg-type]
    assert caught.value.shared
