"""Watches the ranks of a run: finds lost and stuck ranks, measures each step, and records profiles.

If a rank is lost, the other ranks wait in a collective, whose error does not name the lost rank. So each rank writes a
short status (a "note") to the key-value store every second: a count, its step and its phase. A rank also writes its
errors there. A rank whose count has stopped is gone or suspended. A rank is stuck if its count grows while collectives
of other ranks time out. The message names the rank, its host, its last step and its phase.

The collective that exchanges losses and norms in each step also sends `Watch.numbers`. `Watch.report` returns a line
for metrics.jsonl (docs/watching.md) and messages to print.
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
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from esmshard.errors import ExitCode, InputError, LostProcess, UsageError
from esmshard.parallel.preemption import Preempted
from esmshard.parallel.process_group import World

T = TypeVar("T")

BEAT = 1.0
"""How many seconds pass between two notes of a rank. A thread sends the notes, because notes that the main thread sent
in each phase took 3% of a small model's time."""
ROLL_CALL = 10.0
"""How many seconds a rank may take to report its error or to send another note, before it counts as lost or stuck."""
STORE_SILENCE = 40.0
"""How many seconds the key-value store may take to answer, before it counts as gone. If its machine loses the network,
the connection stays open."""
WINDOW = 20
"""`Watch` finds slow ranks by each rank's median wait for data in this number of steps, up to the current step."""
LEAST = 0.03
"""A rank counts as slow if it waits longer for data than the median of the other ranks: by more than this many seconds
per step, and by more than 10% of the median of `Numbers.gradients_s`."""
LISTED = 64
"""With at most this number of ranks, metrics.jsonl lists the values of each rank."""

WARM_UP = 2
"""How many steps run before the first recorded step of a profile, so that the profiler and the allocator can start."""
OPERATIONS = 15
"""The number of rows in the table of operations that a profile returns."""

_LOST = re.compile(r"gloo|nccl|timed out|timeout|connection (closed|reset|refused)|broken pipe|aborted", re.IGNORECASE)


class Stuck(RuntimeError):
    """Is raised if the GPU does not finish its work within the time-out, or if another rank has lost a connection."""


def is_lost(error: BaseException) -> bool:
    """Return whether a lost rank may have caused this error. For a plain RuntimeError, its text decides."""
    return isinstance(error, (Stuck, dist.DistError)) or (
        isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))
    )


def recorder_settings(dumps: Path) -> dict[str, str]:
    """Return environment variables (torch 2.9 or later) that make torch record the last collectives of each rank.

    torch reads the variables when it creates the process group. If a collective times out, torch writes the records to
    the files `rank_0`, `rank_1`, ... in the directory `dumps`.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(dumps.absolute() / "rank_"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


class Control:
    """Sends the status of this rank every second, and finds lost ranks. In a single process, a `Control` does nothing.

    Each rank must put `with Control(...) as control:` around all code in which a rank can get stuck. If a connection
    is lost or a collective times out, the block raises a `LostProcess` that names the lost rank, or the error with
    which another rank ended. The block raises other errors unchanged, and reports them to the other ranks.
    `dumps` is as in the function `recorder_settings`.
    """

    def __init__(self, world: World, dumps: Path) -> None:
        self._world = world
        self._place = (0, "starting")
        self._left = threading.Event()
        self._store: Any = None
        if world.size > 1:
            self._store = self._connection()
            if world.device.type == "cuda":
                dumps.mkdir(parents=True, exist_ok=True)

    def _connection(self) -> Any:
        store = self._world.store.clone()
        store.set_timeout(timedelta(seconds=STORE_SILENCE))
        return store

    def __enter__(self) -> "Control":
        if self._store is not None:
            threading.Thread(target=self._keep_sending, name="notes", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._store is None:
            return
        try:
            if error is not None and is_lost(error):
                raise self._verdict(str(error).strip().split("\n")[0]) from error
            if error is not None:
                code = getattr(error, "exit_code", ExitCode.CRASHED)
                words = str(error) if isinstance(error, (InputError, Preempted)) else f"{type(error).__name__}: {error}"
                self._report(code, words.strip().split("\n")[0][:500])
        except dist.DistError:  # the process that serves the store has ended, too
            pass
        finally:
            self._left.set()

    def host(self, rank: int) -> str:
        """Return the host name of a rank."""
        return str(self._store.get(f"host/{rank}").decode()) if self._store is not None else socket.gethostname()

    def note(self, phase: str, step: int | None = None) -> None:
        """Set the phase that this rank reports, such as `validating`, and its step, from 1. None keeps the step."""
        self._place = (self._place[0] if step is None else step, phase)

    def _keep_sending(self) -> None:
        store, count = self._connection(), 0  # requests of the main thread must not delay the notes
        while not self._left.is_set():
            try:
                store.set(f"note/{self._world.rank}", json.dumps([count, *self._place]))
            except RuntimeError:  # the store is gone, and the main thread will notice this too
                return
            count += 1
            self._left.wait(BEAT)

    def wait_for_device(self) -> None:
        """Wait until the GPU has finished. Raises `Stuck` after the time-out, or if another rank has lost a connection.

        Without this method, the next read of a number from the GPU would wait for a stuck collective until NCCL ends
        the process without a message.
        """
        if self._store is None or self._world.device.type != "cuda":
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        begin = asked = time.monotonic()
        while not event.query():  # type: ignore[no-untyped-call]
            now = time.monotonic()
            if now - begin > self._world.timeout:
                raise Stuck(f"Timed out after {self._world.timeout} s")
            if now - asked > 1:
                asked = now
                if self._store.check(["call"]):
                    raise Stuck("another rank lost its connection")
            time.sleep(0.0005)

    def _report(self, code: int, words: str) -> None:
        self._store.set(f"end/{self._world.rank}", json.dumps([code, words]))

    def _verdict(self, words: str) -> BaseException:
        """Return the error that this rank raises. All surviving ranks have the same message, and one rank prints it.

        `words` is the first line of the original error, which a lost rank may have caused.
        """
        rank, answer = self._world.rank, Future[tuple[int, str, int]]()

        def ask() -> None:
            try:
                answer.set_result(self._roll_call(words))
            except dist.DistError as error:
                answer.set_exception(error)

        # If the process that serves the store is suspended, a request may never end, in spite of its time-out.
        # This rank then abandons the thread after `STORE_SILENCE` seconds.
        threading.Thread(target=ask, name="roll-call", daemon=True).start()
        try:
            code, sentence, speaker = answer.result(STORE_SILENCE)
        except (dist.DistError, TimeoutError):
            code, speaker = ExitCode.LOST, rank
            sentence = (
                f"rank 0 or the launcher on its machine ({os.environ.get('MASTER_ADDR', 'unknown')}), or the network "
                f"to it, is gone in {_at(self._place)}, and with it the store; read the last messages of that machine, "
                "then start again with --resume auto"
            )
        if code == ExitCode.REQUEUE:
            return Preempted(sentence)
        error = InputError(sentence) if code in (ExitCode.FAILED, ExitCode.USAGE) else LostProcess(sentence)
        error.shared = rank != speaker
        if error.shared:
            time.sleep(1)  # the rank that prints must end first, because launchers end all ranks when one rank ends
        elif rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(3)  # other ranks must read the verdict before this process ends, because it serves the store
        return error

    def _roll_call(self, words: str) -> tuple[int, str, int]:
        """Return the exit code, the message, and the rank that prints it; see `_verdict`. All ranks return the same."""
        ranks = range(self._world.size)
        self._store.set("call", "")
        self._report(ExitCode.LOST, "")
        before = [self._noted(rank) for rank in ranks]
        end, missing = time.monotonic() + ROLL_CALL, list(ranks)
        while missing and time.monotonic() < end and not self._store.check(["verdict"]):
            time.sleep(0.05)
            missing = [rank for rank in missing if not self._store.check([f"end/{rank}"])]
        ends = {rank: json.loads(self._store.get(f"end/{rank}")) for rank in ranks if rank not in missing}
        causes = {rank: (code, why) for rank, (code, why) in ends.items() if why}
        silent = [rank for rank in missing if self._noted(rank) == before[rank]]
        # The most important cause is a user's mistake, then a request to stop, then a crash.
        order, codes = (ExitCode.USAGE, ExitCode.FAILED, ExitCode.REQUEUE), [code for code, _ in causes.values()]
        code = next((code for code in order if code in codes), ExitCode.LOST)
        waited = f"the other ranks waited {self._world.timeout} s; " if "timed out" in words.lower() else ""
        again = "start again with --resume auto"
        if causes:
            sentence = "; ".join(f"{self._named([rank], 'ended in')}: {why}" for rank, (_, why) in causes.items())
        elif silent:
            sentence = (
                f"{self._named(silent, 'is gone or does not answer, last heard of in')}; {waited}check that machine "
                f"(out of memory, perhaps), then {again}"
            )
        elif missing and waited:
            sentence = (
                f"{self._named(missing, 'is stuck, last heard of in')}; {waited}check that machine, then {again}, or "
                "raise parallel.step_timeout"
            )
        else:
            where = f"rank {self._world.rank}: {words}"
            sentence = f"the processes lost each other in {_at(self._place)}, though all live ({where}); {again}"
        verdict = json.dumps([code, sentence, self._world.rank if 0 in missing or 0 in causes else 0])
        code, sentence, speaker = json.loads(self._store.compare_set("verdict", "", verdict).decode())
        return int(code), str(sentence), int(speaker)

    def _named(self, ranks: Sequence[int], verb: str) -> str:
        names = [f"rank {rank} (host {self.host(rank)})" for rank in ranks[:8]]
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return f"{', '.join(names)}{more} {verb} {_at(self._noted(ranks[0])[1:])}"

    def _noted(self, rank: int) -> tuple[int, int, str]:
        if not self._store.check([f"note/{rank}"]):
            return -1, 0, "not even started"
        count, step, phase = json.loads(self._store.get(f"note/{rank}"))
        return int(count), int(step), str(phase)


def _at(place: tuple[int, str]) -> str:
    step, phase = place
    return f"step {step}, {phase}" if step else f"the start, {phase}"


def check_first_batch(world: World, digests: Callable[[], Mapping[bytes, str]]) -> None:
    """Check that ranks have different records in the first step, but equal records within a group of `together` ranks.

    Without this check, nobody would notice wrong records, because the loss also falls with them. `digests` reads this
    rank's records of the first step, and returns the record ids by digest. Raises `InputError` on all ranks.
    """
    owners: dict[bytes, int] = {}
    shares = world.gather(world.agree(digests))
    for rank, share in enumerate(shares):
        first = rank - rank % world.together
        if first == rank:
            shared = [(owners.setdefault(digest, rank), record_id) for digest, record_id in share.items()]
            wrong = [(owner, "the same records", record_id) for owner, record_id in shared if owner != rank]
        else:
            what = "different records, but with parallel.tensor or context they need the same records"
            wrong = [(first, what, record_id) for _, record_id in share.items() ^ shares[first].items()]
        for owner, what, record_id in wrong:
            error = InputError(
                f"ranks {owner} and {rank} would train on {what} (first: '{record_id}'); start all through `esmshard "
                "finetune --nproc N`, torchrun or srun, with the same files and the same version of esmshard"
            )
            error.shared = True
            raise error


class Numbers(NamedTuple):
    """Measurements of one rank in one training step. An unknown value is NaN."""

    residues: float
    ideal_s: float
    """The FLOPs of the model in this step, divided by the device's peak FLOP/s."""
    gradients_s: float
    """The seconds from the beginning of the step until this rank had computed all gradients."""
    data_wait_s: float
    peak_memory_bytes: float
    """The maximum memory so far: on a GPU the allocated GPU memory, on a CPU the memory of the process."""
    reserved_memory_bytes: float
    """The maximum GPU memory that torch's allocator has reserved so far; NaN on a CPU."""
    allocation_retries: float
    """How many times so far torch's allocator had to release all its free GPU memory to make an allocation."""


class Watch:
    """Measures the training steps of this rank. `peak` is the device's peak FLOP/s, or None if it is unknown."""

    def __init__(self, world: World, control: Control, peak: float | None = None) -> None:
        self._world, self._control, self._peak = world, control, peak
        self._began = self._data_wait = self._flops = 0.0
        self._residues = 0
        self._recent: deque[list[Numbers]] = deque(maxlen=WINDOW)
        self._slow: set[int] = set()
        self._full: set[int] = set()

    def begin_step(self, step: int, residues: int, flops: float) -> None:
        """Begin to measure a training step (from 1). Call this method before you request the first batch of the step.

        `residues` is this rank's number of residues, without dummy micro-batches. `flops` are the model's FLOPs for
        these residues, without recomputation.
        """
        self._control.note("computing", step)
        self._residues, self._flops, self._data_wait = residues, flops, 0.0
        self._began = time.perf_counter()

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches unchanged, and measure how long this rank waits for each batch."""
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
        """Wait until the device has finished; see `Control.wait_for_device`."""
        self._control.wait_for_device()

    def numbers(self) -> list[float]:
        """Return the values of `Numbers` for this rank. Call this method when all gradients are computed."""
        seconds = time.perf_counter() - self._began
        ideal_s = math.nan if self._peak is None else self._flops / self._peak
        self._control.note("waiting for the other ranks")
        return [self._residues, ideal_s, seconds, self._data_wait, *_memory(self._world.device)]

    def report(self, rows: Sequence[Sequence[float]]) -> tuple[dict[str, Any], list[str]]:
        """Return a step's entries for metrics.jsonl, and new messages. Every rank calls this method after the step.

        `mfu` is the model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B): the model's FLOPs, divided by
        the FLOPs that the devices could do at their peak in the step's time. `rows` are the `numbers` of all ranks.
        """
        ranks = [Numbers(*row) for row in rows]
        self._control.note("done")
        self._recent.append(ranks)
        # Take the longest time, because a rank that began the step late measures a shorter time.
        seconds = max(time.perf_counter() - self._began, *(rank.gradients_s for rank in ranks))
        of_ranks = {
            "residues_per_s": [rank.residues / seconds for rank in ranks],
            "mfu": [rank.ideal_s / seconds for rank in ranks],
        }
        of_ranks |= {name: [getattr(rank, name) for rank in ranks] for name in Numbers._fields[3:]}
        joined: dict[str, Callable[[Sequence[float]], float]] = {
            "residues_per_s": sum,
            "mfu": _mean,
            "allocation_retries": sum,
        }
        line: dict[str, Any] = {"step_s": _number(seconds)}
        line |= {name: _number(joined.get(name, max)(values)) for name, values in of_ranks.items()}
        if len(ranks) <= LISTED:
            line["ranks"] = {name: [_number(value) for value in values] for name, values in of_ranks.items()}
        return line, [*self._slow_ranks(), *self._full_ranks(ranks)]

    def _slow_ranks(self) -> Iterator[str]:
        if len(self._recent) < WINDOW:
            return
        # Use the median, because a single delay does not make a rank slow.
        waits = [median(step[rank].data_wait_s for step in self._recent) for rank in range(self._world.size)]
        least = max(LEAST, 0.1 * median(rank.gradients_s for step in self._recent for rank in step))
        others = [median([*waits[:rank], *waits[rank + 1 :]] or waits) for rank in range(self._world.size)]
        slow = {rank for rank, wait in enumerate(waits) if wait - others[rank] > least}
        for rank in sorted(slow - self._slow):
            yield (
                f"rank {rank} (host {self._control.host(rank)}) waits for data, and the others wait for this rank: "
                f"{waits[rank]:.3g} s per step, but {others[rank]:.3g} s on the other ranks; check that machine's disk "
                "and other programs"
            )
        self._slow = slow

    def _full_ranks(self, ranks: Sequence[Numbers]) -> Iterator[str]:
        full = {rank for rank, numbers in enumerate(ranks) if numbers.allocation_retries > 0}
        for rank in sorted(full - self._full):
            yield (
                f"rank {rank} (host {self._control.host(rank)}) released memory and asked for it again, which is slow "
                f"({ranks[rank].allocation_retries:.0f} times so far); lower batch.tokens_per_rank, or set "
                "parallel.activation_checkpointing"
            )
        self._full |= full


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(value: float) -> float | None:
    """Round a fraction to four significant digits. Return None for NaN and infinity, which JSON does not have."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.4g}")


def _memory(device: torch.device) -> tuple[float, float, float]:
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries")
        return tuple(stats[name] for name in names)  # type: ignore[return-value]
    if sys.platform == "win32":  # Windows does not have `getrusage`
        return math.nan, math.nan, 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024, math.nan, 0


def reading() -> AbstractContextManager[Any]:
    """Mark, in a `with` block, that the main thread waits for data. torch's profile shows this wait."""
    return record_function("esmshard: data")


@contextmanager
def profiled(world: World, steps: int, left: int, directory: Path) -> Iterator[Callable[[], str | None]]:
    """Record a profile of `steps` training steps, from the third step on. Rank R writes the file `rank_R.json.gz`.

    Yields a function that must be called at the end of each step. After the last recorded step, this function returns a
    table of this rank's operations, and after other steps None. A run that ends before the last
    recorded step writes no file. Raises `UsageError` if the `left` steps of the run are too few.
    """
    if not steps:
        yield lambda: None
        return
    if steps + WARM_UP > left:
        raise UsageError(
            f"--profile {steps} needs {steps + WARM_UP} steps, the first {WARM_UP} to warm up, but {left} are left; "
            "profile fewer steps, or raise train.steps"
        )
    on_gpu, tables = world.device.type == "cuda", []

    def write(recorded: profile) -> None:
        if recorded.step_num < WARM_UP + steps:  # an error or a request to stop has ended the recording
            return
        directory.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(directory / f"rank_{world.rank}.json.gz"))
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        tables.append(str(recorded.key_averages().table(sort_by=order, row_limit=OPERATIONS)))

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler prints when it starts and stops
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    plan = schedule(wait=0, warmup=WARM_UP, active=steps, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write) as recorder:

        def step_done() -> str | None:
            recorder.step()
            return tables.pop() if tables else None

        yield step_done
