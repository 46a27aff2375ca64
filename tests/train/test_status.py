"""`status.json`: written whole, read with the eyes of somebody who knows that runs get killed."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from esmshard.errors import InputError
from esmshard.files import replace_text
from esmshard.train.records.lock import NAME, Lock
from esmshard.train.records.status import Status, begun_by_this_launch, mark_failed, read, write

RUNNING: dict[str, Any] = {
    "state": "running",
    "step": 200,
    "steps": 380,
    "attempt": 2,
    "idle": 1,
    "message": "training",
    "checkpoint": "step_000190",
    "started": 1000.5,
    "exit_code": None,
}


def found(out: Path) -> Status:
    status = read(out)
    assert status is not None
    return status


def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESMSHARD_JOB_ID", "17")
    before = time.time()
    with Lock(tmp_path):
        write(tmp_path, **RUNNING)
        text = json.loads((tmp_path / "status.json").read_text())
        assert before <= text.pop("updated") <= time.time()
        assert text == RUNNING | {"job": "17", "launch": None, "host": socket.gethostname()}
        write(tmp_path, **RUNNING | {"state": "preempted", "exit_code": 75, "checkpoint": None})
        assert (found(tmp_path)["state"], found(tmp_path)["exit_code"]) == ("preempted", 75)
    assert found(tmp_path)["state"] == "preempted"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_run_that_never_began_has_none(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    mark_failed(tmp_path, "killed")
    assert list(tmp_path.iterdir()) == []


def test_running_holds_as_long_as_the_lock(tmp_path: Path) -> None:
    with Lock(tmp_path):
        write(tmp_path, **RUNNING)
        assert found(tmp_path) | {"updated": 0.0} == RUNNING | {
            "exit_code": None,
            "job": None,
            "launch": None,
            "host": socket.gethostname(),
            "updated": 0.0,
        }
    assert found(tmp_path)["state"] == "failed"
    assert found(tmp_path)["message"] == "the run ended without a word after step 200; go on with --resume auto"
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"  # reading writes nothing


def test_running_after_a_kill_is_failed(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        Lock(tmp_path).__enter__()
        write(tmp_path, **RUNNING)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert found(tmp_path)["state"] == "failed"


def test_running_on_another_machine_is_believed(tmp_path: Path) -> None:
    with Lock(tmp_path):
        write(tmp_path, **RUNNING)
        text = (tmp_path / NAME).read_text()
    fields = json.loads(text) | {"machine": "other", "pid": 2**22}
    (tmp_path / NAME).write_text(json.dumps(fields))
    assert found(tmp_path)["state"] == "running"


@pytest.mark.parametrize("state", ["preempted", "done", "failed"])
def test_a_last_word_stays(tmp_path: Path, state: str) -> None:
    write(tmp_path, **RUNNING | {"state": state, "exit_code": 75})
    before = (tmp_path / "status.json").read_bytes()
    assert found(tmp_path)["state"] == state  # though nobody holds the directory
    mark_failed(tmp_path, "killed")
    assert (tmp_path / "status.json").read_bytes() == before


def test_a_launcher_speaks_for_killed_processes(tmp_path: Path) -> None:
    write(tmp_path, **RUNNING)
    old = json.loads((tmp_path / "status.json").read_text()) | {"updated": 5.0}
    (tmp_path / "status.json").write_text(json.dumps(old))
    before = time.time()
    mark_failed(tmp_path, "rank 0 was ended by SIGKILL", 137)
    new = json.loads((tmp_path / "status.json").read_text())
    assert before <= new["updated"] <= time.time()
    assert new == old | {
        "state": "failed",
        "exit_code": 137,
        "message": "rank 0 was ended by SIGKILL",
        "updated": new["updated"],
    }


@pytest.mark.parametrize("text", ["", '{"state": "runn', "[]", '{"state": "running"}', "\0\0"])
def test_a_damaged_one_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(InputError, match=r"status.json: damaged; remove it"):
        read(tmp_path)


def test_text_is_replaced_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_text(path, "old, and longer")
    seen = []

    def broken(handle: int) -> None:
        seen.append((path.read_text(), (tmp_path / ".tmp-file").read_text()))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "new")
    assert seen == [("old, and longer", "new")]  # on the disk before it takes the name
    assert path.read_text() == "old, and longer"
    monkeypatch.undo()
    replace_text(path, "newer")
    assert path.read_text() == "newer"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_another_launcher_left_is_not_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not begun_by_this_launch(tmp_path)
    write(tmp_path, **RUNNING)
    assert not begun_by_this_launch(tmp_path), "no launcher is not the same launcher"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert not begun_by_this_launch(tmp_path)
    write(tmp_path, **RUNNING)
    assert begun_by_this_launch(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    assert not begun_by_this_launch(tmp_path)
