"""Starts and ends torch's process group of a run, and exchanges numbers, objects and errors between the ranks."""

import itertools
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from esmshard.devices import DeviceName, chosen_device
from esmshard.errors import InputError, LostProcess, UsageError
from esmshard.parallel import launch
from esmshard.progress import say

T = TypeVar("T")

START_TIMEOUT = 1800
"""How many seconds all ranks may take to start and connect. Loading a container image can take many minutes."""

NCCL_GRACE = 60
"""The seconds that are added to NCCL's time-out. So `Control.wait_for_device` can raise its error before NCCL ends the
process without a message."""

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class World:
    """Describes the ranks of a run, and this process's rank. Its methods exchange values between all ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None
    """A one-dimensional device mesh of all ranks; None for a single process without FSDP."""
    together: int = 1
    """The number of neighbouring ranks that compute the same records together (`Layout.together`)."""
    group: Any = None
    """The process group for the methods of this class; None for torch's default process group."""
    timeout: int = START_TIMEOUT
    """How many seconds the methods of this class, such as `gather`, wait for a late rank."""
    step_timeout: int = START_TIMEOUT
    """How many seconds the collectives of training steps and of checkpoints wait for a late rank."""
    store: Any = None
    """The key-value store through which the ranks connected; None for a single process."""

    def patient(self, seconds: int = 7 * 86400) -> "World":
        """Return a `World` of the same ranks whose methods have the time-out `seconds`, by default a week.

        The other ranks can then wait while the first rank writes a model. All ranks must call this method.
        """
        if self.mesh is None:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds)), timeout=seconds)

    @property
    def data_rank(self) -> int:
        """The index of this rank's group. The `together` ranks of a group compute the same records."""
        return self.rank // self.together

    @property
    def data_size(self) -> int:
        """The number of groups of ranks that compute different records. A group has `together` ranks."""
        return self.size // self.together

    @property
    def is_first(self) -> bool:
        """Whether this process is rank 0, which prints messages and writes files."""
        return self.rank == 0

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """Return the `values` of all ranks, one row for each rank. All ranks must pass the same number of values."""
        if self.mesh is None:
            return [[float(v) for v in values]]
        # gloo exchanges these few numbers on the CPU, even if there is NCCL, because the CPU reads the numbers.
        rows = [torch.empty(len(values), dtype=torch.float64) for _ in range(self.size)]
        dist.all_gather(rows, torch.tensor(values, dtype=torch.float64), group=self.group)
        return [row.tolist() for row in rows]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all ranks, in double precision."""
        return [sum(column) for column in zip(*self.rows(values), strict=True)]

    def min(self, value: float) -> float:
        """Return the smallest value of all ranks."""
        return min(row[0] for row in self.rows([value]))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. The values must be picklable."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_on_first(self, value: Any) -> list[Any]:
        """Return the values of all ranks on the first `together` ranks, and an empty list on other ranks.

        The values are in rank order, and must be picklable.
        """
        if self.mesh is None:
            return [value]
        gathered = [None] * self.size if self.rank < self.together else []
        for receiver in range(self.together):
            dist.gather_object(value, gathered if self.rank == receiver else None, dst=receiver, group=self.group)
        return gathered

    def agree(self, function: Callable[[], T]) -> T:
        """Call a function on every rank, and return its result.

        If the function raises `InputError` on some ranks, all ranks raise the error of the lowest of these ranks.
        """
        result, error = None, None
        try:
            result = function()
        except InputError as caught:
            error = caught
        for rank, first in enumerate(self.gather(error)):
            if first is not None:
                first.args = (f"rank {rank}: {first}" if rank else str(first),)
                first.shared = True
                raise first
        return cast(T, result)

    def from_first(self, function: Callable[[], T]) -> T:
        """Call a function on the first rank only. All ranks return the result, or raise the function's `InputError`."""
        result = self.agree(lambda: function() if self.is_first else None)
        return cast(T, self.gather(result)[0])


@contextmanager
def world(
    start_timeout: int = START_TIMEOUT,
    step_timeout: int | None = None,
    *,
    alone_too: bool = False,
    wanted: DeviceName = None,
) -> Iterator[World]:
    """Connect the processes that a launcher started, for the time of a `with` block.

    The launcher is torchrun, `accelerate launch`, srun or esmshard's launcher. Without a launcher, there is one rank.

    Args:
        start_timeout: how many seconds the ranks may take to connect.
        step_timeout: how many seconds each collective waits for a late rank, once the ranks have connected; by default
            `start_timeout`.
        alone_too: whether to make a process group even for a single process, as `Layout.cpu_offload` requires.
        wanted: the name of a device; see the function `own_device`.

    Raises:
        UsageError: environment variables of a launcher are missing or unreadable, or a process cannot use `wanted`.
        InputError: there are fewer GPUs than processes.
        LostProcess: not all ranks connect in time.
    """
    os.environ.update(launch.variables())
    launch.check()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, size, local_rank = (int(os.environ.get(name) or 0) for name in names) if is_launched() else (0, 1, 0)
    device = own_device(local_rank, size, wanted)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1 and not alone_too:
        yield World(rank, size, device, None)
        return
    seconds = step_timeout or start_timeout
    timeout = timedelta(seconds=seconds + (NCCL_GRACE if device.type == "cuda" else 0))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore() if size == 1 else _meet(rank, size, start_timeout)  # type: ignore[attr-defined]
    with launch.environment(_gloo_interface()):  # later process groups need the variable, too
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        is_lost = False
        try:
            mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
            yield World(rank, size, device, mesh, timeout=seconds, step_timeout=seconds, store=store)
        except LostProcess:
            is_lost = True  # `destroy_process_group` would wait for the lost rank
            raise
        finally:
            if not is_lost:  # There is no barrier here: after an error, other ranks may never reach a barrier.
                dist.destroy_process_group()
                # Without this pause, the interpreter may end before a thread of gloo has freed the tensor of the last
                # collective. The thread then aborts the process (SIGABRT, in one of ten short runs).
                time.sleep(0.1)


_STARTS = itertools.count()
"""Counts the process groups that this process has made. The count is part of their keys in the store (`prefix`)."""


def _gloo_interface() -> dict[str, str]:
    """Return gloo's environment variable for the network interface through which this machine reaches rank 0.

    By default, gloo uses the address of the machine's host name. In Debian's /etc/hosts this is 127.0.1.1, which other
    machines cannot reach. The machine of rank 0 uses the interface of the default route. The result is empty if all
    ranks are on one machine, if the user has set the variable, and outside Linux.
    """
    size = os.environ.get("WORLD_SIZE")
    one_machine = size is None or os.environ.get("LOCAL_WORLD_SIZE", size) == size
    if one_machine or "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return {}
    import fcntl  # Windows does not have this module

    get_address = 0x8915  # SIOCGIFADDR in <linux/sockios.h>
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # nothing is sent
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        if probe.getsockname()[0].startswith("127."):
            probe.connect(("192.0.2.1", 9))  # RFC 5737 reserves this address, so no machine has it
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == probe.getsockname()[0]:
                    return {"GLOO_SOCKET_IFNAME": name}
    return {}


def _meet(rank: int, size: int, seconds: int) -> Any:
    """Connect to the key-value store of a launcher or of rank 0, wait for all ranks, and return the store.

    Raises `LostProcess` if not all ranks connect within `seconds`.
    """
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and launch.restarts_allowed() and by_launcher:
        say(
            "torchrun can start processes again only if each machine has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; without "
            "this variable, new processes may wait forever for the old processes"
        )
    host, port, timeout = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=seconds)
    # If rank 0 serves the store, the store is new at each start. Machines that joined later count fewer restarts.
    prefix = launch.prefix(launch.attempt() if by_launcher else 0, next(_STARTS))
    try:
        server = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=rank == 0 and not by_launcher,
            wait_for_workers=False,
            timeout=timeout,
            multi_tenant=True,
        )
        store = dist.PrefixStore(prefix, server)  # type: ignore[attr-defined]
        store.set(f"host/{rank}", socket.gethostname())
        store.wait([f"host/{other}" for other in range(size)], timeout)
    except dist.DistError as error:
        words = " ".join(str(error).split("\n")[0].split())
        raise LostProcess(
            f"rank {rank}: the {size} ranks did not all connect to {host}:{port} within {seconds} s ({words}); check "
            "that all were started and can reach that address, then start again with --resume auto"
        ) from None
    return store


def processes_per_machine(size: int) -> int:
    """Return how many processes a launcher started on this machine. Without a launcher, return `size`."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size)) if is_launched() else size


def precision_on(device: torch.device, wanted: str, asked_by: str = "parallel.precision") -> Precision:
    """Return the precision `wanted`; for `auto`, the best 16-bit precision of the GPU, or fp32 without a 16-bit format.

    For fp16 on a CPU, raises a `UsageError` that names the recipe key or option `asked_by`.
    """
    if wanted == "auto":
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        return "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    if wanted == "fp16" and device.type == "cpu":
        raise UsageError(f"{asked_by}: fp16 needs a GPU, but this run is on a CPU; choose fp32 or auto")
    return cast(Precision, wanted)


def processes_of(device: torch.device, nproc: int | None) -> int:
    """Return how many processes to start on this machine: `nproc`; by default one per GPU, or one without a GPU."""
    return nproc or (torch.cuda.device_count() if device == torch.device("cuda") else 1)


def own_device(local_rank: int, size: int, wanted: DeviceName = None) -> torch.device:
    """Return the device of a process: an NVIDIA GPU, or Apple's GPU for a single process, or else the CPU.

    Apple's GPU has no collectives, so several processes use the CPU. `wanted` is as in `devices.chosen_device`.

    Raises:
        UsageError: this machine does not have the device, or several processes would share a single GPU.
        InputError: the machine has fewer GPUs than processes.
    """
    device = chosen_device(wanted)
    if size > 1 and wanted is not None and (device.index is not None or device.type == "mps"):
        raise UsageError(
            f"device {device}: is a single GPU, and each of the {size} processes needs one of its own; pass --nproc 1, "
            "or --device cuda or cpu; CUDA_VISIBLE_DEVICES=2,3 chooses among GPUs"
        )
    if device.type == "cuda" and device.index is None:
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"local rank {local_rank} (from 0) has no GPU of its own, because it sees {torch.cuda.device_count()} "
                "of this machine's GPUs; start fewer processes (--nproc); under srun, let each task see all GPUs of "
                "its machine (--gpus-per-node, not --gpus-per-task)"
            )
        return torch.device("cuda", local_rank)
    return torch.device("cpu") if device.type == "mps" and size > 1 else device


def is_launched() -> bool:
    """Return whether a launcher, such as torchrun, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
