"""`esmshard status`: how a run stands, also one whose processes were killed, here or on another machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import esmshard

from esmshard.errors import UsageError
from esmshard.train.records import status
from esmshard.train.records.lock import NAME, Lock
from esmshard.train.records.standing import Standing, as_json, as_text, exit_code, standings

RUNNING: dict[str, Any] = {
    "state": "running",
    "step": 200,
    "steps": 380,
    "attempt": 2,
    "message": "training",
    "checkpoint": "step_000190",
    "started": 1000.5,
    "idle": 0,
    "exit_code": None,
}


def run(out: Path, **changes: Any) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    status.write(out, **RUNNING | changes)
    return out


def held_elsewhere(out: Path) -> None:
    """A lock of another machine."""
    with Lock(out):
        fields = json.loads((out / NAME).read_text())
    (out / NAME).write_text(json.dumps(fields | {"host": "node7", "machine": "node7", "pid": 4242}))


def one(out: Path) -> Standing:
    (found,) = standings(out)
    return found


def test_a_run_of_this_machine(tmp_path: Path) -> None:
    run(tmp_path)
    with Lock(tmp_path):
        found = one(tmp_path)
        assert [found.status[key] for key in ("state", "step", "attempt")] == ["running", 200, 2]
        assert exit_code([found]) == 3
        assert found.last_seen is not None
        assert abs(found.last_seen - time.time()) < 100
        assert found.holder is not None
        assert f"(process {os.getpid()}" in found.holder
    found = one(tmp_path)  # it left without a word
    assert (found.status["state"], found.last_seen, exit_code([found])) == ("failed", None, 1)
    assert "ended without a word after step 200; go on with --resume auto" in found.status["message"]


def test_a_process_that_was_killed(tmp_path: Path) -> None:
    """As a rank under torchrun: status.json stays as it was, and so does the lock."""
    script = (
        "import sys, time; from pathlib import Path; from esmshard.train.records.lock import Lock\n"
        "with Lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    run(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert one(tmp_path).status["state"] == "running"
    process.kill()
    process.communicate()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
    found = one(tmp_path)
    assert (found.status["state"], exit_code([found])) == ("failed", 1)
    assert found.last_seen is not None, "it says when the run was last seen"
    assert found.holder is not None


def test_a_run_of_another_machine_is_believed(tmp_path: Path) -> None:
    run(tmp_path)
    held_elsewhere(tmp_path)
    found = one(tmp_path)
    assert found.status["state"] == "running"
    assert "node7" in str(found.holder)
    assert found.last_seen is not None


def test_the_last_step_is_that_of_the_metrics(tmp_path: Path) -> None:
    run(tmp_path)
    lines = [{"step": n, "lr": 1e-4, "loss": 2.0, "time": 5000.0 + n} for n in range(1, 232)]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"step": 231, "split": "valid", "time": 6000.0}])
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 232, "lr"')
    with Lock(tmp_path):
        found = one(tmp_path)
    assert (found.status["step"], found.last_step) == (231, 5231.0)
    assert one(tmp_path).status["step"] == 200, "what came after the checkpoint is lost"
    assert as_text([found], now=5231.0 + 300).splitlines()[2:4] == [
        "  step        231 of 380, done 5 min ago",
        "  attempt     2, begun 76 min ago",
    ]


def test_several_runs_and_their_exit_code(tmp_path: Path) -> None:
    run(tmp_path / "seed-0", state="done", exit_code=0)
    run(tmp_path / "seed-1", state="preempted", exit_code=75)
    found = standings(tmp_path)
    assert [(Path(s.run).name, s.status["state"]) for s in found] == [("seed-0", "done"), ("seed-1", "preempted")]
    assert exit_code(found) == 75
    assert as_text(found).splitlines() == [
        "seed-0  done       step 200 of 380",
        "seed-1  preempted  step 200 of 380",
    ]
    run(tmp_path / "seed-2")
    assert exit_code(standings(tmp_path)) == 1
    assert json.loads(as_json(standings(tmp_path)))["state"] == "failed"
    with Lock(tmp_path / "seed-2"):
        assert exit_code(standings(tmp_path)) == 3


def test_where_no_run_has_begun(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run has begun there"):
        standings(tmp_path / "nowhere")


def test_the_command(tmp_path: Path) -> None:
    run(tmp_path, state="done", exit_code=0, message="trained and evaluated")
    done = esmshard("status", tmp_path)
    assert (done.returncode, done.stdout.splitlines()[1]) == (0, "  state       done: trained and evaluated")
    run(tmp_path)
    found = esmshard("status", tmp_path, "--json")
    assert found.returncode == 1
    assert json.loads(found.stdout)["runs"][0]["state"] == "failed"
    none = esmshard("status", tmp_path / "nowhere")
    assert none.returncode == 2
    assert none.stderr.startswith("error: ")
    assert len(none.stderr.splitlines()) == 1
