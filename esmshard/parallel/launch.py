"""How processes of a run are started: the variables of torchrun and srun, and the launcher of `--nproc N`.

Every process reads its rank from torch's variables, such as RANK. torchrun and `accelerate launch` set them; `join`
sets them from those of srun; `run_local` starts processes of this machine with them. torch is imported by none of the
functions that a command calls before it knows its work.
"""

import json
import math
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from subprocess import Popen, TimeoutExpired
from typing import Any

from esmshard.errors import ExitCode, InputError, UsageError
from esmshard.parallel import cpu_limits
from esmshard.progress import say

LAUNCHER = "ESMSHARD_LAUNCHER"
"""The environment variable with the process id of esmshard's own launcher, in the processes that it started."""
LAUNCH = "ESMSHARD_LAUNCH"
"""The environment variable with a random name of one call of esmshard's own launcher. Restarts keep this name."""
TRIAL = "ESMSHARD_TRIAL"
"""The environment variable of a trial of a sweep, which ends with its last validation, without a model and a test."""
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"

PORTS = range(20000, 28000)
"""The ports from which the port of rank 0 is chosen under srun, by the numbers of the job and its step."""

FIRST_LEAVES = 10.0
"""The seconds within which rank 0 finds a mistake that another rank has already found."""

STOP_TIMEOUT = 600.0
"""The seconds that processes have to save and leave after SIGTERM or SIGUSR1. Schedulers mostly give them fewer."""

END_TIMEOUT = 30.0
"""The seconds that processes have to leave after any other signal, or after one has failed. They do not save."""

# Windows does not have all of these signals, so they are looked up by name.
TO_SAVE, TO_END = (
    tuple(signal.Signals[name] for name in names if hasattr(signal, name))
    for names in (("SIGTERM", "SIGUSR1"), ("SIGINT", "SIGHUP", "SIGQUIT"))
)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process, and of the processes that it starts, within a `with` block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def attempt() -> int:
    """Return how often esmshard's launcher or torchrun has started this run again; 0 for the first start."""
    return int(os.environ.get(_RESTARTS) or 0)


def restarts_allowed() -> int:
    """Return how often torchrun may start this run again."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def under_torchrun() -> bool:
    """Return whether torchrun started this process, also by `accelerate launch`. torchrun's exit code is 0 or 1."""
    return "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER not in os.environ


def follow_launcher() -> None:
    """Let the kernel send SIGTERM to this process when esmshard's launcher has ended, even by kill -9. Linux only."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(launcher):  # the launcher had ended before the line above
        os.kill(os.getpid(), signal.SIGTERM)


def wait_for_first(code: int) -> None:
    """Wait at most `FIRST_LEAVES` seconds for the launcher to end this process, which then leaves with `code`.

    A wrong recipe is wrong on every rank, and rank 0 prints the message. srun and torchrun end all ranks as
    soon as one of them has failed, so rank 0 must be the first to leave. esmshard's own launcher waits for all ranks.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))
    time.sleep(FIRST_LEAVES)


def join() -> None:
    """Set torch's variables in this process if srun started it. They stay set.

    Raises:
        UsageError: if a variable of srun is missing.
    """
    os.environ.update(variables())


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for a task of srun.

    The result is empty if another launcher has already set RANK, or if this process is alone. A batch script and the
    shell of salloc also have SLURM_NTASKS and SLURM_PROCID, but no SLURM_STEP_NUM_TASKS above 1.

    Raises:
        UsageError: if a variable of srun is missing.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if "RANK" in environ or not tasks.isdecimal() or int(tasks) < 2:
        return {}
    try:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
        counts = _counts(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ["SLURM_TASKS_PER_NODE"])
        step = int(environ.get("SLURM_JOB_ID", "0")) * 31 + int(environ.get("SLURM_STEP_ID", "0"))
        return {
            "RANK": str(int(environ["SLURM_PROCID"])),
            "WORLD_SIZE": tasks,
            "LOCAL_RANK": str(int(environ["SLURM_LOCALID"])),
            "LOCAL_WORLD_SIZE": str(counts[int(environ.get("SLURM_NODEID", "0"))]),
            "MASTER_ADDR": environ.get("MASTER_ADDR") or ("127.0.0.1" if len(counts) == 1 else first_host(nodes)),
            "MASTER_PORT": environ.get("MASTER_PORT") or str(PORTS[step % len(PORTS)]),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(
            f"srun started {tasks} processes, but their SLURM_ variables cannot be read ({error}); use the script "
            "that `esmshard launch` writes, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each "
            "process"
        ) from None


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Raise `UsageError` if only some of torch's variables are set, `InputError` if a value is no rank.

    Rank 0 prints a `UsageError` for all ranks. A process without a valid rank must print its own error.
    """
    ranks = {name: environ[name] for name in ("RANK", "WORLD_SIZE") if environ.get(name)}
    if not ranks:
        return
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not environ.get(name, "0").isdecimal():
            raise InputError(f"{name}={environ[name]}: a number is expected; unset it, or let torchrun set it")
    if len(ranks) == 2 and (rank := int(ranks["RANK"])) >= (size := int(ranks["WORLD_SIZE"])):
        raise InputError(f"RANK={rank}, and WORLD_SIZE={size}: ranks go from 0 to {size - 1}; set them in each process")
    several = len(ranks) == 2 and ranks["WORLD_SIZE"] != "1"
    needed = ["RANK", "WORLD_SIZE", *(("MASTER_ADDR", "MASTER_PORT") if several else ())]
    if missing := [name for name in needed if not environ.get(name)]:
        raise UsageError(
            f"{' and '.join(ranks)} {'is' if len(ranks) == 1 else 'are'} set, but not {' and '.join(missing)}, so that "
            "the processes cannot meet; on one machine `unset RANK WORLD_SIZE LOCAL_RANK` and use `--nproc N`; on "
            "several set MASTER_ADDR to the host of rank 0 and MASTER_PORT=29500 in each process"
        )


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's node list.

    >>> first_host("gpu[007-009,12],login")
    'gpu007'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ValueError(f"no host in {nodes!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _counts(text: str) -> list[int]:
    """Return the number of tasks of each machine: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{text!r} is no number of tasks")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def gloo_interface() -> dict[str, str]:
    """Return the variable that names the network interface by which this machine reaches rank 0, for gloo.

    By default gloo uses the address of the machine's own name. Debian's /etc/hosts gives this name the address
    127.0.1.1, which other machines cannot reach. On rank 0's machine, the interface of the default route is named. The
    result is empty where all ranks are on one machine, where the user has set the variable, and outside Linux.
    """
    one_machine = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]) == os.environ["WORLD_SIZE"]
    if one_machine or "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return {}
    import fcntl  # Windows does not have this module

    get_address = 0x8915  # SIOCGIFADDR in <linux/sockios.h>
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # nothing is sent
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        if probe.getsockname()[0].startswith("127."):
            probe.connect(("192.0.2.1", 9))  # RFC 5737 reserves this address, so no machine has it
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == probe.getsockname()[0]:
                    return {"GLOO_SOCKET_IFNAME": name}
    return {}


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
            with _store(nproc) as (store, store_variables):
                processes.start(arguments, nproc, {**os.environ, **shared, **store_variables, _RESTARTS: str(restarts)})
                processes.watch()
                code, why, may_restart = processes.verdict(partial(last_place, store, restarts))
            if not may_restart or signals or restarts == max_restarts:
                if why:
                    say(f"error: {why}")
                return code
            restarts += 1
            say(f"{why or f'a process ended with exit code {code}'}; restart {restarts} of {max_restarts}")
        return _code_of(signals)


@contextmanager
def _store(nproc: int) -> Iterator[tuple[Any, dict[str, str]]]:
    """Hold the store through which the processes connect, on the loopback interface; yield it, and the variables that
    name it.

    The launcher holds the store, and not rank 0, so that the other ranks can still find the cause when rank 0 is gone.
    torch itself would listen on all addresses. That would be dangerous: torch pickles the values in the store, so
    everyone who can connect to it can run code.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # see the first lines of this file

    # torch looks up the name of each address that it connects to, and writes 127.0.0.1 as ::ffff:127.0.0.1. Often only
    # a name server has a name for that. Without one, each process would wait for an answer and print a warning.
    host, listener = "::1", socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET)
    try:
        listener.bind((host, 0))
    except OSError:
        listener.close()
        host, listener = "127.0.0.1", socket.socket(socket.AF_INET)
        listener.bind((host, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    # The store takes over the socket and closes it, so the socket object must be detached.
    store = TCPStore(
        host, port, nproc, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    interface = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback)} if loopback else {}
    yield store, {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", **interface}


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
            variables = environment | {name: str(value) for name, value in ranks.items()}
            self.handles.append(Popen([sys.executable, *arguments], env=variables, start_new_session=True))  # noqa: S603
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
            if any(code < 0 or code == ExitCode.CRASHED for code in failed) and not left:
                break  # the others would wait for the lost process forever
            if any(code != ExitCode.LOST or not left for code in failed):
                # All ranks find the same mistake of the user. Rank 0 needs this time to print it.
                self.stop_by = min(self.stop_by, now + END_TIMEOUT)
            time.sleep(0.1)
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
        return code == ExitCode.REQUEUE or (code is not None and -code in TO_SAVE and -code in self.signals)

    def verdict(self, last_place: Callable[[int], str]) -> tuple[int, str, bool]:
        """Return the common exit code, a reason if no process has printed one, and whether a restart may help.

        `last_place` returns the last step and phase of a rank, in words; nothing for a rank that has noted none.
        """
        left = any(self._has_left(code) for code in self.codes)
        failed = [
            (rank, code)
            for rank in self.ended
            if (code := self.codes[rank]) and not self._has_left(code) and not (left and code == ExitCode.LOST)
        ]
        if self.killed_late and not failed and self.signals and not any(number in TO_END for number in self.signals):
            count, name = self.killed_late, signal.Signals(self.signals[0]).name
            why = f"{count} processes did not leave within {self.stop_timeout:g} s of {name}, and had to be killed"
            return ExitCode.FAILED, why, False
        if not failed:
            return (_code_of(self.signals) if left or self.killed_late else 0), "", False
        # A mistake is the cause before a signal, a crash, and the loss of a process; of several the first one.
        weights: dict[int, int] = {ExitCode.CRASHED: 2, ExitCode.LOST: 3}
        rank, code = min(failed, key=lambda end: weights.get(end[1], 1 if end[1] < 0 else 0))
        if code > 0:
            words = f"the process of rank {rank} crashed" if code == ExitCode.CRASHED else ""
            return code, words, code in (ExitCode.CRASHED, ExitCode.LOST)
        hint = " (out of memory, perhaps)" if code == -signal.SIGKILL else ""
        by_us = -code in TO_END and -code in self.signals
        words = f"the process of rank {rank} was ended by {signal.Signals(-code).name}{hint}{last_place(rank)}"
        return 128 - code, "" if by_us else words, not by_us


def prefix(restarts: int, start: int) -> str:
    """Return the prefix of the keys of a process group in the store, which may keep the keys of earlier ones."""
    return f"esmshard/{restarts}/{start}"


def last_place(store: Any, restarts: int, rank: int) -> str:
    """Return the last step and phase that a rank has noted (`esmshard.parallel.watch`), in words."""
    key = f"{prefix(restarts, 0)}/note/{rank}"
    if not store.check([key]):
        return ""
    _, step, phase = json.loads(store.get(key))
    return f", last heard of in {f'step {step}' if step else 'the start'}, {phase}"


def _code_of(signals: Sequence[int]) -> int:
    """Return the exit code after signals: 128 + N for a signal that ends a run without saving, else 75."""
    return next((128 + number for number in signals if number in TO_END), ExitCode.REQUEUE)


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
