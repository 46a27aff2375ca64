"""The `embed` job: any number of sequences, one process or many, to one file or a directory of parts.

All embeddings are first written to an embedding store (`esmshard.embed.store.embedding_store`) at `OUT.partial`, part
by part (`esmshard.embed.engines`). After the last part this directory becomes OUT, or its rows are copied, in input
order, into the file OUT. The same command again computes what is missing.
"""

import errno
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from esmshard import remote
from esmshard.embed import engines
from esmshard.embed.engines import Engine, Share
from esmshard.embed.formats.format_registry import suits
from esmshard.embed.job.embed_output import EmbedReport, check_same, finish, finished
from esmshard.embed.job.embed_request import PARTS, EmbedRequest, check_output, file_bytes, rows_bytes
from esmshard.embed.store import part_plan
from esmshard.embed.store.embedding_store import EmbeddingStore, clear, note_file, read_note, remove
from esmshard.embed.store.part_plan import partial
from esmshard.embed.store.reuse import Reuse
from esmshard.embed.store.row_index import RowIndex
from esmshard.errors import InputError, UsageError
from esmshard.files import cache_directory, check_replaced
from esmshard.model import weights
from esmshard.parallel.process_group import own_device, processes_of
from esmshard.progress import Progress, rate, say


@dataclass(frozen=True)
class EmbedJob:
    """A request, and how it is carried out; see `embed`."""

    asked: EmbedRequest
    fasta: Path
    processes: int
    tokens: int | None = None
    reuse: Path | None = None
    overwrite: bool = False
    offload: bool = False
    engine: Engine = "local"
    worker: Share | None = None
    ray_address: str = "auto"
    part_tokens: int | None = None

    address: str | None = None
    """The address of the output, if it lies in a bucket; `asked.out` is then a path of this process."""

    @property
    def directory(self) -> Path:
        """Return the directory of the unfinished store."""
        return partial(self.asked.out)

    @property
    def is_first(self) -> bool:
        """Whether this process reads the input and writes the output."""
        return self.worker is None or self.worker.number == 0


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
) -> EmbedReport | None:
    """Compute the embeddings and write the output. If a part of them is there already, compute what is missing.

    Args:
        asked: the request, see `request`.
        fasta: a plain or compressed file, `-` for the standard input, or a token store; or an address in a bucket.
        nproc: processes on this machine; by default one for each GPU, or one.
        tokens: tokens computed at once.
        reuse: an earlier embedding store. The rows of equal sequences are copied from it.
        overwrite: replace `out` and the files of an interrupted run.
        offload: spread one model over all GPUs of this machine, its memory and its disk.
        engine: what computes the parts: `local` (processes of this machine), `array` (this process is one of several
            that a scheduler or a launcher has started) or `ray` (a Ray cluster).
        worker: number and count of the workers, as `0/8`, for `array`; by default from the environment.
        ray_address: `auto`, `local` or the address of a Ray cluster.
        part_tokens: tokens of a part.

    Returns:
        The report; None in workers of an array other than worker 0, which writes the output.

    Raises:
        UsageError: if the output exists already and is another one, or was begun with another request.
        InputError: if a file cannot be read. In this case no file is left behind.
    """
    if offload and (engine != "local" or nproc not in (None, 1)):
        raise UsageError("--offload spreads one model over all the memory there is; leave --nproc and --engine out")
    if engine == "array" and overwrite:
        raise UsageError("--overwrite lets each worker remove the others' results; remove the output before")
    if worker is not None and engine != "array":
        raise UsageError("--worker is for --engine array; leave it out")
    part_of = engines.share(worker) if engine == "array" else None
    partial(asked.out)
    asked, fasta = asked.of_input(remote.local(fasta))
    reuse = None if reuse is None else remote.local(reuse)
    processes = 1 if offload else processes_of(asked.device, nproc)
    if asked.device.type == "cuda" and engine != "ray":
        own_device(processes - 1, processes, asked.device)  # raises if there is no GPU for each process
    job = EmbedJob(
        asked, fasta, processes, tokens, reuse, overwrite, offload, engine, part_of, ray_address, part_tokens
    )
    if (address := remote.address(asked.out)) is not None:
        from esmshard.embed.job import remote_output

        with _one_sentence(cache_directory()):
            return remote_output.embed(replace(job, address=address))
    with _one_sentence(job.directory):
        try:
            plan = _prepare(job)
            if isinstance(plan, EmbedReport):
                return plan
            if not (job.directory / "manifest.json").exists():
                compute(job, plan)
            if not job.is_first:
                return None
            return finish(job.directory, asked)
        except (InputError, OSError) as error:
            if isinstance(error, UsageError) or job.directory.exists() or not asked.out.exists():
                raise
        return finished(asked, fasta)  # Another process has made the output meanwhile, and removed the parts.


def _prepare(job: EmbedJob) -> EmbedReport | dict[str, Any]:
    """Return the plan, or the manifest, of `OUT.partial`; or the report, if nothing remains to be done."""
    asked, directory = job.asked, job.directory
    if not job.is_first:
        assert job.worker is not None
        while not directory.exists():
            if asked.out.exists():
                return finished(asked, job.fasta)
            engines.wait(job.worker)
        return begin(job)
    for place in (directory, asked.out):
        clear(place)
    if asked.out.exists() and not directory.exists() and not job.overwrite:
        return finished(asked, job.fasta)
    if job.overwrite or not directory.exists():
        check_output(asked, overwrite=job.overwrite)
    if job.overwrite and directory.exists():
        check_replaced(directory, ["plan.json", "manifest.json", "failed.tsv", "index/*", "parts/*", "work/*", ".*"])
        remove(directory)
    if job.reuse is not None:
        Reuse(job.reuse, asked.spec)
    for notice in asked.notices:
        say(notice)
    if changed := weights.altered(asked.found.files):
        say(changed)
    plan = begin(job)
    if not (directory / "manifest.json").exists():
        check_room(directory, asked, plan)
    return plan


def begin(job: EmbedJob) -> dict[str, Any]:
    """Write the plan, or read that of an interrupted run."""
    asked, directory, reuse = job.asked, job.directory, job.reuse
    if (directory / "manifest.json").exists():  # the run was interrupted while the output was written
        embeddings = EmbeddingStore(directory)
        check_same(asked, embeddings, directory)
        part_plan.same_tracks(directory, asked.tracks, embeddings.manifest)
        part_plan.same_input(directory, job.fasta, embeddings.manifest)
        return embeddings.manifest
    workers = job.processes * (1 if job.worker is None else job.worker.count)
    plan = part_plan.begin(
        directory,
        part_plan.PlanRequest(
            job.fasta,
            asked.spec,
            asked.facts,
            asked.longest,
            asked.device.type,
            job.part_tokens,
            reuse,
            workers,
            asked.tracks,
        ),
    )
    if reuse is not None and plan["reuse"] != str(reuse.resolve()):
        raise UsageError(
            f"--reuse {reuse}: {directory} was begun {'with ' + plan['reuse'] if plan['reuse'] else 'without it'}; "
            "leave it out, or start over with --overwrite"
        )
    return plan


def check_room(directory: Path, asked: EmbedRequest, plan: dict[str, Any]) -> None:
    """Refuse an output that cannot fit on the disk, before the first part is computed."""
    index, spec = RowIndex(directory / "index"), asked.spec
    need = rows_bytes(spec, index, engines.missing_parts(directory, plan))
    if asked.fmt != PARTS:
        suits(asked.fmt, spec.outputs, spec.dtype, asked.out, records=plan["records"], id_bytes=index.id_bytes)
        need += file_bytes(asked.fmt, spec, index)
    free = shutil.disk_usage(directory).free
    if need > free:
        raise InputError(
            f"{directory}: {need / 1e9:.1f} GB will be written and {free / 1e9:.1f} GB are free; make room, choose "
            "another place, or store less (--dtype fp16, --pool mean), and run the command again"
        )


def compute(job: EmbedJob, plan: dict[str, Any]) -> None:
    """Compute the parts that are not finished, with the engine of the job."""
    directory, device, tokens = job.directory, job.asked.device, job.tokens
    notes = [read_note(note_file(directory, part)) for part in range(plan["parts"])]
    before = sum(note["rows"] for note in notes if note is not None)
    if before:
        say(f"{job.address or directory}: going on; {before:,} of {plan['unique']:,} sequences are done")
    if None not in notes:
        return
    with Progress("embed", plan["unique"]) as progress:
        counter = _Counter(progress, plan["unique"], before)
        if job.engine == "ray":
            engines.compute_on_ray(directory, device.type, tokens, job.ray_address, counter.add)
        elif job.processes > 1:
            engines.compute_locally(directory, device.type, job.processes, tokens, counter.add, job.worker)
        elif job.offload:
            with tempfile.TemporaryDirectory(prefix="offload-", dir=directory / "work") as folder:
                engines.compute_here(directory, engines.make_embedder(plan, device, tokens, Path(folder)), counter.add)
        else:
            engines.compute_here(directory, engines.make_embedder(plan, device, tokens), counter.add, job.worker)
    if not job.is_first:
        say(f"{job.worker}: its parts are finished; worker 0 writes {job.address or job.asked.out}")


@dataclass
class _Counter:
    """Adds up rows and residues for the line of progress."""

    progress: Progress
    total: int
    """Rows of the whole output."""
    rows: int
    residues: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, rows: int, residues: int) -> None:
        """Count so many more, which have just been computed."""
        if not rows:
            return
        self.rows, self.residues = self.rows + rows, self.residues + residues
        speed = rate(self.residues / max(time.monotonic() - self.began, 1e-9))
        # The total can be exceeded, because a part is counted again when it is computed twice.
        self.progress.update(min(self.rows, self.total), f"{speed} residues/s")


@contextmanager
def _one_sentence(directory: Path) -> Iterator[None]:
    """Turn the error of a full or read-only disk into a message. Finished parts stay."""
    try:
        yield
    except (OSError, RuntimeError, InputError) as caught:
        # An error from reading the input may already be a message.
        error = caught.__cause__ if isinstance(caught, InputError) else caught
        # numpy, HDF5 and torch say it in words only.
        number, words = getattr(error, "errno", None), ("No space left", " requested and ", "iostream error")
        if number in (errno.ENOSPC, errno.EDQUOT) or any(text in str(error) for text in words):
            raise InputError(
                f"{directory}: the disk is full; what is finished stays there: make room and run the command again"
            ) from None
        if isinstance(error, OSError) and number in (errno.EROFS, errno.EACCES, errno.EPERM):
            where = error.filename or directory
            raise InputError(
                f"{where}: cannot be written to ({(error.strerror or str(error)).lower()}); fix that and run the "
                "command again, or choose another place"
            ) from None
        raise
