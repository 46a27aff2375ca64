"""The estimated time of an embedding job.

As many processes as the job would have compute some of its packs at the same time (`esmshard.embed.job.embed_probe`).
The seconds of a pack are modelled as a tokens + b pairs + c sequences, with a, b and c fitted to the measurements. From
this follow the times of all rows that must be computed, part by part, and the assignment of parts to processes.
"""

import heapq
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esmshard.embed.formats.format_registry import FORMATS
from esmshard.embed.job.embed_probe import WRITTEN, WRITTEN_BYTES, costs, write_s
from esmshard.embed.store.part_plan import Spec, read_plan
from esmshard.embed.store.parts import KEY_BYTES, PartLayout, PartReader, PartWriter
from esmshard.embed.store.reuse import Reuse
from esmshard.embed.store.row_index import RowIndex
from esmshard.embed.workers.claims import publish
from esmshard.errors import InputError
from esmshard.launch import cpu_limits
from esmshard.model.weights.open_weights import Weights
from esmshard.progress import say

SEED = 0
_ALL_CORES = 1.15
"""The speed of packs computed at the same time, relative to all cores on one pack at a time, as in a part with few
packs; see `esmshard.model.threads`.
"""
_LEAST_FITTED = 4
"""Packs that are timed for each fitted number."""


@dataclass(frozen=True)
class Time:
    """The seconds of a job, by phase."""

    where: str
    """Device, processes and threads."""
    start: float
    """Seconds to start Python, libraries and model, in all processes."""
    plan: float
    compute: float
    """Seconds to compute the packs and write the parts."""
    write: float
    """Seconds to write the file that is made from the parts."""
    probed: float
    """Seconds that the probe computed. They are not part of the job."""
    packs: int
    """The number of packs that were timed."""
    all_packs: bool
    """Whether the job has no other packs."""

    @property
    def total(self) -> float:
        """Return the seconds of the whole job."""
        return self.start + self.plan + self.compute + self.write


def time_of(
    directory: Path,
    found: Weights,
    device: torch.device,
    fmt: str,
    nproc: int | None,
    tokens: int | None,
    old_U: npt.NDArray[np.int64],
    earlier: Reuse | None,
    seconds: float,
) -> Time:
    """Measure and estimate the times. The time for planning is left at 0.

    Args:
        directory: the directory of a plan, in which this leaves files.
        found: the weights of the plan's model.
        device: the computing device.
        fmt: the format of the file; `parts` if no file is made.
        nproc: processes; by default one for each GPU, or one.
        tokens: tokens of a pack.
        old_U: the row of the earlier embedding store from which each row is copied, or -1, int64 [U].
        earlier: the earlier store.
        seconds: time for which packs are computed.

    Raises:
        InputError: if a process failed.
    """
    np.save(directory / "taken.npy", old_U >= 0)
    processes = nproc or max(1, torch.cuda.device_count() if device.type == "cuda" else 1)
    # These are the threads of `embed` in its own process, or of the processes of `run_local`.
    threads = str(torch.get_num_threads())
    if processes > 1:
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cpu_limits.cores() // processes))
    where = f"{device.type}, {processes} process{'es' * (processes > 1)}"
    if device.type == "cpu":
        where += f" of {threads} thread{'s' * (threads != '1')}"
    heard, probed = _probe(directory, device, fmt, processes, threads, tokens, seconds)
    return _reckon(directory, found, fmt, old_U, earlier, heard, where, probed)


def _probe(
    directory: Path, device: torch.device, fmt: str, processes: int, threads: str, tokens: int | None, seconds: float
) -> tuple[list[dict[str, Any]], float]:
    """Return the results of each process, and the seconds until the last process was ready."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(processes):
            where = f"cuda:{number}" if device.type == "cuda" else device.type
            options = {"directory": str(directory), "device": where, "tokens": tokens, "seconds": seconds, "seed": SEED}
            options |= {"number": number, "processes": processes, "fmt": fmt, "started": time.time()}
            running.append(
                subprocess.Popen(  # noqa: S603
                    [sys.executable, "-m", "esmshard.embed.job.embed_probe", json.dumps(options)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=os.environ | {"OMP_NUM_THREADS": threads},
                )
            )
        ready = [_heard(process, directory) for process in running]
        say(f"probe: {processes} process{'es' * (processes > 1)}, {seconds:.0f} seconds at most")
        for process in running:  # all processes start at the same moment
            assert process.stdin is not None
            process.stdin.write(b"g")
            process.stdin.flush()
        found = [_heard(process, directory) for process in running]
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.communicate()
    return [before | one for before, one in zip(ready, found, strict=True)], max(one["took_s"] for one in found)


def _heard(process: "subprocess.Popen[bytes]", directory: Path) -> dict[str, Any]:
    """Return the next line of a probe."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        code = process.wait()
        if code < 0:
            cause = f"a probe was ended by signal {-code}" + (" (out of memory, perhaps)" if code == -9 else "")
            raise InputError(f"{cause}; give --nproc fewer processes, or --tokens fewer")
        raise ChildProcessError(f"{directory}: a probe ended with exit code {code}")
    said: dict[str, Any] = json.loads(line)
    if "error" in said:
        raise InputError(said["error"])
    return said


def _reckon(
    directory: Path,
    model: Weights,
    fmt: str,
    old_U: npt.NDArray[np.int64],
    earlier: Reuse | None,
    found: list[dict[str, Any]],
    where: str,
    probed: float,
) -> Time:
    spec, index, first = Spec.of(read_plan(directory)), RowIndex(directory / "index"), found[0]
    timed = np.array([pack for one in found for pack in one["packs"]]).reshape(-1, 4)
    per = _fit(timed, spec.dim, model.config.n_layers)
    lanes, busy = first["lanes"], float(np.mean([one["busy"] for one in found]))
    prep_s = max(one["prep_s"] for one in found)
    sync_s = max(one["sync_s"] / max(one["bytes"], 1) for one in found)
    copy_s, copied = _copying(directory, spec, index, old_U, earlier)
    began = time.monotonic()
    publish(directory / "note", "a note")
    note_s = time.monotonic() - began

    # `alone` is the time of a part whose packs follow each other without a gap. Some parts take longer, because some
    # lanes have no pack left at their end.
    looked = [np.array(packs).reshape(-1, 3) @ per for packs in first["parts"]]
    whole = [
        _makespan(pack_s.tolist(), lanes) if len(pack_s) >= lanes else float(pack_s.sum()) * _ALL_CORES / lanes
        for pack_s in looked
    ]
    slack = sum(whole) / (sum(float(pack_s.sum()) for pack_s in looked) / lanes or 1.0)
    known = dict(zip(first["numbers"], whole, strict=True))
    part_s = []
    for part in range(len(index.bounds) - 1):
        length_U, old = index.lengths_of(part), old_U[index.bounds[part] : index.bounds[part + 1]]
        todo = old < 0
        computing = float(costs(length_U[todo], spec.long).sum(0) @ per) / lanes * slack
        beside = prep_s * int(todo.sum()) + copy_s * int((~todo).sum()) + 2 * note_s
        beside += sync_s * spec.kind.bytes_of(spec.long.kept(length_U))
        part_s.append(known.get(part, computing) / busy + beside)
    compute = _makespan(part_s, len(found))

    write = first.get("write_s", 0.0)
    if fmt in FORMATS and not len(timed) and copied is not None:
        write = write_s(spec, fmt, copied, len(index.lengths), directory)
    imports, make = max(one["imports_s"] for one in found), max(one["make_s"] for one in found)
    # The command itself begins with imports and opens the model. With one process, the command is also the worker.
    start = imports + 2 * make if len(found) == 1 else 2 * (imports + make)
    packs = sum(len(pack_s) for pack_s in looked)
    complete = len(known) == len(part_s) and len(timed) >= packs
    return Time(where, start, 0.0, compute, write * len(index.lengths), probed, len(timed), complete)


def _fit(timed_P4: npt.NDArray[np.float64], dim: int, n_layers: int) -> npt.NDArray[np.float64]:
    """Fit the seconds for a token, a pair and a sequence, none below 0, so that the sum over all timed packs is exact.

    Args:
        timed_P4: tokens, pairs, sequences and seconds of each pack.
        dim: the dimension D.
        n_layers: the number of layers of the model.
    """
    if not len(timed_P4):
        return np.zeros(3)
    # Where there is too little to fit, use the operations of linear layers and attention.
    per = np.array([24.0 * n_layers * dim**2, 4.0 * n_layers * dim, 0.0])
    cost_P3, second_P = timed_P4[:, :3], timed_P4[:, 3]
    if len(timed_P4) >= 3 * _LEAST_FITTED:
        from scipy.optimize import nnls

        scale = cost_P3.mean(0)
        fitted, _ = nnls(cost_P3 / scale, second_P)
        per = fitted / scale
    fitted_total: float = (cost_P3 @ per).sum()
    return per * (second_P.sum() / fitted_total)  # type: ignore[no-any-return]


def _copying(
    directory: Path, spec: Spec, index: RowIndex, old_U: npt.NDArray[np.int64], reuse: Reuse | None
) -> tuple[float, PartReader | None]:
    """Measure the seconds for copying a row from the earlier store. Return them with a reader of these rows."""
    rows = np.flatnonzero(old_U >= 0)
    if reuse is None or not len(rows):
        return 0.0, None
    length_U = np.concatenate([index.lengths_of(part) for part in range(len(index.bounds) - 1)])[rows]
    mean = spec.kind.bytes_of(spec.long.kept(length_U)) / len(rows)
    count = max(1, min(len(rows), WRITTEN, int(WRITTEN_BYTES / mean)))
    chosen = np.linspace(0, len(rows) - 1, count).astype(int)
    layout = PartLayout(spec.kind, spec.long.kept(length_U[chosen]))
    writer = PartWriter(directory / "0-copied.safetensors", layout, np.zeros((count, KEY_BYTES), np.uint8))
    began = time.monotonic()
    for at, row in enumerate(rows[chosen].tolist()):
        values = reuse.get(int(old_U[row]), index.content[row : row + 1][0])
        if values is not None:
            writer.add(at, values)
    note = writer.close()
    return (time.monotonic() - began) / count, PartReader(writer.path, layout, note)


def _makespan(seconds: Sequence[float], lanes: int) -> float:
    """Return the time until all jobs are done, if each free lane takes the next job.

    >>> _makespan([2.0, 1.0, 2.0], 2)
    3.0
    """
    free_at = [0.0] * lanes
    for one in seconds:
        heapq.heapreplace(free_at, free_at[0] + one)
    return max(free_at)
