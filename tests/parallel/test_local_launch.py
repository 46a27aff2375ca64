"""The launcher: what it makes of the ways in which processes end, of signals and losses. No process is left over."""

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from esmshard.io.paths import lives
from esmshard.parallel import launch
from esmshard.parallel.launch import LAUNCH, LAUNCHER

sys.path.insert(0, str(Path(__file__).parent))
from test_preemption import ACTING, alive, wait_for, wait_until

KILLED = r"the process of rank 1 was ended by SIGKILL \(out of memory, perhaps\)"
TERM, INT, HUP = int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGHUP)


@pytest.mark.parametrize(
    ("ends", "killed", "signals", "code", "why", "restart"),
    [
        ({0: 0, 1: 0}, 0, [], 0, "", False),
        ({1: 3, 0: 5}, 0, [], 3, "", False),  # the first mistake, which a restart would only repeat
        ({0: 1, 1: -9}, 0, [], 1, "", False),
        ({1: 0, 0: 75}, 0, [], 75, "", False),
        ({0: 75, 1: 3}, 0, [], 3, "", False),
        ({0: 69, 1: 75}, 0, [], 75, "", False),  # it only lost one that has saved
        ({0: 69, 1: -9}, 0, [], 137, "rank 1 was ended by SIGKILL", True),
        ({0: 69, 1: 70}, 0, [], 70, "rank 1 crashed", True),
        ({1: -11, 0: -TERM}, 0, [TERM], 139, "rank 1 was ended by SIGSEGV", True),
        ({0: -TERM, 1: -TERM}, 0, [TERM], 75, "", False),  # in the first second, before there were handlers
        ({0: 75}, 1, [TERM], 1, "1 processes did not leave", False),
        ({}, 2, [INT, INT], 130, "", False),
        ({0: -HUP, 1: -HUP}, 0, [HUP], 129, "", False),
    ],
)
def test_verdicts(ends: Mapping[int, int], killed: int, signals: list[int], code: int, why: str, restart: bool) -> None:
    found = launch._verdict(ends, killed, signals, lambda rank: "")
    assert (found[0], found[2]) == (code, restart)
    assert why in found[1]
    assert bool(why) == bool(found[1])


class Scripted:
    """In place of a process: its exit codes, one for each look of the launcher, and the signals that it got."""

    pid = 0

    def __init__(self, *codes: int | None) -> None:
        self.codes, self.signals = [*codes], list[int]()

    def poll(self) -> int | None:
        return self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def wait(self, timeout: float) -> None:
        pass


def test_who_saves_is_not_killed_for_one_that_lost_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now, killed = [0.0], list[int]()  # each look takes 20 s
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: now.append(now.pop() + 20))
    monkeypatch.setattr(launch, "time", clock)
    monkeypatch.setattr(launch.os, "killpg", lambda pid, number: killed.append(number))
    processes: Any = [Scripted(None, 75), Scripted(None, None, 69), Scripted(*6 * [None], 75)]
    assert launch._watch(processes, [], lambda: False) == ({0: 75, 1: 69, 2: 75}, 0)
    assert processes[2].signals == [signal.SIGTERM]
    assert killed == []
    processes = [Scripted(75), Scripted(None)]
    assert launch._watch(processes, [INT, INT], lambda: False) == ({0: 75}, 1)
    assert killed == [signal.SIGKILL], "Ctrl-C a second time does not wait"


class Launched:
    """A fork of this process, which has imported torch already, in `run_local`."""

    def __init__(self, directory: Path, *actions: str, **options: Any) -> None:
        self.directory, self.output = directory, directory / "output"
        directory.mkdir()
        self.pid = os.fork()
        if self.pid:
            return
        code = 99
        try:
            file = os.open(self.output, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            tempfile.tempdir = str(directory)
            launch.END_TIMEOUT = 600
            launch.STOP_TIMEOUT = 700
            launch.time = self  # type: ignore[assignment]
            code = launch.run_local([str(ACTING), str(directory), *actions], 2, **options)
        finally:
            os._exit(code)

    def monotonic(self) -> float:
        """The clock of the launcher, on which all its patience is over once there is a file `late`."""
        return time.monotonic() + (1e6 if (self.directory / "late").exists() else 0)

    sleep = staticmethod(time.sleep)

    def ready(self, *ranks: int, said: str = "ready") -> list[int]:
        """Process ids of ranks that are in the middle of what they were told."""
        return [int(wait_for(self.directory / f"{said}-0-{rank}")) for rank in ranks]

    def send(self, *numbers: int) -> None:
        for number in numbers:
            os.kill(self.pid, number)
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        """Exit code, and all that was said, but for torch's wonder at an address without a name.

        Where no name server answers, it may have none.
        """
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        wonder = r"^\[W.* The hostname of the client socket cannot be retrieved.*\n"
        return code, re.sub(wonder, "", self.output.read_text(), flags=re.MULTILINE)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start two processes that act; at the end none is left."""
    started: list[Launched] = []

    def start(*actions: str, **options: float) -> Launched:
        started.append(Launched(tmp_path / str(len(started)), *actions, **options))
        return started[-1]

    yield start
    for job in started:
        if job.pid:
            job.send(signal.SIGKILL)
            job.end()
        left = [pid for pid in {int(path.read_text()) for path in job.directory.glob("begun-*")} if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "orphans"


def test_processes_save_whatever_else_comes(run: Callable[..., Launched]) -> None:
    job = run("train enough", "train enough")
    os.kill(job.ready(0, 1)[1], signal.SIGUSR1)
    job.ready(1, said="asked")
    job.send(signal.SIGTERM)
    job.ready(0, said="asked")
    job.send(signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1)
    time.sleep(0.2)  # the launcher passes them on
    (job.directory / "enough").touch()
    code, output = job.end()
    assert code == 75, output
    # Each signal as what it is, the first one first.
    assert [(job.directory / f"saved-0-{rank}").read_text() for rank in (0, 1)] == ["SIGTERM", "SIGUSR1"]


def test_a_process_that_does_not_leave_is_killed(run: Callable[..., Launched]) -> None:
    job = run("train 0", "stubborn", max_restarts=1)
    quick, stubborn = job.ready(0, 1)
    os.kill(quick, signal.SIGTERM)  # the launcher asks the other one, too
    job.ready(1, said="asked")
    wait_until(lambda: not lives(quick), "the launcher to see the end of rank 0")
    assert alive(stubborn), "it has 700 s"
    (job.directory / "late").touch()
    said = "error: 1 processes did not leave within 700 s of SIGTERM, and had to be killed\n"
    assert job.end() == (1, f"stopped by SIGTERM\n{said}")
    assert (job.directory / "saved-0-0").is_file()


def test_the_launcher_is_killed(run: Callable[..., Launched]) -> None:
    job = run("train 0.1")
    pids = job.ready(0, 1)
    job.send(signal.SIGKILL)
    job.end()
    wait_until(lambda: not any(map(alive, pids)), "the end of the ranks")
    assert all((job.directory / f"saved-0-{rank}").read_text() == "SIGTERM" for rank in (0, 1))


def test_killed_twice_and_brought_back_once(run: Callable[..., Launched]) -> None:
    code, output = run("wait", "die 9", "exit 70", "wait", "wait", "die 9", max_restarts=2).end()
    lines = [f"{KILLED}; restart 1 of 2", "the process of rank 0 crashed; restart 2 of 2", f"error: {KILLED}"]
    assert re.fullmatch("".join(f"{line}\n" for line in lines), output), output
    assert code == 137


def test_rank_0_has_time_to_say_what_is_wrong(run: Callable[..., Launched]) -> None:
    job = run("exit 2 1.5", "exit 2", max_restarts=3)
    assert job.end() == (2, "")
    assert (job.directory / "left-0-0").is_file(), "it was not killed before its own end"


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.cpu_limits, "cores", lambda: 8)
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(launch, "Popen", lambda command, env, start_new_session: seen.append(env) or Scripted(0))
    for threads, expected in ((None, "4"), ("3", "3")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if threads:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        before = dict(os.environ)
        assert launch.run_local(["-c", ""], 2) == 0
        ranks = seen[-2:]
        assert [(rank["RANK"], rank["OMP_NUM_THREADS"]) for rank in ranks] == [("0", expected), ("1", expected)]
        assert dict(os.environ) == before
        assert not {LAUNCH, LAUNCHER} & set(before)
