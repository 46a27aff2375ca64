"""The `embed` command: any number of sequences, one process or many, to one file or a directory of parts.

All embeddings are first written to an embedding store (`esmshard.embed.store`) at `OUT.partial`, part by part
(`esmshard.embed.engines`). After the last part this directory becomes OUT, or its rows are copied, in input order, into
the file OUT. The same command again computes what is missing.

A bucket cannot rename: parts are uploaded one by one to their final address, below OUT or, if a file is made of them,
OUT.partial, and what shows that OUT is complete is uploaded last. Any machine can go on from there.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from esmshard.embed import engines
from esmshard.embed.engines import Engine, Share
from esmshard.embed.plan import partial, same_input, same_request, store_of
from esmshard.embed.request import PARTS, EmbedRequest, check_fits, file_bytes, numbers_bytes
from esmshard.embed.spec import Spec
from esmshard.embed.store import (
    CHAINS,
    EmbeddingStore,
    Parts,
    Reuse,
    checked_plan,
    clear,
    counts,
    digest,
    remove,
    seal,
    write_failed,
)
from esmshard.errors import InputError, UsageError, writing
from esmshard.io import remote
from esmshard.io.array_formats import FORMATS, suits
from esmshard.io.paths import cache_directory, check_replaced, read_json, replace_json, without_directories
from esmshard.io.remote import RemoteDirectory
from esmshard.io.symbols import shown
from esmshard.io.tables import counted
from esmshard.io.writers import chains_file, facts_file, failures_file
from esmshard.model import weights
from esmshard.parallel.process_group import own_device, processes_of
from esmshard.progress import Progress, rate, say

ROOM = "what is finished stays there: make room, and run the command again"
STORE = ["plan.json", "manifest.json", "failed.tsv", "index/*", "parts/*"]
"""The files of a store."""


@dataclass(frozen=True)
class EmbedReport:
    """The result of a job."""

    out: Path | str
    """The path, or the address in a bucket."""
    records: int
    computed: int
    """Sequences that went through the model, over all attempts."""
    duplicates: int
    """Records with the same sequence as an earlier record."""
    reused: int
    """Sequences copied from the earlier embedding store."""
    windowed: int
    """Sequences divided into windows for lack of memory."""
    failed: int
    """Records without values; `failed_file` lists them."""
    failed_file: Path | str
    first: str = ""
    """Id and reason of the first record without values."""

    def __str__(self) -> str:
        kept, computed = counted(self.records - self.failed, "record"), counted(self.computed, "sequence")
        text = (
            f"{self.out}: {kept}; {computed} computed, {counted(self.duplicates, 'duplicate')}, {self.reused:,} reused"
        )
        if self.windowed:
            text += f"; {self.windowed:,} in windows, as memory did not suffice for them whole"
        if self.failed:
            text += f"; {counted(self.failed, 'record')} failed, see {self.failed_file}"
        return text

    def check(self) -> None:
        """Raise `InputError` if every record failed, because the output is then empty."""
        if self.failed == self.records:
            raise InputError(
                f"{self.out}: has no values, as every record failed ({self.records:,}), see {self.failed_file}; the "
                f"first, {self.first}; fix that and start over with --overwrite"
            )


@dataclass(frozen=True)
class _Job:
    """A request, and how it is carried out; see `embed`."""

    asked: EmbedRequest
    fasta: Path
    processes: int
    tokens: int | None
    reuse: Path | None
    overwrite: bool
    offload: bool
    engine: Engine
    worker: Share | None
    ray_address: str
    part_tokens: int | None
    url: str | None
    """The address of the output, if it lies in a bucket; `asked.out` is then a path of this process."""

    @property
    def directory(self) -> Path:
        """Return the directory of the unfinished store."""
        return partial(self.asked.out)

    @property
    def is_first(self) -> bool:
        """Whether this process reads the input and writes the output."""
        return self.worker is None or self.worker.number == 0

    @property
    def bucket(self) -> RemoteDirectory:
        """Return where in the bucket the store lies while it is made."""
        return RemoteDirectory(f"{self.url}{'' if self.asked.fmt == PARTS else '.partial'}")


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
    url = remote.address(asked.out)
    if url is not None and engine == "ray":
        raise UsageError(f"{url}: --engine ray writes to a disk that all nodes see; use --engine array for a bucket")
    asked, fasta = asked.of_input(remote.local(fasta))
    reuse = None if reuse is None else remote.local(reuse)
    processes = 1 if offload else processes_of(asked.device, nproc)
    if asked.device.type == "cuda" and engine != "ray":
        own_device(processes - 1, processes, asked.device)  # raises if there is no GPU for each process
    if reuse is not None:
        Reuse(reuse, asked.spec)
    job = _Job(
        asked, fasta, processes, tokens, reuse, overwrite, offload, engine, part_of, ray_address, part_tokens, url
    )
    if url is not None:
        with writing(cache_directory(), ROOM), remote.scratch() as folder:
            local = replace(job, asked=replace(asked, out=folder / url.rpartition("/")[2]))
            with _named(str(local.asked.out), url):
                return _embed_to_bucket(local, url)
    with writing(job.directory, ROOM):
        try:
            plan = _prepare(job)
            if isinstance(plan, EmbedReport):
                return plan
            _compute(job, plan)
            if not job.is_first:
                return None
            embeddings = EmbeddingStore(job.directory, unfinished=True)
            report = _report(embeddings, asked)
            if asked.fmt == PARTS:
                seal(embeddings)
                remove(asked.out, successor=job.directory)
            else:
                write_file(embeddings, asked.out, asked.fmt)
                remove(job.directory)
        except (InputError, OSError) as error:
            if isinstance(error, UsageError) or job.directory.exists() or not asked.out.exists():
                raise
            return _finished(job)  # Another process has made the output meanwhile, and removed the parts.
        for left in asked.out.absolute().parent.glob(f".planning-{job.directory.name}-*"):  # of killed commands
            shutil.rmtree(left, ignore_errors=True)
        return report


def _prepare(job: _Job) -> EmbedReport | dict[str, Any]:
    """Return the plan of `OUT.partial`; or the report, if nothing remains to be done."""
    asked, directory = job.asked, job.directory
    if job.is_first:
        for place in (directory, asked.out):
            clear(place)
        if (directory / "manifest.json").exists() and not job.overwrite:  # interrupted before it got its name
            sealed = EmbeddingStore(directory)
            same_request(directory, sealed.manifest, asked.spec, asked.model, asked.tracks, "was begun")
            remove(asked.out, successor=directory)
        if asked.out.exists() and not directory.exists() and not job.overwrite:
            return _finished(job)
        if job.overwrite or not directory.exists():
            check_output(asked, overwrite=job.overwrite)
        if job.overwrite and directory.exists():
            check_replaced(directory, [*STORE, "work/*", ".*"])
            remove(directory)
        _say_notices(asked)
    else:
        assert job.worker is not None
        while not directory.exists():
            if asked.out.exists():
                return _finished(job)
            engines.wait(job.worker)
    plan = _begin(job)
    check_room(directory, asked, plan)
    return plan


def _begin(job: _Job) -> dict[str, Any]:
    workers = job.processes * (1 if job.worker is None else job.worker.count)
    return job.asked.begin(job.directory, job.fasta, workers, part_tokens=job.part_tokens, reuse=job.reuse)


def _say_notices(asked: EmbedRequest) -> None:
    for notice in asked.notices:
        say(notice)
    if changed := weights.altered(asked.found.files):
        say(changed)


def _compute(job: _Job, plan: dict[str, Any]) -> None:
    """Compute the parts that are not finished, with the engine of the job."""
    directory, device, tokens = job.directory, job.asked.device, job.tokens
    parts = Parts(directory, plan)
    missing, bounds = parts.missing(), plan["bounds"]
    before = plan["unique"] - sum(bounds[part + 1] - bounds[part] for part in missing)
    if before:
        say(f"{job.url or directory}: going on; {before:,} of {plan['unique']:,} sequences are done")
    if not missing:
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
        say(f"{job.worker}: its parts are finished; worker 0 writes {job.url or job.asked.out}")


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
        if rows:
            self.rows, self.residues = self.rows + rows, self.residues + residues
            speed = rate(self.residues / max(time.monotonic() - self.began, 1e-9))
            # The total can be exceeded, because a part is counted again when it is computed twice.
            self.progress.update(min(self.rows, self.total), f"{speed} residues/s")


def _embed_to_bucket(job: _Job, url: str) -> EmbedReport | None:
    """Compute the embeddings, or take part in that, and let the output appear at its address."""
    asked, bucket, is_parts = job.asked, job.bucket, job.asked.fmt == PARTS
    there = RemoteDirectory(url).listing() if is_parts else {}
    if others := [name for name in there if not name.startswith(("plan", "manifest", "failed", "index/", "parts/"))]:
        raise UsageError(
            f"{url}: is no directory of embeddings (it holds {others[0]}), so nothing is written there; choose another "
            "name"
        )
    parent, name = RemoteDirectory(url.rpartition("/")[0]), asked.out.name
    failed = f"{url}/failed.tsv" if is_parts else f"{failures_file(Path(name))}"
    failed = failed if is_parts else f"{parent.url}/{failed}"
    if not job.overwrite and ("manifest.json" in there if is_parts else parent.look(name) is not None):
        for file in [one for one in there if one == "manifest.json" or one.startswith("index/")]:
            bucket.download(file, asked.out / file)
        if not is_parts:
            parent.download(facts_file(Path(name)).name, facts_file(asked.out))
        return replace(_finished(job, url), out=url, failed_file=failed)
    begun = None if job.overwrite else bucket.read("plan.json").get("plan.json")
    known = None if begun is None else checked_plan(begun, bucket.url)
    if known is not None:
        same_request(bucket.url, known, asked.spec, asked.model, asked.tracks, "was begun")
    elif job.is_first:
        bucket.remove(sorted(bucket.listing(), key=lambda one: one != "manifest.json"))  # nothing identifies parts
    _say_notices(asked)
    plan = _begin(job)
    if known is None:
        bucket.write("plan.json", (job.directory / "plan.json").read_bytes())
    else:
        if known["input"] != plan["input"]:
            raise UsageError(
                f"{job.fasta}: is not what {bucket.url} was begun with ({known['source']['path']}, "
                f"{known['records']:,} records); --overwrite starts over"
            )
        plan["bounds"] = known["bounds"]  # of a machine with other devices, perhaps
        plan["digest"] = digest(plan)
        replace_json(job.directory / "plan.json", plan)
    replace_json(job.directory / "bucket.json", {"url": bucket.url, "keeps_parts": not is_parts})
    if not is_parts:
        check_room(job.directory, asked, plan)
    _compute(job, plan)
    if not job.is_first:
        return None
    embeddings = EmbeddingStore(job.directory, unfinished=True)
    report = _report(embeddings, asked)
    if is_parts:
        seal(embeddings)
        made = [path for path in job.directory.rglob("*") if path.is_file() and path.name != "bucket.json"]
        for path in sorted(made, key=lambda path: path.name == "manifest.json"):
            bucket.upload(path, path.relative_to(job.directory).as_posix())
        kept = {f"parts/{embeddings.parts.name(part)}" for part in range(len(embeddings.parts))}
        strays = [one for one in bucket.listing() if one.startswith("parts/") and one not in kept]
        bucket.remove(["plan.json", *strays])
    else:
        write_file(embeddings, asked.out, asked.fmt)
        made = [path for path in asked.out.parent.rglob("*") if path.is_file() and job.directory not in path.parents]
        for path in sorted(made, key=lambda path: path == asked.out):
            parent.upload(path, path.relative_to(asked.out.parent).as_posix())
        beside = {failures_file(asked.out), chains_file(asked.out)} - {*made}  # of an earlier output
        parent.remove([path.name for path in beside])
        bucket.remove(sorted(bucket.listing(), key=lambda one: one != "plan.json"))
    return replace(report, out=url, failed_file=failed)


def _finished(job: _Job, place: str | None = None) -> EmbedReport:
    """Handle an output that is there already: check that it matches the request, and change nothing. `place` is its
    address, if it lies in a bucket.
    """
    asked, out = job.asked, job.asked.out
    if asked.fmt == PARTS:
        known = EmbeddingStore(out).manifest
    else:
        try:
            known = read_json(facts_file(out))
            Spec.of(known), known["facts"]["model"], known["input"], known["source"]["path"], known["tracks"]
            known["records"], known["failed_records"], known["counts"], known["unique"]
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(
                f"{out}: exists already, and {facts_file(out).name}, which says what it holds, is missing or damaged; "
                "--overwrite starts over"
            ) from None
    same_request(place or out, known, asked.spec, without_directories(asked.model), asked.tracks, "was made")
    same_input(place or out, known, job.fasta)
    say(f"{place or out}: is finished already")
    return _report_of(known, asked)


def _report(embeddings: EmbeddingStore, asked: EmbedRequest) -> EmbedReport:
    """Report the work on a store whose parts are finished, over all attempts."""
    failed = list(embeddings.failures())
    known = {"counts": counts(embeddings.parts.notes()), "failed_records": len(failed)}
    report = _report_of({**embeddings.manifest, **known}, asked)
    return replace(report, first=f"{shown(failed[0][0])}: {failed[0][2]}" if failed else "")


def _report_of(known: Mapping[str, Any], asked: EmbedRequest) -> EmbedReport:
    records, counts, out = known["records"], known["counts"], asked.out
    failed_file = out / "failed.tsv" if asked.fmt == PARTS else failures_file(out)
    rows = counts["computed"], records - known["unique"], counts["reused"], counts["windowed"]
    return EmbedReport(out, records, *rows, known["failed_records"], failed_file)


def write_file(embeddings: EmbeddingStore, out: Path, fmt: str) -> None:
    """Write the rows of an embedding store into one file. `OUT.json` describes it; `OUT.failed.tsv` lists failed
    records, if any, and `OUT.chains.tsv` the chains of records with several.

    Raises:
        UsageError: if the format cannot hold the rows, or needs sequences, which a finished store lacks.
        InputError: if a part is damaged.
    """
    about, known = embeddings.about(), embeddings.manifest
    suits(fmt, about.outputs, about.dtype, out)
    if FORMATS[fmt].by_sequence and embeddings.finished:
        raise UsageError(
            f"{embeddings.path}: has no sequences, and {fmt} stores rows by their sequences; write it with embed MODEL "
            f"FASTA -o {out} --format {fmt} --reuse {embeddings.path}, which computes nothing again"
        )
    sequences = store_of(embeddings.path, known) if FORMATS[fmt].by_sequence else None
    with FORMATS[fmt](out, about) as writer, Progress("write", about.n_records or 0) as progress:
        for n, row in enumerate(embeddings.rows(sequences)):
            writer.add(row)
            if n and n % 4096 == 0:
                progress.update(n, fmt)
        for path in (failures_file(out), facts_file(out), chains_file(out)):
            path.unlink(missing_ok=True)
        write_failed(embeddings, failures_file(out))
        if known["chained"]:
            shutil.copyfile(embeddings.path / "index" / CHAINS, chains_file(out))
    facts: dict[str, Any] = {"format": fmt, **embeddings.attributes, "dim": embeddings.spec.dim}
    facts |= {name: known[name] for name in ("spec", "facts", "source", "input", "tracks", "records", "unique")}
    facts |= {"outputs": [one.name for one in embeddings.outputs], "failed_records": len(embeddings.failed)}
    facts |= {"counts": known.get("counts") or counts(embeddings.parts.notes())}
    facts |= {"notices": [*known["facts"]["notices"], *known["notices"]]}
    replace_json(facts_file(out), without_directories(facts))


def check_output(asked: EmbedRequest, *, overwrite: bool) -> None:
    """Refuse to replace an existing output without `overwrite`."""
    out = asked.out
    if asked.fmt != PARTS:
        FORMATS[asked.fmt].check_place(out, overwrite=overwrite)
    elif out.exists():
        if not overwrite:
            raise UsageError(f"{out}: exists already; choose another name or pass --overwrite")
        check_replaced(out, STORE, marker="manifest.json")


def check_room(directory: Path, asked: EmbedRequest, plan: dict[str, Any]) -> None:
    """Refuse an output that cannot fit on the disk, before the first part is computed."""
    parts, place = Parts(directory, plan), directory
    check_fits(place, numbers_bytes(asked, parts, parts.missing()) + file_bytes(asked, parts))


@contextmanager
def _named(path: str, url: str) -> Iterator[None]:
    """Say the address instead of the local path in messages, as the local files are gone when these are read."""
    try:
        yield
    except InputError as error:
        if path not in str(error):
            raise
        raise type(error)(str(error).replace(path, url)) from error.__cause__


def status(out: Path) -> str:
    """Describe the progress of an output and its workers, in some lines. `InputError` if there is no output."""
    if (url := remote.address(out)) is not None:
        raise UsageError(
            f"{url}: status reads a directory on a disk; of an output in a bucket, list {url}/parts/, where each "
            "object is a finished part"
        )
    directory = out if (out / "manifest.json").is_file() or (out / "plan.json").is_file() else partial(out)
    if not directory.is_dir():
        if out.exists():
            return f"{out}: finished"
        raise InputError(f"{out}: there is nothing; embed writes it")
    embeddings = EmbeddingStore(directory, unfinished=True)
    plan, parts = embeddings.manifest, embeddings.parts
    missing, bounds = parts.missing(), plan["bounds"]
    done = plan["unique"] - sum(bounds[part + 1] - bounds[part] for part in missing)
    names = ", ".join(one.name for one in embeddings.outputs)
    lines = [
        f"{directory}: {'finished' if embeddings.finished else 'not finished'}",
        f"holds      {names} of {len(embeddings):,} records ({plan['unique']:,} different sequences) by "
        f"{plan['facts']['model']}, {embeddings.spec.dtype}, computed in {embeddings.spec.compute}",
        f"parts      {len(parts) - len(missing)} of {len(parts)}; {done:,} of {plan['unique']:,} sequences",
    ]
    if embeddings.finished:
        lines += [f"failed     {len(embeddings.failed):,}"] + [f"made by    {text}" for text in plan["made_by"]]
    else:
        lines.append("go on      with the same command")
    return "\n".join(lines)


def merge(directory: Path, out: Path | None, fmt: str | None, overwrite: bool) -> str:
    """Make one file from a finished embedding store. The store stays."""
    if out is None:
        raise UsageError("-o: name the file to write")
    fmt = fmt or out.suffix.removeprefix(".")
    if fmt not in FORMATS:
        raise UsageError(f"{out}: no format '{fmt}'; there are {', '.join(FORMATS)} (by ending, or --format)")
    embeddings = EmbeddingStore(directory)
    FORMATS[fmt].check_place(out, overwrite=overwrite)
    with writing(out, ROOM):
        write_file(embeddings, out, fmt)
    return f"{out}: {counted(len(embeddings) - len(embeddings.failed), 'record')}"
