"""`esmshard status`: how a run stands, also one whose processes were killed, here or on another machine."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command import esmshard

from esmshard.errors import UsageError
from esmshard.train.records import lease, status
from esmshard.train.records.lease import Lease
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


def held(out: Path, beats: int = 0, beat: float = 0.1, **changes: Any) -> None:
    """A lease of another machine, unless changed."""
    node = {"nonce": "a" * 32, "host": "node7", "machine": "node7", "pid": 4242}
    holder = lease._myself(beat).model_copy(update=node | {"beats": beats} | changes)
    work = out / ".work"
    work.write_text(holder.model_dump_json())
    work.replace(out / "lease-1.json")


@contextmanager
def beating(out: Path) -> Iterator[None]:
    stop = threading.Event()

    def beat() -> None:
        beats = 0
        while not stop.wait(0.02):
            beats += 1
            held(out, beats, slow)

    slow = 50.0  # for a change of it is waited up to two minutes, with a look each second
    thread = threading.Thread(target=beat)
    held(out, 0, slow)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def one(out: Path) -> Standing:
    (found,) = standings(out)
    return found


def test_a_run_of_this_machine(tmp_path: Path) -> None:
    run(tmp_path)
    with Lease(tmp_path, lambda message: None, beat=1000.0):
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
    """As a rank under torchrun: status.json stays as it was, and so does the lease."""
    script = (
        "import sys, time; from pathlib import Path; from esmshard.train.records.lease import Lease\n"
        "with Lease(Path(sys.argv[1]), print): print('held', flush=True); time.sleep(600)"
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


def test_a_run_of_another_machine_is_watched(tmp_path: Path) -> None:
    run(tmp_path)
    with beating(tmp_path):
        assert one(tmp_path).status["state"] == "running"
    held(tmp_path, 99)
    found = one(tmp_path)
    assert found.status["state"] == "failed"
    assert "node7" in str(found.holder)


def test_one_that_ends_while_it_is_watched_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(out: Path) -> None:
        run(out, state="done", exit_code=0, message="trained and evaluated")

    monkeypatch.setattr(lease, "watched", watched)
    assert one(run(tmp_path)).status["state"] == "done"


def test_the_last_step_is_that_of_the_metrics(tmp_path: Path) -> None:
    run(tmp_path)
    lines = [{"step": n, "lr": 1e-4, "loss": 2.0, "time": 5000.0 + n} for n in range(1, 232)]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"step": 231, "split": "valid", "time": 6000.0}])
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 232, "lr"')
    with Lease(tmp_path, lambda message: None, beat=1000.0):
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
    with Lease(tmp_path / "seed-2", lambda message: None, beat=1000.0):
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
