"""The `embed` job whose output lies in a bucket: parts are uploaded as they are computed, and the output appears last.

Several commands, on any machines, may write one output together, and any of them may end at any moment. Nothing on the
machines is needed afterwards; the local files of a command are removed with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from esmshard import remote
from esmshard.data.tables import counted
from esmshard.embed.job import embed_job
from esmshard.embed.job.embed_job import EmbedJob
from esmshard.embed.job.embed_output import EmbedReport, finished, merge, report_of
from esmshard.embed.job.embed_request import PARTS
from esmshard.embed.store import part_plan
from esmshard.embed.store.embedding_store import EmbeddingStore
from esmshard.embed.store.parts import DamagedError
from esmshard.embed.store.remote_store import OURS, RemoteStore
from esmshard.embed.store.reuse import Reuse
from esmshard.embed.workers.remote_claims import at_work_in_bucket, worker_of
from esmshard.errors import InputError, UsageError
from esmshard.model import weights
from esmshard.progress import say
from esmshard.remote import RemoteDirectory


def embed(job: EmbedJob) -> EmbedReport:
    """Compute the embeddings, or take part in that, and let the output appear at its address.

    Args:
        job: the job; `address` is that of the output.

    Raises:
        UsageError: if the output exists already, or was begun with another request.
        InputError: if the input or the bucket cannot be read or written.
    """
    url = job.address
    assert url is not None
    if job.shard:
        raise UsageError(f"{url}: --shard writes to a disk only; write there, and copy the result into the bucket")
    with remote.scratch() as folder:
        own = replace(job, asked=replace(job.asked, out=folder / url.rpartition("/")[2]))
        parts = job.asked.fmt == PARTS
        store = RemoteStore(RemoteDirectory(url if parts else f"{url}.partial"), own.directory, not parts)
        with _named(str(own.asked.out), url):
            report = _embed(own, store, url)
    name = "failed.tsv" if parts else f"{url.rpartition('/')[2]}.failed.tsv"
    return replace(report, out=url, failed_file=f"{url}/{name}" if parts else f"{url.rpartition('/')[0]}/{name}")


def _embed(job: EmbedJob, store: RemoteStore, url: str) -> EmbedReport:
    if _is_finished(job, url):
        if job.resume:
            return _finished(job, store, url)
        if not job.overwrite:
            raise UsageError(f"{url}: exists already; choose another name or pass --overwrite")
    _check_begun(job, store)
    if job.reuse is not None:
        Reuse(job.reuse, job.asked.spec)
    for notice in job.asked.notices:
        say(notice)
    if changed := weights.altered(job.asked.found.files):
        say(changed)
    plan = embed_job.begin(job)
    if job.asked.fmt != PARTS:
        embed_job.check_room(job.directory, job.asked, plan)
    plan = store.begin(plan)
    store.pull()
    if not store.is_over:
        embed_job.compute(job, plan)
    return _finish(job, store, url)


def _is_finished(job: EmbedJob, url: str) -> bool:
    """Whether the output is there. `UsageError` if something else is at its address."""
    if job.asked.fmt != PARTS:
        return RemoteDirectory(url).look("") is not None
    place = RemoteDirectory(url)
    found = place.listing()
    if others := [name for name in found if not name.startswith(OURS)]:
        raise UsageError(
            f"{url}: is no directory of embeddings (it holds {others[0]}), so nothing is written there; choose another "
            "name"
        )
    return "manifest.json" in found


def _check_begun(job: EmbedJob, store: RemoteStore) -> None:
    """Refuse, continue or remove what an interrupted command has left."""
    place, begun = store.place, None if job.overwrite else store.plan()
    if not job.resume and (worker := at_work_in_bucket(store, job.directory, say)):
        raise UsageError(
            f"{place.url}: another embed is at work on it ({worker}); wait for it, join it with --resume, stop it "
            "first, or choose another name"
        )
    if begun is None:
        if not job.resume:
            store.clean(None)  # nothing identifies parts without their plan
        return
    if not job.resume:
        raise UsageError(f"{place.url}: left by an interrupted run; --resume goes on, --overwrite starts over")
    difference = job.asked.spec.differs(part_plan.Spec.of(begun), job.asked.model, begun["facts"]["model"])
    if difference:
        raise UsageError(f"{place.url}: was begun {difference}; --overwrite starts over")
    part_plan.same_tracks(place.url, job.asked.tracks, begun)


def _finished(job: EmbedJob, store: RemoteStore, url: str) -> EmbedReport:
    """Handle `--resume` of a finished output: check that it matches the request."""
    asked = job.asked
    if asked.fmt == PARTS:
        for name in store.place.listing():
            if name == "manifest.json" or name.startswith("index/"):
                store.place.download(name, asked.out / name)
        store.clean(EmbeddingStore(asked.out).manifest)  # what a killed worker has left
    else:
        RemoteDirectory(f"{url}.json").download("", asked.out.with_name(f"{asked.out.name}.json"))
    return finished(asked, job.fasta, url)


def _finish(job: EmbedJob, store: RemoteStore, url: str) -> EmbedReport:
    """Make the output from the finished parts, unless another worker does this."""
    directory, asked = job.directory, job.asked
    if not store.is_over:
        store.pull()
    embeddings = EmbeddingStore(directory, unfinished=True)
    report, missing = report_of(embeddings, asked), embeddings.manifest["parts"].count(None)
    if not store.is_over and missing:
        say(f"{url}: {counted(missing, 'part')} are in the hands of other workers; the last one finishes it")
        return report
    with worker_of(directory) as worker:
        while not store.is_over and not worker.claim("finish"):
            if not worker.settle(lambda: [] if store.plan() is None else ["finish"]):
                store.is_over = True
        if store.is_over or store.plan() is None:
            say(f"{url}: is being finished, or was finished, by another worker")
            return report
        if asked.fmt == PARTS:
            store.seal()
        else:
            _merge(job, store, embeddings, url)
    store.clean(embeddings.manifest if asked.fmt == PARTS else None)
    return report


def _merge(job: EmbedJob, store: RemoteStore, embeddings: EmbeddingStore, url: str) -> None:
    """Write the file from all parts, and upload it; the file itself last, after those that describe it."""
    out = job.asked.out
    store.fetch_parts()
    try:
        merge(embeddings, out, job.asked.fmt)
    except DamagedError as error:
        store.forget(error.part)
        raise InputError(f"{error}; go on with --resume: only that part is computed again") from None
    finally:
        embeddings.close()
    parent = RemoteDirectory(url.rpartition("/")[0])
    made = sorted(path for path in out.parent.iterdir() if path.name != job.directory.name)
    for path in sorted(made, key=lambda path: path == out):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                parent.upload(file, file.relative_to(out.parent).as_posix())
    failed = f"{out.name}.failed.tsv"
    if failed not in {path.name for path in made}:
        parent.remove([failed])  # of an earlier output


@contextmanager
def _named(path: str, url: str) -> Iterator[None]:
    """Say the address instead of the local path in messages, as the local files are gone when these are read."""
    try:
        yield
    except InputError as error:
        if path not in str(error):
            raise
        raise type(error)(str(error).replace(path, url)) from error.__cause__
