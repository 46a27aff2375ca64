"""The time and the disk space of an embedding job, estimated before it begins (`embed --dry-run`).

Rows are planned as in the job, in a directory beside OUT that is removed again. Bytes follow from their lengths. The
time of computing follows from some packs, which this process computes.
"""

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from esmshard import remote
from esmshard.embed.engines import make_embedder, with_ends
from esmshard.embed.formats.format_registry import FORMATS, suits
from esmshard.embed.job.embed_request import PARTS, EmbedRequest, file_bytes, rows_bytes
from esmshard.embed.store import part_plan
from esmshard.embed.store.part_plan import partial, store_of
from esmshard.embed.store.reuse import Reuse
from esmshard.embed.store.row_index import STDIN, RowIndex, read_input
from esmshard.errors import InputError
from esmshard.parallel.process_group import processes_of
from esmshard.progress import duration, say

_AT_ONCE = 1 << 16
_SAMPLE = 1024
"""Rows of which some are computed to measure the speed, spread evenly over the input."""


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
    seconds: float
    """Seconds in which all processes compute the rows; on a CPU, processes share the cores."""

    def __str__(self) -> str:
        long = self.asked.spec.long
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
            f"parts       {self.parts:,}, {_size(self.parts_bytes)}",
            f"time        {self.seconds / 3600:.2f} hours ({duration(self.seconds)}) to compute on "
            f"{self.asked.device.type}",
        ]
        if self.asked.fmt != PARTS:
            size = f"{'' if FORMATS[self.asked.fmt].exact else 'at most '}{_size(self.file_bytes)}"
            lines.append(f"{self.asked.fmt:<11} {size} of numbers and ids; the format adds a little")
        lines.append(f"at most     {_size(self.peak)} while it runs, {_size(self.free)} free at {self.place}")
        return "\n".join(lines)


def forecast(
    asked: EmbedRequest,
    fasta: Path,
    *,
    nproc: int | None = None,
    tokens: int | None = None,
    reuse: Path | None = None,
    seconds: float = 20.0,
) -> Forecast:
    """Plan a job, compute some packs, and remove all files again.

    Args:
        asked: the request, see `esmshard.embed.job.embed_request.request`.
        fasta: the input.
        nproc: processes of the job.
        tokens: tokens computed at once.
        reuse: an earlier embedding store.
        seconds: the time after which no further pack is begun.

    Raises:
        InputError: if the output cannot fit on the disk, or the input cannot be read.
        UsageError: if the request cannot be carried out.
    """
    spec, fmt, processes = asked.spec, asked.fmt, processes_of(asked.device, nproc)
    partial(asked.out)
    fasta, reuse = remote.local(fasta), None if reuse is None else remote.local(reuse)
    in_bucket = remote.is_remote(asked.out)
    place = Path(tempfile.gettempdir()) if in_bucket else None
    place = place or next(parent for parent in asked.out.absolute().parents if parent.is_dir())
    with tempfile.TemporaryDirectory(prefix=".esmshard-dry-run-", dir=place, ignore_cleanup_errors=True) as name:
        free = shutil.disk_usage(place).free
        directory, source = Path(name) / "plan", fasta
        if fasta == STDIN:  # the standard input can be read only once
            source = read_input(fasta, Path(name) / "stdin", spec.chains.tokens).path
        asked, source = asked.of_input(source)
        device = asked.device.type
        plan = part_plan.begin(
            directory,
            part_plan.PlanRequest(
                source, spec, asked.facts, asked.longest, device, reuse=reuse, workers=processes, tracks=asked.tracks
            ),
        )
        index = RowIndex(directory / "index")
        length_N = index.lengths[:]
        if fmt != PARTS:
            suits(fmt, spec.outputs, spec.dtype, asked.out, records=len(length_N), id_bytes=index.id_bytes)
        before = sum(path.stat().st_size for path in Path(name).rglob("*") if path.is_file())
        parts_bytes = rows_bytes(spec, index, range(plan["parts"]))
        made = 0 if fmt == PARTS else file_bytes(fmt, spec, index)
        peak = before + parts_bytes + made
        if peak > free and not (in_bucket and fmt == PARTS):  # parts are uploaded one by one
            raise InputError(
                f"{place}: {_size(peak)} would be written before it is finished, and {_size(free)} are free; make "
                "room, choose another place, or store less (--format parts, --dtype fp16, --pool mean)"
            )
        copied_U = np.zeros(plan["unique"], np.bool_)
        if reuse is not None:
            earlier = Reuse(reuse, spec)
            for start in range(0, len(copied_U), _AT_ONCE):
                copied_U[start : start + _AT_ONCE] = earlier.rows(index.content[start : start + _AT_ONCE]) >= 0
        lengths_U = np.concatenate([index.lengths_of(part) for part in range(plan["parts"])])
        needed_U = np.where(copied_U, 0.0, _operations(asked, lengths_U))
        pace = _operations_per_second(directory, plan, asked, lengths_U, tokens, seconds)
        return Forecast(
            asked,
            fasta,
            records=len(length_N),
            residues=int(length_N.sum(dtype=np.int64)),
            longest=int(length_N.max()),
            unique=plan["unique"],
            reused=int(copied_U.sum()),
            over=int((length_N > spec.long.window).sum()),
            parts=plan["parts"],
            parts_bytes=parts_bytes + sum(path.stat().st_size for path in index.path.iterdir()),
            file_bytes=made,
            peak=peak,
            free=free,
            place=place,
            seconds=float(needed_U.sum()) / pace / (processes if device == "cuda" else 1),
        )


def _operations(asked: EmbedRequest, length_U: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Estimate the operations of the linear layers and of attention for each row. Windows count whole."""
    long, config = asked.spec.long, asked.found.config
    seen_U, count_U = long.kept(length_U), np.ones_like(length_U)
    if long.mode == "window":
        seen_U = np.minimum(length_U, long.window)
        count_U = np.maximum(1, -(-(length_U - long.overlap) // (long.window - long.overlap)))
    tokens_U = (seen_U + 2).astype(np.float64)
    return count_U * tokens_U * config.n_layers * config.dim * (24 * config.dim + 4 * tokens_U)


def _operations_per_second(
    directory: Path,
    plan: dict[str, object],
    asked: EmbedRequest,
    length_U: npt.NDArray[np.int64],
    tokens: int | None,
    seconds: float,
) -> float:
    """Compute rows that are spread evenly over the input, without tracks, until `seconds` have passed."""
    index, store = RowIndex(directory / "index"), store_of(directory, plan)
    embedder = make_embedder(plan, asked.device, tokens)
    rows = np.unique(np.linspace(0, len(length_U) - 1, min(_SAMPLE, len(length_U))).astype(np.int64))
    sequences = [with_ends(store.residues(int(record))) for record in index.first.at(rows)]
    shortest = min(sequences, key=len)
    for _ in embedder.compute([shortest]):  # The first call of a model is slow.
        pass
    say(f"computes some packs, for about {seconds:.0f} s at most")
    needed_U, done, began = _operations(asked, length_U[rows]), 0.0, time.monotonic()
    for row, _ in embedder.compute(sequences):
        done += float(needed_U[row])
        if time.monotonic() - began > seconds:
            break
    return done / (time.monotonic() - began)


def _size(nbytes: int) -> str:
    """Format a size in the largest unit, and exactly.

    >>> _size(1234567890), _size(98)
    ('1.2 GB (1,234,567,890 bytes)', '98 bytes')
    """
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name} ({nbytes:,} bytes)"
    return f"{nbytes:,} bytes"
