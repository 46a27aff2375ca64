"""The observation of the ranks of a run: who is gone or stuck, and what each rank measures in a step.

Ranks wait in a collective for a rank that does not come, and the error of the collective says at best that a
connection was lost. So each rank writes its place (step and phase) to the store of the run every second, with a count.
A rank that gets an error notes that. A rank whose count has stopped is gone or suspended. A rank that is alive, and got
no error while others waited in vain, is stuck. It is named with its host and its last place.

A step has one small collective for losses and norms. `Watch.numbers` are part of this collective, so watching needs no
collective and no wait of its own. The report is a mapping for metrics.jsonl (docs/watching.md) and messages to print.
"""

import json
import math
import os
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from esmshard.errors import ExitCode, InputError, LostProcess
from esmshard.parallel.preemption import Preempted
from esmshard.parallel.process_group import World
from esmshard.parallel.profiler import reading

T = TypeVar("T")

BEAT = 1.0
"""The seconds between two notes of a rank. A thread sends them. A note for each phase of each step, sent by the main
thread, took 3% of a small model's time.
"""

ROLL_CALL = 10.0
"""The seconds in which a surviving rank must report an error, and a living one must have sent another note."""

STORE_SILENCE = 40.0
"""The seconds after which a store without an answer counts as gone. Nobody closes a connection to a machine that has
lost its network.
"""

WINDOW = 20
"""The number of steps over which a rank must wait for data for a message."""
LEAST = 0.03
"""The seconds of a step below which no rank counts as slow, because a machine's noise on small models is that large."""
FULL = 0.95
"""The share of its device's memory above which a rank counts as full."""
LISTED = 64
"""The most ranks whose values are written one by one."""

_LOST = re.compile(r"gloo|nccl|timed out|timeout|connection (closed|reset|refused)|broken pipe|aborted", re.IGNORECASE)


class Stuck(RuntimeError):
    """The device does not finish its work, or another rank has reported an error."""


def is_lost(error: BaseException) -> bool:
    """Whether another rank may be the reason for an error. gloo raises plain RuntimeErrors, so the text decides."""
    return isinstance(error, (Stuck, dist.DistError)) or (
        isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))
    )


def recorder_settings(dumps: Path) -> dict[str, str]:
    """Return environment variables with which torch records the last collectives and NCCL writes them at a time-out.

    They are read when the process group is created. Set them before, unless the user has set them. The names are valid
    from torch 2.9 on. NCCL's watchdog appends the rank to the path.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(dumps.absolute() / "rank_"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


class Control:
    """The notes of the ranks, and the search for a lost rank. A single process has neither.

    Use it as `with Control(...) as control:` around all code in which a rank can get stuck. The error of a lost
    connection or a time-out becomes a `LostProcess` that names the rank, or the error of the rank that ended. Other
    errors are raised unchanged; the other ranks then report them and name this rank.

    Args:
        world: all ranks, each of which creates a `Control`.
        dumps: the directory for the files of NCCL's flight recorder, which NCCL does not create.
    """

    def __init__(self, world: World, dumps: Path) -> None:
        self._world = world
        self._place = (0, "starting")
        self._left = threading.Event()
        self._sender = threading.Thread(target=self._keep_sending, name="notes", daemon=True)
        self._store: Any = None
        if world.size > 1:
            self._store = world.connect(STORE_SILENCE)
            if world.device.type == "cuda":
                dumps.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Control":
        if self._store is not None:
            self._sender.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is None:
            return
        try:
            if error is not None and is_lost(error):
                raise self._verdict(str(error).strip().split("\n")[0]) from error
            if error is not None:
                code = getattr(error, "exit_code", ExitCode.CRASHED)
                words = str(error) if isinstance(error, (InputError, Preempted)) else f"{type(error).__name__}: {error}"
                self._store.set(f"ended/{self._world.rank}", json.dumps([code, words.strip().split("\n")[0][:500]]))
        except dist.DistError:  # the process that holds the store has ended, too
            pass
        finally:
            self._left.set()

    def host(self, rank: int) -> str:
        """Return the name of a rank's machine."""
        return str(self._store.get(f"host/{rank}").decode()) if self._store is not None else socket.gethostname()

    def note(self, phase: str, step: int | None = None) -> None:
        """Set what this rank does from now on, such as `validating`, and the step, as users count them from 1 on."""
        self._place = (self._place[0] if step is None else step, phase)

    def _keep_sending(self) -> None:
        store, count = self._world.connect(STORE_SILENCE), 0  # requests of the main thread must not hold up these
        while not self._left.is_set():
            try:
                store.set(f"note/{self._world.rank}", json.dumps([count, *self._place]))
            except RuntimeError:  # the store is gone; the main thread will notice this, too
                return
            count += 1
            self._left.wait(BEAT)

    def wait_for_device(self) -> None:
        """Let the host wait for a GPU no longer than the time-out, and raise `Stuck` after that.

        Collectives on a GPU return at once, and the next read of a number would wait for them until NCCL ends the
        process. The report of another rank ends the wait, too.
        """
        if self._store is not None and self._world.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._wait_until(event.query)

    def _wait_until(self, is_ready: Callable[[], bool]) -> None:
        begin = asked = time.monotonic()
        while not is_ready():
            now = time.monotonic()
            if now - begin > self._world.timeout:
                raise Stuck(f"Timed out after {self._world.timeout} s")
            if now - asked > 1:
                asked = now
                if self._store.check(["call"]):
                    raise Stuck("another rank lost its connection")
            time.sleep(0.0005)

    def _verdict(self, words: str) -> BaseException:
        """Return one error, with the same sentence on all surviving ranks. One rank prints it."""
        rank = self._world.rank
        try:
            code, sentence, speaker = _within(STORE_SILENCE, lambda: self._roll_call(words))
        except (dist.DistError, TimeoutError):
            where = os.environ.get("MASTER_ADDR", "unknown")
            code, speaker = ExitCode.LOST, rank
            sentence = (
                f"rank 0 or the launcher on its machine ({where}), or the way to it, is gone in {_at(self._place)}, "
                "and with it the store through which the processes met; look at what it said last, then start again "
                "with --resume auto"
            )
        if code == ExitCode.REQUEUE:
            return Preempted(sentence)
        error = InputError(sentence) if code in (ExitCode.FAILED, ExitCode.USAGE) else LostProcess(sentence)
        error.shared = rank != speaker
        if error.shared:
            time.sleep(1)  # it prints before any rank ends, because launchers end all ranks when one ends
        elif rank == 0 and self._world.holds_store:
            time.sleep(3)  # ranks that see an error only when others have left still read the verdict here
        return error

    def _roll_call(self, words: str) -> tuple[int, str, int]:
        """Return the exit code, the sentence, and the rank that prints it. The first rank with an error decides."""
        rank, ranks = self._world.rank, range(self._world.size)
        timed_out = "timed out" in words.lower()
        self._store.set("call", "")
        self._store.set(f"waited/{rank}", "timed out" if timed_out else "lost")
        before = [self._noted(other) for other in ranks]
        end, reported = time.monotonic() + ROLL_CALL, {rank}
        while len(reported) < len(ranks) and time.monotonic() < end and not self._store.check(["verdict"]):
            time.sleep(0.05)
            reported = {r for r in ranks if self._store.check([f"waited/{r}"]) or self._store.check([f"ended/{r}"])}
        ended = {r: json.loads(self._store.get(f"ended/{r}")) for r in ranks if self._store.check([f"ended/{r}"])}
        missing = [other for other in ranks if other not in reported]
        silent = [other for other in missing if self._noted(other) == before[other]]
        codes = [code for code, _ in ended.values()]
        # A mistake of the user is more important than a request to stop, and that more than a crash.
        order = (ExitCode.USAGE, ExitCode.FAILED, ExitCode.REQUEUE)
        code = next((code for code in order if code in codes), ExitCode.LOST)
        sentence = self._sentence(ended, missing, silent, timed_out, words)
        verdict = json.dumps([code, sentence, rank if 0 in missing or 0 in ended else 0])
        code, sentence, speaker = json.loads(self._store.compare_set("verdict", "", verdict).decode())
        return int(code), str(sentence), int(speaker)

    def _sentence(
        self,
        ended: Mapping[int, tuple[int, str]],
        missing: Sequence[int],
        silent: Sequence[int],
        timed_out: bool,
        words: str,
    ) -> str:
        again = "start again with --resume auto"
        if ended:
            ends = ((self._named([rank]), _at(self._noted(rank)[1:]), why) for rank, (_, why) in ended.items())
            return "; ".join(f"{who} ended in {place}: {why}" for who, place, why in ends)
        if timed_out and missing:
            blamed = silent or missing
            who, place, waited = self._named(blamed), _at(self._noted(blamed[0])[1:]), self._world.timeout
            fix = f"look at that machine, then {again}, or allow more (parallel.step_timeout)"
            if silent:
                return f"{who} does not answer, last heard of in {place}; the others waited {waited} s for it; {fix}"
            return f"{who} is stuck, last heard of in {place}; the others waited {waited} s for it; {fix}"
        if silent:
            place = _at(self._noted(silent[0])[1:])
            return (
                f"{self._named(silent)} is gone, last heard of in {place}; ended from outside (out of memory, "
                f"perhaps): {again}"
            )
        return (
            f"the processes lost each other in {_at(self._place)}, though all live (rank {self._world.rank}: {words}); "
            + again
        )

    def _named(self, ranks: Sequence[int]) -> str:
        names = [f"rank {rank} (host {self.host(rank)})" for rank in ranks[:8]]
        return ", ".join(names) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")

    def _noted(self, rank: int) -> tuple[int, int, str]:
        """Return the count, the step and the phase of a rank's last note."""
        if not self._store.check([f"note/{rank}"]):
            return -1, 0, "not even started"
        count, step, phase = json.loads(self._store.get(f"note/{rank}"))
        return int(count), int(step), str(phase)


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function in a thread. `TimeoutError` if it does not return in time; the thread is then left running.

    The time-out of torch's store does not end a request to a process that is stopped.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=call, name="roll-call", daemon=True).start()
    return future.result(seconds)


def _at(place: tuple[int, str]) -> str:
    step, phase = place
    return f"step {step}, {phase}" if step else f"the start, {phase}"


def check_first_batch(world: World, digests: Callable[[], Mapping[bytes, str]]) -> None:
    """Stop if two ranks would train on the same records, or ranks that work together on different ones. Nothing
    else would show this, since the loss falls anyway.

    Args:
        world: the ranks that take the step together.
        digests: reads this rank's share of the first step, and returns the ids of its records by digest.

    Raises:
        InputError: on all ranks, if a record is in the shares of two ranks, or not in those of all that work together.
    """
    owners: dict[bytes, int] = {}
    shares = world.gather(world.agree(digests))
    for rank, share in enumerate(shares):
        first = rank - rank % world.together
        if first != rank:
            if differing := [*share.items() ^ shares[first].items()]:
                raise _shared(
                    f"ranks {first} and {rank} compute each layer together (parallel.tensor or context) and would "
                    f"train on different records (first: '{differing[0][1]}'); give both the same files, and the same "
                    "version of esmshard"
                )
            continue
        for digest, record_id in share.items():
            owner = owners.setdefault(digest, rank)
            if owner != rank:
                raise _shared(
                    f"ranks {owner} and {rank} would train on the same records (first: '{record_id}'); each rank must "
                    "take its own share: start through `esmshard finetune --nproc N` or torchrun, which set RANK and "
                    "WORLD_SIZE"
                )


def _shared(message: str) -> InputError:
    error = InputError(message)
    error.shared = True
    return error


@dataclass(frozen=True)
class Numbers:
    """The measurements of one rank in a step. Values that a device does not report are NaN."""

    residues: float
    ideal_s: float
    """The seconds that the device would need at its peak for the FLOPs of the model."""
    gradients_s: float
    """The seconds from the beginning of the step until all gradients exist."""
    data_wait_s: float
    peak_memory_bytes: float
    """The most bytes allocated on the GPU so far; on the CPU the most memory of the process."""
    reserved_memory_bytes: float
    """The most bytes of the GPU that the allocator has held."""
    memory_share: float
    """The same as a share of the device's memory."""
    allocation_retries: float
    """How often so far the allocator had to release all its free memory before it could serve a request."""


@dataclass(frozen=True)
class StepReport:
    """The report on a step of all ranks."""

    line: dict[str, Any]
    """The line for metrics.jsonl."""
    warnings: list[str]
    """The messages that are new in this step."""


class Watch:
    """The measurement of this rank's steps.

    Args:
        world: all ranks.
        control: has the names of ranks, and is notified when a step is done.
        peak: FLOP/s of this device at the precision of the run; None if unknown.
    """

    def __init__(self, world: World, control: Control, peak: float | None = None) -> None:
        self._world, self._control, self._peak = world, control, peak
        self._began = self._data_wait = self._flops = 0.0
        self._residues = 0
        self._recent: deque[list[Numbers]] = deque(maxlen=WINDOW)
        self._warned: set[tuple[str, int]] = set()

    def begin_step(self, step: int, residues: int, flops: float) -> None:
        """Begin a step, right before its first batch is requested.

        Args:
            step: the step as users count them, from 1 on.
            residues: residues of this rank's share, without dummy micro-batches.
            flops: the FLOPs of the model for this share, forward and backward, without recomputation.
        """
        self._control.note("computing", step)
        self._residues, self._flops, self._data_wait = residues, flops, 0.0
        self._began = time.perf_counter()

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the same batches. The time until each batch is ready counts as waiting for data."""
        waiting = iter(batches)
        while True:
            self._control.note("waiting for data")
            begin = time.perf_counter()
            with reading():
                try:
                    batch = next(waiting)
                except StopIteration:
                    return
                finally:
                    self._data_wait += time.perf_counter() - begin
                    self._control.note("computing")
            yield batch

    def wait_for_device(self) -> None:
        """Wait for the device before a step's numbers are read from it. `Stuck` if they do not come in time."""
        self._control.wait_for_device()

    def numbers(self) -> list[float]:
        """Return this rank's part of the step's collective. All gradients exist, and the host has waited for them."""
        seconds = time.perf_counter() - self._began
        numbers = Numbers(
            self._residues,
            math.nan if self._peak is None else self._flops / self._peak,
            seconds,
            self._data_wait,
            *_memory(self._world.device),
        )
        self._control.note("waiting for the other ranks")
        return list(vars(numbers).values())

    def report(self, rows: Sequence[Sequence[float]]) -> StepReport:
        """Turn the numbers of all ranks into a line and messages. Every rank calls this when the step is done.

        Model FLOPs utilisation is that of Chowdhery et al. (2022, PaLM, appendix B): the FLOPs that the model needs,
        divided by the FLOPs that the devices could do in the time of the step.

        Args:
            rows: the `numbers` of each rank, the same on all ranks.
        """
        ranks = [Numbers(*row) for row in rows]
        self._control.note("done")
        self._recent.append(ranks)
        # A rank that began late has a shorter step than the ranks that waited for it in a collective. The longest step
        # counts, so that no part of a step is longer than the whole.
        seconds = max(time.perf_counter() - self._began, *(rank.gradients_s for rank in ranks))
        line = {
            "step_s": _number(seconds),
            "residues_per_s": _number(sum(rank.residues for rank in ranks) / seconds),
            "mfu": _number(sum(rank.ideal_s for rank in ranks) / len(ranks) / seconds),
            "data_wait_s": _number(max(rank.data_wait_s for rank in ranks)),
            "peak_memory_bytes": _count(max(rank.peak_memory_bytes for rank in ranks)),
            "reserved_memory_bytes": _count(max(rank.reserved_memory_bytes for rank in ranks)),
            "allocation_retries": _count(sum(rank.allocation_retries for rank in ranks)),
            "ranks": {
                "residues_per_s": spread([_number(rank.residues / seconds) for rank in ranks]),
                "mfu": spread([_number(rank.ideal_s / seconds) for rank in ranks]),
                "data_wait_s": spread([_number(rank.data_wait_s) for rank in ranks]),
                "peak_memory_bytes": spread([_count(rank.peak_memory_bytes) for rank in ranks]),
                "reserved_memory_bytes": spread([_count(rank.reserved_memory_bytes) for rank in ranks]),
                "allocation_retries": spread([_count(rank.allocation_retries) for rank in ranks]),
            },
        }
        return StepReport(line, [*self._slow(), *self._full(ranks)])

    def _slow(self) -> Iterator[str]:
        """Yield messages on ranks that became slow. A rank that was not slow for a whole window may be named again."""
        if len(self._recent) < WINDOW:
            return
        # The median shows a rank's typical step: one delay, such as a first use of the disk, makes no rank slow.
        waits = [median(step[rank].data_wait_s for step in self._recent) for rank in range(self._world.size)]
        least = max(LEAST, 0.1 * median(rank.gradients_s for step in self._recent for rank in step))
        others = [median([*waits[:rank], *waits[rank + 1 :]] or waits) for rank in range(self._world.size)]
        slow = [rank for rank, wait in enumerate(waits) if wait - others[rank] > least]
        for rank in slow:
            if self._first_time("slow", rank):
                yield (
                    f"{self._name(rank)} waits for data, and all wait for it: {waits[rank]:.3g} s a step, against "
                    f"{others[rank]:.3g} s on the others; look at that machine's disk and other programs"
                )
        self._warned -= {("slow", rank) for rank in range(self._world.size) if rank not in slow}

    def _full(self, ranks: Sequence[Numbers]) -> Iterator[str]:
        """Yield messages on ranks whose memory is almost full, once for each rank, since the numbers never decrease."""
        fix = "lower batch.tokens_per_rank, or set parallel.activation_checkpointing"
        for rank, numbers in enumerate(ranks):
            if numbers.allocation_retries > 0 and self._first_time("retries", rank):
                yield (
                    f"{self._name(rank)} ran out of memory and had to give back and ask again, which is slow "
                    f"({numbers.allocation_retries:.0f} times so far); {fix}"
                )
            elif numbers.memory_share > FULL and self._first_time("full", rank):
                yield f"{self._name(rank)} is full: {numbers.memory_share:.0%} of its device's memory is in use; {fix}"

    def _first_time(self, what: str, rank: int) -> bool:
        is_new = (what, rank) not in self._warned
        self._warned.add((what, rank))
        return is_new

    def _name(self, rank: int) -> str:
        return f"rank {rank} (host {self._control.host(rank)})"


def spread(values: Sequence[float | None]) -> list[float | None] | dict[str, float | None]:
    """Return one value for each rank as a list; for many ranks the extremes, their ranks, and the median.

    >>> spread([3, 1, 2])
    [3, 1, 2]
    >>> spread([5, *range(100)])
    {'min': 0, 'min_rank': 1, 'median': 49, 'max': 99, 'max_rank': 100}
    """
    known = [value for value in values if value is not None]
    if len(values) <= LISTED:
        return list(values)
    if not known:
        return dict.fromkeys(("min", "min_rank", "median", "max", "max_rank"))
    least, most = min(known), max(known)
    return {
        "min": least,
        "min_rank": values.index(least),
        "median": median(known),
        "max": most,
        "max_rank": values.index(most),
    }


def _number(value: float) -> float | None:
    """Round to four digits, since there is a number for every rank and step. JSON has no NaN."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _count(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None


def _memory(device: torch.device) -> tuple[float, float, float, float]:
    """Return the last four fields of `Numbers`."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        reserved = stats["reserved_bytes.all.peak"]
        total = torch.cuda.get_device_properties(device).total_memory
        return stats["allocated_bytes.all.peak"], reserved, reserved / total, stats["num_alloc_retries"]
    if sys.platform == "win32":  # Windows has no such call
        return math.nan, math.nan, math.nan, 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024, math.nan, math.nan, 0
