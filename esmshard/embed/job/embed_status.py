"""The status of an embedding output, the check of its rows, and its conversion into one file."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from esmshard import remote
from esmshard.embed.formats.format_registry import FORMATS
from esmshard.embed.job.embed_output import merge as write_file
from esmshard.embed.store.embedding_store import EmbeddingStore, failed_table, fix
from esmshard.embed.store.part_plan import partial
from esmshard.embed.store.parts import FAILED, DamagedError
from esmshard.errors import InputError, UsageError
from esmshard.files import sha256


def status(out: Path) -> str:
    """Describe the progress of an output and its workers, in some lines. `InputError` if there is no output."""
    if (url := remote.address(out)) is not None:
        raise UsageError(
            f"{url}: status reads a directory on a disk; of an output in a bucket, list {url}/parts/, where each "
            ".json is a finished part"
        )
    directory = out if (out / "manifest.json").is_file() or (out / "plan.json").is_file() else partial(out)
    if not directory.is_dir():
        if out.exists():
            return f"{out}: finished"
        raise InputError(f"{out}: there is nothing; embed writes it")
    if not (directory / "manifest.json").is_file() and not (directory / "plan.json").is_file():
        return f"{directory}: nothing is computed yet; the input is being read, or that was interrupted"
    embeddings = EmbeddingStore(directory, unfinished=True)
    notes = [note for note in embeddings.manifest["parts"] if note is not None]
    rows, unique = sum(note["rows"] for note in notes), embeddings.manifest["unique"]
    names = ", ".join(one.name for one in embeddings.outputs)
    lines = [
        f"{directory}: {'finished' if embeddings.finished else 'not finished'}",
        f"holds      {names} of {len(embeddings):,} records ({unique:,} different sequences) by "
        f"{embeddings.manifest['facts']['model']}, {embeddings.spec.dtype}, computed in {embeddings.spec.compute}",
        f"parts      {len(notes)} of {len(embeddings.manifest['parts'])}; {rows:,} of {unique:,} sequences",
        f"failed     {sum(len(note['failed']) for note in notes)}, "
        f"in windows {sum(len(note['windowed']) for note in notes)}, reused {sum(note['reused'] for note in notes)}",
    ]
    for (device, kernel, torch), count in Counter(
        (note["device"], note["kernel"], note["versions"]["torch"]) for note in notes
    ).items():
        lines.append(f"made by    {device}, kernel {kernel}, torch {torch}: {count} parts")
    if not embeddings.finished:
        lines.append("go on      with the same command")
    return "\n".join(lines)


def verify(out: Path) -> str:
    """Compare every row of an embedding store with what was written.

    Raises:
        InputError: with the faults: rows that are missing, doubled, swapped, cut, changed or of another precision,
            missing parts, or a changed index.
    """
    embeddings = EmbeddingStore(out)
    found = list(faults(embeddings))
    embeddings.close()
    if found:
        more = f"; and {len(found) - 5:,} more" if len(found) > 5 else ""
        raise InputError(f"{'; '.join(found[:5])}{more}: {fix(out)}")
    rows, parts = embeddings.manifest["unique"], len(embeddings.manifest["parts"])
    place = remote.address(out) or out
    return f"{place}: {len(embeddings):,} records, {rows:,} rows in {parts} parts, all as they were written"


def faults(embeddings: EmbeddingStore) -> Iterator[str]:
    """Yield each difference from what was written, as a clause."""
    manifest, index = embeddings.manifest, embeddings.index
    changed = False
    for name, wanted in manifest["index"].items():
        path = embeddings.path / "index" / name
        if not path.is_file() or sha256(path) != wanted:
            changed = True
            yield f"{path}: is not what was written"
    if changed:  # the index defines the positions and the ids of rows
        return
    notes = manifest["parts"]
    if (
        len(notes) != len(index.bounds) - 1
        or len(embeddings) != len(index.rows)
        or manifest["unique"] != len(index.first)
    ):
        yield f"{embeddings.path}/manifest.json: does not go with the index"
        return
    known = {note["file"] for note in notes}
    for path in sorted((embeddings.path / "parts").iterdir()):
        if path.name not in known:
            yield f"{path}: is no part of it"
    for part, note in enumerate(notes):
        if note["part"] != part or (note["dtype"], note["compute"]) != (embeddings.spec.dtype, embeddings.spec.compute):
            yield f"part {part}: was computed in {note['compute']} and stored in {note['dtype']}, or is another one"
            continue
        try:
            reader = embeddings.reader(part)
        except DamagedError as error:
            yield str(error)
            continue
        except (InputError, ValueError, IndexError) as error:
            yield f"part {part}: does not go with the index ({error})"
            continue
        failed_U = np.flatnonzero(reader.status_U == FAILED)
        if (note["rows"], note["bytes"]) != (len(reader.layout), reader.layout.size) or (
            [row for row, _ in note["failed"]] != failed_U.tolist()
        ):
            yield f"part {part}: the manifest says something else of its rows than its file"
        for row in failed_U.tolist():
            if not reader.is_empty(row):
                yield f"{reader.path}: row {row} has failed, and is not empty"
        first = index.bounds[part]
        if not np.array_equal(reader.marks("key"), index.content[first : index.bounds[part + 1]]):
            yield f"{reader.path}: holds other sequences than the index says"
        for row in range(len(reader.layout)):
            try:
                reader.values(row)
            except DamagedError as error:
                record = int(index.first[first + row : first + row + 1][0])
                yield f"{error} ('{index.id_list(record, record + 1)[0]}')"
    path = embeddings.path / "failed.tsv"
    if (path.read_text(encoding="utf-8") if path.is_file() else "") != failed_table(embeddings):
        yield f"{path}: is not what was written"


def merge(directory: Path, out: Path | None, fmt: str | None, overwrite: bool) -> str:
    """Make one file from a finished embedding store. The store stays."""
    if out is None:
        raise UsageError("-o: name the file to write")
    fmt = fmt or out.suffix.removeprefix(".")
    if fmt not in FORMATS:
        raise UsageError(f"{out}: no format '{fmt}'; there are {', '.join(FORMATS)} (by ending, or --format)")
    embeddings = EmbeddingStore(directory)
    FORMATS[fmt].check_place(out, overwrite=overwrite)
    try:
        write_file(embeddings, out, fmt)
    except DamagedError as error:
        raise InputError(f"{error}; {fix(directory)}") from None
    finally:
        embeddings.close()
    return f"{out}: {embeddings.about().n_records:,} records"
