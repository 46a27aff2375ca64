"""A process that holds up the others is named, by all that survive, in one sentence."""

import json
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import watching

from esmshard.errors import InputError
from esmshard.monitor import stuck_ranks
from esmshard.monitor.stuck_ranks import Control, Stuck
from esmshard.parallel.process_group import World

CPU = torch.device("cpu")
HERE = r" \(host [^ )]+\)"
MEND = r"; look at that machine, then start again with --resume auto, or allow more \(parallel\.step_timeout\)"
GONE = (
    r" is gone, last heard of in step 3, computing; ended from outside \(out of memory, perhaps\): start again with .*"
)

SENTENCES = {
    "absent": rf"rank 1{HERE} did not come to step 3 within 2 s, last heard of in step 2, done{MEND}",
    "absent-at-barrier": rf"rank 2{HERE} did not come to step 3 within 2 s, last heard of in step 2, done{MEND}",
    "first-absent": rf"rank 0{HERE} did not come to step 3 within 2 s, last heard of in step 2, done{MEND}",
    "stuck-forward": rf"rank 1{HERE} is stuck in step 3, computing; the others waited 2 s for it{MEND}",
    "stuck-backward": rf"rank 3{HERE} is stuck in step 3, computing; the others waited 2 s for it{MEND}",
    "stuck-loader": rf"rank 2{HERE} is stuck in step 3, waiting for data; the others waited 2 s for it{MEND}",
    "late": rf"rank 1{HERE} is stuck in step 3, computing; the others waited 2 s for it{MEND}",
    "killed": rf"rank 1{HERE}{GONE}",
    "killed-of-six": rf"rank 1{HERE}{GONE}",
    "first-killed": rf"rank 0{HERE}{GONE}",
    "first-killed-with-store": r"rank 0 or the launcher on its machine \(127\.0\.0\.1\), or the way to it, is gone .*",
    "bad-record": rf"rank 2{HERE} ended in step 3, computing: train\.fasta:7: record 'x' is empty",
    "our-mistake": rf"rank 1{HERE} ended in step 3, computing: KeyError: 'trunk'",
    "start": rf"rank 1{HERE} did not come to step 1 within 2 s, last heard of in the start, reading weights"
    + MEND.replace("step_timeout", "start_timeout"),
}
SPEAK = {
    "first-absent": [1],
    "first-killed": [1],
    "first-killed-with-store": [1, 2],  # they have nowhere left to agree on one
}
"""Ranks that print the sentence; the first one elsewhere."""


@pytest.mark.parametrize("job", SENTENCES)
def test_all_survivors_name_the_rank(job: str) -> None:
    ranks = dict(watching.runs()[1][job])
    size = watching.JOBS[job][0]
    if job == "bad-record":
        assert ranks.pop(2)["says"] == "train.fasta:7: record 'x' is empty"
    assert len(ranks) == (size if job == "late" else size - 1)
    said = {rank["says"] for rank in ranks.values()}
    assert len(said) == 1
    assert re.fullmatch(SENTENCES[job], said.pop())
    assert [rank for rank, own in sorted(ranks.items()) if not own["shared"]] == SPEAK.get(job, [0])


@pytest.mark.parametrize("job", SENTENCES)
def test_starting_again_helps_but_after_a_users_mistake(job: str) -> None:
    assert {own["code"] for own in watching.runs()[1][job].values()} == {1 if job == "bad-record" else 69}


@pytest.mark.parametrize("job", [job for job in SENTENCES if "absent" in job or "stuck" in job or job == "start"])
def test_the_others_wait_for_the_time_out(job: str) -> None:
    assert max(own["after"] for own in watching.runs()[1][job].values()) > 2


def test_a_good_run_says_nothing() -> None:
    folder, said = watching.runs()
    assert [said["nothing"][rank]["says"] for rank in range(3)] == ["", "", ""]
    assert not (folder / "nothing" / "flight_recorder").exists()


def test_survivors_leave_the_flight_recorder() -> None:
    directory = watching.runs()[0] / "stuck-forward" / "flight_recorder"
    assert sorted(path.name for path in directory.iterdir()) == ["rank_0.json", "rank_2.json"]
    entries = json.loads((directory / "rank_2.json").read_text())["entries"]
    assert {"gloo:all_gather", "gloo:all_reduce"} <= {entry["profiling_name"] for entry in entries}


def test_the_flight_recorder_is_off_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = stuck_ranks.recorder_settings(tmp_path / "run" / "flight_recorder")
    assert settings == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/run/flight_recorder/rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    assert stuck_ranks.dump_recorder(tmp_path / "dumps", 0, CPU) is None
    assert not (tmp_path / "dumps").exists()
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    assert stuck_ranks.dump_recorder(tmp_path / "dumps", 3, CPU) == tmp_path / "dumps" / "rank_3.json"
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"nccl", raising=False)
    gpu = stuck_ranks.dump_recorder(tmp_path / "dumps", 3, torch.device("cuda"))
    assert gpu == tmp_path / "dumps" / "rank_3"
    assert gpu.read_bytes() == b"nccl"


def test_one_process_needs_no_control(tmp_path: Path) -> None:
    with Control(World(0, 1, CPU, None), start_timeout=1, step_timeout=1, dumps=tmp_path / "dumps") as control:
        control.begin_step(1)
        control.note("validating")
        control.end_step(100)
        control.begin_step(2)
        control.wait_for_device()
        assert control.host(0)
    with pytest.raises(RuntimeError, match="Timed out"), control:
        raise RuntimeError("Timed out waiting")
    assert not (tmp_path / "dumps").exists()


class Store:
    """Keys of a store that was not set up."""

    def __init__(self, **known: str) -> None:
        self.known = known

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self.known

    def get(self, key: str) -> bytes:
        return self.known[key].encode()


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Control:
    """Of rank 0 of twelve, without the others."""
    monkeypatch.setattr(stuck_ranks.distributed_c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(stuck_ranks.distributed_c10d, "PrefixStore", lambda prefix, store: Store())
    return Control(World(0, 12, CPU, None), start_timeout=300, step_timeout=60, dumps=tmp_path)


def test_a_barrier_at_the_first_step_and_every_ten_seconds(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    barriers, timeouts = [], []
    monkeypatch.setattr(
        stuck_ranks.dist, "monitored_barrier", lambda group, timeout, wait_all_ranks: barriers.append((step, timeout))
    )
    monkeypatch.setattr(control, "_set_timeouts", lambda: timeouts.append((step, control._timeout)))
    for step in range(5, 13):
        control.begin_step(step)
        control.end_step(4.0)
    assert barriers == [(5, timedelta(seconds=300)), (8, timedelta(seconds=60)), (11, timedelta(seconds=60))]
    assert timeouts == [(6, 60)], "the first step has the start's time-out"


def test_the_host_waits_for_its_device_no_longer_than_the_time_out(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(stuck_ranks.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stuck_ranks.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 0.25))
    control._wait_until(lambda: now[0] >= 299)
    assert now[0] == 299
    now[0] = 0
    with pytest.raises(Stuck, match="timed out after 300 s"):
        control._wait_until(lambda: False)
    assert now[0] == 300.25
    now[0], control._store = 0, Store(call="[3, '']")
    with pytest.raises(Stuck, match="another rank"):
        control._wait_until(lambda: False)
    assert now[0] == 1.25


def test_all_missing_ranks_are_named_and_many_are_counted(control: Control) -> None:
    control._store = Store(**{f"host/{rank}": f"node{rank // 8}" for rank in range(12) if rank != 2})
    control._store.known |= {"answer/0": "timed out", "note/1": '[4, "validating"]'}
    control._doing = (5, "computing")
    some = control._sentence(dict.fromkeys((0, 3, 4, 5, 6, 7, 8, 9, 10), 0.0), {})
    assert some.startswith(
        "rank 1 (host node0), rank 2 (host unknown), rank 11 (host node1) did not come to step 5 within 300 s, last "
        "heard of in step 4, validating; "
    )
    all_but_one = control._sentence({0: 0.0}, {})
    assert "rank 8 (host node1) and 3 more did not come" in all_but_one
    assert "rank 9" not in all_but_one


@pytest.mark.parametrize(
    ("note", "doing", "says"),
    [
        (
            [5, "done"],
            (5, "validating"),
            "rank 11 (host unknown) is stuck in step 5, done; the others waited 300 s for it;",
        ),
        (
            [4, "done"],
            (5, "computing"),
            "rank 11 (host unknown) did not come to step 5 within 300 s, last heard of in st",
        ),
        (
            [0, "reading"],
            (0, "reading"),
            "rank 11 (host unknown) did not come to the first step within 300 s, last heard",
        ),
    ],
)
def test_stuck_in_a_step_or_not_come_to_it(control: Control, note: list[object], doing: Any, says: str) -> None:
    control._store = Store(**{"answer/0": "timed out", "note/11": json.dumps(note)})
    control._doing = doing
    assert control._sentence(dict.fromkeys(range(11), 0.0), {}).startswith(says)


def test_ranks_that_lost_each_other_are_told_what_the_first_saw(control: Control) -> None:
    control._store = Store(call=json.dumps([7, "gloo: op.preamble.length <= op.nbytes"]))
    control._doing = (5, "computing")
    assert control._sentence(dict.fromkeys(range(12), 0.5), {}) == (
        "the processes lost each other in step 5, though all live (rank 7: gloo: op.preamble.length <= op.nbytes); "
        "start again with --resume auto"
    )


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("Timed out waiting 2000ms for recv operation to complete"), True),
        (RuntimeError("[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 2000 ms"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (torch.distributed.DistBackendError("remote process exited"), True),
        (Stuck("the device"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x3 and 4x2)"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (InputError("weights.pt: the download timed out"), False),
        (KeyError("gloo"), False),
    ],
)
def test_which_errors_another_rank_may_have_caused(error: BaseException, lost: bool) -> None:
    assert stuck_ranks.is_lost(error) is lost
