"""Two ranks that would learn from the same records are stopped, and slow ones are told from busy ones."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from esmshard.data.batching.loader import Example, digests
from esmshard.data.batching.packing import MicroBatch
from esmshard.errors import InputError
from esmshard.parallel.process_group import World
from esmshard.parallel.watch import check_first_batch


class Data:
    """Record 4 is record 3 under another id, and records 6 and 7 are one record twice."""

    ids = ("a", "b", "c", "twin1", "twin2", "e", "same", "same")
    tokens = ([5], [6], [7], [8, 9], [8, 9], [10], [11], [11])

    def __init__(self, crop: int = 0, broken: int | None = None) -> None:
        self.crop, self.broken = crop, broken
        self.epochs: set[int | None] = set()

    def get(self, n: int, epoch: int | None = None) -> Example:
        if n == self.broken:
            raise InputError(f"record {n} is broken")
        self.epochs.add(epoch)
        return Example(self.ids[n], np.array([0, *self.tokens[n], self.crop, 2], np.uint8), {})


class Played:
    """One rank; what the others say is known after each has spoken once."""

    together = 1

    def __init__(self) -> None:
        self.all: list[Any] = []

    def agree(self, function: Any) -> Any:
        return function()

    def gather(self, value: Any) -> list[Any]:
        self.own = value
        return self.all or [value]


def stopped(*shares: list[MicroBatch], data: list[Data] | None = None) -> str | None:
    """The error that every rank raises, or None."""
    data = data or [Data()] * len(shares)
    ranks = [Played() for _ in shares]
    for rank, share, held in zip(ranks, shares, data, strict=True):
        check_first_batch(rank, partial(digests, held, share, 7))  # type: ignore[arg-type]
    everyone = [rank.own for rank in ranks]
    messages = {message_of(rank, share, held, everyone) for rank, share, held in zip(ranks, shares, data, strict=True)}
    assert len(messages) == 1, "ranks disagree"
    assert all(held.epochs <= {7} for held in data)
    return messages.pop()


def message_of(rank: Played, share: list[MicroBatch], held: Data, everyone: list[Any]) -> str | None:
    rank.all = everyone
    try:
        check_first_batch(rank, partial(digests, held, share, 7))  # type: ignore[arg-type]
    except InputError as error:
        return str(error) if error.shared else "each rank prints it"
    return None


def micro(*records: int, is_dummy: bool = False) -> MicroBatch:
    return MicroBatch(records, is_dummy)


def test_own_shares_pass() -> None:
    assert stopped([micro(0, 1)], [micro(2)]) is None
    assert stopped([micro(0), micro(1)], [micro(2), micro(3)], [micro(5), micro(6)]) is None
    assert stopped([micro(0, 1, 2)]) is None


def test_the_same_share_on_two_ranks_is_one_sentence() -> None:
    message = stopped([micro(5, 1)], [micro(5, 1)])
    assert message is not None
    assert message.startswith("ranks 0 and 1 would train on the same records (first: 'e')")


def test_ghosts_count_for_nothing() -> None:
    assert stopped([micro(0)], [micro(0, is_dummy=True)], [micro(0, is_dummy=True)]) is None
    assert stopped([micro(0), micro(1)], [micro(2), micro(1, is_dummy=True)]) is None
    assert stopped([micro(0), micro(1)], [micro(0, is_dummy=True), micro(1)]) is not None


def test_a_record_that_cannot_be_read_is_every_ranks_error() -> None:
    one = World(0, 1, torch.device("cpu"), None)
    with pytest.raises(InputError, match="record 1 is broken") as caught:
        check_first_batch(one, partial(digests, Data(broken=1), [micro(0, 1)], 7))  # type: ignore[arg-type]
    assert caught.value.shared
