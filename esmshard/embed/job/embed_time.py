"""The estimated time of an embedding job: the process that asks computes and writes some of its parts.

Parts take about equally long, so some of them, spread evenly over the input, show the time of all. Processes that share
a CPU are imitated by threads, each with the cores of a process. Of several GPUs one is timed, and the others are taken
to be as fast.
"""

import heapq
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esmshard.embed.compute.embedder import Embedder
from esmshard.embed.compute.outputs import About, Row
from esmshard.embed.formats.format_registry import FORMATS
from esmshard.embed.job.embed_request import PARTS, EmbedRequest, file_bytes
from esmshard.embed.store.embedding_store import EmbeddingStore
from esmshard.embed.store.part_plan import COPIED, Spec, store_of
from esmshard.embed.store.reuse import Reuse
from esmshard.embed.store.row_index import RowIndex
from esmshard.embed.workers.claims import Worker
from esmshard.embed.workers.embed_worker import compute_part, make_embedder, with_ends
from esmshard.parallel import cpu_limits
from esmshard.progress import say

WRITTEN, WRITTEN_BYTES = 2048, 1 << 26
"""Records, and bytes, that are written at most to measure the speed of a format."""


@dataclass(frozen=True)
class Time:
    """The seconds of a job, by phase."""

    where: str
    """Device, processes and threads."""
    start: float
    """Seconds to start Python, libraries and model, in all processes."""
    plan: float
    compute: float
    """Seconds to compute and write the parts."""
    write: float
    """Seconds to write the file that is made from the parts."""
    probed: float
    """Seconds in which parts were timed. They are not part of the job."""
    parts: int
    """The number of parts that were timed."""

    @property
    def total(self) -> float:
        """Return the seconds of the whole job."""
        return self.start + self.plan + self.compute + self.write


def time_of(
    directory: Path,
    plan: dict[str, Any],
    asked: EmbedRequest,
    processes: int,
    tokens: int | None,
    copied_U: npt.NDArray[np.bool_],
    planned: float,
    seconds: float,
) -> Time:
    """Measure and estimate the times.

    Args:
        directory: the directory of the plan, in which this leaves files.
        plan: the plan.
        asked: the request.
        processes: the number of processes of the job.
        tokens: tokens of a pack.
        copied_U: whether each row is copied from an earlier embedding store, bool [U].
        planned: the seconds that planning took.
        seconds: the time after which no further part is begun.
    """
    device, index = asked.device, RowIndex(directory / "index")
    threads, at_once = torch.get_num_threads(), processes if device.type == "cpu" else 1
    if processes > 1:  # as in `run_local`
        threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cpu_limits.cores() // processes))
    where = f"{device.type}, {processes} process{'es' * (processes > 1)}"
    if device.type == "cpu":
        where += f" of {threads} thread{'s' * (threads != 1)}"

    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import esmshard.embed.job.embed_job"], check=True)
    started = time.monotonic() - began
    began = time.monotonic()
    embedder = make_embedder(plan, device, tokens)
    made = time.monotonic() - began
    _warm_up(directory, plan, index, embedder)
    say(f"probe: computes parts for about {seconds:.0f} seconds")
    began = time.monotonic()
    timed = _timed_parts(directory, plan, embedder, at_once, threads, began + seconds)
    probed = time.monotonic() - began

    work_P = [_operations(asked, index, part, copied_U) for part in range(plan["parts"])]
    pace = sum(timed.values()) / sum(work_P[part] for part in timed)
    compute = _makespan([timed.get(part, pace * work) for part, work in enumerate(work_P)], processes)
    write = 0.0 if asked.fmt == PARTS else _write_s(directory, asked, index, list(timed))
    # One process reads the model twice: to know it before the plan, and to compute. Other processes start after that.
    start = started + made if processes == 1 else 2 * (started + made)
    return Time(where, start, planned, compute, write, probed, len(timed))


def _warm_up(directory: Path, plan: dict[str, Any], index: RowIndex, embedder: Embedder) -> None:
    """Compute the shortest sequence of the first part, since the first call of a model is slow."""
    shortest = int(index.lengths_of(0).argmin())
    residues = store_of(directory, plan).residues(int(index.first[shortest : shortest + 1][0]))
    for _ in embedder.compute([with_ends(residues)]):
        pass


def _timed_parts(
    directory: Path, plan: dict[str, Any], embedder: Embedder, at_once: int, threads: int, end: float
) -> dict[int, float]:
    """Compute parts until `end` on the clock `time.monotonic`, and return the seconds of each.

    Args:
        directory: the directory of the plan.
        plan: the plan.
        embedder: the embedder of the plan's spec.
        at_once: the number of parts that are computed at the same time.
        threads: the threads for each of them.
        end: no part is begun after this time, except for the first ones.
    """
    spec = Spec.of(plan)
    order, timed = iter(_spread(plan["parts"])), dict[int, float]()

    def compute(first: int) -> None:
        own = Embedder(embedder.esm, spec.outputs, dtype=spec.dtype, long=spec.long, tokens=embedder.tokens)
        reuse = Reuse(Path(plan["reuse"]), spec) if plan["reuse"] else None
        worker, part = Worker(directory / "work"), first
        while True:
            began = time.monotonic()
            compute_part(directory, plan, spec, part, own, worker, reuse, lambda rows, residues: None)
            timed[part] = time.monotonic() - began
            if time.monotonic() > end or (part := next(order, -1)) < 0:
                return

    first = [part for _, part in zip(range(at_once), order, strict=False)]
    with ThreadPoolExecutor(at_once, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        for done in [pool.submit(compute, part) for part in first]:
            done.result()
    return timed


def _spread(n: int) -> list[int]:
    """Return 0 to n - 1 in an order in which the first k numbers, for any k, are spread evenly.

    >>> _spread(6)
    [0, 5, 2, 4, 1, 3]
    """
    golden = (5**0.5 - 1) / 2
    order: list[int] = np.argsort(np.arange(n) * golden % 1, kind="stable").tolist()
    return order


def _operations(asked: EmbedRequest, index: RowIndex, part: int, copied_U: npt.NDArray[np.bool_]) -> float:
    """Estimate the operations of the linear layers and of attention for a part. Windows overlap, so they count whole.

    Copied rows count as much less as in the plan.
    """
    length_U, long, config = index.lengths_of(part), asked.spec.long, asked.found.config
    seen_U, count_U = long.kept(length_U), np.ones_like(length_U)
    if long.mode == "window":
        seen_U = np.minimum(length_U, long.window)
        count_U = np.maximum(1, -(-(length_U - long.overlap) // (long.window - long.overlap)))
    tokens_U = (seen_U + 2).astype(np.float64)
    cost_U = count_U * tokens_U * config.n_layers * config.dim * (24 * config.dim + 4 * tokens_U)
    return float(np.where(copied_U[index.bounds[part] : index.bounds[part + 1]], cost_U / COPIED, cost_U).sum())


def _write_s(directory: Path, asked: EmbedRequest, index: RowIndex, parts: list[int]) -> float:
    """Write some rows of finished parts into a file, and estimate the seconds for the whole file from their bytes."""
    embeddings, spec = EmbeddingStore(directory, unfinished=True), asked.spec
    out, writer = directory / f"probe.{asked.fmt}", FORMATS[asked.fmt]
    writer.require(out)  # importing the library takes a constant time
    began, written = time.monotonic(), 0
    rows: list[Row] = []
    for row in (row for part in parts for row in range(index.bounds[part], index.bounds[part + 1])):
        values = embeddings.values(row)
        if values is not None:
            rows.append(Row(f"record_{row}", 1, values, f"SEQUENCE{row}"))
            written += sum(array.size for array in values.values()) * writer.number_bytes(spec.dtype)
        if len(rows) == WRITTEN or written > WRITTEN_BYTES:
            break
    if not rows:
        return 0.0
    with writer(out, About(spec.outputs, spec.dim, spec.dtype, len(rows), embeddings.attributes)) as file:
        for one in rows:
            file.add(one)
    embeddings.close()
    return (time.monotonic() - began) * file_bytes(asked.fmt, spec, index) / written


def _makespan(seconds: Sequence[float], processes: int) -> float:
    """Return the time until all jobs are done, if each free process takes the next job.

    >>> _makespan([2.0, 1.0, 2.0], 2)
    3.0
    """
    free_at = [0.0] * processes
    for one in seconds:
        heapq.heapreplace(free_at, free_at[0] + one)
    return max(free_at)
