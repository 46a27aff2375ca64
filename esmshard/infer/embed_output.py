"""What becomes of the finished parts of a product: a directory, or one file, and what is said of it."""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from esmshard.data.symbols import shown
from esmshard.errors import InputError, UsageError
from esmshard.files import read_json
from esmshard.infer import product_plan
from esmshard.infer.claims import Worker, workers
from esmshard.infer.embed_request import PARTS, Request
from esmshard.infer.formats import FORMATS, suits
from esmshard.infer.parts import DamagedError
from esmshard.infer.product import Product, note_file, remove, seal, write_failed
from esmshard.infer.product_plan import Spec
from esmshard.infer.writers import ids_file
from esmshard.progress import Progress, say


@dataclass(frozen=True)
class Report:
    """What was done."""

    out: Path
    records: int
    computed: int
    """Sequences that went through the model, over all attempts."""
    duplicates: int
    """Records whose sequence came before."""
    reused: int
    """Sequences taken from the earlier product."""
    windowed: int
    """Sequences cut into windows for want of memory."""
    failed: int
    """Records without values; they are in `failed`."""
    failed_file: Path

    def __str__(self) -> str:
        said = f"{self.out}: {self.records - self.failed:,} records; {self.computed:,} sequences computed"
        said += f", {self.duplicates:,} duplicates, {self.reused:,} reused"
        if self.windowed:
            said += f"; {self.windowed:,} in windows, as memory did not suffice for them whole"
        if self.failed:
            said += f"; {self.failed:,} records failed, see {self.failed_file}"
        return said

    def check(self) -> None:
        """Raise `InputError` if every record failed: the output holds nothing then."""
        if self.failed < self.records:
            return
        with suppress(OSError, IndexError):  # another worker may be at it
            first = self.failed_file.read_text(encoding="utf-8").splitlines()[1].split("\t")
            raise InputError(
                f"{self.out}: has no values, as every record failed ({self.records:,}), see {self.failed_file}; the "
                f"first, {shown(first[0])}: {first[2]}; mend that and start over with --overwrite"
            )
        raise InputError(
            f"{self.out}: has no values, as every record failed ({self.records:,}); see {self.failed_file}"
        )


def finish(directory: Path, asked: Request) -> Report:
    """Make the output of the finished parts, or leave that to whoever does it."""
    out = asked.out
    if not (directory / "manifest.json").exists():
        count = Product(directory, unfinished=True).manifest["parts"].count(None)
        if count:
            others = sum(1 for _ in workers(directory / "work"))
            say(f"{directory}: {count} parts are in the hands of {others} other workers; the last one finishes {out}")
            return report_of(Product(directory, unfinished=True), asked)
    with Worker(directory / "work") as worker:
        while not worker.claim("finish"):
            if not directory.exists() or not worker.settle(lambda: ["finish"] if directory.exists() else []):
                say(f"{out}: is being finished by another worker")
                return report_of(Product(directory, unfinished=True) if directory.exists() else Product(out), asked)
        product = Product(directory, unfinished=True)
        report = report_of(product, asked)
        try:
            if asked.fmt == PARTS:
                seal(directory).close()
                remove(out, successor=directory)
            else:
                merge(product, out, asked.fmt)
                remove(directory)
        except DamagedError as error:
            # Its note goes, so that it is computed again.
            note_file(directory, error.part).unlink(missing_ok=True)
            raise InputError(f"{error}; go on with --resume: only that part is computed again") from None
        finally:
            product.close()
    return report


def merge(product: Product, out: Path, fmt: str) -> None:
    """Write the rows of a product into one file; `OUT.json` beside it says what it holds, and `OUT.failed.tsv`
    which records failed, if any did.

    Raises:
        UsageError: the format cannot hold them.
        DamagedError: a part does not hold what was written.
    """
    about = product.about()
    suits(fmt, about.outputs, about.dtype, out)
    failed, beside = _failed_file(out), _beside(out)
    _clear_scratch(out)
    with FORMATS[fmt](out, about) as writer, Progress("write", about.n_records) as progress:
        for n, row in enumerate(product.rows()):
            writer.add(row)
            if n and n % 4096 == 0:
                progress.update(n, fmt)
        for path in (failed, beside):
            path.unlink(missing_ok=True)
        write_failed(product, failed)
    said = {
        "format": fmt,
        **product.attributes,
        "outputs": [one.name for one in product.outputs],
        "dim": product.spec.dim,
        "records": about.n_records,
        "failed": len(product) - about.n_records,
        "input": product.manifest["input"],
        "source": product.manifest["source"],
        "spec": product.spec.as_json(),
    }
    scratch = beside.with_name(f".tmp-{beside.name}")
    scratch.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    scratch.replace(beside)


def finished(asked: Request, fasta: Path) -> Report:
    """`--resume` of what is there already: look whether it is the same, and do nothing."""
    out = asked.out
    if asked.fmt == PARTS:
        product = Product(out)
        check_same(asked, product, out)
        product_plan.same_input(out, fasta, product.manifest)
        said = report_of(product, asked)
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
        if difference := asked.spec.differs(spec, asked.model, known["model"]):
            raise UsageError(f"{out}: was made {difference}; --overwrite starts over")
        product_plan.same_input(out, fasta, known)
        said = Report(out, records + failed, 0, 0, 0, 0, failed, _failed_file(out))
    say(f"{out}: is finished already")
    return said


def check_same(asked: Request, product: Product, place: Path) -> None:
    """`UsageError` if a product is not what is asked for."""
    difference = asked.spec.differs(product.spec, asked.model, product.manifest["facts"]["model"])
    if difference:
        raise UsageError(f"{place}: was made {difference}; --overwrite starts over")


def report_of(product: Product, asked: Request) -> Report:
    """What was done for a product, over all attempts."""
    out = asked.out
    notes = [note for note in product.manifest["parts"] if note is not None]
    records, unique = product.manifest["records"], product.manifest["unique"]
    reused = sum(note["reused"] for note in notes)
    windowed = sum(len(note["windowed"]) for note in notes)
    rows = sum(note["rows"] for note in notes)
    failed = out / "failed.tsv" if asked.fmt == PARTS else _failed_file(out)
    return Report(out, records, rows - reused, records - unique, reused, windowed, len(product.failed), failed)


def _beside(out: Path) -> Path:
    return out.with_name(f"{out.name}.json")


def _failed_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.failed.tsv")


def _clear_scratch(out: Path) -> None:
    """Remove what writers that were killed left beside a file: FormatWriter's `.tmp-PROCESS-NAME`."""
    for path in out.parent.glob(".tmp-*") if out.parent.is_dir() else ():
        process, _, name = path.name.removeprefix(".tmp-").partition("-")
        if process.isdigit() and name in (out.name, ids_file(out).name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
