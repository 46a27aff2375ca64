"""The launcher of `--nproc N`: it starts the processes of a run on this machine and watches them until all have ended.

Each process reads its rank from the environment variables of torch. The processes connect through a store in the
launcher. Everything listens on the loopback interface only. On several machines srun or torchrun is used instead of
this module.
"""

import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from subprocess import Popen, TimeoutExpired

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from esmshard.errors import LostProcess
from esmshard.parallel import address, cpu_limits
from esmshard.parallel.preemption import Preempted
from esmshard.parallel.process_environment import CRASHED, LAUNCH, LAUNCHER
from esmshard.progress import say

STOP_TIMEOUT = 600.0
"""The seconds that processes have to save and leave after SIGTERM or SIGUSR1. Schedulers mostly give them fewer."""

END_TIMEOUT = 30.0
"""The seconds that processes have to leave after any other signal, or after one has failed. They do not save."""

# Windows does not have all of these signals, so they are looked up by name.
TO_SAVE, TO_END = (
    tuple(signal.Signals[name] for name in names if hasattr(signal, name))
    for names in (("SIGTERM", "SIGUSR1"), ("SIGINT", "SIGHUP", "SIGQUIT"))
)
_POLL = 0.1  # the seconds between two checks of the processes


def run_local(
    arguments: Sequence[str],
    nproc: int,
    *,
    max_restarts: int = 0,
    stop_timeout: float = STOP_TIMEOUT,
    is_enough: Callable[[], bool] | None = None,
) -> int:
    """Run `python ARGUMENTS` in `nproc` processes of this machine, with RANK and so on in their environment.

    The launcher passes signals on to the processes. It divides the cores among them: each process computes with
    cores / nproc threads unless OMP_NUM_THREADS is set.

    Args:
        arguments: the arguments of the interpreter, such as `-m esmshard finetune recipe.yaml`.
        nproc: the number of processes to start.
        max_restarts: how often all processes are started again after the loss of a process: a signal ended it, it
            crashed (70), or it lost another process (69). A user's mistake or a request to stop never causes a restart.
        stop_timeout: the seconds that the processes have to leave after SIGTERM or SIGUSR1. They are then killed.
        is_enough: called while the processes run; once it returns True, they get SIGTERM.

    Returns:
        0 if all processes succeeded; 75 if processes saved and left, or had not begun when SIGTERM came; else the exit
        code of the process whose failure was the cause, 128 + N if signal N ended it, or the code of a signal to the
        launcher.
    """
    shared = {LAUNCHER: str(os.getpid()), LAUNCH: uuid.uuid4().hex}
    if "OMP_NUM_THREADS" not in os.environ:
        shared |= {"OMP_NUM_THREADS": str(max(1, cpu_limits.cores() // nproc))}
    restarts = 0
    with _listening() as signals:
        while not signals:
            processes = _Processes(signals, stop_timeout, is_enough)
            with _store(nproc) as store_variables:
                processes.start(arguments, nproc, {**os.environ, **shared, **store_variables, _RESTARTS: str(restarts)})
                processes.watch()
            code, why, may_restart = processes.verdict()
            if not may_restart or signals or restarts == max_restarts:
                if why:
                    say(f"error: {why}")
                return code
            restarts += 1
            say(f"{why or f'a process ended with exit code {code}'}; restart {restarts} of {max_restarts}")
        return _code_of(signals)


_RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # process_environment.attempt() reads this variable


@contextmanager
def _store(nproc: int) -> Iterator[dict[str, str]]:
    """Hold the store through which the processes connect, on the loopback interface; yield the variables that name it.

    The launcher holds the store, and not rank 0, so that the other ranks can still find the cause when rank 0 is gone.
    torch itself would listen on all addresses. That would be dangerous: torch pickles the values in the store, so
    everyone who can connect to it can run code.
    """
    host = address.loopback()
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    # The store takes over the socket and closes it, so the socket object must be detached.
    store = TCPStore(
        host, port, nproc, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    variables = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    interface = address.interface(host)
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = interface
    yield variables
    del store


@dataclass
class _Processes:
    """The processes of one start, with their exit codes."""

    signals: list[int]
    """The signals to the launcher so far. The signal handler appends to this list."""
    stop_timeout: float
    is_enough: Callable[[], bool] | None = None
    handles: "list[Popen[bytes]]" = field(default_factory=list)
    forwarded: int = 0
    """The number of signals that were passed on."""
    stop_by: float = math.inf
    """The time at which the processes are killed, on the monotonic clock."""
    killed_late: int = 0
    """The number of processes that did not leave in time after a signal."""
    ended: list[int] = field(default_factory=list)
    """The ranks of ended processes, in the order in which the launcher noticed their end."""
    codes: list[int | None] = field(default_factory=list)
    """The exit codes in rank order, -N after signal N; None while a process runs, or if the launcher killed it."""

    def start(self, arguments: Sequence[str], nproc: int, environment: dict[str, str]) -> None:
        """Start all processes, each as the leader of its own group, so that only the launcher gets Ctrl-C."""
        for rank in range(nproc):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
            own = {name: str(value) for name, value in ranks.items()}
            command = [sys.executable, *arguments]
            self.handles.append(Popen(command, env=environment | own, start_new_session=True))  # noqa: S603
        self.codes = [None] * nproc

    def watch(self) -> None:
        """Pass signals on until all processes have ended. Kill those that do not end."""
        while True:
            self.codes = [process.poll() for process in self.handles]
            self.ended += [n for n, code in enumerate(self.codes) if code is not None and n not in self.ended]
            if self.is_enough is not None and not self.signals and self.is_enough():
                self.signals.append(signal.SIGTERM)
            self._pass_on()
            if None not in self.codes:
                return
            left = any(self._has_left(code) for code in self.codes)
            if left and not self.signals:  # the others cannot continue without a process that was asked to stop alone
                self.signals.append(signal.SIGTERM)
                continue
            now = time.monotonic()
            if now > self.stop_by:
                self.killed_late = self.codes.count(None)
                break
            failed = [code for code in self.codes if code and not self._has_left(code)]
            if any(code < 0 or code == CRASHED for code in failed) and not left:
                break  # the others would wait for the lost process forever
            if any(code != LostProcess.exit_code or not left for code in failed):
                # All ranks find the same mistake of the user. Rank 0 needs this time to print it.
                self.stop_by = min(self.stop_by, now + END_TIMEOUT)
            time.sleep(_POLL)
        for process in self.handles:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(TimeoutExpired):  # a process that hangs in a driver cannot be killed
                    process.wait(END_TIMEOUT)

    def _pass_on(self) -> None:
        for number in self.signals[self.forwarded :]:
            for process in self.handles:
                process.send_signal(number)
            self.forwarded += 1
            impatient = self.signals[: self.forwarded].count(signal.SIGINT) > 1
            seconds = self.stop_timeout if number in TO_SAVE else 0 if impatient else END_TIMEOUT
            self.stop_by = min(self.stop_by, time.monotonic() + seconds)

    def _has_left(self, code: int | None) -> bool:
        """Return whether a process saved and left, or a signal ended it before it had installed its handler."""
        return code == Preempted.exit_code or (code is not None and -code in TO_SAVE and -code in self.signals)

    def verdict(self) -> tuple[int, str, bool]:
        """Return the common exit code, a reason if no process has printed one, and whether a restart may help."""
        left = any(self._has_left(code) for code in self.codes)
        failed = [
            (rank, code)
            for rank in self.ended
            if (code := self.codes[rank]) and not self._has_left(code) and not (left and code == LostProcess.exit_code)
        ]
        if self.killed_late and not failed and self.signals and not any(number in TO_END for number in self.signals):
            count, name = self.killed_late, signal.Signals(self.signals[0]).name
            processes = f"{count} process{'es' if count > 1 else ''}"
            return 1, f"{processes} did not leave within {self.stop_timeout:g} s of {name}, and had to be killed", False
        if not failed:
            return (_code_of(self.signals) if left or self.killed_late else 0), "", False
        rank, code = min(failed, key=lambda one: _weight(one[1]))  # the first one among equal weights
        if code > 0:
            words = f"the process of rank {rank} crashed" if code == CRASHED else ""
            return code, words, code in (CRASHED, LostProcess.exit_code)
        hint = " (out of memory, perhaps)" if code == -signal.SIGKILL else ""
        by_us = -code in TO_END and -code in self.signals
        words = "" if by_us else f"the process of rank {rank} was ended by {signal.Signals(-code).name}{hint}"
        return 128 - code, words, not by_us


def _weight(code: int) -> int:
    """Return the order of a failure as a cause: first a mistake, then a signal, a crash, the loss of a process."""
    return {CRASHED: 2, LostProcess.exit_code: 3}.get(code, 1 if code < 0 else 0)


def _code_of(signals: Sequence[int]) -> int:
    """Return the exit code after signals: 128 + N for a signal that ends a run without saving, else 75."""
    return next((128 + number for number in signals if number in TO_END), Preempted.exit_code)


@contextmanager
def _listening() -> Iterator[list[int]]:
    """Yield the list of signals to this process so far. An ignored signal stays ignored, because `nohup` relies on it.

    Outside the main thread Python allows no handlers, so the list stays empty.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    heard = [number for number in (*TO_SAVE, *TO_END) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in heard}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
