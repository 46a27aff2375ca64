"""The output of an embedding store whose parts are finished: a directory or one file, and a report."""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from esmshard.data.fasta.symbols import shown
from esmshard.data.tables import counted
from esmshard.embed.formats.format_registry import FORMATS, suits
from esmshard.embed.job.embed_request import PARTS, EmbedRequest
from esmshard.embed.store import part_plan
from esmshard.embed.store.embedding_store import EmbeddingStore, note_file, remove, seal, write_failed
from esmshard.embed.store.part_plan import Spec
from esmshard.embed.store.parts import DamagedError
from esmshard.embed.store.row_index import CHAINS
from esmshard.errors import InputError, UsageError
from esmshard.files import read_json, replacing, without_directories
from esmshard.predict.writers import ids_file
from esmshard.progress import Progress, say


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
    """Records without values; `failed.tsv` lists them."""
    failed_file: Path | str

    def __str__(self) -> str:
        kept, computed = counted(self.records - self.failed, "record"), counted(self.computed, "sequence")
        said = (
            f"{self.out}: {kept}; {computed} computed, {counted(self.duplicates, 'duplicate')}, {self.reused:,} reused"
        )
        if self.windowed:
            said += f"; {self.windowed:,} in windows, as memory did not suffice for them whole"
        if self.failed:
            said += f"; {counted(self.failed, 'record')} failed, see {self.failed_file}"
        return said

    def check(self) -> None:
        """Raise `InputError` if every record failed, because the output is then empty."""
        if self.failed < self.records:
            return
        with suppress(OSError, IndexError):  # another worker may remove the file
            first = Path(self.failed_file).read_text(encoding="utf-8").splitlines()[1].split("\t")
            raise InputError(
                f"{self.out}: has no values, as every record failed ({self.records:,}), see {self.failed_file}; the "
                f"first, {shown(first[0])}: {first[2]}; fix that and start over with --overwrite"
            )
        raise InputError(
            f"{self.out}: has no values, as every record failed ({self.records:,}); see {self.failed_file}"
        )


def finish(directory: Path, asked: EmbedRequest) -> EmbedReport:
    """Make the output from the finished parts."""
    out = asked.out
    embeddings = EmbeddingStore(directory, unfinished=True)
    report = report_of(embeddings, asked)
    try:
        if asked.fmt == PARTS:
            seal(directory).close()
            remove(out, successor=directory)
        else:
            merge(embeddings, out, asked.fmt)
            remove(directory)
    except DamagedError as error:
        # Without its note the part is computed again.
        note_file(directory, error.part).unlink(missing_ok=True)
        raise InputError(f"{error}; run the command again: only that part is computed again") from None
    finally:
        embeddings.close()
    for left in out.absolute().parent.glob(f".planning-{directory.name}-*"):  # of commands that were killed
        shutil.rmtree(left, ignore_errors=True)
    return report


def merge(embeddings: EmbeddingStore, out: Path, fmt: str) -> None:
    """Write the rows of an embedding store into one file. `OUT.json` describes it; `OUT.failed.tsv` lists failed
    records, if any.

    Raises:
        UsageError: if the format cannot hold the rows, or needs sequences, which a finished store lacks.
        DamagedError: if a part does not hold the data that was written.
    """
    about = embeddings.about()
    suits(fmt, about.outputs, about.dtype, out)
    by_sequence = FORMATS[fmt].by_sequence
    if by_sequence and embeddings.finished:
        raise UsageError(
            f"{embeddings.path}: has no sequences, and {fmt} stores rows by their sequences; write it with embed MODEL "
            f"FASTA -o {out} --format {fmt} --reuse {embeddings.path}, which computes nothing again"
        )
    failed, beside, chains = _failed_file(out), _beside(out), _chains_file(out)
    _clear_scratch(out)
    with FORMATS[fmt](out, about) as writer, Progress("write", about.n_records) as progress:
        for n, row in enumerate(embeddings.rows(with_residues=by_sequence)):
            writer.add(row)
            if n and n % 4096 == 0:
                progress.update(n, fmt)
        for path in (failed, beside, chains):
            path.unlink(missing_ok=True)
        write_failed(embeddings, failed)
        if embeddings.manifest.get("chained"):
            shutil.copyfile(embeddings.path / "index" / CHAINS, chains)
    said = {
        "format": fmt,
        **embeddings.attributes,
        "outputs": [one.name for one in embeddings.outputs],
        "dim": embeddings.spec.dim,
        "records": about.n_records,
        "failed": len(embeddings) - about.n_records,
        "input": embeddings.manifest["input"],
        "source": embeddings.manifest["source"],
        "spec": embeddings.spec.as_json(),
        "tracks": embeddings.manifest.get("tracks", {}),
        "notices": [*embeddings.manifest["facts"].get("notices", []), *embeddings.manifest["notices"]],
    }
    with replacing(beside) as file:
        file.write(json.dumps(without_directories(said), indent=1) + "\n")


def finished(asked: EmbedRequest, fasta: Path, place: Path | str | None = None) -> EmbedReport:
    """Handle an output that is there already: check that it matches the request, and change nothing. `place` is its
    address, if it lies in a bucket.
    """
    out = asked.out
    if asked.fmt == PARTS:
        embeddings = EmbeddingStore(out)
        check_same(asked, embeddings, out)
        part_plan.same_tracks(out, asked.tracks, embeddings.manifest)
        part_plan.same_input(out, fasta, embeddings.manifest)
        said = report_of(embeddings, asked)
    else:
        try:
            known = read_json(_beside(out))
            spec, failed, records = Spec.of(known), int(known["failed"]), int(known["records"])
            known["model"], known["input"], known["source"]["path"]
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(
                f"{out}: exists already, and {_beside(out).name}, which says what it holds, is missing or damaged; "
                "--overwrite starts over"
            ) from None
        if difference := asked.spec.differs(spec, without_directories(asked.model), known["model"]):
            raise UsageError(f"{out}: was made {difference}; --overwrite starts over")
        part_plan.same_tracks(out, asked.tracks, known)
        part_plan.same_input(out, fasta, known)
        said = EmbedReport(out, records + failed, 0, 0, 0, 0, failed, _failed_file(out))
    say(f"{place or out}: is finished already")
    return said


def check_same(asked: EmbedRequest, embeddings: EmbeddingStore, place: Path) -> None:
    """Raise `UsageError` if an embedding store does not match the request."""
    names = (without_directories(model) for model in (asked.model, embeddings.manifest["facts"]["model"]))
    difference = asked.spec.differs(embeddings.spec, *names)
    if difference:
        raise UsageError(f"{place}: was made {difference}; --overwrite starts over")


def report_of(embeddings: EmbeddingStore, asked: EmbedRequest) -> EmbedReport:
    """Report the work on an embedding store, over all attempts."""
    out = asked.out
    notes = [note for note in embeddings.manifest["parts"] if note is not None]
    records, unique = embeddings.manifest["records"], embeddings.manifest["unique"]
    reused = sum(note["reused"] for note in notes)
    windowed = sum(len(note["windowed"]) for note in notes)
    rows = sum(note["rows"] for note in notes)
    failed = out / "failed.tsv" if asked.fmt == PARTS else _failed_file(out)
    return EmbedReport(out, records, rows - reused, records - unique, reused, windowed, len(embeddings.failed), failed)


def _beside(out: Path) -> Path:
    return out.with_name(f"{out.name}.json")


def _chains_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.{CHAINS}")


def _failed_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.failed.tsv")


def _clear_scratch(out: Path) -> None:
    """Remove the temporary files of killed writers: FormatWriter's `.tmp-PROCESS-NAME`."""
    for path in out.parent.glob(".tmp-*") if out.parent.is_dir() else ():
        process, _, name = path.name.removeprefix(".tmp-").partition("-")
        if process.isdigit() and name in (out.name, ids_file(out).name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
