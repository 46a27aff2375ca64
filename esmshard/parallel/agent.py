"""Looks after the processes of one machine, and agrees with the launchers of the others on how the run goes on."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

from torch.distributed import DistError, DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from esmshard.parallel.meeting import Board, Final
from esmshard.parallel.nodes import Nodes
from esmshard.parallel.preemption import Preempted
from esmshard.parallel.worker import ATTEMPT, LAUNCH, environment
from esmshard.progress import say

END_TIMEOUT = 30.0
"""Seconds after signals for which nothing is saved, or after the place where the machines meet is lost."""

GRACE = 5.0
"""Seconds for which a loss that is only the consequence of another waits until that other one is told."""

# By name, for Windows has not all of them.
TO_SAVE, TO_END = (
    tuple(signal.Signals[name] for name in names if hasattr(signal, name))
    for names in (("SIGTERM", "SIGUSR1"), ("SIGINT", "SIGHUP", "SIGQUIT"))
)
_INTERRUPTED = 128 + signal.SIGINT  # how our commands leave after Ctrl-C
_USAGE = 2


@dataclass(frozen=True)
class Failure:
    """A process that ended otherwise than it should."""

    rank: int
    code: int
    """-N if signal N ended it."""
    told: bool
    """It has said why, in one sentence."""
    transient: bool
    """It may go well if it is started again."""
    sentence: str = ""
    """What it said."""
    shared: bool = False
    """The first process of all has printed the sentence, and this one has not."""
    host: str = ""
    """Its machine, where there are several."""

    @property
    def order(self) -> tuple[bool, bool, bool, int]:
        """Of several that are found at once, the first is the cause: who lost another process is its consequence."""
        return self.is_consequence, not self.told, self.code > 0, self.rank

    @property
    def is_consequence(self) -> bool:
        """Another process was lost first."""
        return self.told and self.transient

    def __str__(self) -> str:
        who = f"the process of rank {self.rank}" + (f" on {self.host}" if self.host else "")
        if self.code > 0:
            return f"{who} ended with exit code {self.code}"
        hint = " (out of memory, perhaps)" if self.code == -signal.SIGKILL else ""
        return f"{who} was ended by {signal.Signals(-self.code).name}{hint}"


class Agent(LocalElasticAgent):
    """torch's agent, but for how it looks after the processes.

    torch's ends all others, within 30 s, when one ends with any code but 0. But one that leaves with 75 has saved, and
    so have the others, or will: they have `stop_timeout` to finish. And the others of one that failed cannot save any
    more, for that takes all: they are killed at once, and all are started again if that may help.

    torch's knows of other machines that they wait. This one tells and hears on the board how their processes ended,
    that one was asked to stop, and that one is gone.

    Args:
        spec: of the processes, and how to meet.
        logs: where they leave what they say at their end.
        nodes: the machines, for what is said of them.
        board: of these.
        signals: that have come so far; more come while it runs.
        stop_timeout: seconds for leaving after SIGTERM or SIGUSR1.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        nodes: Nodes,
        board: Board,
        signals: list[int],
        stop_timeout: float,
    ) -> None:
        super().__init__(spec, logs)
        self._nodes, self._board, self._signals, self._stop_timeout = nodes, board, signals, stop_timeout
        self._host = socket.gethostname() if nodes.most > 1 else ""
        self._sent = 0
        self._failures: list[Failure] = []
        self._stop_by = float("inf")
        self.exit_code = 0
        self.is_meeting = False
        """A thread of its own waits for the other machines, maybe for ever."""

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        while self._meet():
            for local_rank, identity in self._start_workers(group).items():
                group.workers[local_rank].id = identity
            group.state = WorkerState.HEALTHY
            goes_on = self._watch()
            self._stop_workers(group)
            if not goes_on:
                break
        done = {worker.global_rank: None for worker in group.workers}
        return RunResult(WorkerState.FAILED) if self.exit_code else RunResult(WorkerState.SUCCEEDED, done)

    def _meet(self) -> bool:
        """Wait for the other machines: whether there is something to start.

        In a thread, which is left behind if a signal or the end of the run comes first: a connection to a machine that
        is gone may wait for ever.
        """
        board, trouble = self._board, list[Exception]()

        def meet() -> None:
            try:
                group: Any = self._worker_group  # torch says of all its parts that they are None
                self._rendezvous(group)
                board.meet(group.store, group.group_rank, group.group_world_size)
            except Exception as error:  # raised below, if it is not one of those that are expected
                trouble.append(error)

        thread = threading.Thread(target=meet, name="rendezvous", daemon=True)
        thread.start()
        while thread.is_alive() and not (board.final or board.cut_off or self._signals):
            thread.join(0.05)
        self.is_meeting = thread.is_alive()
        if board.final:
            return self._conclude(board.final)
        if trouble and isinstance(trouble[0], DistStoreError) and not board.cut_off:
            return self._meet()  # a machine was lost in the middle of it, and what it had to say did not come
        if board.cut_off or (trouble and isinstance(trouble[0], (RendezvousConnectionError, DistError))):
            return self._conclude(Final(1, self._no_answer(), -1))
        if trouble and isinstance(trouble[0], (RendezvousClosedError, RendezvousGracefulExitError)):
            # The run has ended a moment ago, and this machine was not taken in.
            return self._conclude(self._wait_for_final() or Final(1, self._no_answer(), -1))
        if trouble and isinstance(trouble[0], RendezvousTimeoutError):
            words = (
                f"fewer than {self._nodes.least} machines met at {self._nodes.endpoint} within "
                f"{self._nodes.join_timeout} s, or they would not take this one in; start the same command on each of "
                "them, or let them wait longer (--rdzv-conf join_timeout=SECONDS)"
            )
            return self._conclude(Final(1, words, -1))
        if trouble:
            raise trouble[0]
        if self.is_meeting:  # asked to stop, with nothing to save
            final = Final(self._code_of_signals(), "", board.rank)
            if not board.began_elsewhere():
                board.propose_final(final)
                self._wait_for_final()
            return self._conclude(board.final or final)
        return True

    def _wait_for_final(self) -> Final | None:
        end = time.monotonic() + GRACE
        while not self._board.final and time.monotonic() < end:
            time.sleep(0.05)
        return self._board.final

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._remaining_restarts = worker_group.spec.max_restarts - self._board.restarts  # torch tells the processes
        with environment({ATTEMPT: str(self._board.number), LAUNCH: self._board.launch}):
            started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _watch(self) -> bool:
        """Until it is agreed how the run goes on, and no process of this machine is left: whether all meet again."""
        assert isinstance(self._pcontext, SubprocessContext)
        processes = [self._pcontext.subprocess_handlers[rank].proc for rank in range(self._pcontext.nprocs)]
        board, stop_by_before = self._board, self._stop_by
        told_to_save = decided = cut_off = False
        waits_since = 0.0
        while board.final is None and (board.again is None or board.again.save):
            time.sleep(self._worker_group.spec.monitor_interval)
            codes = [process.poll() for process in processes]
            running = codes.count(None)
            left_here = any(code is not None and self._has_left(code) for code in codes)
            if board.cut_off and not cut_off:  # one that saves may do so still: its peers live, perhaps
                cut_off, self._stop_by = True, min(self._stop_by, time.monotonic() + END_TIMEOUT)
            if not self._signals and (cut_off or (board.again is None and (board.asked or (running and left_here)))):
                self._signals.append(signal.SIGTERM)  # another was asked, and the others cannot go on without it
            if any(number in TO_SAVE for number in self._signals):
                board.ask()
            if board.again is not None and not told_to_save:
                told_to_save = True
                say(board.again.words)
                _send(processes, signal.SIGTERM)
                self._stop_by = min(self._stop_by, time.monotonic() + self._stop_timeout)
            self._send_on(processes)

            left = left_here or "left" in board.ended.values()
            self._failures = [
                self._failure(rank, code) for rank, code in enumerate(codes) if code and not self._has_left(code)
            ]
            too_late = running > 0 and time.monotonic() > self._stop_by
            if running and not too_late and not board.gone and (left or not self._failures):
                if board.waiting and not self._signals and board.again is None and not board.ended:
                    board.waiting = False
                    board.propose_again("another machine has come: all save, and go on with it", save=True)
                continue
            _kill(processes)
            if board.again is not None and not self._signals:
                self._stop_by = stop_by_before
                board.end("left")
                break
            if board.cut_off:
                saved = all(code is not None and self._has_left(code) for code in codes)
                return self._conclude(Final(Preempted.exit_code if saved else 1, self._no_answer(), -1))
            if decided:
                continue
            cause = min(
                (f for f in self._failures if not (left and f.is_consequence)), key=lambda f: f.order, default=None
            )
            if too_late:
                decided = True
                board.propose_final(self._too_late(running))
            elif board.gone or cause is not None:
                waits_since = waits_since or time.monotonic()
                if cause is not None and cause.is_consequence and board.size > 1 and not board.gone:
                    board.end("lost")
                    if time.monotonic() - waits_since < GRACE:
                        continue
                decided = True
                self._decide(None if board.gone else cause, may_restart=not left and not self._signals)
            elif any(number in TO_END for number in self._signals):
                decided = True
                board.propose_final(Final(self._code_of_signals(), "", board.rank))
            else:
                board.end("left" if left_here else "done")
                if len(board.ended) == board.size:
                    decided = True
                    left = "left" in board.ended.values()
                    board.propose_final(Final(Preempted.exit_code if left else 0, "", board.rank))
        _kill(processes)
        if board.final:
            return self._conclude(board.final)
        if board.again is not None and not told_to_save:
            say(board.again.words)
        return True

    def _decide(self, cause: Failure | None, may_restart: bool) -> None:
        """Propose how it goes on after a failure; after the loss of a machine, where there is none."""
        board = self._board
        if cause is None:
            words = f"{', '.join(board.gone)} gave no sign of life for {self._nodes.patience} s"
            final = Final(1, f"{words}; start again with --resume auto", board.rank)
            transient = True
        else:
            ended_by_us = -cause.code in TO_END and -cause.code in self._signals
            code = cause.code if cause.code > 0 else 128 - cause.code if ended_by_us else 1
            words, transient = str(cause), cause.transient
            final = Final(code, "" if ended_by_us else cause.sentence or words, board.rank)
        if may_restart and transient:
            board.propose_again(words, otherwise=final)
        else:
            board.propose_final(final)

    def _conclude(self, final: Final) -> bool:
        """Leave as all do, and say why unless a process of this machine has done so."""
        self.exit_code = final.code
        first = self._board.rank == 0
        told = [f.sentence for f in self._failures if f.told and (first or not f.shared)]
        crashed = final.by == self._board.rank and any(f.code > 0 and str(f) == final.words for f in self._failures)
        if final.words and final.words not in told and not crashed:
            say(f"error: {final.words}")
        return False

    def _send_on(self, processes: "Sequence[Popen[bytes]]") -> None:
        for number in self._signals[self._sent :]:
            _send(processes, number)
            self._sent += 1
            impatient = self._signals[: self._sent].count(signal.SIGINT) > 1
            allowed = self._stop_timeout if number in TO_SAVE else 0 if impatient else END_TIMEOUT
            self._stop_by = min(self._stop_by, time.monotonic() + allowed)

    def _has_left(self, code: int) -> bool:
        """Whether a process saved, or was ended by a signal before it could take one: in its first second."""
        again = self._board.again
        asked = -code in self._signals or (-code == signal.SIGTERM and again is not None and again.save)
        return code == Preempted.exit_code or (-code in TO_SAVE and asked)

    def _failure(self, local_rank: int, code: int) -> Failure:
        assert self._pcontext is not None
        note = Path(self._pcontext.error_files[local_rank])
        told = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None
        rank = self._worker_group.workers[local_rank].global_rank
        if told is None:
            return Failure(rank, code, False, code not in (_USAGE, _INTERRUPTED), host=self._host)
        traits, message = told.get("errorTraits", {}), told.get("message", "")
        sentence = str(message.get("message", "") if isinstance(message, dict) else message)
        transient, shared = (traits.get(name) == "True" for name in ("retryability", "shared"))
        return Failure(rank, code, True, transient, sentence, shared, self._host)

    def _too_late(self, running: int) -> Final:
        ended = any(number in TO_END for number in self._signals)
        if ended or not self._signals:
            return Final(self._code_of_signals(), "", self._board.rank)
        name = signal.Signals(self._signals[0]).name
        processes = f"{running} process{'es' if running > 1 else ''}" + (f" on {self._host}" if self._host else "")
        words = f"{processes} did not leave within {self._stop_timeout:g} s of {name}, and had to be killed"
        return Final(1, words, self._board.rank)

    def _code_of_signals(self) -> int:
        first = next((number for number in self._signals if number in TO_END), None)
        return Preempted.exit_code if first is None else 128 + first

    def _no_answer(self) -> str:
        return (
            f"{self._nodes.endpoint} gives no answer: the launcher on that machine, or the way to it, is gone, and the "
            "run cannot go on without it; start again with --resume auto"
        )


def _send(processes: "Sequence[Popen[bytes]]", number: int) -> None:
    for process in processes:
        process.send_signal(number)


def _kill(processes: "Sequence[Popen[bytes]]") -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(TimeoutExpired):  # one that hangs in its driver cannot even be killed
                process.wait(END_TIMEOUT)
