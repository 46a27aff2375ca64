"""The processes of a run: start, agree, stop. Any launcher that sets RANK, WORLD_SIZE and LOCAL_RANK will do."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from esmshard.errors import InputError, LostProcess, UsageError
from esmshard.launch import address, launchers, process_environment
from esmshard.progress import say

if TYPE_CHECKING:  # torch may be built without any of this, and one process does without it
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

START_TIMEOUT = 1800
"""Seconds that a collective waits for a rank before the run ends: enough for the first read of a large model."""

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class World:
    """What one process knows of the others. A single process answers itself and starts no process group."""

    rank: int
    size: int
    device: torch.device
    mesh: "DeviceMesh | None"
    """All ranks in one dimension; None for a single process that shards nothing."""

    @property
    def is_first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """The numbers of all ranks, a row a rank, in double precision. As many on each rank."""
        if self.mesh is None:
            return [[float(v) for v in values]]
        # On the CPU over gloo, also beside NCCL: a few numbers are not worth a kernel, and the host needs them anyway.
        rows = [torch.empty(len(values), dtype=torch.float64) for _ in range(self.size)]
        dist.all_gather(rows, torch.tensor(values, dtype=torch.float64))
        return [row.tolist() for row in rows]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in double precision."""
        return [sum(column) for column in zip(*self.rows(values), strict=True)]

    def min(self, value: float) -> float:
        """Least value of all ranks."""
        return min(row[0] for row in self.rows([value]))

    def gather(self, value: Any) -> list[Any]:
        """The picklable values of all ranks, in rank order, on every rank."""
        if self.mesh is None:
            return [value]
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


@contextmanager
def world(start_timeout: int = START_TIMEOUT, *, alone_too: bool = False) -> Iterator[World]:
    """Join the processes that a launcher started, and leave them at the end. One process has nobody to join.

    Args:
        start_timeout: seconds that a collective waits for a rank.
        alone_too: make a process group for a single process too; FSDP needs one to keep weights outside the GPU.

    Raises:
        UsageError: the variables of a launcher are there in part.
    """
    launchers.check()
    rank, size, local_rank = (int(os.environ.get(k, d)) for k, d in _DEFAULTS.items()) if is_launched() else (0, 1, 0)
    device = own_device(local_rank, size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1 and not alone_too:
        yield World(rank, size, device, None)
        return
    from torch.distributed.device_mesh import init_device_mesh

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    timeout = timedelta(seconds=start_timeout)
    with process_environment.environment({} if size == 1 else _rendezvous_variables(rank)):
        try:
            dist.init_process_group(backend, timeout=timeout, **(alone if size == 1 else {}))
        except dist.DistError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            words = " ".join(str(error).split("\n")[0].split())
            raise LostProcess(
                f"rank {rank}: the {size} ranks did not all meet at {where} within {start_timeout} s ({words}); see "
                "that all were started and reach that address, then start again with --resume auto"
            ) from None
        try:
            yield World(rank, size, device, init_device_mesh(device.type, (size,), mesh_dim_names=("shard",)))
        finally:
            # No barrier: on the way out of an error the others may never come. After a lost connection it is gone
            # already.
            if dist.is_initialized():
                dist.destroy_process_group()
            # A thread of gloo that still holds a tensor of the last collective wants the interpreter to let it go. When
            # it comes while the process is leaving, it takes the whole process with it (SIGABRT, in one of ten short
            # runs).
            time.sleep(0.1)


def _rendezvous_variables(rank: int) -> dict[str, str]:
    """Variables under which torch lets the ranks of several machines find each other; none on one machine.

    gloo takes the address of the machine's own name by itself, which Debian maps to a loopback address.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) == int(os.environ["WORLD_SIZE"]):
        return {}
    if (
        rank == 0
        and process_environment.restarts_allowed()
        and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ):
        say(
            "torchrun can start the processes of several machines again only if each machine has "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; without it the new processes wait in vain for the old ones"
        )
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    own = address.own(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    name = address.interface(own) if own else None
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def processes_per_machine(size: int) -> int:
    """Processes of this run on one machine, as the launcher says; all of them if it says nothing."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size)) if is_launched() else size


def precision_on(device: torch.device, wanted: str) -> Precision:
    """What `parallel.precision` means on a device. `UsageError` for fp16 on a CPU."""
    if wanted == "auto":
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        return "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    if wanted == "fp16" and device.type == "cpu":
        raise UsageError("parallel.precision: fp16 is for GPUs, and this is a CPU; take fp32 or auto")
    return cast(Precision, wanted)


def own_device(local_rank: int, size: int) -> torch.device:
    """The device of a process: its own NVIDIA GPU; else Apple's, for a process that is alone; else the CPU.

    Nothing carries collectives between Apple GPUs, and a machine has only one: several processes take the CPU.
    """
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"process {local_rank} of this machine finds no GPU: there are {torch.cuda.device_count()}; "
                "start fewer processes (--nproc); under srun, let each task see all GPUs of its machine "
                "(--gpus-per-node, not --gpus-per-task)"
            )
        return torch.device("cuda", local_rank)
    return torch.device("mps" if size == 1 and torch.backends.mps.is_available() else "cpu")


_DEFAULTS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def is_launched() -> bool:
    """Whether a launcher, such as torchrun, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
