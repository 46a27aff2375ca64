"""What a rank says of its steps, what is written of all ranks, and who is called slow or full."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from esmshard.parallel import watch as module
from esmshard.parallel.process_group import World
from esmshard.parallel.watch import Numbers, Watch

CPU = torch.device("cpu")


class Heard:
    """A control that has no other ranks; keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def note(self, phase: str, step: int | None = None) -> None:
        self.told.append(phase if step is None else (phase, step))

    def wait_for_device(self) -> None:
        self.told.append("device")

    def host(self, rank: int) -> str:
        return f"node{rank}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as a list of one number to be changed."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def watch_of(size: int = 1, peak: float | None = None, control: Heard | None = None) -> Watch:
    return Watch(World(0, size, CPU, None), control or Heard(), peak)  # type: ignore[arg-type]


def test_what_a_rank_says_of_a_step(clock: list[float]) -> None:
    heard = Heard()
    watch = watch_of(peak=8e9, control=heard)

    def slow_batches() -> Iterator[str]:
        clock[0] += 2.0
        yield "a"
        clock[0] += 0.5
        yield "b"
        clock[0] += 0.25

    clock[0] = 50.0
    watch.begin_step(7, residues=1200, flops=4e9)
    got = []
    for batch in watch.data(slow_batches()):
        got.append(batch)
        clock[0] += 2.5
    watch.wait_for_device()
    own = Numbers(*watch.numbers())
    assert got == ["a", "b"]
    assert own.residues == 1200
    assert own.ideal_s == 0.5
    assert own.gradients_s == 7.75
    assert own.data_wait_s == 2.75
    assert 2**20 < own.peak_memory_bytes < 2**40
    assert math.isnan(own.reserved_memory_bytes)
    assert own.allocation_retries == 0
    wait = ["waiting for data", "computing"]
    assert heard.told == [("computing", 7), *wait * 3, "device", "waiting for the other ranks"]

    watch.begin_step(8, residues=0, flops=0)
    assert watch.numbers()[:4] == [0, 0, 0, 0], "nothing of the step before is left"


def rank(**changes: float) -> list[float]:
    """A row: 2 GB held of a device of 10 GB."""
    own: dict[str, float] = {
        "residues": 1000,
        "ideal_s": 1.0,
        "gradients_s": 2.0,
        "data_wait_s": 0.1,
        "peak_memory_bytes": 1e9,
        "reserved_memory_bytes": 2e9,
        "allocation_retries": 0,
    }
    return list((own | changes).values())


def test_what_is_written_of_all_ranks(clock: list[float]) -> None:
    heard = Heard()
    watch = watch_of(2, control=heard)
    watch.begin_step(1, 0, 0)
    clock[0] += 4.0
    line, _ = watch.report([rank(), [2333, 2.0, 3.0, 0.3, 3e9, 4e9, 2]])
    assert line == {
        "step_s": 4.0,
        "residues_per_s": 833.2,
        "mfu": 0.375,
        "data_wait_s": 0.3,
        "peak_memory_bytes": 3_000_000_000,
        "reserved_memory_bytes": 4_000_000_000,
        "allocation_retries": 2,
        "ranks": {
            "residues_per_s": [250.0, 583.2],
            "mfu": [0.25, 0.5],
            "data_wait_s": [0.1, 0.3],
            "peak_memory_bytes": [1_000_000_000, 3_000_000_000],
            "reserved_memory_bytes": [2_000_000_000, 4_000_000_000],
            "allocation_retries": [0, 2],
        },
    }
    assert heard.told == [("computing", 1), "done"]


def test_a_step_lasts_as_long_as_on_the_rank_that_began_first(clock: list[float]) -> None:
    """This rank was held up before its clock started; the other waited for it in a collective and counts that."""
    watch = watch_of(2)
    watch.begin_step(1, 0, 0)
    clock[0] += 1.0
    line, _ = watch.report([rank(gradients_s=0.75), rank(gradients_s=2.0)])
    assert line["step_s"] == 2.0
    assert line["residues_per_s"] == 1000.0


def test_a_rank_that_waits_for_data_is_named_once_until_it_is_well_again(clock: list[float]) -> None:
    watch = watch_of(3)
    watch.begin_step(1, 0, 0)
    clock[0] += 1.0
    good = [rank()] * 3
    bad = [rank(), rank(data_wait_s=0.7), rank()]
    warnings = [watch.report(rows)[1] for rows in [bad] * 30]
    assert [len(messages) for messages in warnings] == [0] * 19 + [1] + [0] * 10
    assert warnings[19][0].startswith("rank 1 (host node1) waits for data, and the others wait for this rank: 0.7 s ")
    warnings = [watch.report(rows)[1] for rows in [good] * 15 + [bad] * 12]
    # In ten of the last twenty steps: the median lies between.
    assert [len(messages) for messages in warnings] == [0] * 24 + [1] + [0] * 2


def test_a_rank_whose_allocator_retries_is_named_once(clock: list[float]) -> None:
    watch = watch_of(3)
    watch.begin_step(1, 0, 0)
    clock[0] += 1.0
    assert watch.report([rank()] * 3)[1] == []
    retried = [rank(), rank(allocation_retries=3), rank()]
    assert "(3 times so far)" in watch.report(retried)[1][0]
    assert watch.report(retried)[1] == []
