"""The time and the disk space of an embedding job, estimated before it begins.

Rows are planned as in the job, in a directory beside OUT that is removed again. Bytes follow from their lengths. Some
parts are computed to measure the time, see `esmshard.embed.job.embed_time`.
"""

import errno
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard import remote
from esmshard.embed.compute.outputs import Output
from esmshard.embed.formats.format_registry import FORMATS, suits
from esmshard.embed.job.embed_request import PARTS, EmbedRequest, file_bytes, rows_bytes
from esmshard.embed.job.embed_time import Time, time_of
from esmshard.embed.store import part_plan
from esmshard.embed.store.embedding_store import EmbeddingStore
from esmshard.embed.store.part_plan import Spec, partial
from esmshard.embed.store.parts import DONE
from esmshard.embed.store.reuse import Reuse
from esmshard.embed.store.row_index import STDIN, RowIndex, read_input
from esmshard.errors import InputError, UsageError
from esmshard.parallel.process_group import processes_of
from esmshard.progress import duration

_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Forecast:
    """The estimate of a job. Counts are exact, and so are the bytes of numbers and ids, if the format is `exact`."""

    asked: EmbedRequest
    fasta: Path
    records: int
    residues: int
    longest: int
    unique: int
    reused: int
    """Sequences that would be copied from the earlier embedding store."""
    over: int
    """Records of more residues than a window."""
    parts: int
    parts_bytes: int
    """Bytes of the directory of parts."""
    file_bytes: int
    """Bytes of numbers and ids in the file that is made from the parts, at most; 0 if none is made."""
    peak: int
    """Bytes on disk just before the end."""
    free: int
    place: Path
    """The directory on whose disk `free` bytes are free."""
    time: Time

    def __str__(self) -> str:
        long, took = self.asked.spec.long, self.time
        treated = {
            "full": "taken whole, none is cut",
            "window": f"seen in windows that share {long.overlap:,}, none is cut",
            "truncate": f"{self.over:,} are cut to their first {long.window:,}",
        }[long.mode]
        phases = ("start", "plan", "compute", "write")
        made_of = ", ".join(f"{duration(getattr(took, phase))} to {phase}" for phase in phases)
        lines = [
            f"{self.fasta}: {self.records:,} records, {self.residues:,} residues, longest {self.longest:,}",
            f"duplicates  {self.records - self.unique:,} records whose sequence came before",
            f"sequences   {self.unique:,}: {self.unique - self.reused:,} are computed, {self.reused:,} reused",
            f"long        {self.over:,} records over {long.window:,} residues: {treated}",
            f"parts       {self.parts:,}, {_size(self.parts_bytes)}",
            f"time        {took.total / 3600:.2f} hours ({duration(took.total)}) on {took.where}: {made_of}",
            f"probe       {took.parts:,} of {self.parts:,} parts computed in {duration(took.probed)}",
        ]
        if self.asked.fmt != PARTS:
            size = f"{'' if FORMATS[self.asked.fmt].exact else 'at most '}{_size(self.file_bytes)}"
            lines.append(f"{self.asked.fmt:<11} {size} of numbers and ids; the format adds a little")
        lines.append(f"at most     {_size(self.peak)} while it runs, {_size(self.free)} free at {self.place}")
        return "\n".join(lines)


def dry_run(asked: EmbedRequest, fasta: Path, *, nproc: int | None, tokens: int | None, reuse: Path | None) -> str:
    """Return `forecast` as text."""
    return str(forecast(asked, fasta, nproc=nproc, tokens=tokens, reuse=reuse))


def forecast(
    asked: EmbedRequest,
    fasta: Path,
    *,
    nproc: int | None = None,
    tokens: int | None = None,
    reuse: Path | None = None,
    seconds: float = 20.0,
) -> Forecast:
    """Plan a job, time some parts, and remove all files again.

    Args:
        asked: the request, see `esmshard.embed.job.embed_request.request`.
        fasta: the input.
        nproc: processes of the job.
        tokens: tokens computed at once.
        reuse: an earlier embedding store.
        seconds: the time after which no further part is begun.

    Raises:
        InputError: if the output cannot fit on the disk, or the input cannot be read.
        UsageError: if the request cannot be carried out.
    """
    spec, fmt, processes = asked.spec, asked.fmt, processes_of(asked.device, nproc)
    partial(asked.out)
    fasta, reuse = remote.local(fasta), None if reuse is None else remote.local(reuse)
    in_bucket = remote.is_remote(asked.out)
    place = Path(tempfile.gettempdir()) if in_bucket else None
    place = place or next(one for one in asked.out.absolute().parents if one.is_dir())
    earlier = None if reuse is None else Reuse(reuse, spec)
    with _scratch(place) as directory:
        free = shutil.disk_usage(place).free
        began = time.monotonic()
        plan = _planned(directory, asked, fasta, reuse, processes)
        planned = time.monotonic() - began
        index = RowIndex(directory / "index")
        length_N = index.lengths[:]
        if fmt != PARTS:
            suits(fmt, spec.outputs, spec.dtype, asked.out, records=len(length_N), id_bytes=index.id_bytes)
        before = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        parts_bytes = rows_bytes(spec, index, range(plan["parts"]))
        made = 0 if fmt == PARTS else file_bytes(fmt, spec, index)
        peak = before + parts_bytes + made
        if peak > free and not (in_bucket and fmt == PARTS):  # parts are uploaded one by one
            raise InputError(_does_not_fit(asked, index, place, before, peak, free))
        copied_U = np.zeros(plan["unique"], np.bool_)
        if earlier is not None and reuse is not None:
            _find_copied(copied_U, index, earlier, reuse)
        taken = time_of(directory, plan, asked, processes, tokens, copied_U, planned, seconds)
        return Forecast(
            asked,
            fasta,
            len(length_N),
            int(length_N.sum(dtype=np.int64)),
            int(length_N.max()),
            plan["unique"],
            int(copied_U.sum()),
            int((length_N > spec.long.window).sum()),
            plan["parts"],
            parts_bytes + sum(path.stat().st_size for path in index.path.iterdir()),
            made,
            peak,
            free,
            place,
            taken,
        )


@contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    """Provide a directory on the disk of the output, so that its speed is that of the job."""
    try:
        with tempfile.TemporaryDirectory(prefix=".esmshard-dry-run-", dir=place, ignore_cleanup_errors=True) as name:
            yield Path(name)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(f"{place}: the disk is full already while the input is read; make room") from None
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            why = (error.strerror or str(error)).lower()
            raise InputError(f"{error.filename or place}: cannot be written to ({why}); choose another place") from None
        raise


def _planned(directory: Path, asked: EmbedRequest, fasta: Path, reuse: Path | None, processes: int) -> dict[str, Any]:
    if fasta == STDIN:  # the standard input can be read only once
        fasta = read_input(fasta, directory / "stdin", asked.spec.chains.tokens).path
    asked, fasta = asked.of_input(fasta)
    device = asked.device.type
    wanted = part_plan.PlanRequest(
        fasta, asked.spec, asked.facts, asked.longest, device, reuse=reuse, workers=processes, tracks=asked.tracks
    )
    return part_plan.begin(directory, wanted)


def _find_copied(copied_U: npt.NDArray[np.bool_], index: RowIndex, reuse: Reuse, path: Path) -> None:
    """Set the entry of each row that the earlier store holds, computed as requested."""
    embeddings = EmbeddingStore(path)
    bounds = np.array(embeddings.index.bounds)
    for start in range(0, len(copied_U), _AT_ONCE):
        old_M = reuse.rows(index.content[start : start + _AT_ONCE])
        part_M = np.searchsorted(bounds, old_M, "right") - 1  # -1 for rows that the earlier store lacks
        for part in np.unique(part_M[old_M >= 0]).tolist():
            of_part = np.flatnonzero(part_M == part)
            copied_U[start + of_part] = embeddings.reader(part).status_U[old_M[of_part] - bounds[part]] == DONE
    embeddings.close()


def _does_not_fit(asked: EmbedRequest, index: RowIndex, place: Path, before: int, peak: int, free: int) -> str:
    """Return a message with the smallest change that would fit."""
    spec = asked.spec
    smaller = [("--format parts", PARTS, spec)]
    if spec.dtype == "fp32":
        half = replace(spec, dtype="fp16")
        smaller += [("--dtype fp16", asked.fmt, half), ("--format parts --dtype fp16", PARTS, half)]
    means = tuple(dict.fromkeys(Output("mean", one.layer) for one in spec.outputs if one.layer is not None))
    if means and not all(one.pooled for one in spec.outputs):
        pooled = replace(spec, outputs=means)
        smaller += [("--pool mean", asked.fmt, pooled), ("--format parts --pool mean", PARTS, pooled)]
    fix = "nothing smaller fits"
    for said, fmt, changed in smaller:
        need = before + rows_bytes(changed, index, range(len(index.bounds) - 1))
        if fmt != PARTS:
            need += file_bytes(fmt, changed, index)
        if (fmt, changed) != (asked.fmt, spec) and need <= free and _can_hold(fmt, changed, asked.out):
            fix = f"{said} would fit with {_size(need)}"
            break
    said = f"{_size(peak)} would be written before it is finished, and {_size(free)} are free"
    return f"{place}: {said}; make room or choose another place; {fix}"


def _can_hold(fmt: str, spec: Spec, out: Path) -> bool:
    try:
        if fmt != PARTS:
            suits(fmt, spec.outputs, spec.dtype, out)
    except UsageError:
        return False
    return True


def _size(nbytes: int) -> str:
    """Format a size in the largest unit, and exactly.

    >>> _size(1234567890), _size(98)
    ('1.2 GB (1,234,567,890 bytes)', '98 bytes')
    """
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name} ({nbytes:,} bytes)"
    return f"{nbytes:,} bytes"
