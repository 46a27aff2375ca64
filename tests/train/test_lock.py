"""The lock of a run directory: refused, taken over, lost, and raced for."""

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from esmshard.errors import InputError
from esmshard.parallel.launch import LAUNCH
from esmshard.train.run_dir import LOCK, Holder, Lock, abandoned, holder, process_start


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("ESMSHARD_", "SLURM_", "TORCHELASTIC_", LAUNCH)):
            monkeypatch.delenv(name)


def write(out: Path, **changes: Any) -> None:
    """A lock as the run of another machine leaves it, unless changed."""
    fields = {"host": "node7", "namespace": "pid:[1]", "pid": 4242, "process_start": "100", "job": "17"}
    (out / LOCK).write_text(json.dumps(fields | {"since": "2025-11-21 10:00:00"} | changes))


HERE = {key: getattr(Holder.here(), key) for key in ("host", "namespace")}
MYSELF = {**HERE, "pid": os.getpid(), "process_start": process_start(os.getpid())}


def refusal(out: Path) -> str:
    with pytest.raises(InputError) as caught, Lock(out):
        pass
    return str(caught.value)


def test_a_live_process_keeps_the_lock_and_a_killed_one_loses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ESMSHARD_JOB_ID", "17")
    out = tmp_path / "runs" / "one"
    with Lock(out) as held:
        text = json.loads((out / LOCK).read_text())
        assert (text["pid"], text["host"], text["job"]) == (os.getpid(), socket.gethostname(), "17")
        held.check()
        message = refusal(out)  # of the same job, too
        assert f"process {os.getpid()} on {socket.gethostname()}, job 17, " in message
        assert "which is still running" in message
        assert "--take-over" not in message
        assert not abandoned(out)
    assert list(out.iterdir()) == []
    assert abandoned(out)
    child = os.fork()
    if not child:
        Lock(out).__enter__()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert abandoned(out)
    monkeypatch.setenv("ESMSHARD_JOB_ID", "18")
    with Lock(out) as held:
        held.check()
        assert not abandoned(out)
    assert f"process {child} on" in (err := capsys.readouterr().err)
    assert "taken over: its process is gone" in err
    assert list(out.iterdir()) == []


def test_a_run_of_another_machine_is_followed_by_its_job_or_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    assert not abandoned(tmp_path)
    assert "held by process 4242 on node7, job 17" in (message := refusal(tmp_path))
    assert "pass --take-over" in message
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with Lock(tmp_path):
        assert "taken over: an earlier start of this job" in capsys.readouterr().err
    write(tmp_path, job=None)
    with Lock(tmp_path, take_over=True):
        assert "taken over: --take-over" in capsys.readouterr().err


def test_ids_of_processes_are_told_apart(tmp_path: Path) -> None:
    """An id of another boot or container says nothing. A later process with the same id is another process."""
    boot, place = HERE["namespace"].split()
    for namespace in (f"other {place}", f"{boot} pid:[1]"):
        write(tmp_path, host=socket.gethostname(), namespace=namespace, pid=2**22)
        assert "--take-over" in refusal(tmp_path)
    write(tmp_path, **HERE, pid=os.getppid(), process_start="1")
    assert process_start(os.getppid()) not in (None, "1")
    with Lock(tmp_path):
        pass


def test_a_process_that_the_system_hides_may_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/proc` mounted with `hidepid` does not show the processes of other users."""
    write(tmp_path, **MYSELF)

    def hidden(*_: Any, **__: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr("esmshard.train.run_dir._namespace", lambda: HERE["namespace"])
    with monkeypatch.context() as hides:
        hides.setattr(Path, "read_text", hidden)
        assert not abandoned(tmp_path)
        assert "pass --take-over" in refusal(tmp_path)


def test_a_damaged_lock_is_left_to_the_user(tmp_path: Path) -> None:
    for text in (b"", b'{"host": "aa", "pi', b"[1, 2]", b"\xff\xfe"):
        (tmp_path / LOCK).write_bytes(text)
        os.utime(tmp_path / LOCK, (1000, 1000))
        assert holder(tmp_path) is None
        assert not abandoned(tmp_path)
        assert "an unknown run (lock.json is damaged)" in refusal(tmp_path)
    with Lock(tmp_path, take_over=True) as held:
        held.check()
    (tmp_path / LOCK).write_bytes(b"")  # a lock that is being written is not damaged
    writer = threading.Timer(0.1, write, (tmp_path,), MYSELF)
    writer.start()
    assert "still running" in refusal(tmp_path)
    writer.join()


def test_a_run_learns_that_it_lost_its_lock(tmp_path: Path) -> None:
    with Lock(tmp_path) as old:
        write(tmp_path)
        with pytest.raises(InputError, match=r"another run took over .*node7.*; this run stops without saving"):
            old.check()
    assert holder(tmp_path) is not None, "the lock of the other run stays"
    (tmp_path / LOCK).unlink()
    with pytest.raises(InputError, match=r"the lock was removed"):
        old.check()


def test_of_several_processes_one_gets_the_lock_of_a_dead_one(tmp_path: Path) -> None:
    """All start at once; the one that holds it waits until the others have been refused."""
    out, refused = tmp_path / "run", tmp_path / "refused"
    out.mkdir()
    refused.mkdir()
    write(out, **HERE, pid=2**22, process_start="1")
    children = []
    for k in range(3):
        if not (child := os.fork()):
            code = 1
            try:
                with Lock(out) as held:
                    while len(list(refused.iterdir())) < 2:
                        held.check()
                        time.sleep(0.01)
                    code = 0
            except InputError:
                (refused / str(k)).touch()
                code = 3
            finally:
                os._exit(code)
        children.append(child)
    assert sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children) == [0, 3, 3]
    assert list(out.iterdir()) == []


def test_a_lock_that_another_run_took_meanwhile_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at a dead run's lock and its removal another run has taken it over."""
    write(tmp_path, **HERE, pid=2**22, process_start="1")
    rename = Path.rename

    def late(path: Path, target: Path) -> Path:
        monkeypatch.undo()
        write(tmp_path, **MYSELF)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    assert "still running" in refusal(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
