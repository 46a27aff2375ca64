"""What asks a run to stop, with real signals; and what a process tells its launcher."""
# ruff: noqa: PT012  # where a signal interrupts is the point, so what follows it stands in the same block

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from esmshard.errors import InputError, LostProcess, UsageError
from esmshard.parallel import launch, preemption
from esmshard.parallel.preemption import Preempted, Preemption
from esmshard.train.run_dir import process_start

ACTING = Path(__file__).parent / "acting.py"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.001)  # the handler runs before the next instruction


def wait_until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 600
    while not true():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.01)


def wait_for(path: Path) -> str:
    wait_until(path.exists, path.name)
    return path.read_text()


def watchers() -> int:
    """How many threads of this process watch for signals."""
    return sum(thread.name == "preemption" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that watch for signals would end pytest itself, where it leaves late."""
    monkeypatch.setattr(preemption, "LEAVE_WITHIN", 600.0)


@pytest.fixture
def acting(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start `acting.py` with one action, and wait until it is in the middle of it."""
    started = []

    def start(action: str, **environment: str) -> "subprocess.Popen[str]":
        command = [sys.executable, str(ACTING), str(tmp_path), action]
        done = subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)
        started.append(done)
        wait_for(tmp_path / "ready-0-0")
        return done

    yield start
    for done in started:
        done.kill()
        done.communicate()


@pytest.mark.parametrize(
    ("text", "length"),
    [("230m", 13800), ("1d2h3m4s", 93784)],
)
def test_durations(text: str, length: int) -> None:
    assert preemption.seconds(text) == length


@pytest.mark.parametrize("text", ["", "90", "50m3h", "99999d"])
def test_no_durations(text: str) -> None:
    with pytest.raises(UsageError, match=r"(?s)^--stop-after .*: a time is expected, as 3h50m, 230m or 90s$"):
        preemption.seconds(text)


def test_a_signal_stops_at_once_where_nothing_is_to_save() -> None:
    name = "SIGTERM"
    number = int(getattr(signal, name))
    with pytest.raises(Preempted, match=f"^stopped by {name}$") as stopped, Preemption() as asking:
        assert asking.asked == 0
        send(number)
        pytest.fail("went on")
    assert asking.asked == number
    assert stopped.value.exit_code == 75
    assert not isinstance(stopped.value, Exception), "no `except Exception` may take it for a failure"


def test_ten_signals_are_noted_and_the_first_one_counts() -> None:
    steps = 0
    with pytest.raises(Preempted, match=r"^stopped by SIGUSR1$"), Preemption() as asking:
        with asking.noted():
            for number in [signal.SIGUSR1] + 9 * [signal.SIGTERM]:
                send(number)
                steps += 1
        pytest.fail("after training the process has nothing to save, and goes")
    assert steps == 10
    assert preemption.reason(asking.asked) == "SIGUSR1"


def test_an_error_of_the_training_passes_and_no_signal_disturbs_it() -> None:
    with pytest.raises(InputError, match="disk full"), Preemption() as asking:
        try:
            with asking.noted():
                send(signal.SIGTERM)
                raise InputError("disk full")
        finally:
            send(signal.SIGTERM)  # while the process is leaving


def test_a_second_signal_does_not_disturb_the_way_out() -> None:
    left = []
    with pytest.raises(Preempted), Preemption():
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGUSR1)
            left.append("in peace")
    assert left == ["in peace"]


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> tuple[Any, ...]:
        signal.set_wakeup_fd(wakeup := signal.set_wakeup_fd(-1))
        handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)]
        return wakeup, handlers, watchers(), len(list(Path("/dev/fd").iterdir()))

    wait_until(lambda: not watchers(), "threads of earlier tests")
    before = found()
    monkeypatch.setenv(preemption.STOP_AT, str(time.time() + 3600))
    with Preemption():
        inside = found()
    assert not any(a == b for a, b in zip(inside, before, strict=True))
    wait_until(lambda: found() == before, "the thread, which notices that its pipe was closed")


@pytest.mark.parametrize("left", [0.5, -5])
def test_the_time_limit(tmp_path: Path, left: float) -> None:
    """Workers that are started again find that it has passed already. The signal comes wherever the process is then."""
    command = [sys.executable, str(ACTING), str(tmp_path), "idle"]
    environment = {**os.environ, preemption.STOP_AT: str(time.time() + left)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (75, "stopped by the time limit of --stop-after\n")


def test_the_time_limit_is_noted_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(preemption.STOP_AT, str(time.time() + 0.3))
    with pytest.raises(Preempted, match="the time limit"), Preemption() as asking, asking.noted():
        assert asking.asked == 0
        while not asking.asked:
            time.sleep(0.01)
        assert asking.asked == signal.SIGALRM


def test_a_forked_child_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # libraries such as Ray leave one of their own
    with pytest.raises(Preempted), Preemption() as asking:
        monkeypatch.setattr(preemption, "LEAVE_WITHIN", 0.1)
        for _ in range(30):  # it may come when the child has hardly begun
            child = os.fork()
            if child == 0:
                time.sleep(600)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        time.sleep(0.3)  # would end this process, if the child's signal had come through to its thread
        assert asking.asked == 0
        monkeypatch.setattr(preemption, "LEAVE_WITHIN", 600.0)
        send(signal.SIGTERM)  # and this process still listens
        pytest.fail("went on")
    signal.signal(signal.SIGTERM, handler)


@LINUX
def test_a_process_that_is_blocked_in_c_leaves_in_time(acting: Any) -> None:
    done = acting("blocked 0.3")
    begin = time.monotonic()
    done.terminate()
    done.terminate()
    assert done.wait(600) == 75, "it blocks for ever"
    assert time.monotonic() - begin > 0.25
    assert done.stderr.read() == "stopped by SIGTERM\n"


def test_a_run_that_failed_has_the_time_to_say_why(acting: Any) -> None:
    """srun sends SIGTERM to the others of a lost rank. It is no request to stop, and they name that rank."""
    failed = acting("fail-and-explain 0.5")
    failed.terminate()
    assert failed.wait(600) == LostProcess.exit_code
    assert failed.stderr.read() == "rank 1 is gone\n"


@LINUX
def test_a_blocked_training_is_not_ended(acting: Any) -> None:
    done = acting("blocked-in-training 0.1")
    done.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        done.wait(0.8)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_process_saves_to_the_end_whatever_comes(acting: Any, tmp_path: Path, number: int) -> None:
    done = acting("train enough")
    for _ in range(10):
        done.send_signal(number)
        wait_for(tmp_path / "asked-0-0")
    (tmp_path / "enough").touch()
    assert done.wait(600) == 75
    assert (tmp_path / "saved-0-0").read_text() == signal.Signals(number).name


PARENT = """\
import os, subprocess, sys, time
os.environ["ESMSHARD_LAUNCHER"] = str(os.getpid())
subprocess.Popen(sys.argv[1:])
time.sleep(600)
"""


@LINUX
@pytest.mark.parametrize("action", ["train 0.1", "idle"])
def test_a_process_does_not_outlive_its_launcher(tmp_path: Path, action: str) -> None:
    command = [sys.executable, "-c", PARENT, sys.executable, str(ACTING), str(tmp_path), action]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as launcher:
        pid = int(wait_for(tmp_path / "ready-0-0"))
        launcher.kill()
    try:
        wait_until(lambda: not alive(pid), "the end of an orphan")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if action != "idle":
        assert (tmp_path / "saved-0-0").read_text() == "SIGTERM"


def alive(pid: int) -> bool:
    """Whether a process has not ended; a process that has ended may not have been reaped."""
    return process_start(pid) is not None


@pytest.mark.parametrize(
    ("environ", "unsaved", "code"),
    [
        ({}, 0, 75),
        ({}, signal.SIGTERM, 75),
        ({"RANK": "0"}, 0, 75),
        ({"RANK": "0"}, signal.SIGUSR1, 75),
        ({"RANK": "0"}, signal.SIGTERM, 143),  # of srun, perhaps, because another rank has failed
        ({"RANK": "3"}, 0, 0),  # of srun, which ends all when one of them fails
        ({"RANK": "3"}, signal.SIGTERM, 0),
        ({"RANK": "3", launch.LAUNCHER: "1"}, signal.SIGTERM, 75),
        ({"RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, signal.SIGTERM, 0),
    ],
)
def test_the_exit_code_of_a_process_that_was_asked_to_stop(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], unsaved: int, code: int
) -> None:
    for name in ("RANK", launch.LAUNCHER, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert preemption.leaving_code(unsaved) == code


def test_what_comes_before_training_is_distinguished_from_what_comes_after() -> None:
    with pytest.raises(Preempted) as stop, Preemption():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert stop.value.unsaved == signal.SIGTERM
    with pytest.raises(Preempted) as stop, Preemption() as asking, asking.noted():
        os.kill(os.getpid(), signal.SIGTERM)
        assert (asking.asked, asking.unsaved) == (signal.SIGTERM, 0)
    assert stop.value.unsaved == 0
