"""The launcher: what it makes of the ways in which processes end, of signals and losses. No process is left over."""

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from esmshard.io.paths import lives
from esmshard.parallel import launch
from esmshard.parallel.launch import LAUNCH, LAUNCHER

sys.path.insert(0, str(Path(__file__).parent))
from test_preemption import ACTING, alive, wait_for, wait_until


class Launched:
    """A fork of this process, which has imported torch already, in `run_local`."""

    def __init__(
        self,
        directory: Path,
        *actions: str,
        nproc: int,
        **options: Any,
    ) -> None:
        self.directory, self.output, self.options = directory, directory / "output", options
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
            code = launch.run_local([str(ACTING), str(directory), *actions], nproc, **options)
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

    def be_late(self, *after: int) -> None:
        """The launcher has waited long enough, once it has seen the end of these processes."""
        for pid in after:
            wait_until(lambda pid=pid: not lives(pid), "the launcher to see the end of a process")
        (self.directory / "late").touch()

    def end(self) -> tuple[int, str]:
        """Exit code, and all that was said, but for torch's wonder at an address without a name.

        Where no name server answers, it may have none.
        """
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        wonder = r"^\[W.* The hostname of the client socket cannot be retrieved.*\n"
        return code, re.sub(wonder, "", self.output.read_text(), flags=re.MULTILINE)

    def pids(self) -> set[int]:
        return {int(path.read_text()) for path in self.directory.glob("begun-*")}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start processes that act; at the end none is left."""
    started: list[Launched] = []

    def start(*actions: str, nproc: int = 2, **options: float) -> Launched:
        started.append(Launched(tmp_path / str(len(started)), *actions, nproc=nproc, **options))
        return started[-1]

    yield start
    for one in started:
        if one.pid:
            one.send(signal.SIGKILL)
            one.end()
        left = [pid for pid in one.pids() if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "orphans"


KILLED = r"the process of rank {} was ended by SIGKILL \(out of memory, perhaps\)"


@pytest.mark.parametrize(
    ("actions", "code", "said"),
    [
        (["exit 0", "exit 3"], 3, ""),
        (["exit 5 last", "exit 3"], 3, ""),
        (["mistake"], 1, ""),
        (["exit 75", "exit 0"], 75, ""),
        (["exit 69", "die 9"], 137, f"error: {KILLED.format(1)}\n"),
        (["exit 70", "exit 69"], 70, "error: the process of rank 0 crashed\n"),
        (["wait", "die 11"], 139, "error: the process of rank 1 was ended by SIGSEGV\n"),
    ],
    ids=lambda value: "; ".join(value) if isinstance(value, list) else "",
)
def test_exit_codes(run: Callable[..., Launched], actions: list[str], code: int, said: str) -> None:
    ended, output = run(*actions).end()
    assert ended == code
    assert re.fullmatch(said, output), output


def test_processes_save_whatever_else_comes(run: Callable[..., Launched]) -> None:
    number = signal.SIGTERM
    job = run("train enough", "train enough")
    job.ready(0, 1)
    job.send(number)
    job.ready(0, 1, said="asked")
    job.send(signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1)
    time.sleep(0.2)  # the launcher passes them on
    (job.directory / "enough").touch()
    code, output = job.end()
    assert code == 75, output
    for rank in (0, 1):  # each signal as what it is, the first one first
        assert (job.directory / f"saved-0-{rank}").read_text() == signal.Signals(number).name


def test_one_that_was_asked_alone_takes_the_others_along(run: Callable[..., Launched]) -> None:
    job = run("train 0.3", "train 0")
    os.kill(job.ready(0, 1)[1], signal.SIGUSR1)
    assert job.end()[0] == 75
    assert (job.directory / "saved-0-0").read_text() == "SIGTERM"
    assert (job.directory / "saved-0-1").read_text() == "SIGUSR1"


def test_a_failure_beside_one_that_has_saved_is_a_failure(run: Callable[..., Launched]) -> None:
    assert run("exit 75", "exit 3 last").end()[0] == 3


def test_who_only_lost_one_that_has_saved_is_no_failure(run: Callable[..., Launched]) -> None:
    assert run("lost last", "exit 75").end()[0] == 75


def test_a_loss_beside_one_that_has_saved_does_not_end_the_others(run: Callable[..., Launched]) -> None:
    job = run("train 0", "lost-when-asked 0.3", "train 1", nproc=3)
    job.ready(0, 1, 2)
    job.send(signal.SIGTERM)
    assert job.end()[0] == 75
    assert (job.directory / "saved-0-2").is_file()


def test_a_signal_in_the_first_second(run: Callable[..., Launched]) -> None:
    job = run("wait", max_restarts=3)
    job.ready(0, 1)
    job.send(signal.SIGTERM)
    assert job.end() == (75, "")


def test_a_process_that_does_not_leave_is_killed(run: Callable[..., Launched]) -> None:
    job = run("train 0", "stubborn", max_restarts=1)
    quick, stubborn = job.ready(0, 1)
    job.send(signal.SIGTERM)
    job.ready(1, said="asked")
    wait_until(lambda: not lives(quick), "the launcher to see the end of rank 0")
    assert alive(stubborn), "it has 700 s"
    job.be_late()
    assert job.end() == (
        1,
        "stopped by SIGTERM\nerror: 1 processes did not leave within 700 s of SIGTERM, and had to be killed\n",
    )
    assert (job.directory / "saved-0-0").is_file()


def test_interrupted_twice(run: Callable[..., Launched]) -> None:
    job = run("stubborn")
    job.ready(0, 1)
    job.send(signal.SIGINT)
    job.ready(0, 1, said="asked")
    job.send(signal.SIGINT)
    assert job.end() == (130, "")


def test_hung_up(run: Callable[..., Launched]) -> None:
    job = run("wait")
    job.ready(0, 1)
    job.send(signal.SIGHUP)
    assert job.end() == (129, "")


def test_the_launcher_is_killed(run: Callable[..., Launched]) -> None:
    job = run("train 0.1")
    pids = job.ready(0, 1)
    job.send(signal.SIGKILL)
    job.end()
    wait_until(lambda: not any(map(alive, pids)), "the end of the ranks")
    assert all((job.directory / f"saved-0-{rank}").read_text() == "SIGTERM" for rank in (0, 1))


def test_killed_twice_and_brought_back_twice(run: Callable[..., Launched]) -> None:
    code, output = run("wait", "die 9", "exit 70", "wait", "exit 0", max_restarts=2).end()
    lines = [f"{KILLED.format(1)}; restart 1 of 2", "the process of rank 0 crashed; restart 2 of 2"]
    assert re.fullmatch("".join(f"{line}\n" for line in lines), output), output
    assert code == 0


def test_killed_once_too_often(run: Callable[..., Launched]) -> None:
    code, output = run(*3 * ["wait", "die 9"], max_restarts=2).end()
    lines = [f"{KILLED.format(1)}; restart 1 of 2", f"{KILLED.format(1)}; restart 2 of 2", f"error: {KILLED.format(1)}"]
    assert re.fullmatch("".join(f"{line}\n" for line in lines), output), output
    assert code == 137


def test_who_lost_another_is_brought_back_but_is_not_the_cause(run: Callable[..., Launched]) -> None:
    code, output = run("lost", "exit 70 last", "exit 0", max_restarts=1).end()
    assert (code, output) == (0, "the process of rank 1 crashed; restart 1 of 1\n")


def test_rank_0_has_time_to_say_what_is_wrong(run: Callable[..., Launched]) -> None:
    job = run("exit 2 1.5", "exit 2")
    assert job.end()[0] == 2
    assert (job.directory / "left-0-0").is_file(), "it was not killed before its own end"


@pytest.mark.parametrize("action", ["mistake", "exit 75"])
def test_some_ends_are_final(run: Callable[..., Launched], action: str) -> None:
    code, output = run(action, "exit 0", max_restarts=3).end()
    assert (code, output) == (1 if action == "mistake" else int(action.split()[1]), "")


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch.cpu_limits, "cores", lambda: 8)
    for threads, expected in ((None, "4"), ("3", "3")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if threads:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        before = dict(os.environ)
        script = f"import os; open(r'{tmp_path}/' + os.environ['RANK'], 'w').write(os.environ['OMP_NUM_THREADS'])"
        assert launch.run_local(["-c", script], 2) == 0
        assert [(tmp_path / rank).read_text() for rank in "01"] == [expected, expected]
        assert dict(os.environ) == before
        assert not {LAUNCH, LAUNCHER} & set(before)
