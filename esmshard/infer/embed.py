"""Embeddings of any number of sequences: one process or many, interrupted or not, in one file or a directory of parts.

Whatever is written, it is computed into a product (`esmshard.infer.product`) at `OUT.partial` first. With the last part
it becomes the directory OUT, or rows are streamed out of it, in input order, into the file OUT.
"""

import errno
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from esmshard.errors import InputError, UsageError
from esmshard.infer import product_plan
from esmshard.infer.claims import Command, Worker, at_work
from esmshard.infer.embed_output import Report, check_same, finish, finished, report_of
from esmshard.infer.embed_request import PARTS, Request, check_output, file_bytes
from esmshard.infer.formats import suits
from esmshard.infer.local_workers import run_local
from esmshard.infer.product import Product, clear, note_file, read_note, remove
from esmshard.infer.product_index import Index
from esmshard.infer.product_plan import partial
from esmshard.infer.reuse import Reuse
from esmshard.infer.worker import make_embedder, work
from esmshard.model import recorded
from esmshard.parallel.mesh import is_launched
from esmshard.progress import Progress, rate, say

SHARED_PART = 1 << 16
"""Tokens of a part where GPUs share a model: four packs, for those without a part wait for those with one."""


def embed(
    asked: Request,
    fasta: Path,
    *,
    nproc: int | None = None,
    tokens: int | None = None,
    reuse: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    offload: bool = False,
    shard: bool = False,
    part_tokens: int | None = None,
) -> Report:
    """Compute and write.

    Args:
        asked: see `request`.
        fasta: plain or compressed, `-` for the standard input, or a token store.
        nproc: processes of this machine; as many as there are GPUs, or one, by default.
        tokens: computed at once.
        reuse: an earlier product, of which the rows of equal sequences are taken.
        resume: go on with what an interrupted run left, or beside other workers of the same output; begin if there is
            nothing.
        overwrite: replace `out`, and what an interrupted run left.
        offload: keep layers that the GPU has no memory for in that of the machine, or on its disk.
        shard: the processes hold one model together. Those of a launcher all call this, and the first one writes `out`.
        part_tokens: of a part.

    Raises:
        UsageError: the output is there already, or was begun with something else.
        InputError: a file cannot be read; nothing is left behind then.
    """
    if resume and overwrite:
        raise UsageError("--resume goes on, --overwrite starts over; give one of them")
    if offload and (shard or nproc not in (None, 1)):
        raise UsageError("--offload keeps one model in all the memory there is; leave --nproc and --shard out")
    directory, together = partial(asked.out), shard and is_launched()
    if together and nproc is not None:
        raise UsageError("--nproc belongs to a single command; a launcher has started this process already")
    if shard and not together:
        from esmshard.infer.sharded_worker import check_ranks

        nproc = nproc or torch.cuda.device_count()
        check_ranks(nproc)

    every = torch.cuda.device_count() if asked.device.type == "cuda" and not offload else 1
    processes = nproc or max(1, every)

    def prepare() -> Report | dict[str, Any]:
        with _one_sentence(directory):
            return _prepare(asked, fasta, reuse, resume, overwrite, processes, shard, part_tokens)

    with _one_sentence(directory):
        if together:
            return _together(directory, asked, tokens, prepare)
        try:
            plan = prepare()
            if isinstance(plan, Report):
                return plan
            with Command(directory / "work"):  # its workers are processes of their own, and come later
                if not (directory / "manifest.json").exists():
                    _compute(directory, asked, plan, processes, tokens, offload, shard)
                return finish(directory, asked)
        except (InputError, OSError):
            if not resume or directory.exists() or not asked.out.exists():
                raise
        return finished(asked, fasta)  # another worker has made it of all parts, and removed them, meanwhile


def _prepare(
    asked: Request,
    fasta: Path,
    reuse: Path | None,
    resume: bool,
    overwrite: bool,
    processes: int,
    shard: bool,
    part_tokens: int | None,
) -> Report | dict[str, Any]:
    """The plan, or manifest, of what is at `OUT.partial` from now on; what was done, if nothing is left to do."""
    directory = partial(asked.out)
    for place in (directory, asked.out):
        clear(place)
    if resume and not directory.exists() and asked.out.exists():
        return finished(asked, fasta)
    going_on = directory.exists()
    if not (resume and directory.exists()):
        check_output(asked, overwrite=overwrite)
    if directory.exists() and not resume:
        if worker := at_work(directory / "work", say):
            raise UsageError(
                f"{asked.out}: another embed is at work on it ({worker}); wait for it, join it with --resume, stop it "
                "first, or choose another name"
            )
        if not overwrite:
            raise UsageError(f"{directory}: left by an interrupted run; --resume goes on, --overwrite starts over")
        remove(directory)
    if reuse is not None:
        Reuse(reuse, asked.spec)
    for notice in asked.found.notices:
        say(notice)
    if changed := recorded.altered(asked.found.files):
        say(changed)
    if resume and going_on and not directory.exists() and asked.out.exists():  # another worker has finished
        return finished(asked, fasta)
    plan = _begin(directory, asked, fasta, reuse, processes, shard, part_tokens)
    if not (directory / "manifest.json").exists():
        _check_room(directory, asked, plan)
    return plan


def _together(
    directory: Path, asked: Request, tokens: int | None, prepare: Callable[[], Report | dict[str, Any]]
) -> Report:
    """What `embed` does in each of the processes of a launcher."""
    from esmshard.infer.sharded_worker import joined, work_together

    with joined() as ranks:
        plan = ranks.from_first(prepare)
        if isinstance(plan, Report):
            return plan
        if "sha256" not in plan:  # else it is a manifest
            with Command(directory / "work") if ranks.is_first else nullcontext():
                work_together(directory, plan, ranks, tokens)
        report = ranks.from_first(lambda: report_of(Product(directory, unfinished=True), asked))
    return finish(directory, asked) if ranks.is_first else report


def _begin(
    directory: Path,
    asked: Request,
    fasta: Path,
    reuse: Path | None,
    processes: int,
    shard: bool,
    part_tokens: int | None,
) -> dict[str, Any]:
    if (directory / "manifest.json").exists():  # interrupted while the file was made of it
        product = Product(directory)
        check_same(asked, product, directory)
        product_plan.same_input(directory, fasta, product.manifest)
        return product.manifest
    try:
        limit = None if asked.spec.long.mode != "full" else asked.found.config.max_positions
        if shard and asked.device.type != "cpu":
            part_tokens = part_tokens or SHARED_PART
        longest, device = limit and limit - 2, asked.device.type
        plan = product_plan.begin(
            directory, fasta, asked.spec, asked.facts, reuse, part_tokens, device, longest, processes
        )
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


def _check_room(directory: Path, asked: Request, plan: dict[str, Any]) -> None:
    """Refuse what cannot fit, before the first part is computed."""
    index = Index(directory / "index")
    if asked.fmt != PARTS:
        ids = int(index.ids[plan["records"] :][0])
        suits(asked.fmt, asked.spec.outputs, asked.spec.dtype, asked.out, records=plan["records"], id_bytes=ids)
    need = 0
    for part in range(plan["parts"]):
        if not note_file(directory, part).exists():
            need += asked.spec.kind.bytes_of(asked.spec.long.kept(index.lengths_of(part)))
    if asked.fmt != PARTS:
        need += file_bytes(asked, index, plan["records"])
    free = shutil.disk_usage(directory).free
    if need > free:
        raise InputError(
            f"{directory}: {need / 1e9:.1f} GB will be written and {free / 1e9:.1f} GB are free; make room, choose "
            "another place, or store less (--dtype fp16, --pool mean), and go on with --resume"
        )


def _compute(
    directory: Path,
    asked: Request,
    plan: dict[str, Any],
    processes: int,
    tokens: int | None,
    offload: bool,
    shard: bool,
) -> None:
    notes = [read_note(note_file(directory, k)) for k in range(plan["parts"])]
    before = sum(note["rows"] for note in notes if note is not None)
    if before:
        say(f"{directory}: going on; {before:,} of {plan['unique']:,} sequences are done")
    if None not in notes:
        return
    if shard:
        from esmshard.infer.sharded_worker import run_sharded

        run_sharded(directory, processes, tokens)
        return
    began = time.monotonic()
    done, residues = before, 0
    with Progress("embed", plan["unique"], done=before) as progress:

        def told(rows: int, more: int) -> None:
            nonlocal done, residues
            if not rows:
                return
            done, residues = done + rows, residues + more
            # The last line is for the end: what a killed worker did is counted twice when it is done again.
            progress.update(
                min(done, plan["unique"]), f"{rate(residues / max(time.monotonic() - began, 1e-9))} residues/s"
            )

        if processes > 1:
            run_local(directory, asked.device.type, processes, tokens, told)
        else:
            with Worker(directory / "work") as worker, _offload_folder(directory, offload) as folder:
                embedder = make_embedder(plan, asked.device, tokens, folder)
                work(directory, plan, embedder, worker, told)


@contextmanager
def _offload_folder(directory: Path, wanted: bool) -> Iterator[Path | None]:
    """A directory for layers that do not fit into memory; they are gone at the end."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="offload-", dir=directory / "work") as folder:
        yield Path(folder)


@contextmanager
def _one_sentence(directory: Path) -> Iterator[None]:
    """A full or read-only disk is no traceback; what is finished stays."""
    try:
        yield
    except (OSError, RuntimeError, InputError) as caught:
        # Reading the input may have said so already, and knows nothing of --resume.
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
                f"{where}: cannot be written to ({(error.strerror or str(error)).lower()}); mend that and go on with "
                "--resume, or choose another place"
            ) from None
        raise
