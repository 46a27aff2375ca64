"""The time and the disk space of an embedding job, estimated before it begins.

Rows are planned as in the job, in a directory beside OUT that is removed again. Bytes follow from their lengths. Times
are measured for some seconds, see `esmshard.embed.job.embed_time`.
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

from esmshard.embed.compute.outputs import Output
from esmshard.embed.formats.format_registry import FORMATS, suits
from esmshard.embed.job.embed_request import PARTS, EmbedRequest, file_bytes
from esmshard.embed.job.embed_time import Time, time_of
from esmshard.embed.store import part_plan
from esmshard.embed.store.embedding_store import EmbeddingStore
from esmshard.embed.store.part_plan import partial
from esmshard.embed.store.parts import DONE
from esmshard.embed.store.reuse import Reuse
from esmshard.embed.store.row_index import STDIN, RowIndex, read_input
from esmshard.errors import InputError, UsageError
from esmshard.progress import duration

_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Forecast:
    """The estimate of a job. Bytes and counts are exact, sizes of formats within 2% above a megabyte."""

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
    formats: dict[str, int]
    """Bytes of the file, for every format that can hold the outputs and can be written on this machine."""
    parts_bytes: int
    """Bytes of the directory of parts."""
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
        lines = [
            f"{self.fasta}: {self.records:,} records, {self.residues:,} residues, longest {self.longest:,}",
            f"duplicates  {self.records - self.unique:,} records whose sequence came before",
            f"sequences   {self.unique:,}: {self.unique - self.reused:,} are computed, {self.reused:,} reused",
            f"long        {self.over:,} records over {long.window:,} residues: {treated}",
            f"parts       {self.parts:,}",
            f"time        {took.total / 3600:.2f} hours ({duration(took.total)}) on {took.where}: "
            + ", ".join(f"{duration(getattr(took, what))} to {what}" for what in ("start", "plan", "compute", "write")),
        ]
        if not took.packs:
            lines.append("probe       nothing to compute, so nothing was timed")
        else:
            why = "; they are all that there are" if took.all_packs else ""
            lines.append(f"probe       {took.packs:,} packs timed in {duration(took.probed)}{why}")
        sizes = {"parts": self.parts_bytes} | self.formats
        lines += [f"{name:<11} {_size(nbytes)}" for name, nbytes in sizes.items()]
        lines.append(f"at most     {_size(self.peak)} while it runs, {_size(self.free)} free at {self.place}")
        return "\n".join(lines)


def dry_run(
    asked: EmbedRequest,
    fasta: Path,
    *,
    nproc: int | None,
    tokens: int | None,
    reuse: Path | None,
    seconds: float = 20.0,
) -> str:
    """Return `forecast` as text."""
    return str(forecast(asked, fasta, nproc=nproc, tokens=tokens, reuse=reuse, seconds=seconds))


def forecast(
    asked: EmbedRequest,
    fasta: Path,
    *,
    nproc: int | None = None,
    tokens: int | None = None,
    reuse: Path | None = None,
    seconds: float = 20.0,
) -> Forecast:
    """Plan a job, time some packs, and remove all files again.

    Args:
        asked: the request, see `esmshard.embed.job.embed_request.request`.
        fasta: the input.
        nproc: processes of the job.
        tokens: tokens computed at once.
        reuse: an earlier embedding store.
        seconds: time for which packs are computed. The last packs may take longer.

    Raises:
        InputError: if the output cannot fit on the disk, or the input cannot be read.
        UsageError: if the request cannot be carried out.
    """
    partial(asked.out)
    place = next(one for one in asked.out.absolute().parents if one.is_dir())
    earlier = None if reuse is None else Reuse(reuse, asked.spec)
    with _scratch(place) as directory:
        free = shutil.disk_usage(place).free
        began = time.monotonic()
        plan = _planned(directory, asked, fasta, nproc or 1)
        planned = time.monotonic() - began
        index = RowIndex(directory / "index")
        old_U = np.full(plan["unique"], -1, np.int64)
        if earlier is not None and reuse is not None:
            _find_old(old_U, index, earlier, reuse)
        length_N = index.lengths[:]
        id_bytes = (index.path / "ids.txt").stat().st_size
        if asked.fmt != PARTS:
            suits(asked.fmt, asked.spec.outputs, asked.spec.dtype, asked.out, records=len(length_N), id_bytes=id_bytes)
        formats = _formats(asked, index, len(length_N), id_bytes)
        before = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        rows = _rows_bytes(asked, index)
        peak = before + rows + formats.get(asked.fmt, 0)
        if peak > free:
            raise InputError(_does_not_fit(asked, index, place, before, peak, free))
        taken = time_of(directory, asked.found, asked.device, asked.fmt, nproc, tokens, old_U, earlier, seconds)
        return Forecast(
            asked,
            fasta,
            len(length_N),
            int(length_N.sum(dtype=np.int64)),
            int(length_N.max()),
            plan["unique"],
            int((old_U >= 0).sum()),
            int((length_N > asked.spec.long.window).sum()),
            plan["parts"],
            formats,
            rows + sum(path.stat().st_size for path in index.path.iterdir()),
            peak,
            free,
            place,
            replace(taken, plan=planned),
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


def _planned(directory: Path, asked: EmbedRequest, fasta: Path, workers: int) -> dict[str, Any]:
    if fasta == STDIN:  # the standard input can be read only once
        fasta = read_input(fasta, directory / "stdin").path
    limit = None if asked.spec.long.mode != "full" else asked.found.config.max_positions
    longest = None if limit is None else limit - 2
    spec, device = asked.spec, asked.device.type
    return part_plan.begin(directory, fasta, spec, asked.facts, None, None, device, longest, workers)


def _find_old(old_U: npt.NDArray[np.int64], index: RowIndex, reuse: Reuse, path: Path) -> None:
    """Fill in the row of the earlier store from which each row would be copied; -1 stays where there is no such row."""
    embeddings = EmbeddingStore(path)
    bounds = np.array(embeddings.index.bounds)
    for start in range(0, len(old_U), _AT_ONCE):
        old_M = reuse.rows(index.content[start : start + _AT_ONCE])
        part_M = np.searchsorted(bounds, old_M, "right") - 1  # -1 for rows that the earlier store lacks
        for part in np.unique(part_M[old_M >= 0]).tolist():
            of_part = np.flatnonzero(part_M == part)
            of_part = of_part[embeddings.reader(part).status_U[old_M[of_part] - bounds[part]] == DONE]
            old_U[start + of_part] = old_M[of_part]
    embeddings.close()


def _rows_bytes(asked: EmbedRequest, index: RowIndex) -> int:
    parts = range(len(index.bounds) - 1)
    return sum(asked.spec.kind.bytes_of(asked.spec.long.kept(index.lengths_of(part))) for part in parts)


def _formats(asked: EmbedRequest, index: RowIndex, records: int, id_bytes: int) -> dict[str, int]:
    found = {}
    for fmt in FORMATS:
        try:
            suits(fmt, asked.spec.outputs, asked.spec.dtype, asked.out, records=records, id_bytes=id_bytes)
        except UsageError:
            continue
        found[fmt] = file_bytes(asked, index, records, fmt)
    return found


def _does_not_fit(asked: EmbedRequest, index: RowIndex, place: Path, before: int, peak: int, free: int) -> str:
    """Return a message with the smallest change that would fit."""
    spec, records = asked.spec, len(index.lengths)
    half = replace(spec, dtype="fp16") if spec.dtype == "fp32" else None
    means = tuple(dict.fromkeys(Output("mean", one.layer) for one in spec.outputs if one.layer is not None))
    pooled = replace(spec, outputs=means) if means and not all(one.pooled for one in spec.outputs) else None
    changes = [("--format parts", PARTS, spec), ("--dtype fp16", asked.fmt, half)]
    changes += [("--format parts --dtype fp16", PARTS, half), ("--pool mean", asked.fmt, pooled)]
    changes += [("--format parts --pool mean", PARTS, pooled)]
    fix = "nothing smaller fits"
    for said, fmt, changed in changes:
        if changed is None or (fmt, changed) == (asked.fmt, spec):
            continue
        other = replace(asked, fmt=fmt, spec=changed)
        try:
            need = before + _rows_bytes(other, index)
            if fmt != PARTS:
                suits(fmt, changed.outputs, changed.dtype, asked.out)
                need += file_bytes(other, index, records)
        except UsageError:
            continue
        if need <= free:
            fix = f"{said} would fit with {_size(need)}"
            break
    said = f"{_size(peak)} would be written before it is finished, and {_size(free)} are free"
    return f"{place}: {said}; make room or choose another place; {fix}"


def _size(nbytes: int) -> str:
    """Format a size in the largest unit, and exactly.

    >>> _size(1234567890), _size(98)
    ('1.2 GB (1,234,567,890 bytes)', '98 bytes')
    """
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name} ({nbytes:,} bytes)"
    return f"{nbytes:,} bytes"
