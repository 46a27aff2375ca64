"""The time and the disk space of an embedding job, estimated before it begins (`embed --dry-run`)."""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.embed import engines
from esmshard.embed.plan import STDIN, partial, read_input, store_of
from esmshard.embed.request import PARTS, EmbedRequest, check_fits, file_bytes, numbers_bytes
from esmshard.embed.store import Parts, Reuse
from esmshard.io import remote
from esmshard.io.paths import size_text
from esmshard.parallel.process_group import processes_of
from esmshard.progress import duration, say


def forecast(
    asked: EmbedRequest,
    fasta: Path,
    *,
    nproc: int | None = None,
    tokens: int | None = None,
    reuse: Path | None = None,
    seconds: float = 20.0,
) -> str:
    """Plan a job, compute some packs, and remove all files again; describe the job in some lines (`--dry-run`).

    Args:
        asked: the request, see `request`.
        fasta: the input.
        nproc: processes of the job.
        tokens: tokens computed at once.
        reuse: an earlier embedding store.
        seconds: the time after which no further pack is begun.

    Raises:
        InputError: if the output cannot fit on the disk, or the input cannot be read.
        UsageError: if the request cannot be carried out.
    """
    spec, processes = asked.spec, processes_of(asked.device, nproc)
    partial(asked.out)
    named, fasta, reuse = fasta, remote.local(fasta), None if reuse is None else remote.local(reuse)
    in_bucket = remote.address(asked.out) is not None
    place = next(parent for parent in asked.out.absolute().parents if parent.is_dir())
    place = Path(tempfile.gettempdir()) if in_bucket else place
    with tempfile.TemporaryDirectory(prefix=".esmshard-dry-run-", dir=place, ignore_cleanup_errors=True) as name:
        if fasta == STDIN:  # the standard input can be read only once
            fasta = read_input(fasta, Path(name) / "stdin", spec.chains.tokens).path
        asked, fasta = asked.of_input(fasta)
        directory = Path(name) / "plan"
        plan = asked.begin(directory, fasta, processes, reuse=reuse)
        parts, long = Parts(directory, plan), spec.long
        index = parts.index
        parts_bytes, made_bytes = numbers_bytes(asked, parts, range(len(parts))), file_bytes(asked, parts)
        before = sum(path.stat().st_size for path in Path(name).rglob("*") if path.is_file())
        if not (in_bucket and asked.fmt == PARTS):  # parts are uploaded one by one
            check_fits(place, parts_bytes + made_bytes)
        length_N = np.asarray(index.lengths)
        length_U = length_N[index.first].astype(np.int64)
        copied_U = np.zeros(len(length_U), np.bool_)
        if reuse is not None:
            copied_U = Reuse(reuse, spec).rows(np.asarray(index.keys)) >= 0
        needed_U = _operations(asked, length_U)
        pace = _operations_per_second(directory, plan, asked, needed_U, tokens, seconds)
        together = processes if asked.device.type == "cuda" else 1  # processes of a CPU share its cores
        hours = float(needed_U[~copied_U].sum()) / pace / together / 3600
        over = int((length_N > long.window).sum())
        treated = {
            "full": "taken whole, none is cut",
            "window": f"seen in windows that share {long.overlap:,}, none is cut",
            "truncate": f"{over:,} are cut to their first {long.window:,}",
        }[long.mode]
        lines = [
            f"{named}: {len(length_N):,} records, {length_N.sum(dtype=np.int64):,} residues, "
            f"longest {length_N.max():,}",
            f"duplicates  {len(length_N) - len(length_U):,} records whose sequence came before",
            f"sequences   {len(length_U):,}: {(~copied_U).sum():,} are computed, {copied_U.sum():,} reused",
            f"long        {over:,} records over {long.window:,} residues: {treated}",
            f"parts       {len(parts):,}, {size_text(parts_bytes)}",
            f"time        {hours:.2f} hours ({duration(3600 * hours)}) to compute on {asked.device.type}",
            f"at most     {size_text(before + parts_bytes + made_bytes)} while it runs, "
            f"{size_text(shutil.disk_usage(place).free)} free at {place}",
        ]
        if asked.fmt != PARTS:
            lines.insert(-1, f"{asked.fmt:<11} about {size_text(made_bytes)}")
        return "\n".join(lines)


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
    plan: dict[str, Any],
    asked: EmbedRequest,
    needed_U: npt.NDArray[np.float64],
    tokens: int | None,
    seconds: float,
) -> float:
    """Compute up to 1,024 rows that are spread evenly over the input, without tracks, until `seconds` have passed."""
    index, store = Parts(directory, plan).index, store_of(directory, plan)
    embedder = engines.make_embedder(plan, asked.device, tokens)
    rows = np.unique(np.linspace(0, len(needed_U) - 1, min(1024, len(needed_U))).astype(np.int64))
    sequences = [engines.with_ends(store.residues(int(record))) for record in index.first[rows]]
    for _ in embedder.compute([min(sequences, key=len)]):  # The first call of a model is slow.
        pass
    say(f"computes some packs, for about {seconds:.0f} s at most")
    done, began = 0.0, time.monotonic()
    for place, _ in embedder.compute(sequences):
        done += float(needed_U[rows[place]])
        if time.monotonic() - began > seconds:
            break
    return done / (time.monotonic() - began)
