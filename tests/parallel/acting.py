"""A process that does as it is told, for the tests of signals and of the launcher. It starts without torch.

python acting.py DIRECTORY ACTION... : process of rank R takes action number R + ranks * attempt, or else the last one.
It leaves its process id in `begun-ATTEMPT-RANK`, in `ready-ATTEMPT-RANK` when it is in the middle of the action, and in
`asked-ATTEMPT-RANK` when it was signalled. No process ends by itself before all have begun. `exit CODE last` ends after
the launcher has seen the end of all others, `exit CODE asked` after a signal. `train SECONDS` saves for so long, and
`train enough` until there is a file `enough`.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from esmshard.errors import InputError, LostProcess
from esmshard.parallel import launch, preemption
from esmshard.progress import say


def main() -> None:
    directory, actions = Path(sys.argv[1]), sys.argv[2:]
    rank, ranks, attempt = (
        int(os.environ.get("RANK", "0")),
        int(os.environ.get("WORLD_SIZE", "1")),
        launch.attempt(),
    )
    name, *numbers = actions[min(rank + ranks * attempt, len(actions) - 1)].split()

    def leave(name: str) -> None:
        part = directory / f"part-{rank}"
        part.write_text(str(os.getpid()))
        part.rename(directory / f"{name}-{attempt}-{rank}")

    def ready() -> None:
        leave("ready")

    def asked() -> None:
        leave("asked")

    came: list[int] = []
    heeds = name == "stubborn" or numbers[-1:] == ["asked"]
    if name in ("exit", "stubborn", "mistake", "lost"):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, (lambda number, frame: came.append(number)) if heeds else signal.SIG_IGN)
    leave("begun")
    if name in ("exit", "die", "mistake", "lost"):
        # The launcher signals or kills the others of a process that has ended: they would never begin.
        while len(list(directory.glob(f"begun-{attempt}-*"))) < ranks:
            time.sleep(0.01)
    if numbers[-1:] == ["last"]:
        await_end([int(path.read_text()) for path in directory.glob(f"begun-{attempt}-*")])
        numbers.pop()
    if name == "exit":
        ready()
        if heeds:
            await_signal(came)
        time.sleep(float(numbers[1]) if len(numbers) > 1 and not heeds else 0)
        leave("left")
        sys.exit(int(numbers[0]))
    if name == "die":
        os.kill(os.getpid(), int(numbers[0]))
    if name in ("mistake", "lost", "lost-when-asked"):
        if name == "lost-when-asked":
            with preemption.Preemption() as asking, contextlib.suppress(preemption.Preempted):
                train(asking, ready, asked, directory / "in-vain", numbers[0])
        sys.exit(InputError.exit_code if name == "mistake" else LostProcess.exit_code)
    if name == "wait":  # as a process that has no handlers yet
        ready()
        time.sleep(600)
    if name == "stubborn":
        ready()
        await_signal(came)
        asked()
        time.sleep(600)
    preemption.LEAVE_WITHIN = 600.0
    try:
        with Heard() as asking:
            launch.follow_launcher()
            if name == "train":
                train(asking, ready, asked, directory / f"saved-{attempt}-{rank}", numbers[0])
            if name == "fail-and-explain":
                try:
                    with asking.noted():
                        raise LostProcess("rank 1 is gone")
                except LostProcess as error:
                    ready()
                    await_signal(asking)
                    time.sleep(float(numbers[0]))
                    say(str(error))
                    sys.exit(error.exit_code)
            if name in ("blocked", "blocked-in-training"):
                preemption.LEAVE_WITHIN = float(numbers[0])
                if name == "blocked":
                    block(ready)
                with asking.noted():
                    block(ready)
            ready()
            time.sleep(600)
    except preemption.Preempted as stop:
        say(str(stop))
        sys.exit(stop.exit_code)


class Heard(preemption.Preemption):
    """`heard` is set when the thread that watches for signals has seen that there is something to save."""

    def __init__(self) -> None:
        self.heard = threading.Event()
        super().__init__()

    @property
    def _noting(self) -> bool:
        noting = self._is_noting
        if threading.current_thread().name == "preemption":
            self.heard.set()
        return noting

    @_noting.setter
    def _noting(self, noting: bool) -> None:
        self._is_noting = noting


def train(
    asking: preemption.Preemption, ready: Callable[[], None], asked: Callable[[], object], saved: Path, length: str
) -> None:
    with asking.noted():
        ready()
        await_signal(asking)
        asked()
        enough, end = saved.with_name("enough"), time.monotonic() + (0 if length == "enough" else float(length))
        while time.monotonic() < end or (length == "enough" and not enough.exists()):
            time.sleep(0.01)  # a checkpoint, with more signals coming in
        saved.write_text(preemption.reason(asking.asked))


def await_signal(asked: preemption.Preemption | list[int]) -> None:
    while not (asked if isinstance(asked, list) else asked.asked):
        time.sleep(0.01)


def await_end(pids: list[int]) -> None:
    """Of all but this process."""
    while any(pid != os.getpid() and exists(pid) for pid in pids):
        time.sleep(0.01)


def exists(pid: int) -> bool:
    """Whether there is such a process: one that has ended is there until the process that started it has seen that."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def block(ready: Callable[[], None]) -> None:
    """Wait in C for what never comes: Python's handlers do not run, as in a collective without its other ranks."""
    mutex = ctypes.create_string_buffer(128)  # all zeros: PTHREAD_MUTEX_INITIALIZER on Linux
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    try:
        ready()
        lock(mutex)
    except preemption.Preempted:  # a signal came before the process was in the lock
        lock(mutex)


if __name__ == "__main__":
    main()
