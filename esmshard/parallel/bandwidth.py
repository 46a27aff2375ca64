"""How fast the collectives of a sharded run are between these processes, and how far their clocks are apart.

Measured with the calls that FSDP makes, on tensors of the size of a large layer. Bus bandwidth is what NCCL's own tests
call so (nccl-tests, doc/PERFORMANCE.md): for all-gather and reduce-scatter of S bytes in all over n ranks in t seconds,

    bus bandwidth = S / t * (n - 1) / n

that is, the bytes that each rank has to receive, over the time. It can be compared with the speed of a link.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist

# FSDP's own, for torch renames the collectives below them.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from esmshard.parallel.mesh import World

Scope = Literal["all", "machine", "between"]

GPU_BYTES, CPU_BYTES = 256 << 20, 16 << 20
"""Of the whole that is gathered: a layer of the 3B model in bf16 is 157 MB."""
WARM, MOST, PATIENCE = 2, 20, 0.25
"""Calls before the clock runs; calls that count, at most; seconds of one measurement."""
ROUNDS = 12
"""Questions of one clock to another; the quickest answer counts."""


def bus_bandwidth(whole: int, seconds: float, ranks: int) -> float:
    """Bytes/s, as NCCL's tests define it for all-gather and reduce-scatter.

    >>> bus_bandwidth(8_000, 2.0, 4)
    3000.0
    """
    return whole / seconds * (ranks - 1) / ranks


@dataclass(frozen=True)
class Speed:
    """One collective over some ranks."""

    collective: Literal["all_gather", "reduce_scatter"]
    scope: Scope
    """All ranks; those of one machine; or one of each machine, as many groups at once as a machine has ranks."""
    ranks: int
    bytes: int
    """Of the whole."""
    seconds: float
    """Of the slowest rank; the median of several calls."""
    bus: float
    """Bytes/s."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    host: str
    node: str
    """Names the machine; two on one machine may have different hosts, as in containers."""
    local_rank: int


def place() -> Place:
    """Of this process: by the launcher's number of the machine, else Slurm's, else the host's name."""
    import socket

    host = socket.gethostname()
    node = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", host))
    return Place(host, node, int(os.environ.get("LOCAL_RANK", "0")))


def measure(ranks: World, places: Sequence[Place]) -> list[Speed]:
    """Time the collectives. Every rank calls this, and has the same answer.

    Args:
        ranks: of more than one process.
        places: of each rank.
    """
    found = []
    for scope, groups in scopes(places).items():
        mine: Any = None
        for members in groups:  # every rank has to take part in making every group
            group = dist.new_group(members)
            if ranks.rank in members:
                mine = group, len(members)
        if mine is None:
            continue
        for collective in ("all_gather", "reduce_scatter"):
            size, whole, seconds = _time(collective, ranks, *mine)
            slowest = max(row[0] for row in ranks.rows([seconds]))
            found.append(Speed(collective, scope, size, whole, slowest, bus_bandwidth(whole, slowest, size)))  # type: ignore[arg-type]
    return found


def scopes(places: Sequence[Place]) -> dict[Scope, list[list[int]]]:
    """Groups of ranks to measure over. With one machine only `all`; `between` only where all have as many ranks.

    >>> two = [Place("a", "0", 0), Place("a", "0", 1), Place("b", "1", 0), Place("b", "1", 1)]
    >>> scopes(two)
    {'all': [[0, 1, 2, 3]], 'machine': [[0, 1], [2, 3]], 'between': [[0, 2], [1, 3]]}
    """
    nodes: dict[str, list[int]] = {}
    for rank, one in enumerate(places):
        nodes.setdefault(one.node, []).append(rank)
    found: dict[Scope, list[list[int]]] = {"all": [list(range(len(places)))]}
    sizes = {len(members) for members in nodes.values()}
    if len(nodes) > 1 and sizes != {1} and len(sizes) == 1:
        found["machine"] = list(nodes.values())
        found["between"] = [list(members) for members in zip(*nodes.values(), strict=True)]
    return found


def _time(collective: str, ranks: World, group: Any, size: int) -> tuple[int, int, float]:
    on_gpu = ranks.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    share = (GPU_BYTES if on_gpu else CPU_BYTES) // dtype.itemsize // size
    part = torch.ones(share, dtype=dtype, device=ranks.device)
    whole = torch.ones(share * size, dtype=dtype, device=ranks.device)
    call: Callable[[], Any]
    if collective == "all_gather":
        call = partial(DefaultAllGather(), whole, part, group, async_op=False)
    else:
        call = partial(DefaultReduceScatter(), part, whole, group, dist.ReduceOp.SUM, async_op=False)

    times: list[float] = []
    spent, n = 0.0, 0
    while n < WARM + MOST:
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        n += 1
        if n > WARM:
            times.append(seconds)
            spent += seconds
        # They stop together, once one of them has spent its time; and so they begin the next call together.
        done = torch.tensor([float(spent > PATIENCE)], device="cpu" if not on_gpu else ranks.device)
        dist.all_reduce(done, group=group)
        if done.item() > 0:
            break
    return size, share * size * dtype.itemsize, median(times)


@dataclass(frozen=True)
class Clock:
    """How far the clock of another rank is ahead of the first one's."""

    rank: int
    offset: float
    """Seconds; negative if it is behind."""
    uncertainty: float
    """Half of the quickest round trip: the truth is not farther from `offset`."""


def offset(exchanges: Sequence[tuple[float, float, float, float]]) -> tuple[float, float]:
    """Offset of a clock and its uncertainty, from questions and answers as in NTP (RFC 5905, section 8).

    Args:
        exchanges: of each, when the question left here, came there, when the answer left there, came here; each by the
            clock of where it was.

    >>> offset([(10.0, 15.2, 15.3, 10.5), (20.0, 25.05, 25.05, 20.1)])
    (5.0, 0.05)
    """
    here, there, back, home = min(exchanges, key=lambda one: (one[3] - one[0]) - (one[2] - one[1]))
    trip = (home - here) - (back - there)
    return round(((there - here) + (back - home)) / 2, 9), round(trip / 2, 9)


def clocks(ranks: World, places: Sequence[Place]) -> list[Clock]:
    """Clocks of one rank of each machine beside the first rank's. Every rank calls this, and has the same answer."""
    firsts: dict[str, int] = {}
    for rank, one in enumerate(places):
        firsts.setdefault(one.node, rank)
    others = [rank for rank in firsts.values() if rank != 0] or [1]  # on one machine the exchange itself is tried
    found = []
    for other in others:
        exchanges = []
        for _ in range(ROUNDS):
            note = torch.zeros(2, dtype=torch.float64)
            if ranks.rank == 0:
                asked = time.time()
                dist.send(note, other)
                dist.recv(note, other)
                exchanges.append((asked, float(note[0]), float(note[1]), time.time()))
            elif ranks.rank == other:
                dist.recv(note, 0)
                came = time.time()
                note[0], note[1] = came, time.time()
                dist.send(note, 0)
        known = offset(exchanges) if ranks.rank == 0 else (0.0, 0.0)
        seconds, uncertainty = ranks.rows(known)[0]
        found.append(Clock(other, seconds, uncertainty))
    return found


def as_values(found: Sequence[Speed | Clock]) -> list[dict[str, Any]]:
    """For programs: bytes, seconds, bytes/s."""
    return [asdict(one) for one in found]
