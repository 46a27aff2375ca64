"""A process that does as it is told, for the tests of signals and of the launcher. It starts without torch.

python acting.py DIRECTORY ACTION... : process of rank R takes action number R + ranks * attempt, or else the last one.
It leaves its process id in `begun-ATTEMPT-RANK` and, when it is in the middle of it, in `ready-ATTEMPT-RANK`. No
process ends by itself before all have begun; `exit CODE last` ends after the launcher has seen the end of all others.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from esmshard.errors import InputError, LostProcess
from esmshard.launch import preemption, process_environment
from esmshard.progress import say


def main() -> None:
    directory, actions = Path(sys.argv[1]), sys.argv[2:]
    rank, ranks, attempt = (
        int(os.environ.get("RANK", "0")),
        int(os.environ.get("WORLD_SIZE", "1")),
        process_environment.attempt(),
    )
    name, *numbers = actions[min(rank + ranks * attempt, len(actions) - 1)].split()

    def leave(name: str) -> None:
        part = directory / f"part-{rank}"
        part.write_text(str(os.getpid()))
        part.rename(directory / f"{name}-{attempt}-{rank}")

    def ready() -> None:
        leave("ready")

    if name in ("exit", "stubborn", "mistake", "lost"):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    leave("begun")
    if name in ("exit", "die", "mistake", "lost"):
        # The launcher signals or kills the others of a process that has ended: they would never begin.
        while len(list(directory.glob(f"begun-{attempt}-*"))) < ranks:
            time.sleep(0.01)
    if numbers[-1:] == ["last"]:
        others = [int(path.read_text()) for path in directory.glob(f"begun-{attempt}-*")]
        while any(pid != os.getpid() and exists(pid) for pid in others):
            time.sleep(0.01)
        numbers.pop()
    if name == "exit":
        ready()
        time.sleep(float(numbers[1]) if len(numbers) > 1 else 0)
        leave("left")
        sys.exit(int(numbers[0]))
    if name == "die":
        os.kill(os.getpid(), int(numbers[0]))
    if name in ("mistake", "lost", "lost-when-asked"):
        if name == "lost-when-asked":
            with preemption.Preemption() as asking, contextlib.suppress(preemption.Preempted):
                train(asking, ready, directory / "in-vain", float(numbers[0]))
        sys.exit(InputError.exit_code if name == "mistake" else LostProcess.exit_code)
    if name == "wait":  # as a process that has no handlers yet
        ready()
        time.sleep(600)
    if name == "stubborn":
        ready()
        time.sleep(600)
    try:
        with preemption.Preemption() as asking:
            process_environment.follow_launcher()
            if name == "train":
                train(asking, ready, directory / f"saved-{attempt}-{rank}", float(numbers[0]))
            if name == "train-and-tidy":
                preemption.LEAVE_WITHIN = 0.1
                try:
                    # The thread that watches for signals hears of this one while there is something to save.
                    train(asking, ready, directory / f"saved-{attempt}-{rank}", 1)
                finally:
                    time.sleep(float(numbers[0]))
                    leave("tidied")
            if name == "fail-and-explain":
                preemption.LEAVE_WITHIN = 0.1
                try:
                    with asking.noted():
                        raise LostProcess("rank 1 is gone")
                except LostProcess as error:
                    ready()
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


def train(asking: preemption.Preemption, ready: Callable[[], None], saved: Path, seconds: float) -> None:
    with asking.noted():
        ready()
        while not asking.asked:
            time.sleep(0.01)
        end = time.monotonic() + seconds
        while time.monotonic() < end:  # a checkpoint, with more signals coming in
            time.sleep(0.01)
        saved.write_text(preemption.reason(asking.asked))


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
    ready()
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


if __name__ == "__main__":
    main()
