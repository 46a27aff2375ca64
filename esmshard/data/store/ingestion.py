"""Ingestion: reads FASTA files into a token store (`esmshard.data.store.token_store`) in pieces, with any number of
processes, and resumes after interruptions.

The sizes of the files alone decide how the input is cut into pieces of SHARD bytes: ranges of a large plain file,
groups of small files, and each compressed file by itself. Every finished piece is put into `STORE.partial`; when all
pieces are there, they become the store. So one process, many processes (`workers`) and many jobs on a shared file
system (`ingest_part`, then `merge`) write the same bytes, and after an interruption only the missing pieces are read
again. Nothing is synced to disk: a store that a power cut truncated is refused when it is read.

Memory: one block of the input for each process, and at the end the arrays of the index (32 bytes a record).
"""

import hashlib
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
from esmshard.errors import InputError, UsageError, unwritable, writing
from esmshard.files import cache_directory, check_replaced, read_json, sha256, state
from esmshard.progress import INTERVAL, say
from esmshard.vocab import ALPHABET_HASH, EOS

OnDuplicate = Literal["error", "first", "suffix"]

SHARD = 1 << 26
"""Bytes of FASTA text that become one shard of the store, up to the end of a record."""

Say = Callable[[str], None]

_ROOM = "make room, and run the same command again"


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
        on_duplicate: what happens to an id that comes again (see `duplicates.without_duplicates`).
        workers: number of processes. One compressed file is read by one process.
        overwrite: replace the store at `out` when the new store is complete.
        say: takes messages: whether an earlier attempt is continued or started again and, every few seconds, the number
            of records read.

    Raises:
        InputError: a file cannot be read; nothing is left behind then. After any other interruption the finished pieces
            stay, and the same call continues from there.
        UsageError: `out` exists.
    """
    work = _partial(out)
    _check_out(out, overwrite)
    plan = _plan(fastas, rules, on_duplicate)
    made = _missing_parents(out)
    if (work / "plan.json").exists():
        if STDIN in fastas or _read_plan(work) != plan:
            say(f"{work}: left by an ingest of other files or with other options; starting over")
            _remove(work)
        else:
            say(f"{work}: going on with an interrupted ingest")
    counter = _Counter(say)
    with writing(out, _ROOM):
        _claim(work, plan)
    try:
        missing = [] if is_store(work / "store") else _missing_pieces(work, plan)
        if workers > 1 and len(missing) > 1 and STDIN not in fastas:  # Other processes do not have this standard input.
            # Workers are spawned, since forked processes would inherit the threads of this process.
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(min(workers, len(missing)), mp_context=context) as pool:
                try:
                    for done in [pool.submit(read_piece, work, plan, fastas, k) for k in missing]:
                        # In file order, so that the first of several mistakes is reported.
                        counter.add(done.result())
                except BrokenProcessPool:
                    raise ChildProcessError(
                        "a worker process was killed, perhaps because memory ran out; run the same command again with "
                        "fewer workers, it goes on from here"
                    ) from None
                finally:
                    pool.shutdown(cancel_futures=True)
        else:
            for k in missing:
                read_piece(work, plan, fastas, k, counter.add)
        if _plan(fastas, rules, on_duplicate) != plan:
            raise InputError(f"{', '.join(map(str, fastas))}: changed while being read; ingest again")
        return _merge(out, fastas, overwrite)
    except InputError:
        _remove(work)
        for directory in made:
            with suppress(OSError):  # Another process may have put something into the directory.
                directory.rmdir()
        raise
    except OSError as error:
        if unwritable(error) is None:
            raise
        with writing(out, f"{_ROOM}; it goes on with what is in {work}"):
            raise


def ingest_part(
    fastas: Sequence[Path],
    out: Path,
    part: int,
    parts: int,
    rules: Rules = Rules(),  # noqa: B008  # frozen
    on_duplicate: OnDuplicate = "error",
) -> tuple[int, int]:
    """Read one part of the pieces, for an array job. `merge(out)` makes the store when all parts are done.

    Args:
        fastas: as in `ingest`; the same for all parts.
        out: the directory of the future store.
        part: 1 to `parts`.
        parts: number of jobs.
        rules: as in `ingest`.
        on_duplicate: as in `ingest`.

    Returns:
        The number of pieces of this part, and the number of all pieces.
    """
    if STDIN in fastas:
        raise UsageError("--part: the standard input cannot be read in parts; name files")
    work, plan = _partial(out), _plan(fastas, rules, on_duplicate)
    mine = range(part - 1, len(plan["pieces"]), parts)
    with writing(out, _ROOM):
        _claim(work, plan)
        for k in mine:
            if not piece_directory(work, k).exists():
                read_piece(work, plan, fastas, k)
    return len(mine), len(plan["pieces"])


def merge(out: Path, overwrite: bool = False) -> TokenStore:
    """Make a store of the pieces in `STORE.partial`; `overwrite` replaces the store at `out`.

    Raises:
        UsageError: pieces are missing, or `out` exists.
        InputError: an id comes twice and the rules do not allow this.
    """
    work = _partial(out)
    _check_out(out, overwrite)
    if not (work / "plan.json").is_file():
        raise UsageError(f"{work}: no parts to merge; run `esmshard ingest FASTA... -o {out} --part I/N` first")
    plan = _read_plan(work)
    if (plan["version"], plan["alphabet"]) != (VERSION, ALPHABET_HASH):
        raise UsageError(f"{work}: its parts were read by another version; delete it and read them again")
    with writing(out, _ROOM):
        return _merge(out, [Path(source["path"]) for source in plan["sources"]], overwrite)


def _merge(out: Path, fastas: Sequence[Path], overwrite: bool) -> TokenStore:
    work = _partial(out)
    plan = _read_plan(work)
    whole = work / "store"
    if not is_store(whole):
        missing = _missing_pieces(work, plan)
        if missing:
            raise UsageError(
                f"{work}: {len(missing)} of {len(plan['pieces'])} pieces are missing; run the parts that failed again"
            )
        _assemble(work, plan, fastas, whole)
    for k in range(len(plan["pieces"])):  # They must not be taken for finished pieces if the store is deleted later.
        shutil.rmtree(piece_directory(work, k), ignore_errors=True)
    final = without_duplicates(whole, work / "final", plan["on_duplicate"], fastas)
    if plan["rules"]["on_nucleotides"] == "error":
        store = TokenStore(final)
        if found := nucleotides.finding(nucleotides.some(store), counted(len(store), "record")):
            named = ", ".join(map(str, fastas))
            raise InputError(f"{named}: {found}; translate them, or {in_a_store('--on-nucleotides keep')}")
    if overwrite and out.exists():
        _remove(out)
    try:
        final.rename(out)
    except OSError:
        if not is_store(out):  # Another process has made the same store meanwhile.
            raise
    _remove(work)
    return TokenStore(out)


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


def _check_out(out: Path, overwrite: bool = False) -> None:
    if out.exists() and not overwrite:
        raise UsageError(f"{out}: exists already; choose another directory or pass --overwrite")
    shards = ("tokens-*.u8", "headers-*.txt")
    check_replaced(out, ["manifest.json", *shards, *ARRAYS], marker="manifest.json")


def _partial(out: Path) -> Path:
    if out.name in ("", ".."):
        raise UsageError(f"{out}: give the directory of the store a name")
    return out.with_name(f"{out.name}.partial")


def _missing_pieces(work: Path, plan: dict[str, Any]) -> list[int]:
    return [k for k in range(len(plan["pieces"])) if not piece_directory(work, k).exists()]


def _remove(directory: Path) -> None:
    """Delete a directory under another name, so that after a crash no half of it is taken for the whole."""
    if directory.exists():
        trash = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        directory.rename(trash / directory.name)
        shutil.rmtree(trash, ignore_errors=True)


def _missing_parents(out: Path) -> list[Path]:
    return [directory for directory in out.parents if not directory.exists()]


def _plan(fastas: Sequence[Path], rules: Rules, on_duplicate: str) -> dict[str, Any]:
    """Return everything that decides what the store will hold, ready for JSON."""
    if list(fastas).count(STDIN) > 1:
        raise UsageError("-: the standard input can be read once; name it once")
    sources: list[dict[str, Any]] = []
    pieces: list[Piece] = []
    group, size = Piece(sources=[]), 0
    for number, fasta in enumerate(fastas):
        if fasta == STDIN:
            sources.append({"path": "-"})
            pieces += [group, Piece(sources=[number])]
            group, size = Piece(sources=[]), 0
            continue
        plain = is_plain(fasta)
        stat = fasta.stat()
        sources.append({"path": str(fasta.resolve()), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns})
        if size + stat.st_size > SHARD:
            pieces.append(group)
            group, size = Piece(sources=[]), 0
        if plain and stat.st_size > SHARD:
            starts = range(0, stat.st_size, SHARD)
            pieces += [Piece(sources=[number], start=start, stop=start + SHARD) for start in starts]
        else:
            group["sources"].append(number)
            size += stat.st_size
    pieces = [piece for piece in [*pieces, group] if piece["sources"]]
    return {
        "format": FORMAT,
        "version": VERSION,
        "alphabet": ALPHABET_HASH,
        "shard": SHARD,
        "sources": sources,
        "rules": rules.recorded(),
        "on_duplicate": on_duplicate,
        "pieces": pieces,
    }


def _read_plan(work: Path) -> dict[str, Any]:
    try:
        plan: dict[str, Any] = read_json(work / "plan.json")
    except (OSError, ValueError):
        raise InputError(f"{work}/plan.json: cannot be read; delete {work} and ingest again") from None
    return plan


def _claim(work: Path, plan: dict[str, Any]) -> None:
    """Make the directory of the pieces, or check that the existing one has the same plan. Several parts may do this at
    once.
    """
    if not work.exists():
        work.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{work.name}-", dir=work.parent))
        try:
            (scratch / "plan.json").write_text(json.dumps(plan, indent=1), encoding="utf-8")
            scratch.rename(work)
        except OSError:
            if not work.exists():  # Another process was faster.
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    if _read_plan(work) != plan:
        raise UsageError(f"{work}: belongs to an ingest of other files or with other options; delete it to start over")


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


def _assemble(work: Path, plan: dict[str, Any], fastas: Sequence[Path], whole: Path) -> None:
    """Move the shards of all pieces into one directory and index them. May be interrupted and called again."""
    whole.mkdir(exist_ok=True)
    shards: list[Shard] = []
    edits = Edits()
    pieces = [piece_directory(work, k) for k in range(len(plan["pieces"]))]
    for piece in pieces:
        report = read_json(piece / "piece.json")
        edits.extend(Edits(report["counts"], report["first"]))
        for k, shard in enumerate(report["shards"]):
            for old, new in ((token_shard(k), token_shard(len(shards))), (header_shard(k), header_shard(len(shards)))):
                if not (whole / new).exists():
                    (piece / old).rename(whole / new)
            shards.append(Shard(**shard))
    if not any(shard.records for shard in shards):
        raise InputError(f"{', '.join(map(str, fastas))}: no record is left under these rules")
    sources = [source | {"path": Path(source["path"]).name} for source in plan["sources"]]
    sources = [{key: source[key] for key in ("path", "bytes") if key in source} for source in sources]
    facts = {"sources": sources, "rules": plan["rules"], "on_duplicate": plan["on_duplicate"]}
    arrays = ([np.load(piece / f"{name}.npy") for name in ("lengths", "headers", "keys")] for piece in pieces)
    write_index(whole, shards, arrays, facts, edits)


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
