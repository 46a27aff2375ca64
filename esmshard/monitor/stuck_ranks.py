"""The search for the process that holds up a run, so that a message names it in place of a general time-out.

Ranks wait in a collective for a rank that does not arrive, and the error of the collective says at best that a
connection was lost. So each rank writes notes to the rendezvous store (its host, its step, its current phase). A rank
that gets an error opens a roll call in the store. All surviving ranks answer, and a rank that does not answer is named
with its last note.
"""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from esmshard.errors import InputError, LostProcess
from esmshard.parallel.preemption import Preempted
from esmshard.parallel.process_group import World

T = TypeVar("T")

BARRIER_EVERY = 10.0
"""Seconds of steps between two barriers. A barrier takes 1 to 2 ms, which is too much for each step of a small model.
"""

TELL_EVERY = 1.0
"""Seconds between two updates of this rank's note. A thread sends it. A note for each phase of each step, sent by the
main thread, took 3% of a small model's time.
"""

ROLL_CALL = 10.0
"""Seconds in which a surviving rank must answer. All ranks learn of a failure at once, because the first rank that sees
it breaks the connections of the others.
"""

STORE_SILENCE = 40.0
"""Seconds after which a store without an answer counts as gone. Nobody closes a connection to a machine that has lost
its network, and torch would wait for as long as a collective may take.
"""

NCCL_GRACE = 60
"""Seconds by which NCCL's own time-out is later than ours, because NCCL's ends the process at once, without a message.
"""

_LOST = re.compile(
    r"gloo|nccl|monitoredbarrier|timed out|timeout|connection (closed|reset|refused)|broken pipe|aborted", re.IGNORECASE
)
_TIMED_OUT = re.compile(r"timed out|failed to pass monitoredbarrier", re.IGNORECASE)
"""The texts of a time-out. "timeout" is not one, since connections that another rank broke mention an "application
timeout".
"""


_KINDS: dict[str, type[BaseException]] = {"mistake": InputError, "preempted": Preempted}
"""The reasons for which a rank can end that the others must report. The more important reason comes first."""


class Stuck(RuntimeError):
    """The device does not finish its work, or another rank has opened the roll call."""


def is_lost(error: BaseException) -> bool:
    """Whether another rank may be the reason for an error. gloo raises plain RuntimeErrors, so the text decides."""
    return isinstance(error, (Stuck, dist.DistError)) or (
        isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))
    )


def recorder_settings(dumps: Path) -> dict[str, str]:
    """Return environment variables with which torch records the last collectives and writes them at a time-out.

    They are read when the process group is created. Set them before, unless the user has set them. The names are valid
    from torch 2.9 on. NCCL's watchdog appends the rank to the path.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(dumps.absolute() / "rank_"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def dump_recorder(directory: Path, rank: int, device: torch.device) -> Path | None:
    """Write torch's record of this rank's last collectives; None if there is no record.

    On a GPU it is NCCL's record as `rank_N`, which torch's `fr_trace` reads. On the CPU it is gloo's record as
    `rank_N.json`: it lacks the groups that `fr_trace` needs, but people can read JSON (docs/watching.md).
    """
    on_gpu = device.type == "cuda"
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace" if on_gpu else "_dump_fr_trace_json", None)
    if dump is None or os.environ.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
        return None
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / (f"rank_{rank}" if on_gpu else f"rank_{rank}.json")
    path.write_bytes(dump())
    return path


def _break_off() -> None:
    """Make every rank that waits in a collective with this rank see an error now, and not at its own time-out.

    Ranks that are no neighbours of the missing rank would not notice the error. NCCL has an abort. gloo keeps its
    connections as long as any object holds the group, as meshes do, but a receive that times out closes them all.
    """
    for group in list(distributed_c10d._world.pg_map):
        if torch.device("cpu") in group._device_types:
            for peer in set(range(group.size())) - {group.rank()}:
                try:
                    group.recv([torch.empty(1)], peer, 0).wait(timedelta(milliseconds=1))
                except RuntimeError as error:
                    if _TIMED_OUT.search(str(error)):
                        break  # otherwise this connection was broken already; try the next one
    distributed_c10d._abort_process_group()


class Control:
    """The side channel of a run: barriers with a time-out, notes, and the roll call. A single process uses none of
    these.

    Use it as `with Control(...) as control:` around all code in which a rank can get stuck. Inside, the error of a lost
    connection or a time-out becomes an `InputError` that names the rank. Other errors are raised unchanged; the other
    ranks then report them and name this rank.

    Args:
        world: all ranks, each of which creates a `Control`.
        start_timeout: seconds for which a collective waits for a rank until the first step is done.
        step_timeout: these seconds for later steps.
        dumps: the directory for the flight recorder's files, one for each rank.
    """

    def __init__(self, world: World, *, start_timeout: float, step_timeout: float, dumps: Path) -> None:
        self._world, self._dumps = world, dumps
        self._timeout, self._step_timeout, self._key = start_timeout, step_timeout, "start_timeout"
        self._doing = (0, "starting")
        self._left = threading.Event()
        self._sender = threading.Thread(target=self._keep_sending, daemon=True)
        self._since_barrier = BARRIER_EVERY
        self._group: Any = None
        self._store: Any = None
        if world.size > 1:
            self._store = distributed_c10d.PrefixStore("esmshard", distributed_c10d._get_default_store())

    def __enter__(self) -> "Control":
        if self._store is not None:
            self._store.set(f"host/{self._world.rank}", socket.gethostname())
            self._sender.start()
            self._set_timeouts()
            try:
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout))
            except RuntimeError as error:
                self._explain(error)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is not None:
            self._left.set()
            self._sender.join(1)  # the thread ends before the store is closed
            if error is not None:
                self._explain(error)

    def _explain(self, error: BaseException) -> None:
        """Raise an `InputError` in place of an error that another rank caused. Report our own error to the others."""
        if is_lost(error):
            raise self._verdict(str(error)) from None
        try:
            self._send_note()
            kind = next((k for k, of in _KINDS.items() if isinstance(error, of)), "crash")
            words = f"{type(error).__name__}: {error}" if kind == "crash" else f"{error}"
            self._store.set(f"ended/{self._world.rank}", json.dumps([kind, words.strip().split("\n")[0][:500]]))
        except RuntimeError:  # the process that holds the store has ended, too
            pass

    def host(self, rank: int) -> str:
        """Return the name of a rank's machine."""
        return self._read(f"host/{rank}") if self._store is not None else socket.gethostname()

    def note(self, phase: str) -> None:
        """Set what this rank does from now on, such as `validating`. The other ranks can read it a second later."""
        self._doing = (self._doing[0], phase)

    def _send_note(self) -> None:
        self._store.set(f"note/{self._world.rank}", json.dumps(self._doing))

    def _keep_sending(self) -> None:
        sent = None
        while not self._left.is_set():
            if sent != self._doing:
                sent = self._doing
                try:
                    self._send_note()
                except RuntimeError:  # the store is gone; the main thread will notice this, too
                    return
            self._left.wait(TELL_EVERY)

    def begin_step(self, step: int) -> None:
        """Begin a step on this rank. Every ten seconds of steps it waits here for all ranks.

        Args:
            step: the step as users count them, from 1 on, also when a run continues.

        Raises:
            RuntimeError: from gloo, which names the missing ranks on the first rank only; `__exit__` makes it a
                message.
        """
        if self._store is None:
            return
        if self._doing[0] and self._key == "start_timeout":  # the first step is done
            self._timeout, self._key = self._step_timeout, "step_timeout"
            self._set_timeouts()
        # NCCL's watchdog writes to this directory but does not create it
        if not self._doing[0] and self._world.device.type == "cuda":
            self._dumps.mkdir(parents=True, exist_ok=True)
        self._doing = (step, "computing")
        if self._since_barrier >= BARRIER_EVERY:
            self._since_barrier = 0.0
            dist.monitored_barrier(self._group, timedelta(seconds=self._timeout), wait_all_ranks=True)

    def end_step(self, seconds: float) -> None:
        """End a step of `seconds`. All ranks must give the same number, because it decides on the next barrier."""
        self._since_barrier += seconds
        self.note("done")

    def wait_for_device(self) -> None:
        """Let the host wait for a GPU no longer than the time-out, and raise `Stuck` after that.

        Collectives on a GPU return at once, and the next read of a number would wait for them forever. Another rank's
        roll call ends the wait, too.
        """
        if self._store is not None and self._world.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._wait_until(event.query)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        begin = looked = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now - begin > self._timeout:
                raise Stuck(f"timed out after {self._timeout} s")
            if now - looked > 1:
                looked = now
                if self._store.check(["call"]):
                    raise Stuck("another rank lost its connection")
            time.sleep(0.0005)

    def _set_timeouts(self) -> None:
        """Set the time-out of all groups. Groups of the mesh's dimensions have torch's 10 or 30 min, not the default
        group's.
        """
        cuda, nccl = torch.device("cuda"), timedelta(seconds=self._timeout + NCCL_GRACE)
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=self._timeout), group)
            if cuda in group._device_types and distributed_c10d.get_backend(group) != "gloo":
                group._get_backend(cuda)._set_default_timeout(nccl)

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _verdict(self, words: str) -> InputError | Preempted:
        """Hold the roll call and return its conclusion: one message, the same on all surviving ranks. One rank prints
        it.
        """
        rank = self._world.rank
        dump_recorder(self._dumps, rank, self._world.device)
        _break_off()
        try:
            speaker, sentence, kind = _within(STORE_SILENCE, lambda: self._roll_call(words))
        except (RuntimeError, TimeoutError):
            where = os.environ.get("MASTER_ADDR", "unknown")
            speaker, kind = rank, "crash"
            sentence = (
                f"rank 0 or the launcher on its machine ({where}), or the way to it, is gone in {self._here()}, and "
                "with it the store through which the processes met; look at what it said last, then start again with "
                "--resume auto"
            )
        if kind == "preempted":
            return Preempted(sentence)
        error = InputError(sentence) if kind == "mistake" else LostProcess(sentence)
        error.shared = rank != speaker
        if error.shared:
            time.sleep(1)  # it prints before any rank ends, because launchers end all ranks when one ends
        return error

    def _roll_call(self, words: str) -> tuple[int, str, str]:
        """Return the rank that prints, the message, and why a rank ended if one reported it: a user's mistake, or a
        stop.

        The rank that opens the call concludes it, because only this rank knows who was late.
        """
        rank, size = self._world.rank, self._world.size
        self._send_note()
        call = json.dumps([rank, words.strip().split("\n")[0]])
        opened = self._store.compare_set("call", "", call).decode() == call
        self._store.set(f"answer/{rank}", "timed out" if _TIMED_OUT.search(words) else "lost")
        answered, ended, kinds = {rank: 0.0}, dict[int, str](), {"crash"}
        begin = time.monotonic()
        # The other ranks conclude later, in case the rank that opened the call has ended meanwhile.
        while (waited := time.monotonic() - begin) < ROLL_CALL * (1 if opened else 2):
            for other in set(range(size)) - set(answered) - set(ended):
                if self._store.check([f"answer/{other}"]):
                    answered[other] = waited
                elif note := self._read(f"ended/{other}"):
                    kind, ended[other] = json.loads(note)
                    kinds.add(kind)
            if self._read("verdict") or (opened and len(answered) + len(ended) == size):
                break
            time.sleep(0.05)
        kind = next(kind for kind in (*_KINDS, "crash") if kind in kinds)
        verdict = json.dumps([min(answered), self._sentence(answered, ended), kind])
        speaker, sentence, kind = json.loads(self._store.compare_set("verdict", "", verdict).decode())
        return int(speaker), str(sentence), str(kind)

    def _sentence(self, answered: dict[int, float], ended: dict[int, str]) -> str:
        if ended:
            return "; ".join(f"{self._named([rank])} ended in {self._at(rank)}: {why}" for rank, why in ended.items())
        again = "start again with --resume auto"
        # No rank is missing: a rank was only late, and its time-out was not the first.
        late = [rank for rank, seconds in answered.items() if seconds > ROLL_CALL / 5]
        missing = sorted(set(range(self._world.size)) - set(answered)) or sorted(late)
        if not missing:
            opener, words = json.loads(self._read("call"))
            return f"the processes lost each other in {self._here()}, though all live (rank {opener}: {words}); {again}"
        who, at = self._named(missing), self._at(missing[0])
        if not any(self._read(f"answer/{rank}") == "timed out" for rank in answered):
            return f"{who} is gone, last heard of in {at}; ended from outside (out of memory, perhaps): {again}"
        waited = f"{self._timeout:g} s"
        if self._noted(missing[0])[0] == self._doing[0] > 0:
            what = f"is stuck in {at}; the others waited {waited} for it"
        else:
            what = f"did not come to {self._here()} within {waited}, last heard of in {at}"
        return f"{who} {what}; look at that machine, then {again}, or allow more (parallel.{self._key})"

    def _named(self, ranks: list[int]) -> str:
        some = [f"rank {rank} (host {self._read(f'host/{rank}') or 'unknown'})" for rank in ranks[:8]]
        return ", ".join(some) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")

    def _noted(self, rank: int) -> tuple[int, str]:
        note = self._read(f"note/{rank}")
        step, phase = json.loads(note) if note else (0, "not even started")
        return int(step), str(phase)

    def _at(self, rank: int) -> str:
        step, phase = self._noted(rank)
        return f"step {step}, {phase}" if step else f"the start, {phase}"

    def _here(self) -> str:
        return f"step {self._doing[0]}" if self._doing[0] else "the first step"


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function in a thread. `TimeoutError` if it does not return in time; the thread is then left running."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except RuntimeError as error:
            future.set_exception(error)

    threading.Thread(target=call, name="roll-call", daemon=True).start()
    return future.result(seconds)
