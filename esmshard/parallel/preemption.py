"""Handles requests to stop a run before its end: signals of a scheduler, and the time limit of `--stop-after`.

After SIGTERM or SIGUSR1, a run saves a checkpoint, ends with exit code 75, and can continue later. The time limit is a
SIGALRM with the same effect. All ranks must save after the same step. So during training, a rank only stores the
signal, and the ranks exchange stored signals in each step. Before and after training, a signal ends the process at
once, because there is nothing to save.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from esmshard.errors import ExitCode, UsageError
from esmshard.parallel import launch

STOP_AT = "ESMSHARD_STOP_AT"
"""The environment variable with the time to stop, in seconds since 1970. A restart keeps this time."""

LEAVE_WITHIN = 25.0
"""How many seconds a process may take to end after a signal if it has nothing to save. Schedulers kill processes about
30 s after SIGTERM."""

_REASONS = {"SIGTERM": "SIGTERM", "SIGUSR1": "SIGUSR1", "SIGALRM": "the time limit of --stop-after"}
_SIGNALS = {int(getattr(signal, name)): words for name, words in _REASONS.items() if hasattr(signal, name)}


class Preempted(BaseException):
    """Is raised when a run was asked to stop. `except Exception` does not catch it, because a stop is no failure."""

    exit_code = ExitCode.REQUEUE

    def __init__(self, message: str, unsaved: int = 0) -> None:
        """Store the message and `unsaved`: the number of a signal that came before training began, otherwise 0."""
        super().__init__(message)
        self.unsaved = unsaved


def leaving_code(unsaved: int = 0) -> int:
    """Return the exit code of this process after a `Preempted` with the attribute `unsaved`.

    The code is 75 for a single process, and for a process of esmshard's launcher. Under torchrun the code is 0, because
    torchrun would restart all ranks after 75.

    srun returns the highest code of all ranks, and sends SIGTERM to all ranks when one rank fails. So rank 0 has 75,
    and the other ranks have 0. But if `unsaved` is SIGTERM, another rank may have failed before training, and after
    75 a scheduler would repeat this failure forever. So rank 0 then has 143, the code after SIGTERM.
    """
    if launch.LAUNCHER in os.environ or "RANK" not in os.environ:
        return Preempted.exit_code
    if os.environ["RANK"] != "0" or "TORCHELASTIC_RUN_ID" in os.environ:
        return 0
    return 128 + unsaved if unsaved == signal.SIGTERM else Preempted.exit_code


def reason(asked: int) -> str:
    """Return the text for the signal with the number `asked`, such as `SIGTERM`."""
    return _SIGNALS[asked]


def seconds(duration: str) -> int:
    """Convert a duration such as `3h50m`, `230m`, `90s` or `1d` to seconds. Raises `UsageError` for other texts.

    >>> seconds("3h50m")
    13800
    """
    parts = re.fullmatch(r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m)?(?:(\d{1,7})s)?", duration, re.ASCII)
    numbers = parts.groups("0") if parts else ()
    length = sum(int(number) * unit for number, unit in zip(numbers, (86400, 3600, 60, 1), strict=False))
    if not length:
        raise UsageError(f"--stop-after {duration}: is not a duration; write it like 3h50m, 230m or 90s")
    return length


class Preemption:
    """Receives requests to stop this process, inside a `with` block.

    A signal raises `Preempted` at once, except inside a block of `noted`. Python runs signal handlers only between two
    instructions, so a process that waits in a collective for a lost rank does not react. Therefore a thread also reads
    each signal. Outside a block of `noted`, the thread ends the process `LEAVE_WITHIN` seconds after the signal.

    Outside the main thread, Python allows no signal handlers, so only the time limit has an effect.
    """

    def __init__(self) -> None:
        stop_at = os.environ.get(STOP_AT)
        try:
            self._stop_at = float(stop_at) if stop_at else None
        except ValueError:
            raise UsageError(f"{STOP_AT}={stop_at}: is not a time in seconds since 1970; use --stop-after") from None
        self._asked = 0
        self._noting = self._leaving = False
        self.began = False
        """Whether training has begun, so that there is something to save."""
        self._left = threading.Event()
        self._undo = ExitStack()

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is not threading.main_thread():
            return self
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._undo.callback(os.close, write)
        self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write, warn_on_full_buffer=False))
        for number in _SIGNALS:
            if number != signal.SIGALRM or self._stop_at is not None:
                self._undo.callback(signal.signal, number, signal.signal(number, self._on_signal))
        threading.Thread(target=self._watch, args=(read,), name="preemption", daemon=True).start()
        if self._stop_at is not None:
            timer = threading.Timer(max(0.01, self._stop_at - time.time()), os.kill, (os.getpid(), signal.SIGALRM))
            timer.daemon = True
            timer.start()
            self._undo.callback(timer.cancel)
        _installed.append(self)
        self._undo.callback(_installed.remove, self)
        return self

    def __exit__(self, *error: object) -> None:
        self._leaving = True  # a signal during the next lines must not raise `Preempted`
        self._left.set()
        self._undo.close()

    @property
    def asked(self) -> int:
        """The number of the first signal that asked this process to stop; 0 without a signal. SIGALRM stands for the
        time limit. The ranks may have different values, so they must agree on a value before they act.
        """
        if not self._asked and self._stop_at is not None and time.time() >= self._stop_at:
            self._asked = int(signal.SIGALRM)
        return self._asked

    @property
    def unsaved(self) -> int:
        """The same number as `asked` if training has not begun, so that there is nothing to save; otherwise 0."""
        return 0 if self.began else self.asked

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Protect training and saving in a `with` block: a signal does not interrupt the block, and only sets `asked`.

        Raises:
            Preempted: at the beginning or the end of the block, if the process was asked to stop.
        """
        self._stop_if_asked()
        self._noting = self.began = True
        try:
            yield
        except BaseException:
            self._leaving = True  # a signal must not replace this error
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
        """Read signal numbers from a pipe, in a thread. Python writes the number of each signal when it arrives."""
        with open(wakeups, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):  # an empty result means that the other end was closed
                asked = next((number for number in numbers if number in _SIGNALS), 0)
                if asked and not self._noting and not self._left.wait(LEAVE_WITHIN) and not self._noting:
                    if os.environ.get("RANK", "0") == "0":
                        os.write(2, f"stopped by {reason(asked)}\n".encode())
                    os._exit(leaving_code(0 if self.began else asked))


_installed: list[Preemption] = []
_before_fork = threading.local()
"""The attribute `mask` has the signals that a thread had blocked before a fork. `_unblock` restores the mask."""


def _block() -> None:
    """Block the signals while a process forks. Otherwise the child could write a signal into the parent's pipe."""
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS if _installed else ())


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _after_fork_in_child() -> None:
    """Remove the signal handlers in a forked child, so that a signal ends the child."""
    for preemption in _installed[::-1]:
        preemption.__exit__()
    _unblock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_after_fork_in_child)
