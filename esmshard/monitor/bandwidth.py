"""The measured speed of a sharded run's collectives between these processes.

The measurement uses the calls that FSDP makes, on tensors of the size of a large layer. Bus bandwidth is defined as in
NCCL's own tests (nccl-tests, doc/PERFORMANCE.md): for all-gather and reduce-scatter of S bytes in total over n ranks in
t seconds,

    bus bandwidth = S / t * (n - 1) / n

that is, the bytes that each rank must receive, divided by the time. Bus bandwidth can be compared with the speed of a
link.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist

# These are FSDP's own functions, since torch renames the collectives that they call.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from esmshard.launch.process_group import World

Scope = Literal["all", "machine", "between"]
Collective = Literal["all_gather", "reduce_scatter"]
COLLECTIVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter")

GPU_BYTES, CPU_BYTES = 256 << 20, 16 << 20
"""Bytes of the gathered tensor. A layer of the 3B model in bf16 has 157 MB."""
WARM, MOST, PATIENCE = 2, 20, 0.25
"""The number of calls before the measurement; the most calls of a measurement; its seconds."""


def bus_bandwidth(whole: int, seconds: float, ranks: int) -> float:
    """Return bytes/s, as NCCL's tests define them for all-gather and reduce-scatter.

    >>> bus_bandwidth(8_000, 2.0, 4)
    3000.0
    """
    return whole / seconds * (ranks - 1) / ranks


@dataclass(frozen=True)
class Speed:
    """The measured speed of one collective over some ranks."""

    collective: Collective
    scope: Scope
    """The ranks: all; those of one machine; or one of each machine, with as many groups at once as a machine has ranks.
    """
    ranks: int
    bytes: int
    """Bytes of the whole tensor."""
    seconds: float
    """Seconds of the slowest rank; the median of several calls."""
    bus: float
    """Bus bandwidth in bytes/s."""


@dataclass(frozen=True)
class Place:
    """The location of a rank."""

    host: str
    node: str
    """The id of the machine. Two ranks of one machine may have different hosts, as in containers."""
    local_rank: int


def place() -> Place:
    """Return the location of this process, by the launcher's machine number, else Slurm's, else the host's name."""
    host = socket.gethostname()
    node = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", host))
    return Place(host, node, int(os.environ.get("LOCAL_RANK", "0")))


def measure(ranks: World, places: Sequence[Place]) -> list[Speed]:
    """Time the collectives between several ranks, which are at these places.

    Every rank calls this function, and gets the same result.
    """
    found = []
    for scope, groups in scopes(places).items():
        group, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
        for collective in COLLECTIVES:
            whole, seconds = _time(collective, ranks, group)
            slowest, size = max(row[0] for row in ranks.rows([seconds])), group.size()
            found.append(Speed(collective, scope, size, whole, slowest, bus_bandwidth(whole, slowest, size)))
    return found


def scopes(places: Sequence[Place]) -> dict[Scope, list[list[int]]]:
    """Return groups of ranks to measure. One machine has `all` only; `between` needs equally many ranks on each
    machine.

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


def _time(collective: Collective, ranks: World, group: dist.ProcessGroup) -> tuple[int, float]:
    """Return the bytes of the whole tensor and the seconds of a call on this rank."""
    on_gpu, size = ranks.device.type == "cuda", group.size()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    share = (GPU_BYTES if on_gpu else CPU_BYTES) // dtype.itemsize // size
    part = torch.ones(share, dtype=dtype, device=ranks.device)
    whole = torch.ones(share * size, dtype=dtype, device=ranks.device)
    call: Callable[[], Any] = partial(DefaultAllGather(), whole, part, group, async_op=False)
    if collective == "reduce_scatter":
        call = partial(DefaultReduceScatter(), part, whole, group, dist.ReduceOp.SUM, async_op=False)
    wait = torch.cuda.synchronize if on_gpu else _nothing
    times: list[float] = []
    for _ in range(WARM + MOST):
        wait()
        began = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - began)
        # All ranks stop together, once one of them has used its time, so the next call also begins together.
        done = torch.tensor([float(sum(times[WARM:]) > PATIENCE)], device=ranks.device)
        dist.all_reduce(done, group=group)
        if done.item() > 0:
            break
    return whole.nbytes, median(times[WARM:])


def _nothing() -> None:
    """Wait for nothing: on the CPU a call ends when its work has ended."""
