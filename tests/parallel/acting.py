"""A process that does as it is told, for the tests of signals and of the launcher. It starts without torch.

python acting.py DIRECTORY ACTION... : process of rank R takes action number R + ranks * attempt, or else the last one.
It leaves its process id in `begun-ATTEMPT-RANK` and, when it is in the middle of it, in `ready-ATTEMPT-RANK`.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from esmshard.errors import InputError
from esmshard.parallel import preemption, worker
from esmshard.progress import say


def main() -> None:
    directory, actions = Path(sys.argv[1]), sys.argv[2:]
    rank, ranks, attempt = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), worker.attempt()
    name, *numbers = actions[min(rank + ranks * attempt, len(actions) - 1)].split()

    def leave(name: str) -> None:
        part = directory / f"part-{rank}"
        part.write_text(str(os.getpid()))
        part.rename(directory / f"{name}-{attempt}-{rank}")

    def ready() -> None:
        leave("ready")

    leave("begun")
    if name in ("exit", "stubborn"):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        ready()
    if name == "exit":
        time.sleep(float(numbers[1]) if len(numbers) > 1 else 0)
        sys.exit(int(numbers[0]))
    if name == "die":
        # Not before all have begun: the others are killed with the first one.
        while len(list(directory.glob(f"begun-{attempt}-*"))) < ranks:
            time.sleep(0.01)
        os.kill(os.getpid(), int(numbers[0]))
    if name in ("mistake", "lost", "lost-when-asked"):
        if name == "lost-when-asked":
            with preemption.Preemption() as asking, contextlib.suppress(preemption.Preempted):
                train(asking, ready, directory / "in-vain", float(numbers[0]))
        elif numbers:
            time.sleep(float(numbers[0]))
        error = InputError(name)
        error.transient = name != "mistake"
        worker.tell_launcher(error)
        sys.exit(error.exit_code)
    if name == "wait":  # as a process that has no handlers yet
        ready()
        time.sleep(60)
    if name == "stubborn":
        time.sleep(60)
    try:
        with preemption.Preemption() as asking:
            worker.follow_launcher()
            if name == "train":
                train(asking, ready, directory / f"saved-{attempt}-{rank}", float(numbers[0]))
            if name == "train-and-tidy":
                preemption.LEAVE_WITHIN = 0.1
                try:
                    train(asking, ready, directory / f"saved-{attempt}-{rank}", 0)
                finally:
                    time.sleep(float(numbers[0]))
                    leave("tidied")
            if name in ("blocked", "blocked-in-training"):
                preemption.LEAVE_WITHIN = float(numbers[0])
                if name == "blocked":
                    block(ready)
                with asking.noted():
                    block(ready)
            ready()
            time.sleep(60)
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


def block(ready: Callable[[], None]) -> None:
    """Wait in C for what never comes: Python's handlers do not run, as in a collective without its other ranks."""
    mutex = ctypes.create_string_buffer(128)  # all zeros: PTHREAD_MUTEX_INITIALIZER on Linux
    ready()
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


if __name__ == "__main__":
    main()
