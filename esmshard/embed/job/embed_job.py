"""The `embed` job: any number of sequences, one process or many, with restarts, to one file or a directory of parts.

All embeddings are first written to an embedding store (`esmshard.embed.store.embedding_store`) at `OUT.partial`. After
the last part this directory becomes OUT, or its rows are copied, in input order, into the file OUT.
"""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from esmshard import remote
from esmshard.embed.formats.format_registry import suits
from esmshard.embed.job.embed_output import EmbedReport, check_same, finish, finished, report_of
from esmshard.embed.job.embed_request import PARTS, EmbedRequest, check_output, file_bytes, rows_bytes
from esmshard.embed.store import part_plan
from esmshard.embed.store.embedding_store import EmbeddingStore, clear, note_file, read_note, remove
from esmshard.embed.store.part_plan import partial
from esmshard.embed.store.reuse import Reuse
from esmshard.embed.store.row_index import RowIndex
from esmshard.embed.workers.claims import Command, at_work
from esmshard.embed.workers.embed_worker import make_embedder, work
from esmshard.embed.workers.local_workers import run_local
from esmshard.embed.workers.remote_claims import worker_of
from esmshard.errors import InputError, UsageError
from esmshard.files import cache_directory, check_replaced
from esmshard.model import weights
from esmshard.parallel.layout import check_tensor
from esmshard.parallel.process_group import is_launched, own_device, processes_of, processes_per_machine
from esmshard.progress import Progress, rate, say

SHARED_PART = 1 << 16
"""Tokens of a part where GPUs share a model. This is four packs, since ranks without a part wait for the others."""


@dataclass(frozen=True)
class EmbedJob:
    """A request, and how it is carried out; see `embed`."""

    asked: EmbedRequest
    fasta: Path
    processes: int
    tokens: int | None
    reuse: Path | None
    resume: bool
    overwrite: bool
    offload: bool
    shard: bool
    tensor: int
    part_tokens: int | None

    address: str | None = None
    """The address of the output, if it lies in a bucket; `asked.out` is then a path of this process."""

    @property
    def directory(self) -> Path:
        """Return the directory of the unfinished store."""
        return partial(self.asked.out)


def embed(
    asked: EmbedRequest,
    fasta: Path,
    *,
    nproc: int | None = None,
    tokens: int | None = None,
    reuse: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    offload: bool = False,
    shard: bool = False,
    tensor: int = 1,
    part_tokens: int | None = None,
) -> EmbedReport:
    """Compute the embeddings and write the output.

    Args:
        asked: the request, see `request`.
        fasta: a plain or compressed file, `-` for the standard input, or a token store; or an address in a bucket.
        nproc: processes on this machine; by default one for each GPU, or one.
        tokens: tokens computed at once.
        reuse: an earlier embedding store. The rows of equal sequences are copied from it.
        resume: continue an interrupted run, or join other workers of the same output; begin if there is none.
        overwrite: replace `out` and the files of an interrupted run.
        offload: keep layers that do not fit on the GPU in the machine's memory or on its disk.
        shard: the processes hold one model together. All processes of a launcher call this; the first one writes `out`.
        tensor: with `shard`, the number of processes of one machine that compute each layer together.
        part_tokens: tokens of a part.

    Raises:
        UsageError: if the output exists already, or was begun with another request.
        InputError: if a file cannot be read. In this case no file is left behind.
    """
    if resume and overwrite:
        raise UsageError("--resume goes on, --overwrite starts over; give one of them")
    if offload and (shard or nproc not in (None, 1)):
        raise UsageError("--offload keeps one model in all the memory there is; leave --nproc and --shard out")
    directory, together = partial(asked.out), shard and is_launched()
    if together and nproc is not None:
        raise UsageError("--nproc belongs to a single command; a launcher has started this process already")
    if shard and not together:
        from esmshard.embed.workers.sharded_worker import check_ranks

        nproc = processes_of(asked.device, nproc)
        check_ranks(nproc, asked.named)
    if tensor > 1:
        _check_tensor(asked, shard, tensor, nproc)

    asked, fasta = asked.of_input(remote.local(fasta))
    reuse = None if reuse is None else remote.local(reuse)
    processes = 1 if offload else processes_of(asked.device, nproc)
    if asked.device.type == "cuda" and not together:
        own_device(processes - 1, processes, asked.device)  # raises if there is no GPU for each process
    job = EmbedJob(asked, fasta, processes, tokens, reuse, resume, overwrite, offload, shard, tensor, part_tokens)
    if (address := remote.address(asked.out)) is not None:
        from esmshard.embed.job import remote_output

        with _one_sentence(cache_directory()):
            return remote_output.embed(replace(job, address=address))
    with _one_sentence(directory):
        if together:
            return _together(job)
        try:
            plan = _prepare(job)
            if isinstance(plan, EmbedReport):
                return plan
            with Command(directory / "work"):  # the workers are separate processes that start later
                if not (directory / "manifest.json").exists():
                    compute(job, plan)
                return finish(directory, asked)
        except (InputError, OSError):
            if not resume or directory.exists() or not asked.out.exists():
                raise
        return finished(asked, fasta)  # another worker has meanwhile made the output and removed the parts


def _check_tensor(asked: EmbedRequest, shard: bool, tensor: int, nproc: int | None) -> None:
    """Raise `UsageError` if groups of `tensor` processes cannot compute each layer together."""
    if not shard:
        raise UsageError("--tensor divides the layers of a model that processes hold together; add --shard")
    processes = nproc or processes_per_machine(int(os.environ.get("WORLD_SIZE", "1")))
    if processes % tensor:
        raise UsageError(
            f"--tensor: groups of {tensor} processes do not divide the {processes} of one machine; choose a number "
            "that does"
        )
    config = asked.found.config
    check_tensor(tensor, n_heads=config.n_heads, ffn_width=config.ffn_width, name="--tensor")


def _prepare(job: EmbedJob) -> EmbedReport | dict[str, Any]:
    """Return the plan, or the manifest, of `OUT.partial`; or the report, if nothing remains to be done."""
    asked, directory = job.asked, job.directory
    for place in (directory, asked.out):
        clear(place)
    if job.resume and not directory.exists() and asked.out.exists():
        return finished(asked, job.fasta)
    going_on = directory.exists()
    if not (job.resume and going_on):
        check_output(asked, overwrite=job.overwrite)
    if going_on and not job.resume:
        if worker := at_work(directory / "work", say):
            raise UsageError(
                f"{asked.out}: another embed is at work on it ({worker}); wait for it, join it with --resume, stop it "
                "first, or choose another name"
            )
        if not job.overwrite:
            raise UsageError(f"{directory}: left by an interrupted run; --resume goes on, --overwrite starts over")
        check_replaced(directory, ["plan.json", "manifest.json", "failed.tsv", "index/*", "parts/*", "work/*", ".*"])
        remove(directory)
    if job.reuse is not None:
        Reuse(job.reuse, asked.spec)
    for notice in asked.notices:
        say(notice)
    if changed := weights.altered(asked.found.files):
        say(changed)
    if job.resume and going_on and not directory.exists() and asked.out.exists():  # another worker has finished
        return finished(asked, job.fasta)
    plan = begin(job)
    if not (directory / "manifest.json").exists():
        check_room(directory, asked, plan)
    return plan


def _together(job: EmbedJob) -> EmbedReport:
    """Run `embed` in one of the processes of a launcher."""
    from esmshard.embed.workers.sharded_worker import joined, work_together

    asked, directory = job.asked, job.directory

    def prepare() -> EmbedReport | dict[str, Any]:
        with _one_sentence(directory):  # the other ranks get the message, too
            return _prepare(job)

    with joined(asked.named) as ranks:
        plan = ranks.from_first(prepare)
        if isinstance(plan, EmbedReport):
            return plan
        if "sha256" not in plan:  # without sha256 it is a plan, else a manifest
            with Command(directory / "work") if ranks.is_first else nullcontext():
                work_together(directory, plan, ranks, job.tokens, job.tensor)
        report = ranks.from_first(lambda: report_of(EmbeddingStore(directory, unfinished=True), asked))
    return finish(directory, asked) if ranks.is_first else report


def begin(job: EmbedJob) -> dict[str, Any]:
    """Write the plan, or read that of an interrupted run. Remove the directory if there is no plan in the end."""
    asked, directory, reuse, device = job.asked, job.directory, job.reuse, job.asked.device.type
    if (directory / "manifest.json").exists():  # the run was interrupted while the file was written
        embeddings = EmbeddingStore(directory)
        check_same(asked, embeddings, directory)
        part_plan.same_tracks(directory, asked.tracks, embeddings.manifest)
        part_plan.same_input(directory, job.fasta, embeddings.manifest)
        return embeddings.manifest
    tokens = job.part_tokens or (SHARED_PART if job.shard and device != "cpu" else None)
    wanted = part_plan.PlanRequest(
        job.fasta, asked.spec, asked.facts, asked.longest, device, tokens, reuse, job.processes, asked.tracks
    )
    try:
        plan = part_plan.begin(directory, wanted)
    except BaseException:
        if not (directory / "plan.json").exists() and not at_work(directory / "work", say):
            with suppress(OSError):
                remove(directory)
        raise
    if reuse is not None and plan["reuse"] != str(reuse.resolve()):
        raise UsageError(
            f"--reuse {reuse}: {directory} was begun {'with ' + plan['reuse'] if plan['reuse'] else 'without it'}; "
            "leave it out, or start over with --overwrite"
        )
    return plan


def check_room(directory: Path, asked: EmbedRequest, plan: dict[str, Any]) -> None:
    """Refuse an output that cannot fit on the disk, before the first part is computed."""
    index, spec = RowIndex(directory / "index"), asked.spec
    need = rows_bytes(spec, index, (k for k in range(plan["parts"]) if not note_file(directory, k).exists()))
    if asked.fmt != PARTS:
        suits(asked.fmt, spec.outputs, spec.dtype, asked.out, records=plan["records"], id_bytes=index.id_bytes)
        need += file_bytes(asked.fmt, spec, index)
    free = shutil.disk_usage(directory).free
    if need > free:
        raise InputError(
            f"{directory}: {need / 1e9:.1f} GB will be written and {free / 1e9:.1f} GB are free; make room, choose "
            "another place, or store less (--dtype fp16, --pool mean), and go on with --resume"
        )


def compute(job: EmbedJob, plan: dict[str, Any]) -> None:
    """Compute the parts that are not finished."""
    directory, device = job.directory, job.asked.device
    notes = [read_note(note_file(directory, k)) for k in range(plan["parts"])]
    before = sum(note["rows"] for note in notes if note is not None)
    if before:
        say(f"{job.address or directory}: going on; {before:,} of {plan['unique']:,} sequences are done")
    if None not in notes:
        return
    if job.shard:
        from esmshard.embed.workers.sharded_worker import run_sharded

        run_sharded(directory, job.processes, job.tokens, job.asked.named, job.tensor)
        return
    with Progress("embed", plan["unique"]) as progress:
        counter = _Counter(progress, plan["unique"], before)
        if job.processes > 1:
            run_local(directory, device.type, job.processes, job.tokens, counter.add)
        else:
            with worker_of(directory) as worker, _offload_folder(directory, job.offload) as folder:
                embedder = make_embedder(plan, device, job.tokens, folder)
                work(directory, plan, embedder, worker, counter.add)


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
        # The total can be exceeded, because the work of a killed worker is counted again when it is repeated.
        self.progress.update(min(self.rows, self.total), f"{speed} residues/s")


@contextmanager
def _offload_folder(directory: Path, wanted: bool) -> Iterator[Path | None]:
    """Provide a directory for layers that do not fit into memory, and remove it at the end."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="offload-", dir=directory / "work") as folder:
        yield Path(folder)


@contextmanager
def _one_sentence(directory: Path) -> Iterator[None]:
    """Turn the error of a full or read-only disk into a message. Finished parts stay."""
    try:
        yield
    except (OSError, RuntimeError, InputError) as caught:
        # An error from reading the input may already be a message, but without --resume.
        error = caught.__cause__ if isinstance(caught, InputError) else caught
        # numpy, HDF5 and torch say it in words only.
        number, words = getattr(error, "errno", None), ("No space left", " requested and ", "iostream error")
        if number in (errno.ENOSPC, errno.EDQUOT) or any(text in str(error) for text in words):
            raise InputError(
                f"{directory}: the disk is full; what is finished stays there: make room and go on with --resume"
            ) from None
        if isinstance(error, OSError) and number in (errno.EROFS, errno.EACCES, errno.EPERM):
            where = error.filename or directory
            raise InputError(
                f"{where}: cannot be written to ({(error.strerror or str(error)).lower()}); fix that and go on with "
                "--resume, or choose another place"
            ) from None
        raise
