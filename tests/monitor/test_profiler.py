"""Where the time of a step goes: the arithmetic by hand, and real ranks with a slow loader."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import watching

from esmshard.errors import UsageError
from esmshard.monitor.profiler import Interval, Profile, Shares, intervals_of, shares, table
from esmshard.parallel.process_group import World

ONE = World(0, 1, torch.device("cpu"), None)


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([("compute", 2, 4)], Shares(10, 2, 0, 0, 0, 8)),
        ([("compute", 2, 4), ("compute", 3, 6)], Shares(10, 4, 0, 0, 0, 6)),
        ([("compute", 0, 10), ("communication", 3, 5)], Shares(10, 10, 2, 0, 0, 0)),
        ([("compute", 0, 4), ("communication", 3, 5), ("communication", 4.5, 6)], Shares(10, 4, 3, 2, 0, 4)),
        ([("communication", 0, 4), ("data", 3, 8)], Shares(10, 0, 4, 4, 4, 2)),
        ([("compute", -5, 1), ("communication", 9, 12), ("data", 20, 30)], Shares(10, 1, 1, 1, 0, 8)),
        ([], Shares(10, 0, 0, 0, 0, 10)),
    ],
)
def test_shares_of_one_step_of_ten_seconds(intervals: list[Interval], expected: Shares) -> None:
    found = shares([*intervals, ("step", 0, 10)])
    assert found == expected
    assert found.compute + found.exposed + found.data + found.other == found.step


def test_shares_are_means_over_steps_and_what_lies_between_them_is_left_out() -> None:
    steps: list[Interval] = [("step", 0, 10), ("step", 20, 24)]
    rest: list[Interval] = [("compute", 8, 22), ("communication", 11, 19), ("data", 23, 24), ("compute", 30, 31)]
    assert shares(steps + rest) == Shares(7, 2, 0, 0, 0.5, 4.5)


def event(name: str, start: float, end: float, category: str = "cpu_op", thread: int = 1) -> dict[str, Any]:
    """Complete events are in microseconds."""
    return {"ph": "X", "name": name, "cat": category, "tid": thread, "ts": start * 1e6, "dur": (end - start) * 1e6}


STEP = event("ProfilerStep#3", 0, 10, "user_annotation")


def found(*events: dict[str, Any]) -> list[Interval]:
    other = {"ph": "i", "name": "aten::add", "cat": "cpu_op", "tid": 1, "ts": 0}
    return sorted((k, round(a, 9), round(b, 9)) for k, a, b in intervals_of({"traceEvents": [other, *events]}))


def test_what_a_trace_of_the_cpu_says() -> None:
    assert found(
        STEP,
        event("esmshard: data", 0, 2, "user_annotation"),
        event("aten::stack", 1, 2),  # in the loader it is no computation
        event("aten::add", 2, 3),
        event("fsdp::chunk_cat", 4, 5),
        event("aten::mm", 4, 5, thread=2),
        event("aten::mm", 6, 7, thread=2),  # of a thread that takes no steps
        event("autograd::engine::evaluate_function: AddmmBackward0", 5, 9),
        event("torch::autograd::AccumulateGrad", 5, 9),
        event("AddmmBackward0", 5, 9),
        event("c10d::_allgather_base_", 7, 7.5),
        event("gloo:all_gather", 7.25, 8, "user_annotation", thread=3),
        event("FSDP::all_gather", 5, 9, "user_annotation"),
    ) == [
        ("communication", 7, 7.5),
        ("communication", 7.25, 8),
        ("compute", 2, 3),
        ("compute", 4, 5),
        ("data", 0, 2),
        ("step", 0, 10),
    ]


def test_what_a_trace_of_a_gpu_says() -> None:
    assert found(
        STEP,
        event("ProfilerStep#3", 0, 11, "gpu_user_annotation", 7),
        event("esmshard: data", 0, 2, "user_annotation"),
        event("esmshard: data", 0, 9, "gpu_user_annotation", 7),
        event("aten::mm", 0, 1),
        event("c10d::_allgather_base_", 0, 1),
        event("cudaLaunchKernel", 0, 1, "cuda_runtime"),
        event("sm90_xmma_gemm", 1, 4, "kernel", 7),
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 3, 6, "kernel", 20),
        event("Memcpy HtoD (Pinned -> Device)", 6, 7, "gpu_memcpy", 7),
        event("Memset (Device)", 8, 9, "gpu_memset", 7),
    ) == [
        ("communication", 3, 6),
        ("compute", 1, 4),
        ("compute", 6, 7),
        ("compute", 8, 9),
        ("data", 0, 2),
        ("step", 0, 10),
    ]


def test_the_table_has_a_line_a_rank() -> None:
    assert table([Shares(10, 6, 4, 2, 1.5, 0.5), Shares(10, 7, 3, 1, 1.23456, 0)], 3) == (
        "seconds a step over 3 steps\n"
        "rank           step        compute  communication        exposed           data          other\n"
        "   0             10              6              4              2            1.5            0.5\n"
        "   1             10              7              3              1          1.235              0"
    )


def test_no_steps_record_nothing(tmp_path: Path) -> None:
    with Profile(ONE, 0, 1, tmp_path / "profile") as profile:
        assert [profile.step_done() for _ in range(4)] == [None] * 4
    assert not (tmp_path / "profile").exists()


def test_more_steps_than_there_are_is_a_mistake(tmp_path: Path) -> None:
    says = "--profile 9 needs 11 steps, the first 2 to warm up, and 10 are left; profile fewer, or raise train.steps"
    with pytest.raises(UsageError) as caught:
        Profile(ONE, 9, 10, tmp_path)
    assert str(caught.value) == says
    Profile(ONE, 8, 10, tmp_path)


def test_a_run_that_ends_early_leaves_no_profiler_behind(tmp_path: Path) -> None:
    for _ in range(2):
        with Profile(ONE, 1, 10, tmp_path) as profile:
            profile.step_done()
    assert not list(tmp_path.iterdir())


def test_two_ranks_whose_loader_sleeps() -> None:
    folder, said = watching.runs()
    ranks = said["profiled"]
    told = [[text for text in ranks[n]["tables"] if text] for n in (0, 1)]
    assert told[0] == told[1]
    assert [text is not None for text in ranks[0]["tables"]] == [False] * 4 + [True] + [False] * 2
    for n in (0, 1):
        with gzip.open(folder / "profiled" / "profile" / f"rank_{n}.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        steps = [e["name"] for e in events if e.get("cat") == "user_annotation" and "ProfilerStep" in e["name"]]
        assert sorted(steps) == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
        line = told[0][0].split("\n")[2 + n].split()
        rank, step, compute, communication, exposed, data, other = map(float, line)
        assert rank == n
        assert 0.2 <= data < step
        assert 0 < compute < step
        assert 0 < exposed <= communication
        assert compute + exposed + data + other == pytest.approx(step, rel=0.01)
