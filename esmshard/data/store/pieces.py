"""One piece of the input of an ingestion, read into its own shards and arrays."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.fasta.fasta_blocks import Block, read_blocks
from esmshard.data.fasta.symbols import Edits, Rules
from esmshard.data.store.store_index import Shard
from esmshard.data.store.token_store import header_shard, keys, token_shard

Piece = dict[str, Any]
"""`sources`: numbers of input files. For a range of one plain file also `start` and `stop`, in bytes."""


def piece_directory(work: Path, number: int) -> Path:
    """Return the directory that a piece has when it is complete."""
    return work / f"piece-{number:05d}"


def read_piece(
    work: Path,
    plan: dict[str, Any],
    fastas: Sequence[Path],
    number: int,
    count: Callable[[int], None] = lambda _: None,
) -> int:
    """Read one piece into a directory that gets its name when it is complete. Return the number of records."""
    target = piece_directory(work, number)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=work))
    try:
        piece, edits = plan["pieces"][number], Edits()
        with _Writer(scratch) as writer:
            rules = Rules(**plan["rules"])
            base = 0
            for source in piece["sources"]:
                start, last = piece.get("start", 0), base
                for block in read_blocks(fastas[source], edits, rules, start, piece.get("stop")):
                    read = base + block.at - start
                    for shard, part in _by_shard(block, read, plan["shard"]):
                        writer.add(shard, part)
                    last = read + len(block.chunk)
                    count(len(block.ids))
                base = last  # The next small file continues where this file ends.
        shards = [asdict(shard) for shard in writer.shards]
        report = {"shards": shards, "counts": edits.counts, "first": edits.first}
        (scratch / "piece.json").write_text(json.dumps(report), encoding="utf-8")
        try:
            scratch.rename(target)
        except OSError:
            if not target.exists():  # Another process has read the same piece meanwhile.
                raise
        return sum(shard.records for shard in writer.shards)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _by_shard(block: Block, read: int, size: int) -> Iterator[tuple[int, Block]]:
    """Yield (shard, records) of a block that begins `read` bytes after its piece. The `>` of a record decides its
    shard.
    """
    if read // size == (read + len(block.chunk) - 1) // size:
        yield read // size, block
        return
    shard_N = (read + block.starts - block.at) // size
    stops = np.cumsum(block.lengths + 1)
    for shard in np.unique(shard_N).tolist():
        begin, end = np.searchsorted(shard_N, [shard, shard + 1]).tolist()
        first, last = int(stops[begin - 1]) if begin else 0, int(stops[end - 1])
        yield (
            shard,
            replace(
                block,
                ids=block.ids[begin:end],
                headers=block.headers[begin:end],
                tokens=block.tokens[first:last],
                lengths=block.lengths[begin:end],
            ),
        )


class _Writer:
    """A writer of the shards of one piece that also collects the arrays for the index."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._current = directory, -1
        self.shards: list[Shard] = []
        self._arrays: tuple[list[npt.NDArray[Any]], ...] = ([], [], [])

    def add(self, number: int, block: Block) -> None:
        """Append records to a shard. When the shard number changes, new files are opened."""
        if number != self._current:
            self._close()
            self._current = number
            k = len(self.shards)
            names = (token_shard(k), header_shard(k))
            self._files = [open(self._directory / name, "wb") for name in names]  # noqa: SIM115
            self._hashes = [hashlib.sha256(), hashlib.sha256()]
            self.shards.append(Shard())
        lines = b"\n".join([*block.headers, b""])
        for file, digest, data in zip(self._files, self._hashes, (block.tokens, lines), strict=True):
            file.write(data)
            digest.update(data)
        shard = self.shards[-1]
        shard.records += len(block.ids)
        shard.tokens += len(block.tokens)
        shard.headers += len(lines)
        columns: tuple[npt.NDArray[Any], ...] = (
            block.lengths.astype(np.int32),
            np.fromiter(map(len, block.headers), np.int32, len(block.headers)),
            keys(block.ids),
        )
        for parts, column in zip(self._arrays, columns, strict=True):
            parts.append(column)

    def _close(self) -> None:
        if self.shards:
            for file in self._files:
                file.close()
            self.shards[-1].sha256 = [digest.hexdigest() for digest in self._hashes]

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        for name, parts, dtype in zip(("lengths", "headers", "keys"), self._arrays, "iiQ", strict=True):
            np.save(self._directory / f"{name}.npy", np.concatenate([np.zeros(0, dtype), *parts]))
