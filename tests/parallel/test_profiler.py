"""The profile of some steps: the steps that are recorded, and what is left when a run ends early."""

import gzip
import json
import time
from pathlib import Path

import pytest
import torch

from esmshard.errors import UsageError
from esmshard.parallel.preemption import Preempted
from esmshard.parallel.process_group import World
from esmshard.parallel.watch import profiled, reading

ALONE = World(0, 1, torch.device("cpu"), None)


def test_the_trace_has_the_steps_after_the_first_two(tmp_path: Path) -> None:
    tables = []
    with profiled(ALONE, 3, 10, tmp_path / "profile") as step_done:
        for _ in range(7):
            with reading():
                time.sleep(0.01)
            torch.ones(8, 8) @ torch.ones(8, 8)
            tables.append(step_done())
    assert [table is not None for table in tables] == [False] * 4 + [True] + [False] * 2
    assert "aten::mm" in str(tables[4])
    with gzip.open(tmp_path / "profile" / "rank_0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [mark["name"] for mark in marks if "ProfilerStep" in mark["name"]]
    assert sorted(steps) == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    waits = [mark["dur"] for mark in marks if mark["name"] == "esmshard: data"]
    assert len(waits) == 3
    assert min(waits) >= 1e4, "microseconds"


def test_more_steps_than_there_are_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs 11 steps"), profiled(ALONE, 9, 10, tmp_path):
        pass


@pytest.mark.parametrize("done", [0, 4])
def test_a_run_that_is_asked_to_stop_leaves_no_part_of_a_trace(done: int, tmp_path: Path) -> None:
    def run() -> None:
        with profiled(ALONE, 3, 10, tmp_path / "profile") as step_done:
            for _ in range(done):
                step_done()
            raise Preempted("asked", 15)

    with pytest.raises(Preempted, match="asked"):
        run()
    assert not (tmp_path / "profile").exists()
