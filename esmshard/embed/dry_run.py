"""The time and the disk space of an embedding job, estimated before it begins (`embed --dry-run`)."""

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from esmshard.embed.compute import Work, opened, with_ends
from esmshard.embed.engines import check_fits, file_bytes, numbers_bytes, read_from
from esmshard.embed.parts import Parts, Reuse, begin, read_input
from esmshard.embed.spec import PARTS, EmbedRequest
from esmshard.io import remote
from esmshard.io.paths import size_text
from esmshard.parallel.process_group import processes_of
from esmshard.progress import duration, say

SECONDS = 20.0
"""The time after which no further pack is computed."""


def forecast(
    asked: EmbedRequest, fasta: Path, *, nproc: int | None = None, tokens: int | None = None, reuse: Path | None = None
) -> str:
    """Plan a job, compute some packs, and remove all files again; describe the job in some lines.

    Args:
        asked: the request, see `request`.
        fasta: the input.
        nproc: processes of the job.
        tokens: tokens computed at once.
        reuse: an earlier directory of parts.

    Raises:
        InputError: if the output cannot fit on the disk, or the input cannot be read.
        UsageError: if the request cannot be carried out.
    """
    spec, long, in_bucket = asked.spec, asked.spec.long, remote.address(asked.out) is not None
    place = next(parent for parent in asked.out.absolute().parents if parent.is_dir())
    place = Path(tempfile.gettempdir()) if in_bucket else place
    with (
        tempfile.TemporaryDirectory(prefix=".esmshard-dry-run-", dir=place, ignore_cleanup_errors=True) as name,
        read_from(asked, fasta) as (read, path, _),
    ):
        directory = Path(name) / "plan"
        parts = Parts(directory, begin(directory, path, read))
        parts_bytes, made_bytes = numbers_bytes(asked, parts, range(len(parts))), file_bytes(asked, parts)
        before = sum(path.stat().st_size for path in Path(name).rglob("*") if path.is_file())
        if not (in_bucket and asked.fmt == PARTS):  # parts are uploaded one by one
            check_fits(place, parts_bytes + made_bytes)
        length_N = np.asarray(parts.index.lengths)
        length_U, copied_U = length_N[parts.index.first].astype(np.int64), np.zeros(len(parts.index.first), np.bool_)
        if reuse is not None:
            copied_U = Reuse(remote.local(reuse), spec).rows(np.asarray(parts.index.keys)) >= 0
        # Operations of the linear layers and of attention; a sequence in windows has as many windows as fit into it.
        seen_U = (length_U if long.mode == "full" else np.minimum(length_U, long.window)) + 2.0
        windows_U = np.maximum(1, length_U / long.window) if long.mode == "window" else 1
        needed_U = windows_U * seen_U * (24 * spec.dim + 4 * seen_U)
        store = read_input(path, directory / "work" / "input", spec.chains.tokens)
        embedder = opened(Work(directory, store.path, asked.model, str(asked.device), tokens)).embedder
        # Rows that are spread evenly over the input, without tracks. The first call of a model is slow.
        rows = np.unique(np.linspace(0, len(length_U) - 1, min(1024, len(length_U))).astype(np.int64))
        sequences = [with_ends(store.residues(int(record))) for record in parts.index.first[rows]]
        for _ in embedder.compute([min(sequences, key=len)]):
            pass
        say(f"computes some packs, for about {SECONDS:.0f} s at most")
        done, began = 0.0, time.monotonic()
        for row, _ in embedder.compute(sequences):
            done += float(needed_U[rows[row]])
            if time.monotonic() - began > SECONDS:
                break
        opened.cache_clear()
        # Processes of a CPU share its cores.
        together = processes_of(asked.device, nproc) if asked.device.type == "cuda" else 1
        seconds = float(needed_U[~copied_U].sum()) * (time.monotonic() - began) / done / together
        over = int((length_N > long.window).sum())
        treated = {
            "full": "taken whole, none is cut",
            "window": f"seen in windows that share {long.overlap:,}, none is cut",
            "truncate": f"{over:,} are cut to their first {long.window:,}",
        }[long.mode]
        lines = [
            f"{fasta}: {len(length_N):,} records, {length_N.sum(dtype=np.int64):,} residues, "
            f"longest {length_N.max():,}",
            f"duplicates  {len(length_N) - len(length_U):,} records whose sequence came before",
            f"sequences   {len(length_U):,}: {(~copied_U).sum():,} are computed, {copied_U.sum():,} reused",
            f"long        {over:,} records over {long.window:,} residues: {treated}",
            f"parts       {len(parts):,}, {size_text(parts_bytes)}",
            f"time        {seconds / 3600:.2f} hours ({duration(seconds)}) to compute on {asked.device.type}",
            f"at most     {size_text(before + parts_bytes + made_bytes)} while it runs, "
            f"{size_text(shutil.disk_usage(place).free)} free at {place}",
        ]
        if asked.fmt != PARTS:
            lines.insert(-1, f"{asked.fmt:<11} about {size_text(made_bytes)}")
        return "\n".join(lines)
