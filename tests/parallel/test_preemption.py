"""What asks a run to stop, with real signals; and what a process tells its launcher."""
# ruff: noqa: PT012  # where a signal interrupts is the point, so what follows it stands in the same block

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esmshard.errors import InputError, UsageError
from esmshard.parallel import launch, preemption
from esmshard.parallel.preemption import Preempted, Preemption
from esmshard.train.run_dir import process_start

ACTING = Path(__file__).parent / "acting.py"


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


def alive(pid: int) -> bool:
    """Whether a process has not ended; a process that has ended may not have been reaped."""
    return process_start(pid) is not None


def watchers() -> int:
    """How many threads of this process watch for signals."""
    return sum(thread.name == "preemption" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that watch for signals would end pytest itself, where it leaves late."""
    monkeypatch.setattr(preemption, "LEAVE_WITHIN", 600.0)


def test_durations() -> None:
    assert preemption.seconds("230m") == 13800
    assert preemption.seconds("1d2h3m4s") == 93784
    for text in ("", "90", "50m3h", "99999d"):
        with pytest.raises(UsageError, match="--stop-after"):
            preemption.seconds(text)


def test_a_signal_stops_at_once_where_nothing_is_to_save() -> None:
    left = []
    with pytest.raises(Preempted, match=r"^stopped by SIGTERM$") as stopped, Preemption() as asking:
        assert asking.asked == 0
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGUSR1)  # a second signal does not disturb the way out
            left.append("in peace")
        pytest.fail("went on")
    assert left == ["in peace"]
    assert asking.asked == stopped.value.unsaved == signal.SIGTERM
    assert stopped.value.exit_code == 75
    assert not isinstance(stopped.value, Exception), "no `except Exception` may take it for a failure"


def test_ten_signals_are_noted_and_the_first_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "LEAVE_WITHIN", 0.1)  # for who has nothing to save
    steps = 0
    with pytest.raises(Preempted, match=r"^stopped by SIGUSR1$") as stopped, Preemption() as asking:
        with asking.noted():
            for number in [signal.SIGUSR1] + 9 * [signal.SIGTERM]:
                send(number)
                steps += 1
            assert (asking.asked, asking.unsaved) == (signal.SIGUSR1, 0)
            time.sleep(0.3)
            monkeypatch.setattr(preemption, "LEAVE_WITHIN", 600.0)
        pytest.fail("after training the process has nothing to save, and goes")
    assert (steps, stopped.value.unsaved) == (10, 0)


def test_an_error_of_the_training_passes_and_no_signal_disturbs_it() -> None:
    with pytest.raises(InputError, match="disk full"), Preemption() as asking:
        try:
            with asking.noted():
                send(signal.SIGTERM)
                raise InputError("disk full")
        finally:
            send(signal.SIGTERM)  # while the process is leaving


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


def test_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It interrupts where nothing is to save, also if it has passed already, and is noted while training."""
    for left in (0.3, -5):
        monkeypatch.setenv(preemption.STOP_AT, str(time.time() + left))
        with pytest.raises(Preempted, match=r"^stopped by the time limit of --stop-after$"), Preemption():
            time.sleep(600)
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
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        os.kill(child, signal.SIGTERM)  # it comes when the child has hardly begun
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        time.sleep(0.3)  # would end this process, if the child's signal had come through to its thread
        assert asking.asked == 0
        monkeypatch.setattr(preemption, "LEAVE_WITHIN", 600.0)
        send(signal.SIGTERM)  # and this process still listens
        pytest.fail("went on")
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_process_that_is_blocked_in_c_leaves_in_time(tmp_path: Path) -> None:
    command = [sys.executable, str(ACTING), str(tmp_path), "blocked 0.3"]
    done = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "ready-0-0")
    begin = time.monotonic()
    done.terminate()
    done.terminate()
    assert done.wait(600) == 75, "it blocks for ever"
    assert time.monotonic() - begin > 0.25
    assert done.communicate()[1] == "stopped by SIGTERM\n"


def test_the_exit_code_of_a_process_that_was_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    for environ, unsaved, code in (
        ({}, 0, 75),
        ({"RANK": "0"}, signal.SIGUSR1, 75),
        ({"RANK": "0"}, signal.SIGTERM, 143),  # of srun, perhaps, because another rank has failed
        ({"RANK": "3"}, signal.SIGTERM, 0),  # of srun, which ends all when one of them fails
        ({"RANK": "3", launch.LAUNCHER: "1"}, signal.SIGTERM, 75),
        ({"RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, signal.SIGTERM, 0),
    ):
        for name in ("RANK", launch.LAUNCHER, "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert preemption.leaving_code(unsaved) == code, environ
