"""Writes token stores (`ingest`) and reads them (`TokenStore`): the tokens of sequence files as memory-mapped arrays.

A store is a directory, which has a temporary name until the store is complete. Files of version 4:

    tokens-00000.u8 ...   residue tokens of all records, one byte each, with `<eos>` after each record
    headers-00000.txt ... one header without `>` per line; its first word is the id
    offsets.npy           int64 [N + 1]: record n is bytes offsets[n] : offsets[n + 1] of the joined token shards
    headers.npy           int64 [N + 1]: header n is bytes headers[n] : headers[n + 1] of the joined header shards
    ids.npy               uint64 [N]: the hashes of the ids (function `keys`), sorted
    rows.npy              uint32 or uint64 [N]: the record index (from 0) of each hash in `ids.npy`
    manifest.json         version, alphabet, counts, lengths, sources, rules, edits; sha256 of each file, of all tokens
                          together, and of the manifest

The sha256 of the manifest and the arrays is checked when a store is opened, and the sha256 of a shard before its first
use in a process. So a damaged byte is never read as a residue or an id. The arrays are memory-mapped, not loaded.
"""

import bisect
import functools
import hashlib
import itertools
import json
import multiprocessing
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError, UsageError, writing
from esmshard.io.paths import check_replaced, locked_directory, read_json, sha256, state, whole_directory
from esmshard.io.sequences import CONVERSION, READ_ONCE, STDIN, is_plain, other_kind, read_blocks, repeated
from esmshard.io.symbols import JOINED, Edits, Rules, in_a_store, nucleotides
from esmshard.io.tables import counted
from esmshard.progress import INTERVAL, say
from esmshard.vocab import ALPHABET_HASH

FORMAT, VERSION = "esmshard-tokens", 4
ARRAYS = ("offsets.npy", "headers.npy", "ids.npy", "rows.npy")
COLUMNS = {"lengths": np.int32, "headers": np.int32, "keys": np.uint64}
"""The arrays of the temporary `columns.npz`. For each record: token count, header size in bytes, hash of the id."""
_OPEN_SHARDS = 256
"""The maximum number of shards that stay mapped into memory. Each mapped shard uses a file descriptor."""
_SAMPLE = 10_000
"""The maximum number of records that `ingest` checks for DNA and RNA. They are evenly spread over the store."""


class TokenStore:
    """An open token store. Tokens and headers are read from disk when they are used."""

    def __init__(self, path: Path, checked: frozenset[str] = frozenset()) -> None:
        """Open the store in the directory `path`. The sha256 of the files in `checked` is not checked again.

        Raise `InputError` if the manifest or an array is missing or changed, or if the store is not of this `VERSION`.
        """
        self.path = path
        self.manifest = _manifest(path)
        self._checked = set(checked)
        self.notices: list[str] = self.manifest["notices"]
        """Sentences about the changes that `ingest` made to sequences and ids."""
        for name in ARRAYS:
            self._check(name)
        self.offsets, self.header_offsets, self.keys, self.rows = (
            np.asarray(np.load(path / name, mmap_mode="r", allow_pickle=False)) for name in ARRAYS
        )
        # The number of the first record in each shard, and the offsets of its first token byte and header byte.
        sizes = [[shard["records"], shard["tokens"], shard["headers"]] for shard in self.manifest["shards"]]
        self._first_records, *self._first_bytes = np.cumsum([[0, 0, 0], *sizes], axis=0).T.tolist()
        # A reference to `self` in the cache would keep the files open, so the cache gets the path.
        self._mapped = functools.lru_cache(_OPEN_SHARDS)(functools.partial(_mapped, self.path))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "checked": frozenset(self._checked)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # The new process maps the files again.

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """The number of tokens of each record, with linkers between chains and without `<eos>`, int32 [N]."""
        lengths = np.empty(len(self), np.int32)
        np.subtract(self.offsets[1:], self.offsets[:-1], out=lengths, casting="unsafe")
        return lengths - 1

    @property
    def linker(self) -> int | None:
        """The number of tokens in each linker between chains; None if every record is one chain."""
        return linker_of(self.manifest)

    def check_linker(self, linker: int, path: Path) -> None:
        """Raise `InputError` if the linkers of this store do not have `linker` tokens. The message names `path`."""
        if self.linker not in (None, linker):
            raise InputError(
                f"{path}: its chains were joined by a linker of {self.linker} residues, but linker:{linker} is "
                f"requested; make a store with `esmshard ingest FASTA -o STORE --join linker:{linker}`, where FASTA is "
                f"{', '.join(source['path'] for source in self.manifest['sources'])}, or use linker:{self.linker}"
            )

    def residues(self, n: int) -> npt.NDArray[np.uint8]:
        """Return the residue tokens of record n (from 0), with the linkers between chains, uint8 [L]."""
        return self._read("tokens", 0, self.offsets, n)

    def description(self, n: int) -> str:
        """Return the header line of record n without `>`."""
        return self.header(n).strip().decode()

    def id(self, n: int) -> str:
        """Return the id of record n."""
        return self.header(n).split(None, 1)[0].decode()

    def find(self, record_id: str) -> int | None:
        """Return the index (from 0) of the record with this id; None if no record has the id."""
        name = record_id.encode(errors="surrogatepass")
        wanted = keys([name])[0]
        at = int(self.keys.searchsorted(wanted))
        while at < len(self) and self.keys[at] == wanted:
            n = int(self.rows[at])
            if self.header(n).split(None, 1)[:1] == [name]:
                return n
            at += 1
        return None

    @property
    def digest(self) -> str:
        """A hash of all sequences in record order. It does not depend on the sizes of the shards."""
        return hashlib.sha256(self.manifest["tokens_sha256"].encode()).hexdigest()

    def verify(self) -> None:
        """Check the sha256 of every file. Raise `InputError` about the first file that has changed."""
        for name in self.manifest["sha256"]:
            self._check(name)

    def _check(self, name: str) -> None:
        if name in self._checked:
            return
        try:
            digest = sha256(self.path / name)
        except OSError as error:
            raise InputError(
                f"{self.path}/{name}: cannot be read ({error.strerror}); delete {self.path} and ingest again"
            ) from None
        if digest != self.manifest["sha256"][name]:
            raise InputError(
                f"{self.path}/{name}: has changed since it was written; delete {self.path} and ingest again"
            )
        self._checked.add(name)

    def header(self, n: int) -> bytes:
        """Return the header line of record n in bytes, without `>`."""
        return self._read("headers", 1, self.header_offsets, n).tobytes()

    def _read(self, kind: str, column: int, offsets: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.uint8]:
        """Return the tokens (`column` 0) or the header (1) of record n, without the final `<eos>` or line feed."""
        if not 0 <= n < len(self):
            raise IndexError(n)
        shard = bisect.bisect_right(self._first_records, n) - 1
        name = token_shard(shard) if kind == "tokens" else header_shard(shard)
        begin = self._first_bytes[column][shard]
        self._check(name)
        return self._mapped(name)[int(offsets[n]) - begin : int(offsets[n + 1]) - 1 - begin]


def _mapped(directory: Path, name: str) -> npt.NDArray[np.uint8]:
    return np.asarray(np.memmap(directory / name, dtype=np.uint8, mode="r"))


def token_shard(k: int) -> str:
    """Return the file name of token shard k (from 0)."""
    return f"tokens-{k:05d}.u8"


def header_shard(k: int) -> str:
    """Return the file name of header shard k (from 0)."""
    return f"headers-{k:05d}.txt"


def keys(names: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Return a hash of each id, uint64 [N]. Callers must also compare the ids, since two ids may have the same hash."""
    high = np.fromiter(map(zlib.crc32, names), np.uint64, len(names))
    return high << np.uint64(32) | np.fromiter(map(zlib.adler32, names), np.uint64, len(names))


def linker_of(manifest: Mapping[str, Any]) -> int | None:
    """Return `TokenStore.linker` from the manifest of a store."""
    joined = any(kind.startswith(JOINED) for kind in manifest.get("edits", {}))
    return int(manifest["rules"]["linker"]) if joined else None


def is_store(path: Path) -> bool:
    """Return whether a path is a token store, that is, a directory with `manifest.json`."""
    return (path / "manifest.json").is_file()


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = read_json(path / "manifest.json")
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: not a token store (it has no manifest.json)") from None
    except (OSError, ValueError):
        raise InputError(f"{path}/manifest.json: cannot be read; delete the store and ingest again") from None
    known = {"format": FORMAT, "version": VERSION, "alphabet": ALPHABET_HASH}
    if not isinstance(manifest, dict) or not known.items() <= manifest.items():
        raise InputError(f"{path}: not a token store that this version of esmshard can read; ingest again")
    if manifest.get("manifest_sha256") != manifest_sha256(manifest):
        raise InputError(f"{path}/manifest.json: has changed since it was written; delete {path} and ingest again")
    return manifest


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of all entries of a manifest except the entry `manifest_sha256`."""
    values = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


_EDGES = np.array([0, 32, 64, 128, 192, 256, 384, 512, 768, 1023, 2048, 4096, 8192, 1 << 31])
"""The bin edges of the length histogram, in residues. ESM-2 was trained on at most 1022 residues per sequence."""


@dataclass
class Shard:
    """The sizes and hashes of a shard, which has a token file and a header file."""

    records: int = 0
    tokens: int = 0  # bytes of the token file
    headers: int = 0  # bytes of the header file
    sha256: list[str] = field(default_factory=list)
    """The sha256 of the token file and of the header file."""


def write_index(
    directory: Path,
    shards: Sequence[Shard],
    columns: Sequence[npt.NDArray[Any]],
    facts: Mapping[str, Any],
    edits: Edits,
) -> None:
    """Write the arrays and the manifest of a store. The shards are already in `directory`.

    `columns` has an array for each key of `COLUMNS`, in record order. `facts` and `edits` also go into the manifest.
    """
    length_N, header_N, keys = columns
    total, residues = len(length_N), int(length_N.sum(dtype=np.int64))
    for name, column_N in (("offsets.npy", length_N), ("headers.npy", header_N)):
        offsets = np.zeros(total + 1, np.int64)
        np.cumsum(column_N + 1, out=offsets[1:])  # One byte, `<eos>` or a line feed, ends each record.
        np.save(directory / name, offsets)
    order = np.argsort(keys, kind="stable")
    np.save(directory / "rows.npy", order.astype(np.uint32 if total < 1 << 32 else np.uint64))
    np.save(directory / "ids.npy", keys[order])
    tokens = hashlib.sha256()
    for k in range(len(shards)):
        tokens.update(np.memmap(directory / token_shard(k), np.uint8, mode="r").data)
    names = [name for k in range(len(shards)) for name in (token_shard(k), header_shard(k))]
    hashes = dict(zip(names, (digest for shard in shards for digest in shard.sha256), strict=True))
    hashes |= {name: sha256(directory / name) for name in ARRAYS}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "alphabet": ALPHABET_HASH,
        "records": total,
        "residues": residues,
        "tokens_sha256": tokens.hexdigest(),
        "lengths": {
            "shortest": int(length_N.min()),
            "longest": int(length_N.max()),
            "mean": round(residues / total, 2),
            "histogram": {
                f"{low}-{high - 1}": int(count)
                for low, high, count in zip(_EDGES, _EDGES[1:], np.histogram(length_N, _EDGES)[0], strict=False)
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
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


OnDuplicate = Literal["error", "first", "suffix"]
Say = Callable[[str], None]

SHARD = 1 << 26
"""The approximate size of a shard in bytes, tokens and headers together."""


@dataclass(frozen=True)
class Piece:
    """The input of a `read_piece` call: several small files, a large compressed file, or a part of a plain file."""

    sources: list[int]
    """The indices of the files in the list of all input files."""
    start: int = 0
    """The offset of the part's first byte in the file."""
    stop: int | None = None
    """The offset of the byte after the part; None if the part ends with the file."""


def ingest(
    fastas: Sequence[Path],
    out: Path,
    rules: Rules = Rules(),  # noqa: B008  # frozen
    on_duplicate: OnDuplicate = "error",
    workers: int = 1,
    overwrite: bool = False,
    say: Say = say,
) -> TokenStore:
    """Read sequence files into a new store at `out`.

    Args:
        fastas: plain or compressed files. `-` is the standard input.
        out: the directory of the store.
        rules: the allowed changes of sequences, and the columns of tables.
        on_duplicate: the treatment of several records with the same id. `error` keeps the first record if all have the
            same sequence, and raises an error otherwise. `first` keeps the first record. `suffix` keeps all records,
            and gives all but the first the unused ids `ID_2`, `ID_3` ...
        workers: the number of processes. Only one process reads a compressed file.
        overwrite: replace an existing store at `out` after the new store is complete.
        say: is called every few seconds with a text such as `ingest: 5,000 records`.

    Raise `InputError` if a file cannot be read or seems to be DNA or RNA, a record breaks the rules, `on_duplicate` is
    `error` and an id has different sequences, or no record is left. Raise `UsageError` if `out` exists and `overwrite`
    is false, or if `out` exists and is no store.
    """
    if out.name in ("", ".."):
        raise UsageError(f"{out}: is no name for a new directory; give a name such as NAME.store")
    if out.exists() and not overwrite:
        raise UsageError(f"{out}: exists already; choose another directory or pass --overwrite")
    check_replaced(out, ["manifest.json", "tokens-*.u8", "headers-*.txt", *ARRAYS], marker="manifest.json")
    if list(fastas).count(STDIN) > 1:
        raise UsageError("-: the standard input can be read only once; give - only once")
    names, files = ", ".join(map(str, fastas)), [fasta for fasta in fastas if fasta != STDIN]
    pieces = _pieces(fastas)
    before = [state(fasta) for fasta in files]
    sizes = dict(zip(files, (size for _, size, *_ in before), strict=True))
    sources = [{"path": fasta.name, "bytes": sizes[fasta]} if fasta in sizes else {"path": "-"} for fasta in fastas]
    facts = {"sources": sources, "rules": rules.recorded(), "on_duplicate": on_duplicate}
    with writing(out, "make room, and run the same command again"), whole_directory(out, sync=False) as work:
        final, shards, edits = work / "read", list[Shard](), Edits()
        final.mkdir()
        for number, (of_piece, edits_of_piece) in enumerate(_read_pieces(work, pieces, fastas, rules, workers, say)):
            edits.extend(edits_of_piece)
            for k, shard in enumerate(of_piece):
                for name in (token_shard, header_shard):
                    (_folder(work, number) / name(k)).rename(final / name(len(shards)))
                shards.append(shard)
        if [state(fasta) for fasta in files] != before:
            raise InputError(f"{names}: changed while being read; ingest again")
        if not shards:
            raise InputError(
                f"{names}: every record was left out by --on-unknown drop or --long skip; change these options"
            )
        files_of_columns = [_folder(work, number) / "columns.npz" for number in range(len(pieces))]
        columns = [np.concatenate([np.load(file)[name] for file in files_of_columns]) for name in COLUMNS]
        write_index(final, shards, columns, facts, edits)
        store = _without_duplicates(TokenStore(final), work / "unique", on_duplicate, names, facts, edits)
        if rules.on_nucleotides == "error":
            sample_n = np.linspace(0, len(store) - 1, min(len(store), _SAMPLE)).astype(np.int64).tolist()
            if reason := nucleotides(map(store.residues, sample_n), counted(len(store), "record")):
                raise InputError(f"{names}: {reason}; translate them, or {in_a_store('--on-nucleotides keep')}")
        for file in store.path.iterdir():
            file.rename(work / file.name)
        for directory in [path for path in work.iterdir() if path.is_dir()]:
            shutil.rmtree(directory)
    return TokenStore(out)


def _pieces(fastas: Sequence[Path]) -> list[Piece]:
    """Divide the files into inputs for `read_piece` by size only, so that shards do not depend on `workers`."""
    pieces, size = [Piece([])], 0
    for number, fasta in enumerate(fastas):
        plain, file_size = (False, SHARD) if fasta == STDIN else (is_plain(fasta), fasta.stat().st_size)
        if plain and file_size > SHARD:
            pieces += [Piece([number], start, start + SHARD) for start in range(0, file_size, SHARD)]
        if size + file_size > SHARD:
            pieces.append(Piece([]))
            size = 0
        if not plain or file_size <= SHARD:
            pieces[-1].sources.append(number)
            size += file_size
    return [piece for piece in pieces if piece.sources]


def _folder(work: Path, number: int) -> Path:
    return work / f"piece-{number:05d}"


def _read_pieces(
    work: Path, pieces: Sequence[Piece], fastas: Sequence[Path], rules: Rules, workers: int, say: Say
) -> Iterator[tuple[list[Shard], Edits]]:
    total, last = 0, time.monotonic()

    def count(records: int) -> None:
        nonlocal total, last
        total += records
        if time.monotonic() - last >= INTERVAL:
            last = time.monotonic()
            say(f"ingest: {total:,} records")

    if workers == 1 or len(pieces) == 1 or STDIN in fastas:  # A worker cannot read the standard input of this process.
        for number, piece in enumerate(pieces):
            yield read_piece(_folder(work, number), piece, fastas, rules, count)
        return
    # Forked workers would inherit the threads of this process.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(pieces)), mp_context=context) as pool:
        try:
            folders = [_folder(work, number) for number in range(len(pieces))]
            waiting = [pool.submit(read_piece, *each, fastas, rules) for each in zip(folders, pieces, strict=True)]
            for future in waiting:  # The file order makes sure that the first of several errors is reported.
                shards, edits = future.result()
                count(sum(shard.records for shard in shards))
                yield shards, edits
        except BrokenProcessPool:
            raise ChildProcessError(
                "a worker process was killed, perhaps because memory was full; run the command again with fewer workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def read_piece(
    folder: Path, piece: Piece, fastas: Sequence[Path], rules: Rules, count: Callable[[int], None] = lambda _: None
) -> tuple[list[Shard], Edits]:
    """Write the shards and `columns.npz` of `piece` into the new directory `folder`.

    Call `count` after each block with the number of records in the block.
    """
    folder.mkdir()
    edits, shards = Edits(), list[Shard]()
    columns: list[list[npt.NDArray[Any]]] = [[np.zeros(0, kind)] for kind in COLUMNS.values()]
    blocks = (read_blocks(fastas[source], edits, rules, piece.start, piece.stop) for source in piece.sources)
    with ExitStack() as files:
        for block in itertools.chain.from_iterable(blocks):
            if not shards or shards[-1].tokens + shards[-1].headers >= SHARD:
                files.close()
                names = token_shard(len(shards)), header_shard(len(shards))
                opened = [files.enter_context(open(folder / name, "wb")) for name in names]
                digests = [hashlib.sha256(), hashlib.sha256()]
                shards.append(Shard())
            lines = b"\n".join([*block.headers, b""])
            for file, digest, data in zip(opened, digests, (block.tokens, lines), strict=True):
                file.write(data)
                digest.update(data)
            shard = shards[-1]
            shard.records += len(block.ids)
            shard.tokens += len(block.tokens)
            shard.headers += len(lines)
            shard.sha256 = [digest.hexdigest() for digest in digests]
            header_N = np.fromiter(map(len, block.headers), np.int32, len(block.headers))
            block_columns: tuple[npt.NDArray[Any], ...] = (block.lengths, header_N, keys(block.ids))
            for parts, column_N in zip(columns, block_columns, strict=True):
                parts.append(column_N.astype(parts[0].dtype, copy=False))
            count(len(block.ids))
    arrays: dict[str, Any] = dict(zip(COLUMNS, map(np.concatenate, columns), strict=True))
    np.savez(folder / "columns.npz", **arrays)
    return shards, edits


def cached(source: Path, rules: Rules = Rules(), linker: int | None = None) -> TokenStore:  # noqa: B008  # frozen
    """Open a store, or ingest a sequence file into the cache and open the cached store.

    The cache key has the rules and `paths.state`, so an edited file is read again. Other processes that open the file
    wait until it is read. `linker` is the required number of tokens between two chains. If `linker` is None, a file
    gets `rules.linker`, and a store may have any linker. Raise `InputError` if `source` cannot be read, or if it is a
    store with a linker that is not `linker`.
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
    name = f"{FORMAT}/{VERSION}/{ALPHABET_HASH}/{source.resolve()}/{now}"
    if other_kind(source) is not None:
        name += f"/{CONVERSION}"
    if linker is not None:
        rules = replace(rules, linker=linker)
    if rules != Rules():
        name += f"/{rules}"
    with locked_directory("stores", name) as out:
        if out.exists():
            try:
                store = TokenStore(out)
                store.verify()
                return store
            except InputError:
                shutil.rmtree(out)  # The cached store is damaged, so the file is read again.
        return ingest([source], out, rules)


def _without_duplicates(
    store: TokenStore, final: Path, on_duplicate: OnDuplicate, names: str, facts: Mapping[str, Any], edits: Edits
) -> TokenStore:
    """Apply `on_duplicate` of `ingest`. Return `store` if no id repeats; otherwise write a store at `final`."""
    dropped: dict[int, str] = {}
    renamed: dict[int, tuple[str, str]] = {}
    clash: tuple[int, str] | None = None
    new_ids: set[str] = set()
    for name, rows in _repeated_ids(store):
        first = store.residues(rows[0])
        for place, n in enumerate(rows[1:], 2):
            if on_duplicate == "suffix":
                number = place
                while f"{name}_{number}" in new_ids or store.find(f"{name}_{number}") is not None:
                    number += 1
                renamed[n] = name, f"{name}_{number}"
                new_ids.add(renamed[n][1])
            elif np.array_equal(first, store.residues(n)):
                dropped[n] = READ_ONCE
            elif on_duplicate == "first":
                dropped[n] = "a record with the id of an earlier one and another sequence was left out"
            else:
                clash = min(clash or (n, name), (n, name))
    if clash is not None:
        raise InputError(repeated(clash[1], names))
    if not dropped and not renamed:
        return store
    kept_N = np.ones(len(store), dtype=bool)
    kept_N[list(dropped)] = False
    header_N = np.diff(store.header_offsets) - 1
    key_N = np.empty_like(store.keys)
    key_N[store.rows] = store.keys
    new_headers: dict[int, bytes] = {}
    for n in sorted({*dropped, *renamed}):
        if n in dropped:
            edits.add(dropped[n], store.id(n))
        else:
            old, new = renamed[n]
            edits.add("an id that came again got a number", new)
            new_headers[n] = new.encode() + store.header(n).lstrip()[len(old.encode()) :]
            header_N[n], key_N[n] = len(new_headers[n]), keys([new.encode()])[0]
    changed_N = ~kept_N
    changed_N[list(new_headers)] = True
    final.mkdir()
    shards, start = list[Shard](), 0
    for k, before in enumerate(store.manifest["shards"]):
        part = slice(start, start + before["records"])
        start, kept = part.stop, kept_N[part]
        if not kept.any():
            continue
        sources = [store.path / token_shard(k), store.path / header_shard(k)]
        files = [final / token_shard(len(shards)), final / header_shard(len(shards))]
        if changed_N[part].any():
            tokens = np.fromfile(sources[0], np.uint8)[np.repeat(kept, store.lengths[part] + 1)]
            lines = enumerate(sources[1].read_bytes().split(b"\n")[:-1], part.start)
            headers = b"".join(new_headers.get(n, line) + b"\n" for n, line in lines if kept_N[n])
            for file, data in zip(files, (tokens.tobytes(), headers), strict=True):
                file.write_bytes(data)
            hashes = [sha256(file) for file in files]
        else:
            hashes = [store.manifest["sha256"][source.name] for source in sources]
            for source, file in zip(sources, files, strict=True):
                source.rename(file)
        token_bytes, header_bytes = (file.stat().st_size for file in files)
        shards.append(Shard(int(kept.sum()), token_bytes, header_bytes, hashes))
    write_index(final, shards, [store.lengths[kept_N], header_N[kept_N], key_N[kept_N]], facts, edits)
    return TokenStore(final)


def _repeated_ids(store: TokenStore) -> Iterator[tuple[str, list[int]]]:
    """Yield each repeated id with the indices of its records, in record order."""
    again = np.flatnonzero(store.keys[1:] == store.keys[:-1])  # Entries k and k + 1 of `ids.npy` are equal.
    for run in np.split(again, np.flatnonzero(np.diff(again) > 1) + 1) if len(again) else []:
        by_id: dict[str, list[int]] = {}
        for n in store.rows[run[0] : run[-1] + 2].tolist():  # The sort was stable, so n increases.
            by_id.setdefault(store.id(n), []).append(n)
        yield from ((name, rows) for name, rows in by_id.items() if len(rows) > 1)
