"""One run at a time in a directory: refused, followed, taken over, lost; and races of many processes."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from esmshard.errors import InputError
from esmshard.launch.liveness import process_start
from esmshard.train.records import lease
from esmshard.train.records.lease import Lease, abandoned, is_lease, job_id

SLOW = 1000.0
"""A beat that no test waits for."""
WATCHED = 50.0
"""A beat for whose change is waited up to two minutes, with a look at it each second."""


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ESMSHARD_JOB_ID", "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def said() -> list[str]:
    return []


def silent(message: str) -> None:
    """Where nothing is to be said."""
    raise AssertionError(f"said: {message}")


def files(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def write(out: Path, number: int = 1, **changes: Any) -> Path:
    """A lease as another machine's run writes it, unless changed."""
    fields = {
        "nonce": "a" * 32,
        "user": "ada",
        "job": "17",
        "host": "node7",
        "machine": "node7 boot pid:[1]",
        "pid": 4242,
        "process_start": "100",
        "beat_s": 0.1,
        "since": "2025-11-21 10:00:00",
        "beats": 3,
    }
    out.mkdir(exist_ok=True)
    path, work = out / f"lease-{number}.json", out / ".work"
    work.write_text(json.dumps(fields | changes))
    return work.rename(path)


def here() -> dict[str, Any]:
    """What a run on this machine says of itself."""
    return {"host": socket.gethostname(), "machine": lease.machine()}


@contextmanager
def changing(path: Path, **changes: Any) -> Iterator[None]:
    """The holder's count moves twenty times a second."""
    stop = threading.Event()

    def move() -> None:
        beats = 3
        while not stop.wait(0.05):
            beats += 1
            write(path.parent, beats=beats, **changes)

    thread = threading.Thread(target=move)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def refusal(out: Path, say: Callable[[str], None] = silent, beat: float = SLOW) -> str:
    with pytest.raises(InputError) as caught, Lease(out, say, beat=beat):
        pass
    return str(caught.value)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_lease_lies_in_the_directory_while_it_is_held(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "one"
    before = time.time()
    with Lease(out, silent, beat=SLOW) as held:
        assert files(out) == ["lease-1.json"]
        found = json.loads((out / "lease-1.json").read_text())
        assert (found["pid"], found["host"], found["job"]) == (os.getpid(), socket.gethostname(), None)
        since = time.mktime(time.strptime(found["since"], "%Y-%m-%d %H:%M:%S"))
        assert int(before) <= since <= time.time()
        held.check()
    assert files(out) == []
    with Lease(out, silent, beat=SLOW):
        assert files(out) == ["lease-1.json"]


def test_the_count_grows_in_place(tmp_path: Path) -> None:
    path = tmp_path / "lease-1.json"
    with Lease(tmp_path, silent, beat=0.02):
        first, inode = path.read_bytes(), path.stat().st_ino
        wait_until(lambda: json.loads(path.read_text())["beats"] >= 12)
        last = path.read_bytes()
        assert len(first) == len(last)
        assert path.stat().st_ino == inode
        assert json.loads(first)["nonce"] == json.loads(last)["nonce"]


def test_two_leases_never_have_the_same_nonce(tmp_path: Path) -> None:
    with Lease(tmp_path / "a", silent, beat=SLOW), Lease(tmp_path / "b", silent, beat=SLOW):
        a, b = (json.loads((tmp_path / x / "lease-1.json").read_text())["nonce"] for x in "ab")
    assert a != b


def test_a_live_process_here_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESMSHARD_JOB_ID", "17")
    monkeypatch.setenv("LOGNAME", "ada")
    with Lease(tmp_path, silent, beat=SLOW):
        before = (tmp_path / "lease-1.json").read_bytes()
        since = json.loads(before)["since"]
        message = refusal(tmp_path)  # the same job, too: twice at once is once too often
        assert message == (
            f"{tmp_path}: held by ada on {socket.gethostname()} (process {os.getpid()}, job 17) since {since}, which "
            "is still running; wait for it, stop it, or choose another directory with out=DIR"
        )
        assert (tmp_path / "lease-1.json").read_bytes() == before
    assert files(tmp_path) == []


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_process_here_is_followed_at_once(tmp_path: Path, said: list[str], reaped: bool) -> None:
    out = tmp_path / "run"
    child = os.fork()
    if not child:
        Lease(out, silent, beat=SLOW).__enter__()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | (0 if reaped else os.WNOWAIT))
    try:
        assert files(out) == ["lease-1.json"]
        assert abandoned(out)
        with Lease(out, said.append, beat=SLOW) as held:
            assert files(out) == ["lease-2.json"]
            held.check()
            assert not abandoned(out)
        assert files(out) == []
        assert len(said) == 1
        assert f"(process {child})" in said[0]
        assert said[0].endswith(", whose process is gone; taken over")
    finally:
        if not reaped:
            os.waitpid(child, 0)


def test_another_process_under_the_same_id_is_no_sign_of_life(tmp_path: Path, said: list[str]) -> None:
    write(tmp_path, **here(), pid=os.getppid(), process_start="1")
    assert process_start(os.getppid()) not in (None, "1")
    with Lease(tmp_path, said.append, beat=SLOW):
        assert said[0].endswith(", whose process is gone; taken over")


def test_the_same_job_on_another_machine_is_followed_at_once(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    write(tmp_path, number=4)
    with Lease(tmp_path, said.append, beat=SLOW) as held:
        assert files(tmp_path) == ["lease-5.json"]
        held.check()
    assert said == [
        f"{tmp_path}: held by ada on node7 (process 4242, job 17) since 2025-11-21 10:00:00, an earlier start of this "
        "job; taken over"
    ]


@pytest.mark.parametrize("job", ["18", None])
def test_a_silent_run_of_another_machine_is_watched_and_followed(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, job: str | None
) -> None:
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    write(tmp_path, job="17" if job else None, beat_s=0.2)
    begin = time.monotonic()
    with Lease(tmp_path, said.append, beat=0.1):
        assert time.monotonic() - begin >= 0.5  # two and a half of the longer beat
        assert files(tmp_path) == ["lease-2.json"]
    assert [text.partition("10:00:00")[2] for text in said] == [
        "; watching for 0.5 s whether it gives a sign of life",
        ", which gave no sign of life for 0.5 s; taken over",
    ]


def test_the_longer_of_both_beats_is_waited_for(tmp_path: Path, said: list[str]) -> None:
    write(tmp_path, beat_s=0.01)
    begin = time.monotonic()
    with Lease(tmp_path, said.append, beat=0.2):
        assert time.monotonic() - begin >= 0.5


def test_a_live_run_of_another_machine_is_refused(tmp_path: Path, said: list[str]) -> None:
    path = write(tmp_path, beat_s=WATCHED)
    with changing(path, beat_s=WATCHED):
        message = refusal(tmp_path, said.append, beat=0.1)
    assert "held by ada on node7 (process 4242, job 17) since 2025-11-21 10:00:00, which is still running" in message
    assert "out=DIR" in message
    assert len(said) == 1
    assert files(tmp_path) == ["lease-1.json"]


def test_the_same_host_after_a_restart_is_another_machine(tmp_path: Path, said: list[str]) -> None:
    """Process ids of another boot, or of another container, say nothing."""
    write(tmp_path, host=socket.gethostname(), machine=f"{socket.gethostname()} boot", pid=2**22, beat_s=0.01)
    with Lease(tmp_path, said.append, beat=0.05):
        assert "watching" in said[0]


@pytest.mark.parametrize(
    "text", [b"", b'{"nonce": "aaaa", "us', b"\x00" * 300, b"[1, 2]", b'{"nonce": 3}', b"\xff\xfe"]
)
def test_a_damaged_lease_is_watched_and_followed(tmp_path: Path, said: list[str], text: bytes) -> None:
    (tmp_path / "lease-3.json").write_bytes(text)
    assert not abandoned(tmp_path)
    with Lease(tmp_path, said.append, beat=0.1):
        assert files(tmp_path) == ["lease-4.json"]
    who = f"{tmp_path}: held by an unknown run (lease-3.json is damaged)"
    assert said == [
        f"{who}; watching for 0.25 s whether it gives a sign of life",
        f"{who}, which gave no sign of life for 0.25 s; taken over",
    ]


def test_a_lease_that_is_just_being_written_is_no_stale_one(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "lease-1.json").write_bytes(b"")
    writer = threading.Timer(0.3, lambda: write(tmp_path, **here(), pid=os.getpid(), process_start=start))
    start = process_start(os.getpid())
    writer.start()
    assert "still running" in refusal(tmp_path, said.append, beat=WATCHED)
    writer.join()


def test_a_run_that_ends_while_it_is_watched_makes_room(tmp_path: Path, said: list[str]) -> None:
    path = write(tmp_path)
    remover = threading.Timer(0.3, path.unlink)
    remover.start()
    with Lease(tmp_path, said.append, beat=WATCHED):
        assert files(tmp_path) == ["lease-1.json"]
    assert len(said) == 1
    assert "watching" in said[0]


def test_only_the_highest_number_counts(tmp_path: Path, said: list[str]) -> None:
    """A lower one is what a run left that had lost its lease long ago."""
    with Lease(tmp_path, silent, beat=SLOW):
        (tmp_path / "lease-1.json").rename(tmp_path / "lease-10.json")
        write(tmp_path, number=9)
        assert "still running" in refusal(tmp_path)
        (tmp_path / "lease-10.json").rename(tmp_path / "lease-1.json")
        (tmp_path / "lease-9.json").unlink()


def test_a_suspended_run_learns_that_it_lost_its_lease(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESMSHARD_JOB_ID", "j")
    with Lease(tmp_path, silent, beat=0.05) as old:
        monkeypatch.setattr(lease, "machine", lambda: "elsewhere")
        with Lease(tmp_path, said.append, beat=SLOW) as new:
            wait_until(lambda: old._lost is not None)
            with pytest.raises(InputError, match=r"another run took over \(.* job j\) since .*\); this run stops"):
                old.check()
            old.__exit__(None, None, None)
            assert files(tmp_path) == ["lease-2.json"]
            new.check()
    assert files(tmp_path) == []


def test_a_check_that_comes_late_looks_at_the_files(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was stopped, and its next beat is not yet due."""
    with Lease(tmp_path, silent, beat=SLOW) as old:
        write(tmp_path, number=2)
        old.check()
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 1.9 * SLOW)
        old.check()
        monkeypatch.setattr(time, "time", lambda: now + 2.1 * SLOW)
        with pytest.raises(InputError, match="another run took over"):
            old.check()


def test_a_check_looks_once_and_not_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, real, now = [], lease._numbers, time.time()
    with Lease(tmp_path, silent, beat=SLOW) as held:
        monkeypatch.setattr(lease, "_numbers", lambda out: looked.append(out) or real(out))
        monkeypatch.setattr(time, "time", lambda: now + 3 * SLOW)
        for _ in range(5):
            held.check()
        assert len(looked) == 1


def test_a_listing_that_is_older_than_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of NFS may not see for seconds what another one has made, but cannot make it again."""
    write(tmp_path, **here(), pid=os.getpid(), process_start=process_start(os.getpid()))
    monkeypatch.setattr(lease, "_numbers", lambda out: [])
    assert "still running" in refusal(tmp_path)
    assert files(tmp_path) == ["lease-1.json"]


def test_a_removed_lease_is_lost_and_does_not_come_back(tmp_path: Path) -> None:
    with Lease(tmp_path, silent, beat=0.02) as held:
        (tmp_path / "lease-1.json").unlink()
        wait_until(lambda: held._lost is not None)
        time.sleep(0.1)
        assert files(tmp_path) == []
        with pytest.raises(InputError, match="lease of this run was removed; this run stops without saving"):
            held.check()


def test_a_stranger_under_the_same_number_keeps_its_lease(tmp_path: Path) -> None:
    with Lease(tmp_path, silent, beat=0.02) as held:
        (tmp_path / "lease-1.json").unlink()
        theirs = write(tmp_path).read_text()
        wait_until(lambda: held._lost is not None)
    assert (tmp_path / "lease-1.json").read_text() == theirs


def test_a_hiccup_of_the_file_system_is_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def broken(file: Any, text: bytes) -> None:
        raise OSError(28, "No space left on device")

    path, real = tmp_path / "lease-1.json", lease._write
    with Lease(tmp_path, silent, beat=0.5) as held:
        monkeypatch.setattr(lease, "_write", broken)
        wait = held._ended.wait
        monkeypatch.setattr(held._ended, "wait", lambda seconds: waits.append(seconds) or wait(seconds))
        wait_until(lambda: len(waits) >= 4)
        held.check()
        assert waits[1:4] == [0.1] * 3, "a write that failed is tried again sooner than at the next beat"
        monkeypatch.setattr(lease, "_write", real)
        wait_until(lambda: waits[-1] == 0.5)
        before = json.loads(path.read_text())["beats"]
        wait_until(lambda: json.loads(path.read_text())["beats"] > before)
        held.check()


def test_an_unreadable_file_system_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(out: Path) -> list[int]:
        raise OSError(5, "Input/output error")

    with Lease(tmp_path, silent, beat=0.02) as held:
        with monkeypatch.context() as patch:
            patch.setattr(lease, "_numbers", broken)
            time.sleep(0.2)
            held.check()
        held.check()
    assert files(tmp_path) == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, text: bytes) -> None:
        file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lease, "_write", full)
    assert refusal(tmp_path) == (
        f"{tmp_path}: cannot be written to (no space left on device); fix that, or choose another directory with "
        "out=DIR"
    )
    assert files(tmp_path) == []


def test_half_a_write_is_a_full_disk(tmp_path: Path) -> None:
    class Short:
        def write(self, text: bytes) -> int:
            return len(text) - 1

    with pytest.raises(OSError, match="full"):
        lease._write(Short(), b"abc")  # type: ignore[arg-type]


def test_a_path_through_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written to (not a directory)" in refusal(tmp_path / "file" / "run")


def test_a_run_that_comes_between_look_and_file_keeps_the_directory(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next number is gone when this run wants it."""
    write(tmp_path, **here(), pid=2**22)
    judge = Lease._follow

    def slow(self: Lease, path: Path) -> str | None:
        verdict = judge(self, path)
        if not rival:  # it takes over right after our look at the dead one
            rival.append(Lease(tmp_path, said.append, beat=SLOW))
            rival[0].__enter__()
        return verdict

    rival: list[Lease] = []
    monkeypatch.setattr(Lease, "_follow", slow)
    assert "still running" in refusal(tmp_path)
    assert files(tmp_path) == ["lease-2.json"]
    rival[0].check()
    rival[0].__exit__(None, None, None)
    assert len(said) == 1


def test_a_new_lease_beside_a_followed_one_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between look and file the dead lease was followed, given back, and another run began at 1 again."""
    write(tmp_path, number=4, **here(), pid=2**22)
    judge = Lease._follow

    def slow(self: Lease, path: Path) -> str | None:
        verdict = judge(self, path)
        if path.name == "lease-4.json":
            path.unlink()
            write(tmp_path, number=1, **here(), pid=os.getpid(), process_start=process_start(os.getpid()))
        return verdict

    monkeypatch.setattr(Lease, "_follow", slow)
    assert "still running" in refusal(tmp_path)
    assert files(tmp_path) == ["lease-1.json"]


def race(out: Path, processes: int, beat: float) -> tuple[int, int]:
    """Processes that want a directory at the same moment: how many hold it, how many were refused."""
    gate, finish, verdicts = os.pipe(), os.pipe(), os.pipe()
    children = []
    for _ in range(processes):
        if child := os.fork():
            children.append(child)
            continue
        try:
            os.close(gate[1])
            os.close(finish[1])
            os.read(gate[0], 1)
            try:
                with Lease(out, lambda message: None, beat=beat) as held:
                    time.sleep(3 * min(beat, 0.4))
                    held.check()
                    os.write(verdicts[1], b"h")
                    os.read(finish[0], 1)
            except InputError as error:
                os.write(verdicts[1], b"r" if "still running" in str(error) else b"l")
            os._exit(0)
        finally:
            os._exit(1)
    os.close(gate[1])  # the end of file is the shot
    found = b"".join(os.read(verdicts[0], 1) for _ in children)
    names = files(out)
    os.close(finish[1])
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * processes
    for end in (gate[0], finish[0], *verdicts):
        os.close(end)
    assert len(names) == 1
    assert files(out) == []
    return found.count(b"h"), found.count(b"r")


@pytest.mark.parametrize("before", ["nothing", "a dead process", "a silent machine", "a damaged file"])
def test_of_many_that_start_at_once_one_holds_the_directory(tmp_path: Path, before: str) -> None:
    silent_one = before in ("a silent machine", "a damaged file")
    for n in range(1 if silent_one else 3):
        out = tmp_path / str(n)
        out.mkdir()
        if before == "a damaged file":
            (out / "lease-1.json").write_bytes(b"")
        elif before != "nothing":
            write(out, **(here() if before == "a dead process" else {}), pid=2**22, beat_s=0.05)
        assert race(out, 16, 0.4 if silent_one else WATCHED) == (1, 15)


def test_what_a_job_is_called() -> None:
    assert job_id({}) is None
    assert job_id({"ESMSHARD_JOB_ID": "x", "SLURM_JOB_ID": "5"}) == "x"
    assert job_id({"SLURM_JOB_ID": "5", "TORCHELASTIC_RUN_ID": "r"}) == "5"
    assert job_id({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0"}) == "5_0"
    assert job_id({"TORCHELASTIC_RUN_ID": "r"}) == "r"
    assert job_id({"TORCHELASTIC_RUN_ID": "none"}) is None
    assert job_id({"ESMSHARD_JOB_ID": "", "TORCHELASTIC_RUN_ID": ""}) is None


def test_leases_are_told_from_results() -> None:
    assert is_lease(Path("run/lease-12.json"))
    assert not is_lease(Path("run/lease-x.json"))
    assert not is_lease(Path("run/status.json"))
    assert not is_lease(Path("run/lease-1.json.txt"))


def test_abandoned_only_where_that_is_certain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert abandoned(tmp_path / "nothing")
    assert abandoned(tmp_path)
    write(tmp_path, number=2)
    assert not abandoned(tmp_path)
    write(tmp_path, number=10, **here(), pid=2**22)
    assert abandoned(tmp_path)
    write(tmp_path, number=10, **here(), pid=os.getpid(), process_start=process_start(os.getpid()))
    assert not abandoned(tmp_path)
    monkeypatch.setattr(lease, "process_start", lambda pid: None)
    assert not abandoned(tmp_path)


def test_a_user_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.setattr(lease.getpass, "getuser", nameless)
    with Lease(tmp_path, silent, beat=SLOW):
        assert json.loads((tmp_path / "lease-1.json").read_text())["user"] == str(os.getuid())
