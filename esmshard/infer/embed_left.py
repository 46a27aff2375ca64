"""What `embed` left: how far it is, whether every row is as it was written, and one file of it."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from esmshard.errors import InputError, UsageError
from esmshard.files import sha256
from esmshard.infer.claims import Worker, workers
from esmshard.infer.embed_output import merge as write_file
from esmshard.infer.formats import FORMATS, check_place
from esmshard.infer.parts import FAILED, DamagedError
from esmshard.infer.product import Product, failed_table, mend
from esmshard.infer.product_plan import partial


def status(out: Path) -> str:
    """How far an output is, and who works on it, in some lines. `InputError` if there is nothing."""
    directory = out if (out / "manifest.json").is_file() or (out / "plan.json").is_file() else partial(out)
    if not directory.is_dir():
        if out.exists():
            return f"{out}: finished"
        raise InputError(f"{out}: there is nothing; embed writes it")
    if not (directory / "manifest.json").is_file() and not (directory / "plan.json").is_file():
        return f"{directory}: nothing is computed yet; the input is being read, or that was interrupted"
    product = Product(directory, unfinished=True)
    notes = [note for note in product.manifest["parts"] if note is not None]
    rows, unique = sum(note["rows"] for note in notes), product.manifest["unique"]
    names = ", ".join(one.name for one in product.outputs)
    lines = [
        f"{directory}: {'finished' if product.finished else 'not finished'}",
        f"holds      {names} of {len(product):,} records ({unique:,} different sequences) by "
        f"{product.manifest['facts']['model']}, {product.spec.dtype}, computed in {product.spec.compute}",
        f"parts      {len(notes)} of {len(product.manifest['parts'])}; {rows:,} of {unique:,} sequences",
        f"failed     {sum(len(note['failed']) for note in notes)}, "
        f"in windows {sum(len(note['windowed']) for note in notes)}, reused {sum(note['reused'] for note in notes)}",
    ]
    for (device, kernel, torch), count in Counter(
        (note["device"], note["kernel"], note["versions"]["torch"]) for note in notes
    ).items():
        lines.append(f"made by    {device}, kernel {kernel}, torch {torch}: {count} parts")
    here = Worker(directory / "work")
    for note in workers(directory / "work"):
        state = {True: "alive", False: "gone", None: "on another machine"}[here.lives(note)]
        lines.append(f"worker     {note['host']} process {note['pid']}, {state}: {note['rows']:,} sequences")
    if not product.finished:
        lines.append("go on      esmshard embed ... --resume")
    return "\n".join(lines)


def verify(out: Path) -> str:
    """Compare every row of a product with what was written.

    Raises:
        InputError: naming the faults: rows that are dropped, doubled, swapped, cut, changed or of another precision,
            parts that are missing, an index that was changed.
    """
    product = Product(out)
    found = list(faults(product))
    product.close()
    if found:
        more = f"; and {len(found) - 5:,} more" if len(found) > 5 else ""
        raise InputError(f"{'; '.join(found[:5])}{more}: {mend(out)}")
    rows, parts = product.manifest["unique"], len(product.manifest["parts"])
    return f"{out}: {len(product):,} records, {rows:,} rows in {parts} parts, all as they were written"


def faults(product: Product) -> Iterator[str]:
    """Everything that is not as it was written, a clause each."""
    manifest, index = product.manifest, product.index
    changed = False
    for name, wanted in manifest["index"].items():
        path = product.path / "index" / name
        if not path.is_file() or sha256(path) != wanted:
            changed = True
            yield f"{path}: is not what was written"
    if changed:  # where rows lie, and whose they are, it says
        return
    notes = manifest["parts"]
    if len(notes) != len(index.bounds) - 1 or len(product) != len(index.rows) or manifest["unique"] != len(index.first):
        yield f"{product.path}/manifest.json: does not go with the index"
        return
    known = {note["file"] for note in notes}
    for path in sorted((product.path / "parts").iterdir()):
        if path.name not in known:
            yield f"{path}: is no part of it"
    for part, note in enumerate(notes):
        if note["part"] != part or (note["dtype"], note["compute"]) != (product.spec.dtype, product.spec.compute):
            yield f"part {part}: was computed in {note['compute']} and stored in {note['dtype']}, or is another one"
            continue
        try:
            reader = product.reader(part)
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
    path = product.path / "failed.tsv"
    if (path.read_text(encoding="utf-8") if path.is_file() else "") != failed_table(product):
        yield f"{path}: is not what was written"


def merge(directory: Path, out: Path | None, fmt: str | None, overwrite: bool) -> str:
    """Make one file of a finished product; the directory stays."""
    if out is None:
        raise UsageError("-o: name the file to write")
    fmt = fmt or out.suffix.removeprefix(".")
    if fmt not in FORMATS:
        raise UsageError(f"{out}: no format '{fmt}'; there are {', '.join(FORMATS)} (by ending, or --format)")
    product = Product(directory)
    check_place(fmt, out, overwrite=overwrite)
    try:
        write_file(product, out, fmt)
    except DamagedError as error:
        raise InputError(f"{error}; {mend(directory)}") from None
    finally:
        product.close()
    return f"{out}: {product.about().n_records:,} records"
