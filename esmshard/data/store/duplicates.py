"""Ids that come more than once in a token store. The store's index finds them, so that memory does
not grow with them.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from esmshard.data.fasta.fasta_reader import READ_ONCE, repeated
from esmshard.data.fasta.symbols import Edits
from esmshard.data.store.store_index import Shard, write_index
from esmshard.data.store.token_store import TokenStore, header_shard, keys, token_shard
from esmshard.errors import InputError
from esmshard.files import sha256
from esmshard.vocab import EOS

OnDuplicate = Literal["error", "first", "suffix"]


def without_duplicates(whole: Path, final: Path, on_duplicate: OnDuplicate, sources: Sequence[Path]) -> Path:
    """Return the directory of a store in which every id comes once: `whole` if this is true already, else a new store
    at `final`.

    Args:
        whole: a store, which is not changed.
        final: the directory of the new store; replaced if it exists.
        on_duplicate: what happens to an id that comes again. `error`: the record is read once and counted if the
            sequence is the same, else refused. `first`: all records but the first are left out. `suffix`: later records
            are named `ID_2`, `ID_3` ..., with numbers that are free.
        sources: the FASTA files, for messages.

    Raises:
        InputError: an id has two sequences; the message names it.
    """
    store = TokenStore(whole)
    dropped: dict[int, str] = {}
    renamed: dict[int, str] = {}
    clash: tuple[int, str] | None = None
    taken: set[str] = set()
    for name, rows in _repeated_ids(store):
        first = store.residues(rows[0])
        for place, n in enumerate(rows[1:], 2):
            same = np.array_equal(first, store.residues(n))
            if on_duplicate == "suffix":
                number = place
                while f"{name}_{number}" in taken or store.find(f"{name}_{number}") is not None:
                    number += 1
                renamed[n] = f"{name}_{number}"
                taken.add(renamed[n])
            elif same:
                dropped[n] = READ_ONCE
            elif on_duplicate == "first":
                dropped[n] = "a record with the id of an earlier one and another sequence was left out"
            else:
                clash = min(clash or (n, name), (n, name))
    if clash is not None:
        raise InputError(repeated(clash[1], sources))
    if not dropped and not renamed:
        return whole
    edits = Edits()
    for kind, entry in store.manifest["edits"].items():
        edits.counts[kind], edits.first[kind] = entry["records"], list(entry["first"])
    for n in sorted({*dropped, *renamed}):
        edits.add(dropped.get(n, "an id that came again got a number"), renamed.get(n) or store.id(n))
    _rewrite(store, final, dropped, renamed, edits)
    return final


def _repeated_ids(store: TokenStore) -> Iterator[tuple[str, list[int]]]:
    """Yield each id that several records have, with the numbers of these records in file order."""
    again = np.flatnonzero(store.keys[1:] == store.keys[:-1])  # Rows k and k + 1 of the index share a key.
    for run in np.split(again, np.flatnonzero(np.diff(again) > 1) + 1) if len(again) else []:
        by_id: dict[str, list[int]] = {}
        for n in store.rows[run[0] : run[-1] + 2].tolist():  # The index is sorted stably, so these are in file order.
            by_id.setdefault(store.id(n), []).append(n)
        yield from ((name, rows) for name, rows in by_id.items() if len(rows) > 1)


def _rewrite(store: TokenStore, final: Path, dropped: dict[int, str], renamed: dict[int, str], edits: Edits) -> None:
    """Copy a store: unchanged shards are hard-linked, the others are written record by record."""
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir()
    touched = np.array(sorted({*dropped, *renamed}))
    keys_N = np.empty(len(store), np.uint64)
    keys_N[store.rows] = store.keys
    length_N, header_N = np.diff(store.offsets) - 1, np.diff(store.header_offsets) - 1
    shards: list[Shard] = []
    hashes = store.manifest["sha256"]
    begin = 0
    for k, old in enumerate(store.manifest["shards"]):
        rows = range(begin, begin + old["records"])
        begin = rows.stop
        tokens, headers = final / token_shard(len(shards)), final / header_shard(len(shards))
        if np.searchsorted(touched, rows.start) == np.searchsorted(touched, rows.stop):
            for name, path in ((token_shard(k), tokens), (header_shard(k), headers)):
                _link(store.path / name, path)
            shards.append(Shard(**old, sha256=[hashes[token_shard(k)], hashes[header_shard(k)]]))
            continue
        shard = Shard()
        with open(tokens, "wb") as token_file, open(headers, "wb") as header_file:
            for n in rows:
                if n in dropped:
                    continue
                header = store.header(n)
                if n in renamed:
                    old_id, new_id = store.id(n).encode(), renamed[n].encode()
                    header = new_id + header.lstrip()[len(old_id) :]
                    header_N[n], keys_N[n] = len(header), keys([new_id])[0]
                token_file.write(store.residues(n).tobytes() + bytes([EOS]))
                header_file.write(header + b"\n")
                shard.records += 1
        if shard.records:
            shard.tokens, shard.headers = tokens.stat().st_size, headers.stat().st_size
            shard.sha256 = [sha256(tokens), sha256(headers)]
            shards.append(shard)
        else:
            tokens.unlink()
            headers.unlink()
    kept = np.ones(len(store), dtype=bool)
    kept[list(dropped)] = False
    facts = {name: store.manifest[name] for name in ("sources", "rules", "on_duplicate")}
    write_index(final, shards, [(length_N[kept], header_N[kept], keys_N[kept])], facts, edits)


def _link(old: Path, new: Path) -> None:
    try:
        new.hardlink_to(old)
    except OSError:  # Not every file system has hard links.
        shutil.copyfile(old, new)
