"""What a rank says of its steps, what is written of all ranks, and who is called slow or full."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import watching

from esmshard.monitor import watch as module
from esmshard.monitor.communication import CommunicationClock, length
from esmshard.monitor.watch import Numbers, Watch, spread
from esmshard.parallel.process_group import World

CPU = torch.device("cpu")


class Heard:
    """A control that has no other ranks; keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin_step(self, step: int) -> None:
        self.told.append(step)

    def note(self, phase: str) -> None:
        self.told.append(phase)

    def end_step(self, seconds: float) -> None:
        self.told.append(seconds)

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
    return Watch(torch.nn.Linear(1, 1), World(0, size, CPU, None), control or Heard(), peak)  # type: ignore[arg-type]


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
        begin = watch._clock.mark()
        clock[0] += 1.5
        watch._clock.add(begin)
        clock[0] += 1.0
    watch.wait_for_device()
    own = Numbers(*watch.numbers())
    assert got == ["a", "b"]
    assert own.residues == 1200
    assert own.ideal_s == 0.5
    assert own.gradients_s == 7.75
    assert own.data_wait_s == 2.75
    assert own.communication_s == 3.0
    assert own.busy_s == 4.75
    assert 2**20 < own.peak_memory_bytes < 2**40
    assert math.isnan(own.reserved_memory_bytes)
    assert own.allocation_retries == 0
    wait = ["waiting for data", "computing"]
    assert heard.told == [7, *wait * 3, "device"]

    watch.begin_step(8, residues=0, flops=0)
    assert watch.numbers()[:5] == [0, 0, 0, 0, 0], "nothing of the step before is left"


def rank(**changes: float) -> list[float]:
    """A row: 1.5 s of own work, 2 GB held of a device of 10 GB."""
    own: dict[str, float] = {
        "residues": 1000,
        "ideal_s": 1.0,
        "gradients_s": 2.0,
        "data_wait_s": 0.1,
        "communication_s": 0.5,
        "peak_memory_bytes": 1e9,
        "reserved_memory_bytes": 2e9,
        "memory_share": 0.2,
        "allocation_retries": 0,
    }
    return list((own | changes).values())


def test_what_is_written_of_all_ranks(clock: list[float]) -> None:
    heard = Heard()
    watch = watch_of(2, control=heard)
    watch.begin_step(1, 0, 0)
    clock[0] += 4.0
    report = watch.report(
        [
            rank(),
            rank(
                residues=2333,
                ideal_s=2.0,
                gradients_s=3.0,
                data_wait_s=0.3,
                communication_s=1.5,
                peak_memory_bytes=3e9,
                reserved_memory_bytes=4e9,
                allocation_retries=2,
            ),
        ]
    )
    assert report.line == {
        "step_s": 4.0,
        "residues_per_s": 833.2,
        "mfu": 0.375,
        "data_wait_s": 0.3,
        "communication_share": 0.25,
        "peak_memory_bytes": 3_000_000_000,
        "reserved_memory_bytes": 4_000_000_000,
        "allocation_retries": 2,
        "ranks": {
            "residues_per_s": [250.0, 583.2],
            "mfu": [0.25, 0.5],
            "busy_s": [1.5, 1.5],
            "data_wait_s": [0.1, 0.3],
            "communication_share": [0.125, 0.375],
            "peak_memory_bytes": [1_000_000_000, 3_000_000_000],
            "reserved_memory_bytes": [2_000_000_000, 4_000_000_000],
            "allocation_retries": [0, 2],
        },
    }
    assert heard.told == [1, 3.0], "the control needs the same number on all ranks"


def test_a_step_lasts_as_long_as_on_the_rank_that_began_first(clock: list[float]) -> None:
    """This rank was held up before its clock started; the other waited for it in a collective and counts that."""
    watch = watch_of(2)
    watch.begin_step(1, 0, 0)
    clock[0] += 1.0
    line = watch.report(
        [rank(gradients_s=0.75, communication_s=0.25), rank(gradients_s=2.0, communication_s=1.75)]
    ).line
    assert line["step_s"] == 2.0
    assert line["residues_per_s"] == 1000.0
    assert line["communication_share"] == 0.5
    assert line["ranks"]["communication_share"] == [0.125, 0.875]


def test_what_a_cpu_does_not_tell_is_null(clock: list[float]) -> None:
    watch = watch_of(peak=None)
    watch.begin_step(1, 10, 5.0)
    clock[0] += 2.0
    line = watch.report([watch.numbers()]).line
    assert line["mfu"] is None
    assert line["reserved_memory_bytes"] is None
    assert line["ranks"]["mfu"] == [None]
    assert line["ranks"]["reserved_memory_bytes"] == [None]
    assert line["residues_per_s"] == 5.0
    assert line["allocation_retries"] == 0


def test_many_ranks_are_written_as_their_spread() -> None:
    values = [float(n) for n in range(65)]
    values[10], values[20] = 99.0, -1.0
    assert spread(values[:64]) == values[:64]
    assert spread(values) == {"min": -1.0, "min_rank": 20, "median": 33.0, "max": 99.0, "max_rank": 10}
    assert spread([None, *values[1:]])["median"] == 33.5  # type: ignore[call-overload,index]
    nothing = {"min": None, "min_rank": None, "median": None, "max": None, "max_rank": None}
    assert spread([None] * 65) == nothing


SLOW = (
    "rank 1 (host node1) is slow, and all wait for it: a step takes {} s of its own, {} of them for data, against 1.5 "
    "s on the others; look at that machine's clocks, disk and other programs"
)


def test_a_slow_rank_is_named_once_until_it_is_well_again(clock: list[float]) -> None:
    watch = watch_of(3)
    watch.begin_step(1, 0, 0)
    clock[0] += 1.0
    good = [rank()] * 3
    bad = [rank(), rank(gradients_s=2.5, communication_s=0.1, data_wait_s=0.7), rank()]
    said = [watch.report(rows).warnings for rows in [bad] * 30]
    assert said == [[]] * 19 + [[SLOW.format(2.4, 0.7)]] + [[]] * 10
    said = [watch.report(rows).warnings for rows in [good] * 15 + [bad] * 12]
    halfway = [[SLOW.format(1.95, 0.4)]]  # in ten of the last twenty steps: the median lies between
    assert said == [[]] * 24 + halfway + [[]] * 2


def test_a_hiccup_makes_no_rank_slow(clock: list[float]) -> None:
    watch = watch_of(3)
    watch.begin_step(1, 0, 0)
    clock[0] += 1.0
    for step in range(60):
        hiccup = rank(gradients_s=50.0) if step % 5 == 0 else rank()
        assert watch.report([rank(), hiccup, rank()]).warnings == []


MEND = "lower batch.tokens_per_rank, or set parallel.activation_checkpointing"


def test_a_full_rank_is_named_once(clock: list[float]) -> None:
    watch = watch_of(3)
    watch.begin_step(1, 0, 0)
    clock[0] += 1.0
    assert watch.report([rank(), rank(memory_share=0.95), rank()]).warnings == []
    full = [rank(), rank(), rank(memory_share=0.974)]
    sentence = f"rank 2 (host node2) is full: 97% of its device's memory is in use; {MEND}"
    assert watch.report(full).warnings == [sentence]
    assert watch.report(full).warnings == []
    retried = [rank(), rank(memory_share=0.99, allocation_retries=3), full[2]]
    sentence = (
        "rank 1 (host node1) ran out of memory and had to give back and ask again, which is slow (3 times so far); "
        + MEND
    )
    assert watch.report(retried).warnings == [sentence]


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {
        "reserved_bytes.all.peak": 30,
        "reserved_bytes.all.current": 5,
        "allocated_bytes.all.peak": 20,
        "allocated_bytes.all.current": 4,
        "num_alloc_retries": 2,
        "num_ooms": 7,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=40))
    assert module._memory(torch.device("cuda", 0)) == (20, 30, 0.75, 2)


def test_time_that_intervals_share_counts_once() -> None:
    assert length([(5, 6), (0, 2), (1, 1.5), (2, 3), (5.5, 7)]) == 5
    assert length([]) == 0


def test_collectives_of_a_gpu_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time count once; events are in milliseconds, and read only when asked for."""
    device_time = iter([1000.0, 1010.0, 1020.0, 1015.0, 1030.0, 2000.0, 2100.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(device_time)

        def elapsed_time(self, other: "Event") -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = CommunicationClock(torch.device("cuda", 0))
    assert clock.mark() is None, "between steps nothing is recorded"
    clock.start()
    clock.add(clock.mark())  # 1010 to 1020
    clock.add(clock.mark())  # 1015 to 1030
    assert clock.seconds() == 0.020
    clock.add(clock.mark())
    clock.start()
    assert clock.seconds() == 0


@pytest.mark.parametrize("layout", watching.LAYOUTS)
def test_the_clock_changes_no_bit_of_a_gradient(layout: str) -> None:
    ranks = watching.runs()[1]["measured"]
    assert [ranks[n][layout]["same"] for n in range(4)] == [True] * 4
    assert [ranks[n][layout]["moved"] for n in range(4)] == [True] * 4, "not all are zero"


@pytest.mark.parametrize("layout", watching.LAYOUTS)
def test_ranks_that_sleep_are_busy_and_the_others_communicate(layout: str) -> None:
    """Rank 1 sleeps 2 x 0.2 s, then rank 2 sleeps 2 x 0.3 s; whoever does not sleep waits in a collective."""
    rows = watching.runs()[1]["measured"][0][layout]
    factor = rows["factor"]
    quiet, slow = ([Numbers(*row) for row in rows[kind]] for kind in ("quiet", "slow"))
    assert [own.residues for own in slow] == [100, 200, 300, 400]
    assert [own.ideal_s for own in slow] == [0.2] * 4
    assert all(0 < own.communication_s < own.gradients_s for own in quiet)
    for own, slept, waited in zip(slow, [0, 0.4, 0.6, 0], watching.LEAST_WAITS, strict=True):
        assert own.communication_s > waited * factor
        assert own.busy_s >= slept * factor
