"""Start local processes through torch's own elastic agent, let them leave in peace, start them again after a loss."""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from esmshard.parallel.preemption import Preempted
from esmshard.parallel.worker import LAUNCHER, SHARED_CORES, environment
from esmshard.progress import say

STOP_TIMEOUT = 600.0
"""Seconds that processes have to save and leave after SIGTERM or SIGUSR1. A scheduler's own bound is mostly shorter."""

END_TIMEOUT = 30.0
"""Seconds after the other signals, for which nothing is saved."""

# By name, for Windows has not all of them.
_TO_SAVE, _TO_END = (
    tuple(signal.Signals[name] for name in names if hasattr(signal, name))
    for names in (("SIGTERM", "SIGUSR1"), ("SIGINT", "SIGHUP", "SIGQUIT"))
)
_INTERRUPTED = 128 + signal.SIGINT  # how our commands leave after Ctrl-C
_USAGE = 2


def run_local(
    arguments: Sequence[str], nproc: int, *, max_restarts: int = 0, stop_timeout: float = STOP_TIMEOUT
) -> int:
    """Run `python ARGUMENTS` in `nproc` processes of this machine, with RANK and so on in their environment.

    Signals that come here go on to the processes. The cores are shared out: each process computes with cores / nproc
    threads unless OMP_NUM_THREADS says otherwise.

    Args:
        arguments: of the interpreter, such as `-m esmshard finetune recipe.yaml`.
        nproc: processes to start.
        max_restarts: how often all are started again when one was lost: killed, crashed, or without another one
            (`InputError.transient`). Never after a user's mistake, nor when the run was asked to stop.
        stop_timeout: seconds that they have for leaving after SIGTERM or SIGUSR1; then they are killed.

    Returns:
        0 if all went well; 75 if processes left with it, or had not begun when SIGTERM came; else the exit code of the
        process whose failure was the cause, 1 if it was killed, 128 + N if that was by signal N from here.
    """
    variables = {
        LAUNCHER: str(os.getpid()),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",  # torch's handlers leave the processes behind at a second signal
    }
    if "OMP_NUM_THREADS" not in os.environ:
        variables |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)), SHARED_CORES: "1"}
    rendezvous = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",  # a free port: two runs on one machine never meet
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
    )
    with (
        environment(variables),
        _quiet(),
        tempfile.TemporaryDirectory(prefix="esmshard_") as notes,
        _listening() as signals,
    ):
        spec = WorkerSpec(
            role="default",
            local_world_size=nproc,
            entrypoint=sys.executable,
            args=tuple(arguments),
            rdzv_handler=get_rendezvous_handler(rendezvous),
            max_restarts=max_restarts,
            monitor_interval=0.1,
        )
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=notes), signals, stop_timeout)
        agent.run()
        spec.rdzv_handler.shutdown()
    return agent.exit_code


@contextmanager
def _quiet() -> Iterator[None]:
    """The agent logs each failure as a page; the worker has said what is wrong already, and the rest is said here."""
    logger = logging.getLogger("torch.distributed")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _listening() -> Iterator[list[int]]:
    """The signals that have come so far. One that is ignored stays so: `nohup` would be in vain otherwise.

    Outside the main thread, where Python allows no handlers, none is heard.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    heard = [number for number in (*_TO_SAVE, *_TO_END) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in heard}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class _Failure:
    """A process that ended otherwise than it should."""

    rank: int
    code: int
    """-N if signal N ended it."""
    told: bool
    """It has said why, in one sentence."""
    transient: bool
    """It may go well if it is started again."""

    @property
    def order(self) -> tuple[bool, bool, bool, int]:
        """Of several that are found at once, the first is the cause: who lost another process is its consequence."""
        return self.told and self.transient, not self.told, self.code > 0, self.rank

    def __str__(self) -> str:
        if self.code > 0:
            return f"the process of rank {self.rank} ended with exit code {self.code}"
        hint = " (out of memory, perhaps)" if self.code == -signal.SIGKILL else ""
        return f"the process of rank {self.rank} was ended by {signal.Signals(-self.code).name}{hint}"


class _Agent(LocalElasticAgent):
    """torch's agent, but for how it looks after the processes.

    torch's ends all others, within 30 s, when one ends with any code but 0. But one that leaves with 75 has saved, and
    so have the others, or will: they have `stop_timeout` to finish. And the others of one that failed cannot save any
    more, for that takes all: they are killed at once, and the agent starts all again if that may help.
    """

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, signals: list[int], stop_timeout: float) -> None:
        super().__init__(spec, logs)
        self._signals, self._stop_timeout = signals, stop_timeout
        self._sent = 0
        self._stop_by = float("inf")
        self.exit_code = 0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert isinstance(self._pcontext, SubprocessContext)
        processes = [self._pcontext.subprocess_handlers[rank].proc for rank in range(self._pcontext.nprocs)]
        self._send_on(processes)
        codes = [process.poll() for process in processes]
        running = codes.count(None)
        left = any(code is not None and self._has_left(code) for code in codes)
        failures = [self._failure(rank, code) for rank, code in enumerate(codes) if code and not self._has_left(code)]
        if running and left and not self._signals:
            self._signals.append(signal.SIGTERM)  # it alone was asked, and the others cannot go on without it
        too_late = running > 0 and time.monotonic() > self._stop_by
        if running and not too_late and (left or not failures):
            return RunResult(state=WorkerState.HEALTHY)
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                with suppress(TimeoutExpired):  # one that hangs in its driver cannot even be killed
                    process.wait(END_TIMEOUT)
        if too_late:
            return self._end_too_late(running)
        causes = sorted((f for f in failures if not (left and f.told and f.transient)), key=lambda f: f.order)
        if causes:
            return self._end_failed(causes[0], may_restart=not left and not self._signals)
        self.exit_code = Preempted.exit_code if left else 0
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(range(len(processes))))

    def _send_on(self, processes: "Sequence[Popen[bytes]]") -> None:
        for number in self._signals[self._sent :]:
            for process in processes:
                process.send_signal(number)
            self._sent += 1
            impatient = self._signals[: self._sent].count(signal.SIGINT) > 1
            allowed = self._stop_timeout if number in _TO_SAVE else 0 if impatient else END_TIMEOUT
            self._stop_by = min(self._stop_by, time.monotonic() + allowed)

    def _has_left(self, code: int) -> bool:
        """Whether a process saved, or was ended by a signal before it could take one: in its first second."""
        return code == Preempted.exit_code or (-code in _TO_SAVE and -code in self._signals)

    def _failure(self, rank: int, code: int) -> _Failure:
        assert self._pcontext is not None
        note = Path(self._pcontext.error_files[rank])
        told = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None
        if told is not None:
            return _Failure(rank, code, True, told.get("errorTraits", {}).get("retryability") == "True")
        return _Failure(rank, code, False, code not in (_USAGE, _INTERRUPTED))

    def _end_failed(self, cause: _Failure, may_restart: bool) -> RunResult:
        if may_restart and cause.transient and self._remaining_restarts:
            most = self._worker_group.spec.max_restarts
            say(f"{cause}; restart {most - self._remaining_restarts + 1} of {most}")
        else:
            self._remaining_restarts = 0
            ended_by_us = -cause.code in _TO_END and -cause.code in self._signals
            self.exit_code = cause.code if cause.code > 0 else 128 - cause.code if ended_by_us else 1
            if cause.code < 0 and not ended_by_us:
                say(f"error: {cause}")
        return RunResult(state=WorkerState.FAILED)

    def _end_too_late(self, running: int) -> RunResult:
        self._remaining_restarts = 0
        first = next((number for number in self._signals if number in _TO_END), None)
        self.exit_code = 128 + first if first is not None else 1
        if first is None:
            name = signal.Signals(self._signals[0]).name
            processes = f"{running} process{'es' if running > 1 else ''}"
            say(f"error: {processes} did not leave within {self._stop_timeout:g} s of {name}, and had to be killed")
        return RunResult(state=WorkerState.FAILED)
