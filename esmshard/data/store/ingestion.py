"""Ingestion: reads FASTA files into a token store (`esmshard.data.store.token_store`) with any number of processes.

The sizes of the files alone decide how the input is cut into pieces of SHARD bytes: ranges of a large plain file,
groups of small files, and each compressed file by itself. So any number of processes writes the same bytes. The store
gets its name when it is complete, and after an interruption the input is read again. Nothing is synced to disk: a store
that a power cut truncated is refused when it is read.

Memory: one block of the input for each process, and at the end the arrays of the index (32 bytes a record).
"""

import hashlib
import json
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from esmshard.data.fasta import nucleotides
from esmshard.data.fasta.fasta_blocks import Block, read_blocks
from esmshard.data.fasta.fasta_reader import READ_ONCE, repeated
from esmshard.data.fasta.sources import CONVERSION, STDIN, is_plain, other_kind
from esmshard.data.fasta.symbols import Edits, Rules, in_a_store
from esmshard.data.store.store_index import Shard, write_index
from esmshard.data.store.token_store import (
    ARRAYS,
    FORMAT,
    VERSION,
    TokenStore,
    header_shard,
    is_store,
    keys,
    token_shard,
)
from esmshard.data.tables import counted
from esmshard.errors import InputError, UsageError, writing
from esmshard.files import cache_directory, check_replaced, read_json, sha256, state, whole_directory
from esmshard.progress import INTERVAL, say
from esmshard.vocab import ALPHABET_HASH, EOS

OnDuplicate = Literal["error", "first", "suffix"]

SHARD = 1 << 26
"""Bytes of FASTA text that become one shard of the store, up to the end of a record."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Piece:
    """What one process reads at a time."""

    sources: list[int] = field(default_factory=list)
    """The numbers of input files."""
    start: int = 0
    """The first byte, and the byte after the last one, of a range of one plain file."""
    stop: int | None = None


def ingest(
    fastas: Sequence[Path],
    out: Path,
    rules: Rules = Rules(),  # noqa: B008  # frozen
    on_duplicate: OnDuplicate = "error",
    workers: int = 1,
    overwrite: bool = False,
    say: Say = say,
) -> TokenStore:
    """Read FASTA files into a new store at `out`. An id in two files is a duplicate like any other.

    Args:
        fastas: plain or compressed files; `-` is standard input.
        out: a directory that does not exist yet.
        rules: what may be changed while reading.
        on_duplicate: what happens to an id that comes again (see `without_duplicates`).
        workers: number of processes. One compressed file is read by one process.
        overwrite: replace the store at `out` when the new store is complete.
        say: takes the number of records read, every few seconds.

    Raises:
        InputError: a file cannot be read; nothing is left behind then.
        UsageError: `out` exists.
    """
    if out.name in ("", ".."):
        raise UsageError(f"{out}: give the directory of the store a name")
    if out.exists() and not overwrite:
        raise UsageError(f"{out}: exists already; choose another directory or pass --overwrite")
    shards = ("tokens-*.u8", "headers-*.txt")
    check_replaced(out, ["manifest.json", *shards, *ARRAYS], marker="manifest.json")
    sources, pieces = _pieces(fastas)
    made, named = [parent for parent in out.parents if not parent.exists()], ", ".join(map(str, fastas))
    try:
        with writing(out, "make room, and run the same command again"), whole_directory(out, sync=False) as work:
            whole = work / "whole"
            _read_pieces(work, pieces, fastas, rules, workers, _Counter(say))
            if _pieces(fastas) != (sources, pieces):
                raise InputError(f"{named}: changed while being read; ingest again")
            _assemble(work, len(pieces), whole, named, sources, rules, on_duplicate)
            final = without_duplicates(whole, work / "final", on_duplicate, fastas)
            if rules.on_nucleotides == "error":
                store = TokenStore(final)
                if found := nucleotides.finding(nucleotides.some(store), counted(len(store), "record")):
                    raise InputError(f"{named}: {found}; translate them, or {in_a_store('--on-nucleotides keep')}")
            for file in final.iterdir():
                file.rename(work / file.name)
            for directory in [path for path in work.iterdir() if path.is_dir()]:
                shutil.rmtree(directory)
    except InputError:
        for directory in made:
            with suppress(OSError):  # Another process may have put something into the directory.
                directory.rmdir()
        raise
    return TokenStore(out)


def _read_pieces(
    work: Path, pieces: Sequence[Piece], fastas: Sequence[Path], rules: Rules, workers: int, counter: "_Counter"
) -> None:
    """Read all pieces into directories, in this process or in several."""
    if workers == 1 or len(pieces) == 1 or STDIN in fastas:  # Other processes do not have this standard input.
        for number, piece in enumerate(pieces):
            read_piece(work, number, piece, fastas, rules, counter.add)
        return
    # Workers are spawned, since forked processes would inherit the threads of this process.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(pieces)), mp_context=context) as pool:
        try:
            waiting = [pool.submit(read_piece, work, k, piece, fastas, rules) for k, piece in enumerate(pieces)]
            for done in waiting:  # In file order, so that the first of several mistakes is reported.
                counter.add(done.result())
        except BrokenProcessPool:
            raise ChildProcessError(
                "a worker process was killed, perhaps because memory ran out; run the same command again with fewer "
                "workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def cached(source: Path, rules: Rules = Rules(), linker: int | None = None) -> TokenStore:  # noqa: B008  # frozen
    """Open the store of a data path: the path itself, or the store of a FASTA file, which is ingested on first use and
    cached.

    The cache (`$ESMSHARD_CACHE`, else `$XDG_CACHE_HOME/esmshard`, else `~/.cache/esmshard`) is keyed by path and
    `files.state`, so that an edited file is read again. If several processes open the same file, one reads and the
    others wait.

    Args:
        source: the data path.
        rules: the rules for a FASTA file or table.
        linker: the number of tokens between two chains of a record; None for that of `rules`, and in a store any.

    Raises:
        InputError: the path cannot be read, or is a store whose chains were joined by another linker.
    """
    if is_store(source):
        store = TokenStore(source)
        if linker is not None:
            store.check_linker(linker, source)
        return store
    try:
        now = state(source)
    except OSError as error:
        raise InputError(f"{source}: {(error.strerror or 'cannot be read').lower()}") from None
    from filelock import FileLock  # slow to import

    name = f"{FORMAT}/{VERSION}/{ALPHABET_HASH}/{source.resolve()}/{now}"
    if other_kind(source) is not None:  # Which columns of a table are read follows from the table and these rules.
        name += f"/{CONVERSION}"
    if linker is not None:
        rules = replace(rules, linker=linker)
    if rules != Rules():
        name += f"/{rules}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:24]
    out, locks = cache_directory() / "stores" / digest, cache_directory() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{digest}.lock"):
        if out.exists():
            try:
                store = TokenStore(out)
                store.verify()
                return store
            except InputError:
                shutil.rmtree(out)  # This is a damaged copy; the FASTA file still has its records.
        return ingest([source], out, rules)


def _pieces(fastas: Sequence[Path]) -> tuple[list[dict[str, Any]], list[Piece]]:
    """Return facts about the files, and how they are cut into pieces."""
    if list(fastas).count(STDIN) > 1:
        raise UsageError("-: the standard input can be read once; name it once")
    sources: list[dict[str, Any]] = []
    pieces: list[Piece] = []
    group, size = Piece(), 0
    for number, fasta in enumerate(fastas):
        if fasta == STDIN:
            sources.append({"path": "-"})
            pieces += [group, Piece([number])]
            group, size = Piece(), 0
            continue
        plain = is_plain(fasta)
        stat = fasta.stat()
        sources.append({"path": str(fasta.resolve()), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns})
        if size + stat.st_size > SHARD:
            pieces.append(group)
            group, size = Piece(), 0
        if plain and stat.st_size > SHARD:
            pieces += [Piece([number], start, start + SHARD) for start in range(0, stat.st_size, SHARD)]
        else:
            group.sources.append(number)
            size += stat.st_size
    return sources, [piece for piece in [*pieces, group] if piece.sources]


@dataclass
class _Counter:
    """Adds up records, and says their number every few seconds."""

    say: Say
    records: int = 0
    last_said: float = field(default_factory=time.monotonic)

    def add(self, more: int) -> None:
        """Count so many more records."""
        self.records += more
        if time.monotonic() - self.last_said >= INTERVAL:
            self.last_said = time.monotonic()
            self.say(f"ingest: {self.records:,} records")


def _assemble(
    work: Path,
    count: int,
    whole: Path,
    named: str,
    sources: Sequence[Mapping[str, Any]],
    rules: Rules,
    on_duplicate: str,
) -> None:
    """Move the shards of all pieces into one directory and index them."""
    whole.mkdir()
    shards: list[Shard] = []
    edits = Edits()
    pieces = [work / f"piece-{number:05d}" for number in range(count)]
    for piece in pieces:
        report = read_json(piece / "piece.json")
        edits.extend(Edits(report["counts"], report["first"]))
        for k, shard in enumerate(report["shards"]):
            for old, new in ((token_shard(k), token_shard(len(shards))), (header_shard(k), header_shard(len(shards)))):
                (piece / old).rename(whole / new)
            shards.append(Shard(**shard))
    if not any(shard.records for shard in shards):
        raise InputError(f"{named}: no record is left under these rules")
    recorded = [{**source, "path": Path(source["path"]).name} for source in sources]
    recorded = [{key: source[key] for key in ("path", "bytes") if key in source} for source in recorded]
    facts = {"sources": recorded, "rules": rules.recorded(), "on_duplicate": on_duplicate}
    arrays = ([np.load(piece / f"{name}.npy") for name in ("lengths", "headers", "keys")] for piece in pieces)
    write_index(whole, shards, arrays, facts, edits)


def read_piece(
    work: Path,
    number: int,
    piece: Piece,
    fastas: Sequence[Path],
    rules: Rules,
    count: Callable[[int], None] = lambda _: None,
) -> int:
    """Read one piece into a directory of its own. Return the number of records."""
    directory, edits, base = work / f"piece-{number:05d}", Edits(), 0
    directory.mkdir()
    with _Writer(directory) as writer:
        for source in piece.sources:
            last = base
            for block in read_blocks(fastas[source], edits, rules, piece.start, piece.stop):
                read = base + block.at - piece.start
                for shard, part in _by_shard(block, read, SHARD):
                    writer.add(shard, part)
                last = read + len(block.chunk)
                count(len(block.ids))
            base = last  # The next small file continues where this file ends.
    report = {"shards": [asdict(shard) for shard in writer.shards], "counts": edits.counts, "first": edits.first}
    (directory / "piece.json").write_text(json.dumps(report), encoding="utf-8")
    return sum(shard.records for shard in writer.shards)


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


def without_duplicates(whole: Path, final: Path, on_duplicate: OnDuplicate, sources: Sequence[Path]) -> Path:
    """Return the directory of a store in which every id comes once: `whole` if this is true already, else a new store
    at `final`.

    Args:
        whole: a store, of which unchanged shards are moved.
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
    """Make another store of a store: unchanged shards are moved, the others are written record by record."""
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
                (store.path / name).rename(path)
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
