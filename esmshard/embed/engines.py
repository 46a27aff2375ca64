"""The engines that compute the parts of an embedding job: processes of this machine, workers of an array, or Ray.

A part is finished when its file exists, so there is no protocol between processes: each engine only divides the numbers
of the missing parts. If two processes compute the same part, the second file replaces an equal one.
"""

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from esmshard.embed.embedder import Embedder, Failed
from esmshard.embed.plan import store_of, tracks_of
from esmshard.embed.spec import TORCH, Spec
from esmshard.embed.store import Layout, Parts, Reuse, key_bytes, read_plan
from esmshard.errors import InputError, UsageError
from esmshard.model import weights
from esmshard.model.attention import kernel_name
from esmshard.model.families.family_registry import family_of
from esmshard.model.weights import model_hash
from esmshard.parallel import cpu_limits
from esmshard.progress import say
from esmshard.vocab import CLS, EOS

Engine = Literal["local", "array", "ray"]

MOST_LOSSES = 3
"""How often processes may be killed without a finished part in between."""
OFFLOADED_PACK = 16384
"""Tokens of a pack where layers are copied for each pack."""

Progressed = Callable[[int, int], None]
"""A function that is called with the number of finished rows and residues."""


@dataclass(frozen=True)
class Share:
    """Worker `number` of `count` workers: it computes the parts number, number + count, ...

    Worker 0 also makes the plan, computes what other workers have not finished, and writes the output.
    """

    number: int
    count: int

    def __str__(self) -> str:
        return f"worker {self.number} of {self.count}"


def share(text: str | None) -> Share:
    """Return the share of this process, from `--worker I/N` or from the variables of a scheduler or a launcher.

    Slurm's array, torchrun and srun have both numbers in the environment. Kubernetes' Indexed Job has only the
    number of the pod, so it needs `--worker $JOB_COMPLETION_INDEX/N`.

    Raises:
        UsageError: if the numbers are missing or make no sense.
    """
    if text is not None:
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            raise UsageError(f"--worker {text}: a number from 0 and the number of workers are expected, such as 0/8")
        return Share(int(number), int(count))
    known = os.environ
    if "SLURM_ARRAY_TASK_ID" in known:
        first, step = int(known.get("SLURM_ARRAY_TASK_MIN", "0")), int(known.get("SLURM_ARRAY_TASK_STEP", "1"))
        return Share((int(known["SLURM_ARRAY_TASK_ID"]) - first) // step, int(known["SLURM_ARRAY_TASK_COUNT"]))
    for number, count in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if number in known and count in known:
            return Share(int(known[number]), int(known[count]))
    raise UsageError("--engine array: this process does not know its number; give --worker I/N, such as --worker 0/8")


def _parts_of(parts: list[int], part_of: Share | None) -> list[int]:
    """Return those of the missing parts that a worker computes, in its order."""
    if part_of is None:
        return parts
    mine = [part for part in parts if part % part_of.count == part_of.number]
    # The others' parts come last and backwards: their owners, if they are at work, compute them forwards.
    return mine + (sorted(set(parts) - set(mine), reverse=True) if part_of.number == 0 else [])


def compute_here(directory: Path, embedder: Embedder, progressed: Progressed, part_of: Share | None = None) -> None:
    """Compute missing parts in this process, one after the other.

    Args:
        directory: `OUT.partial`.
        embedder: the embedder of the plan's spec.
        progressed: called with progress.
        part_of: the share of this process; by default all parts.
    """
    plan = read_plan(directory)
    parts = Parts(directory, plan)
    for part in _parts_of(parts.missing(), part_of):
        if not parts.is_done(part):
            compute_part(directory, plan, parts, part, embedder, progressed)


def compute_locally(
    directory: Path,
    device: str,
    processes: int,
    tokens: int | None,
    progressed: Progressed,
    part_of: Share | None = None,
) -> None:
    """Compute the missing parts in processes of this machine. A killed process is started again.

    Args:
        directory: `OUT.partial`.
        device: the type of the device. With `cuda` each process has a GPU of its own.
        processes: the number of processes.
        tokens: tokens of a pack.
        progressed: called with the rows and residues of each finished part.
        part_of: the share of this machine; by default all parts.

    Raises:
        InputError: with the message of a process, or if processes were killed again and again.
    """
    all_parts, losses = Parts(directory, read_plan(directory)), 0
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cpu_limits.cores() // processes))
    context = multiprocessing.get_context("spawn")
    while parts := _parts_of(all_parts.missing(), part_of):
        numbers = context.SimpleQueue()
        for number in range(processes):
            numbers.put(number)
        pool = ProcessPoolExecutor(processes, context, _begin_process, (numbers, device, threads))
        children: list[Any] = []
        try:
            waiting = [pool.submit(_compute_in_process, str(directory), tokens, part) for part in parts]
            children = multiprocessing.active_children()
            for done in as_completed(waiting):
                progressed(*done.result())
        except BrokenProcessPool:
            losses = losses + 1 if len(_parts_of(all_parts.missing(), part_of)) == len(parts) else 1
            codes = {child.exitcode for child in children} - {0, None, -signal.SIGTERM}
            cause = f"a process was ended by signal {-min(codes)}" if codes else "a process was ended"
            cause += " (out of memory, perhaps)" if -signal.SIGKILL in codes else ""
            if losses > MOST_LOSSES:
                raise InputError(
                    f"{directory}: {cause}, {losses} times without a part finished; give --nproc fewer processes, or "
                    "--tokens fewer, and run the command again"
                ) from None
            say(f"{cause}; another one takes its place")
        except BaseException:
            for child in children:
                child.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


_process: dict[str, Any] = {}
"""The device of this process of a pool, and its open model."""


def _begin_process(numbers: Any, device: str, threads: int) -> None:
    """Prepare a process of the pool: it has a device of its own, leaves Ctrl-C to its parent, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    number = numbers.get()
    _process["device"] = f"cuda:{number}" if device == "cuda" else device


def _compute_in_process(directory: str, tokens: int | None, part: int) -> tuple[int, int]:
    return _compute_once(directory, _process["device"], tokens, part)


def _compute_once(directory: str, device: str, tokens: int | None, part: int) -> tuple[int, int]:
    """Compute a part, unless it was finished meanwhile. Return its computed rows and residues."""
    rows, residues = 0, 0

    def count(more_rows: int, more_residues: int) -> None:
        nonlocal rows, residues
        rows, residues = rows + more_rows, residues + more_residues

    plan, parts, embedder = _open(directory, device, tokens)
    if not parts.is_done(part):
        compute_part(Path(directory), plan, parts, part, embedder, count)
    return rows, residues


@functools.lru_cache(maxsize=1)
def _open(directory: str, device: str, tokens: int | None) -> tuple[dict[str, Any], Parts, Embedder]:
    plan = read_plan(Path(directory))
    return plan, Parts(Path(directory), plan), make_embedder(plan, torch.device(device), tokens)


def compute_on_ray(directory: Path, device: str, tokens: int | None, address: str, progressed: Progressed) -> None:
    """Compute the missing parts as tasks of a Ray cluster, each with one GPU or one core.

    Nodes may join and leave: Ray gives the parts of a lost node to other nodes. All nodes need the same file system.

    Args:
        directory: `OUT.partial`.
        device: the type of the device.
        tokens: tokens of a pack.
        address: `auto` for the cluster to which this machine belongs, `local` for one of this machine alone, or the
            address of a cluster.
        progressed: called with the rows and residues of each finished part.

    Raises:
        UsageError: if Ray is not installed, or the cluster cannot be reached.
        InputError: with the message of a task.
    """
    try:
        import ray
    except ImportError:
        raise UsageError("--engine ray needs Ray; pip install 'esmshard[ray]'") from None
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal():  # Ray itself tries an address at which nobody answers for many minutes.
            socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).split("\n", maxsplit=1)[0]
        raise UsageError(
            f"--ray-address {address}: no Ray cluster can be reached there ({why}); start one with ray start --head, "
            "or give --ray-address local"
        ) from None
    try:
        use = {"num_gpus": 1} if device == "cuda" else {"num_cpus": 1}
        task = ray.remote(**use, max_retries=-1, scheduling_strategy="SPREAD")(_compute_in_task)
        parts = Parts(directory, read_plan(directory)).missing()
        waiting = [task.remote(str(directory.resolve()), device, tokens, part) for part in parts]
        while waiting:
            done, waiting = ray.wait(waiting)
            progressed(*ray.get(done[0]))
    except ray.exceptions.RayTaskError as error:
        cause = error.as_instanceof_cause()
        if not isinstance(cause, (InputError, OSError)):
            raise
        raise InputError(str(error.cause)) from None
    finally:
        ray.shutdown()


def _compute_in_task(directory: str, device: str, tokens: int | None, part: int) -> tuple[int, int]:
    if device == "cpu":
        torch.set_num_threads(1)  # Ray gave this task one core.
    return _compute_once(directory, "cuda:0" if device == "cuda" else device, tokens, part)


_told_to_wait: set[Share] = set()


def wait(worker: Share) -> None:
    """Wait a moment for worker 0, which reads the input and writes the plan. Say so once."""
    if worker not in _told_to_wait:
        say(f"{worker}: waits until worker 0 has read the input")
        _told_to_wait.add(worker)
    time.sleep(0.5)


def compute_part(
    directory: Path, plan: Mapping[str, Any], parts: Parts, part: int, embedder: Embedder, progressed: Progressed
) -> None:
    """Compute one part and write it.

    Args:
        directory: `OUT.partial`.
        plan: its plan.
        parts: its parts.
        part: the number of the part.
        embedder: the embedder of the plan's spec.
        progressed: called with progress.
    """
    began, spec, index, store = time.monotonic(), Spec.of(plan), parts.index, store_of(directory, plan)
    first_n = index.first[index.bounds[part] : index.bounds[part + 1]].tolist()
    length_n = index.lengths_of(part)
    layout = Layout(spec, length_n)
    tensors = {one.name: layout.empty(one) for one in spec.outputs}

    def put(row: int, values: Mapping[str, torch.Tensor]) -> None:
        for one in spec.outputs:
            target = tensors[one.name][layout.slice(one, row)]
            target.copy_(values[one.name].reshape(target.shape))

    todo = list(range(len(first_n)))
    if plan["reuse"]:
        earlier = _reuse(plan["reuse"], spec)
        old_n = earlier.rows(np.asarray(index.keys[index.bounds[part] : index.bounds[part + 1]]))
        todo = np.flatnonzero(old_n < 0).tolist()
        for row in np.flatnonzero(old_n >= 0).tolist():
            values = {name: torch.from_numpy(x) for name, x in earlier.values(int(old_n[row])).items()}
            put(row, {name: x.view(TORCH[spec.dtype]) for name, x in values.items()})
        progressed(len(first_n) - len(todo), 0)
    failed, windowed = list[tuple[int, str]](), list[tuple[int, int]]()
    records = tracks_of(directory, plan, family_of(embedder.esm.config).tracks, store)
    tracks = None if records is None else [records.get(first_n[row], slice(None)) for row in todo]
    for place, result in embedder.compute([with_ends(store.residues(first_n[row])) for row in todo], tracks):
        row = todo[place]
        if isinstance(result, Failed):
            failed.append((row, result.reason))
        else:
            put(row, result.values)
            windowed += [(row, result.windowed)] if result.windowed else []
        progressed(1, int(length_n[row]))
    on_gpu = embedder.device.type == "cuda"
    note = {
        "rows": len(first_n),
        "failed": sorted(failed),
        "windowed": sorted(windowed),
        "reused": len(first_n) - len(todo),
        "kernel": kernel_name(embedder.device, TORCH[spec.compute]),
        "device": torch.cuda.get_device_name(embedder.device) if on_gpu else embedder.device.type,
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began, 3),
    }
    parts.write(part, {**tensors, "keys": torch.from_numpy(key_bytes(index, part))}, note)


@functools.lru_cache(maxsize=1)
def _reuse(path: str, spec: Spec) -> Reuse:
    return Reuse(Path(path), spec)


def with_ends(residues: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the residues between `<cls>` and `<eos>`, as the embedder expects them."""
    return np.concatenate(([CLS], residues, [EOS])).astype(np.uint8)


def make_embedder(
    plan: Mapping[str, Any], device: torch.device, tokens: int | None, offload: Path | None = None
) -> Embedder:
    """Open the model of a plan on a device. `InputError` if it is not the model that the plan was made for.

    Args:
        plan: the plan of the store.
        device: the computing device.
        tokens: tokens of a pack.
        offload: a directory for layers that fit neither on the devices nor into memory. Each pass reads them.
    """
    read, spec = weights.read(plan["facts"]["model"]), Spec.of(plan)
    if model_hash(read) != spec.model_hash:
        raise InputError(f"{read.source}: its weights were changed since; --overwrite starts over")
    read = weights.joining(read, spec.chains, "--join")
    dtype, how = TORCH[spec.compute], dict[str, Any](dtype=spec.dtype, long=spec.long)
    if offload is None:
        return Embedder(weights.build(read, device, dtype).eval(), spec.outputs, tokens=tokens, **how)
    from esmshard.embed.offload import offloaded

    esm = offloaded(read, offload, dtype, device)
    # A pass copies the layers once, whatever its number of tokens. Packs at the same time would wait for each other.
    return Embedder(esm, spec.outputs, tokens=tokens or OFFLOADED_PACK, device=device, workers=1, **how)
