"""The arrays and the manifest of a token store, which are written after its shards."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.fasta.symbols import Edits
from esmshard.data.store.token_store import ARRAYS, FORMAT, VERSION, header_shard, manifest_sha256, token_shard
from esmshard.files import sha256
from esmshard.vocab import ALPHABET_HASH

_EDGES = np.array([0, 32, 64, 128, 192, 256, 384, 512, 768, 1023, 2048, 4096, 8192, 1 << 31])
"""First lengths of the bins of the length histogram, in residues. ESM-2 was trained on at most 1022 residues."""


@dataclass
class Shard:
    """The entry of the manifest for one shard: a file of tokens and a file of headers."""

    records: int = 0
    tokens: int = 0
    """Size of the file of tokens in bytes."""
    headers: int = 0
    """Size of the file of headers in bytes."""
    sha256: list[str] = field(default_factory=list)
    """The sha256 of the files of tokens and of headers."""


def write_index(
    directory: Path,
    shards: Sequence[Shard],
    columns: Iterable[Sequence[npt.NDArray[Any]]],
    facts: Mapping[str, Any],
    edits: Edits,
) -> None:
    """Index the shards of a directory, which makes the directory a store.

    Args:
        directory: the directory with the shards under their final names.
        shards: what the shards hold.
        columns: arrays of some records at a time, in file order: residues, bytes of the header line, and
            `token_store.keys` of the id.
        facts: further entries of the manifest.
        edits: what was changed while reading.
    """
    total = sum(shard.records for shard in shards)
    offsets = _array(directory / "offsets.npy", total + 1)
    headers = _array(directory / "headers.npy", total + 1)
    keys = np.empty(total, np.uint64)
    histogram = np.zeros(len(_EDGES) - 1, np.int64)
    shortest, longest, at = 1 << 62, 0, 0
    for length_N, header_N, key_N in columns:
        if not len(length_N):
            continue
        rows = slice(at + 1, at + 1 + len(length_N))
        for array, column_N in ((offsets, length_N), (headers, header_N)):  # Each record has one byte more at its end.
            np.cumsum(column_N.astype(np.int64) + 1, out=array[rows])
            array[rows] += array[at]
        keys[at : at + len(key_N)] = key_N
        histogram += np.histogram(length_N, _EDGES)[0]
        shortest, longest = min(shortest, int(length_N.min())), max(longest, int(length_N.max()))
        at += len(length_N)
    assert at == total
    residues = int(offsets[-1]) - total
    del offsets, headers  # Deleting the arrays writes them to disk.
    order = np.argsort(keys, kind="stable")
    np.save(directory / "rows.npy", order.astype(np.uint32 if total < 1 << 32 else np.uint64))
    np.save(directory / "ids.npy", keys[order])
    names = [name for k in range(len(shards)) for name in (token_shard(k), header_shard(k))]
    hashes = dict(zip(names, (digest for shard in shards for digest in shard.sha256), strict=True))
    hashes |= {name: sha256(directory / name) for name in ARRAYS}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "alphabet": ALPHABET_HASH,
        "records": total,
        "residues": residues,
        "lengths": {
            "shortest": shortest,
            "longest": longest,
            "mean": round(residues / total, 2),
            "histogram": {
                f"{low}-{high - 1}": int(count)
                for low, high, count in zip(_EDGES[:-1], _EDGES[1:], histogram, strict=True)
                if count
            },
        },
        **facts,
        "edits": {kind: {"records": count, "first": edits.first[kind][:3]} for kind, count in edits.counts.items()},
        "notices": edits.notices(),
        "shards": [{"records": s.records, "tokens": s.tokens, "headers": s.headers} for s in shards],
        "sha256": hashes,
    }
    manifest["manifest_sha256"] = manifest_sha256(manifest)
    scratch = directory / ".manifest.json"
    scratch.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    scratch.rename(directory / "manifest.json")  # The manifest makes the directory a store.


def _array(path: Path, length: int) -> npt.NDArray[np.int64]:
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=(length,))
    array[0] = 0
    return array
