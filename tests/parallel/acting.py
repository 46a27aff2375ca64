"""A process that does as it is told, for the tests of signals and of the launcher. It starts without torch.

python acting.py DIRECTORY ACTION... : process of rank R takes action number R + ranks * attempt, or else the last one.
It leaves its process id in `begun-ATTEMPT-RANK`, in `ready-ATTEMPT-RANK` when it is in the middle of the action, and in
`asked-ATTEMPT-RANK` when it was signalled. No process ends by itself before all have begun. `train SECONDS` saves for
so long, and `train enough` until there is a file `enough`.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from esmshard.parallel import launch, preemption
from esmshard.progress import say


def main() -> None:
    directory, actions = Path(sys.argv[1]), sys.argv[2:]
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    attempt = launch.attempt()
    name, *numbers = actions[min(rank + ranks * attempt, len(actions) - 1)].split()

    def leave(name: str) -> None:
        part = directory / f"part-{rank}"
        part.write_text(str(os.getpid()))
        part.rename(directory / f"{name}-{attempt}-{rank}")

    came: list[int] = []
    if name in ("exit", "stubborn"):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: came.append(number))
    leave("begun")
    if name in ("exit", "die"):
        # The launcher signals or kills the others of a process that has ended: they would never begin.
        while len(list(directory.glob(f"begun-{attempt}-*"))) < ranks:
            time.sleep(0.01)
    if name == "exit":
        end = time.monotonic() + (float(numbers[1]) if len(numbers) > 1 else 0)
        while time.monotonic() < end:
            time.sleep(0.01)
        leave("left")
        sys.exit(int(numbers[0]))
    if name == "die":
        os.kill(os.getpid(), int(numbers[0]))
    if name == "wait":  # as a process that has no handlers yet
        leave("ready")
        time.sleep(600)
    if name == "stubborn":
        leave("ready")
        while not came:
            time.sleep(0.01)
        leave("asked")
        time.sleep(600)
    preemption.LEAVE_WITHIN = 600.0
    try:
        with preemption.Preemption() as asking:
            launch.follow_launcher()
            if name == "train":
                with asking.noted():
                    leave("ready")
                    while not asking.asked:
                        time.sleep(0.01)
                    leave("asked")
                    length = numbers[0]
                    end = time.monotonic() + (0 if length == "enough" else float(length))
                    while time.monotonic() < end or (length == "enough" and not (directory / "enough").exists()):
                        time.sleep(0.01)  # a checkpoint, with more signals coming in
                    (directory / f"saved-{attempt}-{rank}").write_text(preemption.reason(asking.asked))
            preemption.LEAVE_WITHIN = float(numbers[0])
            block(lambda: leave("ready"))
    except preemption.Preempted as stop:
        say(str(stop))
        sys.exit(stop.exit_code)


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
