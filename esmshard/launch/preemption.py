"""What asks a run to stop before its end: a scheduler's signal, or the time limit of `--stop-after`.

SIGTERM and SIGUSR1 mean: save, leave with exit code 75, and be started again later. So does the time limit, which comes
as SIGALRM. While a run trains they are only noted, for a checkpoint takes all ranks: each passes on what it has noted
with the numbers of its step, and all save after the same one. Before and after there is nothing to save, and they end
the process at once.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from esmshard.errors import UsageError
from esmshard.launch import process_environment

STOP_AT = "ESMSHARD_STOP_AT"
"""Environment variable: when to stop, in seconds since 1970. It outlives the workers, which may be started again."""

LEAVE_WITHIN = 10.0
"""Seconds that a process which has nothing to save may take to leave. Schedulers kill some 30 s after SIGTERM."""

EXPLAIN_WITHIN = 25.0
"""Seconds that a process may take to leave where training has failed: it finds out which rank was lost, and names it.
srun sends SIGTERM to the others of a lost rank, and SIGKILL 30 s later."""

_REASONS = {"SIGTERM": "SIGTERM", "SIGUSR1": "SIGUSR1", "SIGALRM": "the time limit of --stop-after"}
_SIGNALS = {int(getattr(signal, name)): words for name, words in _REASONS.items() if hasattr(signal, name)}

_installed: "list[Preemption]" = []


class Preempted(BaseException):
    """The run was asked to stop, and can go on later. Not an `Exception`: nothing should take it for a failure."""

    exit_code = 75
    """EX_TEMPFAIL: try again later."""

    def __init__(self, message: str, unsaved: int = 0) -> None:
        """`unsaved` is the number of the signal where it came before the run began to train; 0 otherwise."""
        super().__init__(message)
        self.unsaved = unsaved


def leaving_code(unsaved: int = 0) -> int:
    """The exit code with which this process leaves after `Preempted`, whose `unsaved` is given.

    75 for a process that is alone, or that our own launcher started. srun and mpirun return the highest code of all
    ranks, and end the others when one of them fails: rank 0, which leaves last, has 75, the others have 0. They end
    them by SIGTERM. A rank 0 that has nothing to save yet cannot know whether it is that, and 75 would start a mistake
    of another rank again for ever: it leaves with 143, as if the signal had ended it. torchrun would take 75 for a
    failure, and start all ranks again: 0 there, and `status.json` says that the run is preempted.
    """
    if process_environment.under_torchrun():
        return 0
    if process_environment.LAUNCHER in os.environ or "RANK" not in os.environ:
        return Preempted.exit_code
    if os.environ["RANK"] != "0":
        return 0
    return 128 + unsaved if unsaved == signal.SIGTERM else Preempted.exit_code


def reason(asked: int) -> str:
    """What `Preemption.asked` means, in words.

    >>> reason(int(signal.SIGTERM))
    'SIGTERM'
    """
    return _SIGNALS[asked]


def seconds(duration: str) -> int:
    """The seconds of a duration such as `3h50m`, `230m`, `90s` or `1d`.

    >>> seconds("3h50m")
    13800

    Raises:
        UsageError: if it is none.
    """
    parts = re.fullmatch(r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m)?(?:(\d{1,7})s)?", duration, re.ASCII)
    numbers = parts.groups("0") if parts else ()
    length = sum(int(number) * unit for number, unit in zip(numbers, (86400, 3600, 60, 1), strict=False))
    if not length:
        raise UsageError(f"--stop-after {duration}: a time is expected, as 3h50m, 230m or 90s")
    return length


class Preemption:
    """Listens for what asks this process to stop, until the end of its `with` block.

    A signal raises `Preempted` where the process is, except inside `noted`. Python runs handlers between two
    instructions only, so a process that waits inside a C++ call, for a rank that never comes say, would not hear: a
    thread sees each signal too, and ends the process after `LEAVE_WITHIN` seconds if it has not left by itself
    (`EXPLAIN_WITHIN` where training has failed).

    Outside the main thread, where Python allows no handlers, it only knows the time limit.
    """

    def __init__(self) -> None:
        self._stop_at = _stop_at()
        self._asked = 0
        self._noting = self._leaving = False
        self._failed = False
        self.began = False
        """Whether the run has begun to train."""
        self._left = threading.Event()
        self._restore: list[Callable[[], Any]] = []

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is not threading.main_thread():
            return self
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._restore = [partial(signal.set_wakeup_fd, before), partial(os.close, write)]
        threading.Thread(target=self._watch, args=(read,), name="preemption", daemon=True).start()
        _installed.append(self)
        for number in _SIGNALS:
            if number != signal.SIGALRM or self._stop_at is not None:
                handler = signal.signal(number, self._on_signal)
                self._restore.insert(0, partial(signal.signal, number, handler))
        if self._stop_at is not None:
            left, interval = signal.setitimer(signal.ITIMER_REAL, max(self._stop_at - time.time(), 1e-3))
            self._restore.insert(0, partial(_set_timer, time.monotonic() + left if left else 0.0, interval))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving = True  # what comes between this line and the last changes nothing any more
        self._left.set()
        self._uninstall()

    def _uninstall(self) -> None:
        for undo in self._restore:
            undo()
        self._restore.clear()
        if self in _installed:
            _installed.remove(self)

    @property
    def asked(self) -> int:
        """0, or what asked first: the number of its signal, SIGALRM's for the time limit. `reason` puts it in words.

        The ranks of a run may see different values: they must agree on one before they act on it.
        """
        # The timer counts no time in which the machine sleeps, and other threads have none.
        if not self._asked and self._stop_at is not None and time.time() >= self._stop_at:
            self._asked = int(signal.SIGALRM)
        return self._asked

    @property
    def unsaved(self) -> int:
        """What asked first, as `asked` has it, where that was before the run began to train; 0 otherwise."""
        return 0 if self.began else self.asked

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, for the steps of training and all that saves: `asked` tells, and nothing is interrupted.

        At its end the process has nothing to save any more.

        Raises:
            Preempted: at either end, if the process was asked to stop and no error is on its way.
        """
        self._stop_if_asked()
        self._noting = self.began = True
        try:
            yield
        except BaseException as error:
            self._leaving = True  # let it leave in peace
            self._failed = not isinstance(error, Preempted)
            raise
        finally:
            self._noting = False
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self.asked and not self._leaving:
            self._leaving = True
            raise Preempted(f"stopped by {reason(self._asked)}", self.unsaved)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = self._asked or number
        if not self._noting:
            self._stop_if_asked()

    def _watch(self, wakeups: int) -> None:
        """Run by a thread. The pipe has the number of each signal, written when it comes, whatever Python is doing."""
        with open(wakeups, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):  # nothing: the other end was closed
                asked = next((number for number in numbers if number in _SIGNALS), 0)
                within = EXPLAIN_WITHIN if self._failed else LEAVE_WITHIN
                if asked and not self._noting and not self._left.wait(within) and not self._noting:
                    if os.environ.get("RANK", "0") == "0":
                        os.write(2, f"stopped by {reason(asked)}\n".encode())
                    os._exit(leaving_code(0 if self.began else asked))


def _set_timer(due: float, interval: float) -> None:
    """As it was before; `due` on the monotonic clock, 0 for never."""
    signal.setitimer(signal.ITIMER_REAL, max(due - time.monotonic(), 1e-3) if due else 0.0, interval)


def _stop_at() -> float | None:
    text = os.environ.get(STOP_AT)
    try:
        return float(text) if text else None
    except ValueError:
        raise UsageError(f"{STOP_AT}={text}: seconds since 1970 are expected; --stop-after sets it") from None


# A forked child is not asked to save: signals end it as they end any process, and the pipe is its parent's. They wait
# while it is made; one that came sooner than the last line below would be taken for one to its parent.


def _before_fork() -> None:
    _before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS if _installed else ())


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before.mask)


def _after_fork_in_child() -> None:
    for preemption in _installed[::-1]:
        preemption._uninstall()
    signal.pthread_sigmask(signal.SIG_SETMASK, _before.mask)


_before = threading.local()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
