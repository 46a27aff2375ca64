"""Starts the processes of a run on this machine, and reads the environment variables of other launchers.

Every process reads its rank from torch's environment variables, such as `RANK`. torchrun and `accelerate launch` set
these variables. The function `variables` computes them for a task of srun. The function `run_local` starts processes
for `--nproc N` and sets the variables.

`run_local` does not use torch's `elastic_launch`, because the key-value store of `elastic_launch` listens on all
addresses. `elastic_launch` also restarts a run after a user's mistake, and hides the exit codes of processes that got a
signal. This module imports torch only when it starts processes.
"""

import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from subprocess import Popen, TimeoutExpired
from typing import Any

from esmshard.errors import ExitCode, UsageError
from esmshard.parallel import cpu_limits
from esmshard.progress import say

LAUNCHER = "ESMSHARD_LAUNCHER"
"""The environment variable with the process id of esmshard's launcher. Only its processes have the variable."""
LAUNCH = "ESMSHARD_LAUNCH"
"""The environment variable with a random text for each call of esmshard's launcher. Restarts keep the text."""
TRIAL = "ESMSHARD_TRIAL"
"""The environment variable that marks a run as a trial of a sweep. A trial writes no model."""
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"

PORTS = range(20000, 28000)
"""The ports on which rank 0 may listen under srun. The Slurm job id and step id determine the port."""
FIRST_LEAVES = 10.0
"""How many seconds all ranks except rank 0 wait after a user's mistake, so that rank 0 can print the mistake first."""
STOP_TIMEOUT = 600.0
"""How many seconds processes have to save a checkpoint and end, after SIGTERM or SIGUSR1."""
END_TIMEOUT = 30.0
"""How many seconds processes have to end without saving, after any other signal or after a failure."""

# Windows does not have all of these signals.
TO_SAVE, TO_END = (
    tuple(signal.Signals[name] for name in names if hasattr(signal, name))
    for names in (("SIGTERM", "SIGUSR1"), ("SIGINT", "SIGHUP", "SIGQUIT"))
)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside a `with` block, and restore the old values at the end of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def attempt() -> int:
    """Return how many times the launcher has restarted the processes of this run."""
    return int(os.environ.get(_RESTARTS) or 0)


def restarts_allowed() -> int:
    """Return how many times torchrun may restart the processes of this run; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def follow_launcher() -> None:
    """Ask the Linux kernel to send SIGTERM to this process when esmshard's launcher ends, even after kill -9.

    Without esmshard's launcher, and on other systems, this function does nothing.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(launcher):  # the launcher had ended before the line above
        os.kill(os.getpid(), signal.SIGTERM)


def wait_for_first(code: int) -> None:
    """Wait for `FIRST_LEAVES` seconds. If SIGTERM arrives while waiting, end the process with the exit code `code`.

    If the recipe has a mistake, every rank finds the mistake, but only rank 0 prints the message. srun and torchrun end
    all ranks as soon as one rank has failed, so rank 0 must end first.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))
    time.sleep(FIRST_LEAVES)


def check() -> None:
    """Raise `UsageError` if an environment variable that torch needs is missing, or has an impossible value."""
    if not (os.environ.get("RANK") or os.environ.get("WORLD_SIZE")):
        return
    needed = ["RANK", "WORLD_SIZE"] + (["MASTER_ADDR", "MASTER_PORT"] if os.environ.get("WORLD_SIZE") != "1" else [])
    missing = [name for name in needed if not os.environ.get(name)]
    numbers = [os.environ.get(name) or "0" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if missing or not all(map(str.isdecimal, numbers)) or int(numbers[0]) >= int(numbers[1]):
        raise UsageError(
            f"RANK={numbers[0]}, WORLD_SIZE={numbers[1]}: this is not a valid rank of a run "
            f"({'missing: ' + ', '.join(missing) if missing else 'a value is wrong'}); on one machine `unset RANK "
            "WORLD_SIZE LOCAL_RANK` and use `--nproc N`; on several let torchrun or srun start the processes"
        )


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return torch's environment variables, such as `RANK` and `WORLD_SIZE`, for a task of srun.

    The result is empty if `RANK` is already set, or if srun started fewer than two tasks. `SLURM_STEP_NUM_TASKS` has
    the number of tasks, because a batch script without srun also has `SLURM_NTASKS`. Raises `UsageError` if another
    variable of srun is missing or unreadable.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if "RANK" in environ or not tasks.isdecimal() or int(tasks) < 2:
        return {}
    try:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
        per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ["SLURM_TASKS_PER_NODE"]  # 2(x3),1 is 2, 2, 2, 1
        parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node)
        counts = [count for count, times in parts for _ in range(int(times or 1))]
        step = int(environ.get("SLURM_JOB_ID", "0")) * 31 + int(environ.get("SLURM_STEP_ID", "0"))
        return {
            "RANK": environ["SLURM_PROCID"],
            "WORLD_SIZE": tasks,
            "LOCAL_RANK": environ["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": counts[int(environ.get("SLURM_NODEID", "0"))],
            "MASTER_ADDR": environ.get("MASTER_ADDR") or ("127.0.0.1" if len(counts) == 1 else first_host(nodes)),
            "MASTER_PORT": environ.get("MASTER_PORT") or str(PORTS[step % len(PORTS)]),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(
            f"srun started {tasks} processes, but their SLURM_ variables cannot be read ({error}); use the script "
            "that `esmshard launch` writes"
        ) from None


def first_host(nodes: str) -> str:
    """Return the first host in a node list of Slurm. Raises `ValueError` if the list is empty.

    >>> first_host("gpu[007-009,12],login")
    'gpu007'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ValueError(f"no host in {nodes!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def run_local(
    arguments: Sequence[str],
    nproc: int,
    *,
    max_restarts: int = 0,
    is_enough: Callable[[], bool] = lambda: False,
) -> int:
    """Run `python ARGUMENTS` in `nproc` processes of this machine, with torch's variables in their environment.

    This process is the launcher. It passes signals on to the processes, and kills processes that have not ended after
    `STOP_TIMEOUT` or `END_TIMEOUT` seconds. Each process has cores / nproc threads unless `OMP_NUM_THREADS` is set.

    Args:
        arguments: the arguments of the Python interpreter, such as `-m esmshard finetune recipe.yaml`.
        nproc: the number of processes to start.
        max_restarts: the maximum number of restarts. The launcher restarts all processes if a signal ended a process,
            or if a process has the exit code 70 (crashed) or 69 (lost another process).
        is_enough: the launcher calls this function repeatedly. When it returns True, the processes get SIGTERM.

    Returns:
        The exit code of the launcher: 0 if all processes succeeded; 75 if processes saved and ended, or SIGTERM
        ended them at their start; 1 if processes that had to save were killed; 128 + N if signal N ended the run or a
        process; otherwise the exit code of a failed process. A user's mistake has precedence over a crash.
    """
    shared = {LAUNCHER: str(os.getpid()), LAUNCH: uuid.uuid4().hex}
    shared |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cpu_limits.cores() // nproc))}
    with _listening() as signals:
        store, place = _store()
        for restarts in range(max_restarts + 1):
            if signals:
                break
            ranks = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), _RESTARTS: str(restarts)}
            processes = []
            for rank in range(nproc):  # each process has its own session, so only the launcher gets Ctrl-C
                ranks |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command, variables = [sys.executable, *arguments], {**os.environ, **shared, **place, **ranks}
                processes.append(Popen(command, env=variables, start_new_session=True))  # noqa: S603
            ends, killed = _watch(processes, signals, is_enough)
            code, why, may_restart = _verdict(ends, killed, signals, partial(_place, store, restarts))
            if not may_restart or signals or restarts == max_restarts:
                if why:
                    say(f"error: {why}")
                return code
            say(f"{why or f'a process ended with exit code {code}'}; restart {restarts + 1} of {max_restarts}")
        return _code_of(signals)


def _store() -> tuple[Any, dict[str, str]]:
    """Make the key-value store through which the processes connect. Return the store, and its environment variables.

    The launcher serves the store, so that ranks can find the cause of an error even after the end of rank 0. The store
    listens only on the loopback interface, because torch unpickles values from the store. Anyone who connects could
    run code.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # see the first lines of this file

    try:  # for 127.0.0.1, torch may wait for a name server that does not answer
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6, backlog=1024)
    except OSError:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    host, port = listener.getsockname()[:2]
    # The store takes over the socket and closes it, so the socket object must be detached.
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    interface = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback)} if loopback else {}
    return store, {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", **interface}


def _watch(
    processes: "Sequence[Popen[bytes]]", signals: list[int], is_enough: Callable[[], bool]
) -> tuple[dict[int, int], int]:
    """Pass signals on to the processes until all have ended, and kill processes that do not end in time.

    Returns:
        The exit codes by rank, in the order in which the processes ended, and the number of killed processes. A process
        that signal N ended has the exit code -N; killed processes have no entry.
    """
    ends: dict[int, int] = {}
    passed_on, stop_by = 0, math.inf
    while True:
        codes = {rank: process.poll() for rank, process in enumerate(processes)}
        ends |= {rank: code for rank, code in codes.items() if code is not None and rank not in ends}
        has_left = any(_has_left(code, signals) for code in ends.values())
        if not signals and (has_left or is_enough()):  # if one process has left, the other processes cannot go on
            signals.append(signal.SIGTERM)
        if len(ends) == len(processes):
            return ends, 0
        for number in signals[passed_on:]:
            for process in processes:
                process.send_signal(number)
            stop_by = min(stop_by, time.monotonic() + (STOP_TIMEOUT if number in TO_SAVE else END_TIMEOUT))
        passed_on = len(signals)
        failed = {code for code in ends.values() if code and not _has_left(code, signals)}
        if has_left:  # the other processes lose this process, and may still save
            failed -= {ExitCode.LOST}
        elif any(code < 0 or code == ExitCode.CRASHED for code in failed):
            break  # all other processes would wait for the lost process forever
        if failed:  # all ranks find the same mistake of the user, and rank 0 needs time to print it
            stop_by = min(stop_by, time.monotonic() + END_TIMEOUT)
        if signals.count(signal.SIGINT) > 1 or time.monotonic() > stop_by:
            break
        time.sleep(0.1)
    late = [process for process in processes if process.poll() is None]
    for process in late:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(TimeoutExpired):  # a process that hangs in a driver cannot be killed
            process.wait(END_TIMEOUT)
    return ends, len(late)


def _has_left(code: int, signals: Sequence[int]) -> bool:
    """Return whether `code` means that a process saved and ended, or that one of `signals` ended it at its start."""
    return code == ExitCode.REQUEUE or (-code in TO_SAVE and -code in signals)


def _verdict(
    ends: Mapping[int, int], killed: int, signals: Sequence[int], place_of: Callable[[int], str]
) -> tuple[int, str, bool]:
    """Return the launcher's exit code, the error message if no process has printed it, and whether a restart may help.

    `ends` and `killed` are results of `_watch`. `place_of` returns the last step and phase of a rank as text.
    """
    has_left = any(_has_left(code, signals) for code in ends.values())
    failed = [(rank, code) for rank, code in ends.items() if code and not _has_left(code, signals)]
    failed = [(rank, code) for rank, code in failed if not (has_left and code == ExitCode.LOST)]
    if not failed:
        if killed and not any(number in TO_END for number in signals):
            name = signal.Signals(signals[0]).name
            why = f"{killed} processes did not leave within {STOP_TIMEOUT:g} s of {name}, and had to be killed"
            return ExitCode.FAILED, why, False
        return (_code_of(signals) if has_left or killed else 0), "", False
    # The cause is a user's mistake, or else a signal, a crash, or the loss of a process.
    weights: dict[int, int] = {ExitCode.CRASHED: 2, ExitCode.LOST: 3}
    rank, code = min(failed, key=lambda end: weights.get(end[1], int(end[1] < 0)))
    if code > 0:
        return code, f"the process of rank {rank} crashed" * (code == ExitCode.CRASHED), code in weights
    if -code in signals:
        return 128 - code, "", False
    name = signal.Signals(-code).name + (" (out of memory, perhaps)" if code == -signal.SIGKILL else "")
    return 128 - code, f"the process of rank {rank} was ended by {name}{place_of(rank)}", True


def prefix(restarts: int, start: int) -> str:
    """Return the prefix of a process group's keys in the store; `start` counts the process groups of one process."""
    return f"esmshard/{restarts}/{start}"


def _place(store: Any, restarts: int, rank: int) -> str:
    key = f"{prefix(restarts, 0)}/note/{rank}"
    if not store.check([key]):
        return ""
    _, step, phase = json.loads(store.get(key))
    return f", last heard of in {f'step {step}' if step else 'the start'}, {phase}"


def _code_of(signals: Sequence[int]) -> int:
    """Return the launcher's exit code after signals: 128 + N if signal N ends a run without saving, otherwise 75."""
    return next((128 + number for number in signals if number in TO_END), ExitCode.REQUEUE)


@contextmanager
def _listening() -> Iterator[list[int]]:
    """Yield a list to which a signal handler appends the number of each received signal.

    Signals that the process already ignores stay ignored, as the command `nohup` requires. Outside the main thread,
    Python allows no signal handlers, so the list stays empty.
    """
    received: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    handled = [n for n in (*TO_SAVE, *TO_END) if is_main and signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in handled}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
