"""The processes of a run: start, agree, stop. Any launcher that sets RANK, WORLD_SIZE and LOCAL_RANK will do."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from esmshard.errors import InputError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""How long a collective waits for a rank before the run ends. Long enough for the first read of a large model."""


@dataclass(frozen=True)
class World:
    """What one process knows of the others. A single process is a world of one, on the same code path."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in double precision."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def min(self, value: float) -> float:
        """Least value of all ranks."""
        return self._reduce([value], dist.ReduceOp.MIN)[0]

    def gather(self, value: Any) -> list[Any]:
        """The picklable values of all ranks, in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def agree(self, function: Callable[[], T]) -> T:
        """Call it on every rank; if it raises `InputError` on any, all raise the first one's."""
        result, error = None, None
        try:
            result = function()
        except InputError as caught:
            error = caught
        failed = [(rank, e) for rank, e in enumerate(self.gather(error)) if e is not None]
        if failed:
            rank, first = failed[0]
            if rank:
                first.args = (f"rank {rank}: {first}",)
            first.shared = True
            raise first
        return cast(T, result)

    def from_first(self, function: Callable[[], T]) -> T:
        """Call it on the first rank only; all get its result, or raise its `InputError`."""
        result = self.agree(lambda: function() if self.is_first else None)
        return cast(T, self.gather(result)[0])

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        # On the CPU over gloo, also beside NCCL: a few numbers are not worth a kernel, and the host needs them anyway.
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()


@contextmanager
def world() -> Iterator[World]:
    """Join the processes that a launcher started (a world of one without a launcher), and leave them at the end."""
    launched = is_launched()
    rank, size, local_rank = (int(os.environ.get(k, d)) for k, d in _DEFAULTS.items()) if launched else (0, 1, 0)
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"process {local_rank} of this machine finds no GPU: there are {torch.cuda.device_count()}; "
                "start fewer processes (--nproc)"
            )
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    if launched:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
    try:
        yield World(rank, size, device, init_device_mesh(device.type, (size,), mesh_dim_names=("shard",)))
    finally:
        # No barrier: on the way out of an error the others may never come.
        dist.destroy_process_group()


_DEFAULTS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def is_launched() -> bool:
    """Whether a launcher, such as torchrun, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
