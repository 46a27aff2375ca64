"""Run the `embed` command: divide the input into parts, compute the parts with an engine, and write the output.

The engine `local` starts processes on this machine. The engine `array` uses workers that a scheduler or a launcher has
started. The engine `ray` uses a Ray cluster. A part is finished when its file exists (`esmshard.embed.parts`), so
processes exchange no messages. If the command runs again, it computes only the missing parts.

After the last part, the directory `OUT.partial` is renamed to OUT, or its rows are copied to the file OUT in input
order. A bucket cannot rename files, so parts are uploaded to their final address. The manifest is uploaded last, and
shows that the directory is complete.
"""

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from esmshard.data.structures.structure_folder import cached_split, holds_structures, notices
from esmshard.data.tracks import with_paths
from esmshard.embed.compute import Work, compute_part, worker_of
from esmshard.embed.parts import EmbeddingStore, Parts, RowIndex, begin, conclude, partial, remove, settings_of
from esmshard.embed.spec import PARTS, EmbedRequest, difference
from esmshard.errors import InputError, UsageError, writing
from esmshard.io import remote
from esmshard.io.array_formats import FORMATS, NUMPY, About, suits
from esmshard.io.paths import check_replaced, read_json, replace_json, size_text
from esmshard.io.remote import RemoteDirectory
from esmshard.io.store import TokenStore, is_store
from esmshard.io.tables import counted
from esmshard.io.writers import facts_file, failures_file, write_chains
from esmshard.model import weights
from esmshard.parallel import cpu_limits
from esmshard.parallel.process_group import own_device, processes_of
from esmshard.progress import Progress, rate, say
from esmshard.tasks.finetuned import without_tracks

Engine = Literal["local", "array", "ray"]
Progressed = Callable[[int, int], None]
"""A function that is called with the number of rows and the number of residues that were finished since its last call.
"""

STDIN = Path("-")
ROOM = "the finished parts are kept: make room, and run the command again"
PART_FILE = f"parts/{'[0-9]' * 6}-{'[0-9a-f]' * 8}.safetensors"
PARTS_FILES = ["plan.json", "manifest.json", "failed.tsv", "index/*", PART_FILE]
"""The names of the files in a directory of parts, as patterns for the module `fnmatch`."""
MOST_LOSSES = 3
"""How many times in a row processes may be killed while no part is finished. The next time is an `InputError`."""


def summary(out: Path | str, manifest: Mapping[str, Any]) -> str:
    """Describe the content of a finished output in one line, for the user."""
    failed, records = manifest["failed_records"], manifest["records"]
    text = (
        f"{out}: {counted(records - failed, 'record')}; {counted(manifest['computed'], 'sequence')} computed, "
        f"{counted(records - manifest['unique'], 'duplicate')}, {manifest['reused']:,} reused"
    )
    if windowed := len(manifest["windowed_rows"]):
        text += f"; {windowed:,} in windows, for lack of memory"
    return text + (f"; {counted(failed, 'record')} failed, see {manifest['failed_file']}" if failed else "")


@dataclass(frozen=True)
class Share:
    """The parts of worker `number` among `count` workers: the parts `number`, `number + count`, and so on.

    Worker 0 also computes the unfinished parts of the other workers, and writes the output.
    """

    number: int
    count: int

    def of(self, missing: list[int]) -> list[int]:
        """Return the missing parts that this worker computes, in the order in which the worker computes them."""
        assigned = [part for part in missing if part % self.count == self.number]
        # The other workers may be computing their parts forwards, so worker 0 begins with the last of these parts.
        return assigned + (sorted(set(missing) - set(assigned), reverse=True) if self.number == 0 else [])


def share(text: str | None) -> Share:
    """Return the share of this process, from the option `--worker I/N` (`text`) or else from environment variables.

    Slurm arrays, torchrun and srun set I and N. An Indexed Job of Kubernetes sets only I, so the option
    `--worker $JOB_COMPLETION_INDEX/N` is necessary. Raise `UsageError` if I or N is missing or wrong.
    """
    if text is not None:
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            raise UsageError(f"--worker {text}: I/N is expected, worker I (from 0) of N workers, such as 0/8")
        return Share(int(number), int(count))
    env = os.environ
    if "SLURM_ARRAY_TASK_ID" in env:
        first, step = int(env.get("SLURM_ARRAY_TASK_MIN", "0")), int(env.get("SLURM_ARRAY_TASK_STEP", "1"))
        return Share((int(env["SLURM_ARRAY_TASK_ID"]) - first) // step, int(env["SLURM_ARRAY_TASK_COUNT"]))
    for number_name, count_name in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if number_name in env and count_name in env:
            return Share(int(env[number_name]), int(env[count_name]))
    raise UsageError(
        "--engine array: no environment variable says which worker this is; give --worker I/N, such as --worker 0/8"
    )


def compute_here(work: Work, parts: Sequence[int], progressed: Progressed) -> None:
    """Compute the parts in this process, one part after the other."""
    try:
        for part in parts:
            progressed(*compute_part(work, part))
    finally:
        worker_of.cache_clear()  # frees the memory of the model


def compute_locally(work: Work, missing: Callable[[], list[int]], processes: int, progressed: Progressed) -> None:
    """Compute the missing parts in several processes of this machine. If a process is killed, start all processes
    again, at most MOST_LOSSES times in a row; then raise `InputError`. With the device `cuda`, each process has its
    own GPU.
    """
    losses, context = 0, multiprocessing.get_context("spawn")
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cpu_limits.cores() // processes))
    while parts := missing():
        numbers = context.SimpleQueue()
        for number in range(processes):
            numbers.put(number)
        pool = ProcessPoolExecutor(processes, context, _begin_process, (numbers, threads))
        children: list[Any] = []
        try:
            waiting = [pool.submit(_compute_in_process, work, part) for part in parts]
            children = multiprocessing.active_children()
            for done in as_completed(waiting):
                progressed(*done.result())
        except BrokenProcessPool:
            losses = losses + 1 if len(missing()) == len(parts) else 1
            if losses > MOST_LOSSES:
                raise InputError(
                    f"{work.directory}: processes were killed {losses} times before a part was finished, perhaps for "
                    "lack of memory; pass a smaller --nproc or --tokens, and run the command again"
                ) from None
            say("a process was killed, perhaps for lack of memory; all processes are started again")
        except BaseException:
            for child in children:
                child.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


_number = 0
"""The index of this process in its pool, from 0. With the device `cuda`, process N uses GPU N."""


def _begin_process(numbers: Any, threads: int) -> None:
    """Give a new process of the pool its index. Make the process ignore Ctrl-C, and end when its parent ends."""
    global _number  # noqa: PLW0603  # each process has its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _number = numbers.get()


def _compute_in_process(work: Work, part: int) -> tuple[int, int]:
    return compute_part(replace(work, device=f"cuda:{_number}") if work.device == "cuda" else work, part)


def compute_on_ray(work: Work, parts: Sequence[int], address: str, progressed: Progressed) -> None:
    """Compute each part as a task of a Ray cluster. A task uses one GPU or one core.

    Machines may join and leave: Ray repeats the tasks of a lost machine on others. All machines need a common file
    system. `address` is the address of a cluster, `auto` for the cluster that runs on this machine, or `local` for a
    new cluster with this machine only. Raise `UsageError` if the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError:
        raise UsageError("--engine ray needs Ray; pip install 'esmshard[ray]'") from None
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal():  # Ray waits many minutes for an address that does not answer.
            socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).split("\n", maxsplit=1)[0]
        raise UsageError(
            f"--ray-address {address}: no Ray cluster answers ({why}); start a cluster with ray start --head, or pass "
            "--ray-address local"
        ) from None
    try:
        use = {"num_gpus": 1} if work.device == "cuda" else {"num_cpus": 1}
        task = ray.remote(**use, max_retries=-1, scheduling_strategy="SPREAD")(_compute_in_task)
        waiting = [task.remote(work, part) for part in parts]
        while waiting:
            done, waiting = ray.wait(waiting)
            progressed(*ray.get(done[0]))
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.as_instanceof_cause(), (InputError, OSError)):
            raise
        raise InputError(str(error.cause)) from None
    finally:
        ray.shutdown()


def _compute_in_task(work: Work, part: int) -> tuple[int, int]:
    if work.device == "cpu":
        torch.set_num_threads(1)  # Ray gave this task one core.
    return compute_part(work, part)


def embed(
    asked: EmbedRequest,
    fasta: Path,
    *,
    nproc: int | None = None,
    tokens: int | None = None,
    reuse: Path | None = None,
    overwrite: bool = False,
    offload: bool = False,
    engine: Engine = "local",
    worker: str | None = None,
    ray_address: str = "auto",
    part_tokens: int | None = None,
) -> dict[str, Any] | None:
    """Compute embeddings and write the output. Do not repeat parts that an interrupted command has finished.

    The arguments are the options of `esmshard embed` (docs/embed.md). `fasta` is a plain or compressed file, `-` for
    the standard input, a token store, structures, or an address in a bucket. For `part_tokens` see `begin`.

    Returns:
        The manifest (see `esmshard.embed.parts`), with the path of `failed.tsv` as `failed_file`. With the engine
        `array`, only worker 0 writes the output, and the other workers return None.

    Raises:
        UsageError: if options contradict each other, or the output exists or was begun with settings other than these.
        InputError: if the input cannot be read (then no file is left behind), or parts cannot be computed or written.
    """
    if offload and (engine != "local" or nproc not in (None, 1)):
        raise UsageError("--offload spreads one model over all memory of the machine; leave --nproc and --engine out")
    if engine == "array" and overwrite:
        raise UsageError(
            "--overwrite: a worker would remove results of other workers; remove the output first, and leave "
            "--overwrite out"
        )
    if worker is not None and engine != "array":
        raise UsageError("--worker is for --engine array; leave it out")
    my_share, url = share(worker) if engine == "array" else Share(0, 1), remote.address(asked.out)
    if url is not None and engine == "ray":
        raise UsageError(f"{url}: --engine ray writes to a disk that all nodes see; use --engine array for a bucket")
    partial(asked.out)
    processes = 1 if offload else processes_of(asked.device, nproc)
    if asked.device.type == "cuda" and engine != "ray":
        own_device(processes - 1, processes, asked.device)  # raises if there are fewer GPUs than processes
    reuse = None if reuse is None else reusable(reuse, asked).path
    scratch = contextlib.nullcontext(asked.out.parent) if url is None else remote.scratch()
    with read_from(asked, fasta) as (prepared, sequences, sentences), scratch as folder:
        on_disk = replace(prepared, out=folder / asked.out.name)
        directory = partial(on_disk.out)
        work = Work(
            directory.resolve(),
            sequences.resolve() if is_store(sequences) else directory.resolve() / "work" / "input",
            asked.model,
            "cuda" if asked.device.type == "cuda" and (processes > 1 or engine == "ray") else str(asked.device),
            tokens,
            reuse,
            offload,
            url,
        )

        def compute(parts: Parts, progressed: Progressed) -> None:
            if engine == "ray":
                compute_on_ray(work, my_share.of(parts.missing()), ray_address, progressed)
            elif processes > 1:
                compute_locally(work, lambda: my_share.of(parts.missing()), processes, progressed)
            else:
                compute_here(work, my_share.of(parts.missing()), progressed)

        job = _Job(on_disk, sequences, settings_of(on_disk, sequences), overwrite, url)
        with writing(directory, ROOM):
            try:
                manifest = job.finished()
                if my_share.number and url is None and manifest is None and not directory.exists():
                    say(f"worker {my_share.number} of {my_share.count}: waits until worker 0 has read the input")
                    while manifest is None and not directory.exists():
                        job.clear_way()  # raises the error that stopped worker 0
                        time.sleep(0.5)
                        manifest = job.finished()
                if manifest is None:
                    manifest = job.run(compute, sentences, part_tokens, work.store if my_share.number == 0 else None)
                else:
                    say(f"{url or asked.out}: is finished already")
                    if not directory.exists() or _json(directory, "plan.json").get("settings") == job.settings:
                        remove(directory)  # An earlier command was killed after it had written the output.
            except (InputError, OSError):
                if directory.exists() or (manifest := job.finished()) is None:
                    raise  # If the output is complete, another process has written it and removed the parts.
    if manifest is None:
        return None
    return manifest | {"failed_file": f"{url or asked.out}{'/' if asked.fmt == PARTS else '.'}failed.tsv"}


def reusable(path: Path, asked: EmbedRequest) -> EmbeddingStore:
    """Open an earlier directory of parts. Raise `UsageError` if its settings or outputs do not suit the request."""
    store = EmbeddingStore(remote.local(path).resolve())
    store.check_reuse(asked.spec)
    return store


@contextlib.contextmanager
def read_from(asked: EmbedRequest, fasta: Path) -> Iterator[tuple[EmbedRequest, Path, list[str]]]:
    """Yield the request with a path for each track, the path of the sequences (a file or a token store), and notices
    for the user. Structures become a FASTA file of their chains. The standard input becomes a file, because it can be
    read only once.
    """
    with contextlib.ExitStack() as stack:
        sentences = [*asked.weights.notices, *without_tracks(asked.model, [file.track.name for file in asked.tracks])]
        path = given = remote.local(fasta)
        if given == STDIN:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="esmshard-embed-"))) / "stdin"
            with open(path, "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        elif holds_structures(given):
            path = cached_split(given)
            sentences += [f"{given}: the sequences of its chains were read", *(f"{given}: {s}" for s in notices(path))]
        yield replace(asked, tracks=tuple(with_paths(given, asked.tracks))), path, sentences


@dataclass(frozen=True)
class _Job:
    """One `embed` command. `asked.out` is a path on this machine, even if the output is uploaded to a bucket."""

    asked: EmbedRequest
    fasta: Path
    settings: Mapping[str, str]
    """See `settings_of`."""
    overwrite: bool
    url: str | None

    def run(
        self,
        compute: Callable[[Parts, Progressed], None],
        sentences: Sequence[str],
        part_tokens: int | None,
        store: Path | None,
    ) -> dict[str, Any] | None:
        """Make the plan and compute the parts, unless they exist already. If `store` (the path of the token store) is
        given, also write the output and return the manifest. Otherwise return None.
        """
        asked, directory, is_parts = self.asked, partial(self.asked.out), self.asked.fmt == PARTS
        self.clear_way()
        for notice in filter(None, [*sentences, weights.altered(asked.weights.files)]):
            say(notice)
        plan = begin(directory, self.fasta, asked, sentences, part_tokens)
        self.check_same(plan, "begun")
        bucket = None if self.url is None else RemoteDirectory(self.url)
        if bucket is not None:
            bucket.write("plan.json", (directory / "plan.json").read_bytes())
        parts = Parts(directory, plan, bucket)
        missing, bounds, total = parts.missing(), plan["bounds"], plan["unique"]
        if bucket is None:
            check_fits(directory, part_bytes(asked, parts.index, missing) + file_bytes(asked, parts.index))
        done, residues, began = total - sum(bounds[part + 1] - bounds[part] for part in missing), 0, time.monotonic()
        if done:
            say(f"{self.url or directory}: going on; {done:,} of {total:,} sequences are done")
        with Progress("embed", total) as progress:

            def progressed(more_rows: int, more_residues: int) -> None:
                nonlocal done, residues
                # A part that is computed twice counts twice, so the sum may exceed the total.
                done, residues = min(done + more_rows, total), residues + more_residues
                if more_rows:
                    progress.update(done, f"{rate(residues / (time.monotonic() - began))} residues/s")

            if missing:
                compute(parts, progressed)
        if store is None:
            say("the parts of this worker are finished; worker 0 writes the output")
            return None
        manifest = conclude(directory, plan, parts)
        if bucket is not None:
            for path in [*(directory / "index").iterdir(), *directory.glob("failed.tsv"), directory / "manifest.json"]:
                bucket.upload(path, path.relative_to(directory).as_posix())
            kept = {f"parts/{parts.name(part)}" for part in range(len(parts))}
            bucket.remove(name for name in bucket.listing("parts") if fnmatchcase(name, PART_FILE) and name not in kept)
        elif is_parts:
            shutil.rmtree(directory / "work", ignore_errors=True)
            for stray in set(parts.folder.iterdir()) - {parts.folder / parts.name(part) for part in range(len(parts))}:
                stray.unlink(missing_ok=True)  # A killed worker or an earlier plan left this file.
            remove(asked.out)
            directory.rename(asked.out)
        else:
            sequences = TokenStore(store) if FORMATS[asked.fmt].by_sequence else None
            write_file(EmbeddingStore(directory), asked.out, asked.fmt, sequences)
        for stray in asked.out.absolute().parent.glob(f".planning-{directory.name}-*"):  # left by killed commands
            shutil.rmtree(stray, ignore_errors=True)
        remove(directory)
        return manifest

    def finished(self) -> dict[str, Any] | None:
        """Return the manifest if the output of this request is finished; None if it must still be written."""
        out = self.asked.out
        if self.asked.fmt == PARTS:
            manifest = _json(out if self.url is None else RemoteDirectory(self.url), "manifest.json")
        else:
            manifest = _json(out.parent, facts_file(out).name) if out.exists() else {}
        if self.overwrite or "settings" not in manifest:  # Another program may have written the file.
            return None
        self.check_same(manifest, "made")
        return manifest

    def check_same(self, known: Mapping[str, Any], verb: str) -> None:
        """Raise `UsageError` if `known`, a plan or a manifest, has other settings than this command."""
        if different := difference(known.get("settings", {}), self.settings):
            place = self.url or (self.asked.out if verb == "made" else partial(self.asked.out))
            raise UsageError(f"{place}: was {verb} with {different}; --overwrite starts over")

    def clear_way(self) -> None:
        """Raise `UsageError` if the output exists, or was begun with other settings. If `overwrite` is true, remove the
        old output instead. Never replace files of other programs.
        """
        asked, directory, overwrite = self.asked, partial(self.asked.out), self.overwrite
        bucket = None if self.url is None else RemoteDirectory(self.url)
        names = [] if bucket is None else [*bucket.listing()]
        plan = _json(bucket or directory, "plan.json")  # written first: without a plan, the files are not ours
        if names and "settings" not in plan:
            raise UsageError(
                f"{self.url}: is no directory of embeddings (it contains {names[0]}), so embed writes nothing into it; "
                "choose another name"
            )
        if plan and not overwrite:
            self.check_same(plan, "begun")
        replaced = plan and overwrite and plan.get("settings") != self.settings
        if bucket is not None:
            if replaced or (overwrite and "manifest.json" in names):
                ours = [name for name in names if any(fnmatchcase(name, pattern) for pattern in PARTS_FILES)]
                bucket.remove(sorted(ours, key=lambda name: (name == "plan.json", name != "manifest.json")))
            return
        check_replaced(directory, ["*"], marker="plan.json")
        if not plan or overwrite:  # If a plan exists, the command that made the plan has checked this.
            if asked.fmt != PARTS:
                FORMATS[asked.fmt].check_place(asked.out, overwrite=overwrite)
            elif asked.out.exists() and not overwrite:
                raise UsageError(f"{asked.out}: exists already; choose another name or pass --overwrite")
            else:
                check_replaced(asked.out, PARTS_FILES, marker="manifest.json")
        if replaced:
            check_replaced(directory, [*PARTS_FILES, "parts/.*", "work/*", ".*"])
            remove(directory)


def _json(place: Path | RemoteDirectory, name: str) -> dict[str, Any]:
    """Read a JSON file from a directory or a bucket. If the file does not exist, return an empty dictionary."""
    if isinstance(place, RemoteDirectory):
        return dict(json.loads(place.read(name).get(name, "{}")))
    return dict(read_json(place / name)) if (place / name).is_file() else {}


def check_fits(place: Path, need: int) -> None:
    """Raise `InputError` if the disk with the directory `place` has no room for `need` bytes."""
    free = shutil.disk_usage(place).free
    if need > free:
        raise InputError(
            f"{place}: the output needs {size_text(need)} and only {size_text(free)} are free; make room, choose "
            "another place, or store less (--format parts, --dtype fp16, --pool mean), and run the command again"
        )


def part_bytes(asked: EmbedRequest, index: RowIndex, parts: Iterable[int]) -> int:
    """Return the total size of the values in the given parts, in bytes."""
    spec = asked.spec
    numbers = sum(int(spec.numbers(spec.long.kept(index.lengths_of(part))).sum()) for part in parts)
    return numbers * np.dtype(NUMPY[spec.dtype]).itemsize


def file_bytes(asked: EmbedRequest, index: RowIndex) -> int:
    """Return the approximate size of the output file in bytes; 0 for a directory of parts. Raise `UsageError` if the
    file format cannot store the outputs or the number of records.
    """
    if asked.fmt == PARTS:
        return 0
    spec, writer, id_bytes = asked.spec, FORMATS[asked.fmt], int(index.ids[-1])
    suits(asked.fmt, spec.outputs, spec.dtype, asked.out, records=len(index.lengths), id_bytes=id_bytes)
    length = index.lengths if not writer.by_sequence else index.lengths[index.first]
    numbers = int(spec.numbers(spec.long.kept(length.astype(np.int64))).sum())
    return numbers * writer.number_bytes[spec.dtype] + id_bytes


def forecast(asked: EmbedRequest, fasta: Path, reuse: Path | None = None) -> str:
    """Describe the input and the size of the output in several lines. Compute no embedding, and leave no file. Raise
    the errors that `embed` would raise before the computation.
    """
    in_bucket, long = remote.address(asked.out) is not None, asked.spec.long
    place = None if in_bucket else next(folder for folder in asked.out.absolute().parents if folder.is_dir())
    with (
        tempfile.TemporaryDirectory(prefix=".esmshard-dry-run-", dir=place, ignore_cleanup_errors=True) as name,
        read_from(asked, fasta) as (prepared, path, _),
    ):
        plan = begin(Path(name) / "plan", path, prepared)
        index, parts = RowIndex(Path(name) / "plan" / "index", plan["bounds"]), range(len(plan["bounds"]) - 1)
        copied = 0 if reuse is None else (reusable(reuse, asked).rows_to_reuse(np.asarray(index.keys)) >= 0).sum()
        of_parts, of_file, length_N = part_bytes(asked, index, parts), file_bytes(asked, index), index.lengths
        if place is not None:
            check_fits(place, of_parts + of_file)
        treated = {"full": "computed whole", "window": "in overlapping windows", "truncate": "cut"}[long.mode]
        lines = [
            f"records     {len(length_N):,} with {length_N.sum(dtype=np.int64):,} residues, longest {length_N.max():,}",
            f"sequences   {plan['unique']:,} different: {plan['unique'] - copied:,} to compute, {copied:,} reused",
            f"long        {(length_N > long.window).sum():,} records over {long.window:,} residues: {treated}",
            f"parts       {len(parts):,}, {size_text(of_parts)}",
        ]
        lines += [f"{asked.fmt:<11} about {size_text(of_file)}"] if of_file else []
        lines += [] if place is None else [f"free        {size_text(shutil.disk_usage(place).free)} at {place}"]
        return "\n".join(lines)


def write_file(embeddings: EmbeddingStore, out: Path, fmt: str, sequences: TokenStore | None = None) -> None:
    """Write the rows of a directory of parts into the file OUT, and a description into `OUT.json`. Failed records are
    listed in `OUT.failed.tsv`, and the chains of records with several chains in `OUT.chains.tsv`. Some formats need
    the sequences, which a directory of parts does not have.
    """
    if FORMATS[fmt].by_sequence and sequences is None:
        raise UsageError(
            f"{embeddings.path}: has no sequences, which the format {fmt} needs; run embed MODEL FASTA -o {out} "
            f"--format {fmt} --reuse {embeddings.path}, which copies the rows"
        )
    spec, count = embeddings.spec, len(embeddings) - len(embeddings.failed)
    about = About(embeddings.outputs, spec.dim, spec.dtype, count, embeddings.attributes)
    with FORMATS[fmt](out, about) as writer, Progress("write", count) as progress:
        for n, row in enumerate(embeddings.rows(sequences)):
            writer.add(row)
            if n and n % 4096 == 0:
                progress.update(n, fmt)
        # The writer gives these files their final names together with the output.
        if embeddings.failed:
            shutil.copyfile(embeddings.path / "failed.tsv", failures_file(writer.work))
        write_chains(writer.work, embeddings.chains, spec.chains.text)
        facts = {"format": fmt, **embeddings.attributes, "dim": spec.dim, **embeddings.manifest}
        facts = {name: value for name, value in facts.items() if name not in ("bounds", "digest")}
        replace_json(facts_file(writer.work), facts | {"outputs": [output.name for output in embeddings.outputs]})


def status(out: Path) -> str:
    """Describe the progress of an output in one or two lines. Raise `InputError` if the output does not exist, and
    `UsageError` if it is in a bucket.
    """
    if (url := remote.address(out)) is not None:
        raise UsageError(f"{url}: status reads a directory on a disk; list {url}/parts/, where each object is a part")
    directory = next((folder for folder in (out, partial(out)) if (folder / "plan.json").is_file()), None)
    if directory is None:
        if out.exists():
            return f"{out}: finished"
        raise InputError(f"{out}: does not exist yet; run esmshard embed MODEL FASTA -o {out} first")
    plan = read_json(directory / "plan.json")
    parts, settings = Parts(directory, plan), plan["settings"]
    done = len(parts) - len(parts.missing())
    return (
        f"{directory}: {'not ' if directory != out else ''}finished, {done} of {len(parts)} parts\n"
        f"{settings['--pool and --layers']} of {plan['records']:,} records ({plan['unique']:,} different "
        f"sequences) by {plan['model']}, {settings['--dtype']}, computed in {settings['--precision']}"
    )


def merge(directory: Path, out: Path, fmt: str | None, overwrite: bool) -> str:
    """Make one file from a finished directory of parts, and return a line of text for the user."""
    fmt, embeddings = fmt or out.suffix.removeprefix("."), EmbeddingStore(directory)
    size = {"records": len(embeddings), "id_bytes": int(embeddings.index.ids[-1])}
    suits(fmt, embeddings.outputs, embeddings.spec.dtype, out, **size)
    FORMATS[fmt].check_place(out, overwrite=overwrite)
    with writing(out, ROOM):
        write_file(embeddings, out, fmt)
    return f"{out}: {counted(len(embeddings) - len(embeddings.failed), 'record')}"
