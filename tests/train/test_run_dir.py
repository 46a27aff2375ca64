"""status.json, metrics.jsonl, goodput and `esmshard status`, also for killed runs."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from esmshard.errors import UsageError
from esmshard.parallel.preemption import Preempted
from esmshard.train import run_dir
from esmshard.train.run_dir import EXIT_CODES, LOCK, STATUS, Attempt, Holder, Lock, cut, goodput, joint_state, standings


def run(out: Path, **changes: Any) -> Path:
    """A run directory without a lock."""
    out.mkdir(parents=True, exist_ok=True)
    facts = {"state": "running", "step": 200, "steps": 380, "attempt": 2, "message": "training"}
    facts |= {"exit_code": None, "checkpoint": "step_000190", "started": 1000.5, "job": None, "host": "h", "updated": 2}
    (out / STATUS).write_text(json.dumps(facts | changes))
    return out


def test_a_run_of_this_machine(tmp_path: Path) -> None:
    run(tmp_path)
    with Lock(tmp_path):
        (held,) = standings(tmp_path)
    assert [held[key] for key in ("state", "step", "attempt")] == ["running", 200, 2]
    assert EXIT_CODES[joint_state([held])] == 3
    assert abs(held["last_seen"] - time.time()) < 100
    assert f"process {os.getpid()}" in held["holder"]
    (ended,) = standings(tmp_path)  # the run could not write its last state
    assert (ended["state"], ended["last_seen"], EXIT_CODES[joint_state([ended])]) == ("failed", None, 1)
    assert "after step 200" in ended["message"]
    assert json.loads((tmp_path / STATUS).read_text())["state"] == "running", "reading writes nothing"
    dead = Holder.here().model_copy(update={"pid": 2**22})  # a process that was killed leaves its lock
    (tmp_path / LOCK).write_text(dead.model_dump_json())
    (killed,) = standings(tmp_path)
    assert (killed["state"], killed["holder"]) == ("failed", str(dead))
    assert killed["last_seen"] is not None


def test_several_runs_and_their_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "seed-0", state="done", exit_code=0)
    run(tmp_path / "seed-1", state="preempted", exit_code=75)
    assert EXIT_CODES[joint_state(runs := standings(tmp_path))] == 75
    assert [line.split()[1] for line in run_dir.status_text(runs).splitlines()] == ["done", "preempted"]
    monkeypatch.chdir(tmp_path / "seed-0")
    assert run_dir.status_text(standings(Path())).startswith("seed-0  done")
    run(tmp_path / "seed-2")
    assert EXIT_CODES[joint_state(standings(tmp_path))] == 1
    with Lock(tmp_path / "seed-2"):
        assert EXIT_CODES[joint_state(standings(tmp_path))] == 3
    with pytest.raises(UsageError, match="no run has begun there"):
        standings(tmp_path / "nowhere")


def test_what_an_attempt_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESMSHARD_JOB_ID", "17")
    attempt = Attempt(tmp_path, 1000.0)
    attempt.open(True, 6)
    attempt.begin(0)
    attempt.step_done({"step": 1, "loss": float("nan"), "step_s": 2.0})
    assert run_dir.read_status(tmp_path) == json.loads((tmp_path / STATUS).read_text())
    with pytest.raises(Preempted), attempt:
        raise Preempted("asked to stop")
    status: Any = run_dir.read_status(tmp_path)
    assert time.time() - status.pop("updated") < 100
    expected = {"state": "preempted", "step": 1, "steps": 6, "attempt": 1, "exit_code": 75, "message": "asked to stop"}
    assert status == expected | {"checkpoint": None, "started": 1000.0, "job": "17", "host": socket.gethostname()}
    lines = list(run_dir.metrics_of(tmp_path))
    assert [line.get("event", line.get("step")) for line in lines] == ["attempt", 1, "first_step", "end"]
    assert lines[1]["loss"] is None
    assert [*run_dir.metrics_of(tmp_path, tail=80)] == lines[-1:], "a line that is cut off is left out"
    assert not (tmp_path / LOCK).exists()
    assert run_dir.begun_by_this_job(tmp_path)
    monkeypatch.setenv("ESMSHARD_JOB_ID", "18")
    assert not run_dir.begun_by_this_job(tmp_path)
    # The launcher writes the status of killed processes.
    assert "exit code 137" in run_dir.last_word(tmp_path / "never", 137)
    run(tmp_path)
    assert "failed (exit code 137)" in run_dir.last_word(tmp_path, 137)
    status = run_dir.read_status(tmp_path)
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 137, 200)


def step(n: int, time: float, step_s: float | None = 2.0) -> dict[str, Any]:
    return {"step": n, "loss": 1.0, "step_s": step_s, "time": time}


def attempt(n: int, started: float, lost: int = 0, seconds: float = 0.0) -> dict[str, Any]:
    times = {"started": started, "time": started + 5}
    return {"event": "attempt", "attempt": n, **times, "from_step": 0, "steps_lost": lost, "seconds_lost": seconds}


def end(state: str, time: float) -> dict[str, Any]:
    return {"event": "end", "state": state, "time": time}


# An attempt that was killed in its fifth step. Its last line is from second 100.
KILLED = [
    attempt(1, 1000.0),
    step(1, 1010.0, 4.0),
    {"event": "first_step", "seconds": 10.0, "time": 1010.0},
    step(2, 1012.0, 2.0),
    {"step": 2, "split": "valid", "loss": 1.0, "time": 1015.0},
    step(3, 1050.0, 3.0),
    {"step": 3, "split": "valid", "loss": 1.0, "time": 1060.0},
    step(4, 1100.0, 5.0),
]


def test_goodput_of_an_unbroken_run_and_of_a_killed_one_that_goes_on() -> None:
    whole = goodput([*KILLED, end("done", 1120.0)])
    assert [*whole.values()] == [1, 0, 0.0, 14.0, 120.0, 14 / 120]
    assert goodput(KILLED)["allocated_s"] == 100.0, "a running attempt counts to its last line"
    kept, lost, seconds = cut(KILLED, 2)
    assert kept == [*KILLED[:5], end("killed", 1100.0)]
    assert (lost, seconds) == (2, 8.0)
    # The second attempt repeats steps 3 and 4 in 20 s, 9 of them in steps. The hour in the queue does not count.
    begun = attempt(2, 5000.0, lost, seconds)
    lines = [*kept, begun, step(3, 5011.0, 4.0), step(4, 5017.0, 5.0), end("done", 5020.0)]
    assert [*goodput(lines).values()] == [2, 2, 8.0, 15.0, 120.0, 15 / 120]
    assert run_dir.goodput_text(goodput(lines)).startswith(
        "goodput 12%: 15s of 2m00s in steps that count; 2 attempts, 2 steps"
    )


def test_lines_of_lost_steps_go_and_events_stay() -> None:
    for done, lost in ((0, 4), (1, 3), (3, 1), (4, 0), (9, 0)):
        assert cut(KILLED, done)[1] == lost
    assert cut(KILLED, 2, validated=False)[0] == [*KILLED[:4], end("killed", 1100.0)]
    once = cut(KILLED, 2)[0]
    assert cut(once, 2) == (once, 0, 0.0), "two starts in a row without an attempt"
    ended = [attempt(1, 1000.0), step(1, 1010.0), step(2, 1012.0), end("preempted", 1030.0)]
    assert cut(ended, 1)[:2] == ([ended[0], ended[1], ended[3]], 1)
    idle = [attempt(1, 100.0), attempt(2, 200.0), end("failed", 207.0)]
    kept, *lost_s = cut(idle, 0)
    assert (kept, lost_s) == ([idle[0], end("killed", 105.0), *idle[1:]], [0, 0.0])
    assert goodput(kept)["allocated_s"] == goodput(idle)["allocated_s"] == 5 + 7
