"""The input of an embedding store as a token store, and the index of its records and rows. No torch.

The index is on disk. Memory for each record is used only while the token store is made (its index) and while duplicates
are searched (some numbers for each of a quarter of a million records).
"""

import bisect
import copy
import functools
import hashlib
import itertools
import os
import tempfile
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.fasta.symbols import Rules
from esmshard.data.labels.pairing import UNIPROT
from esmshard.data.store.ingestion import ingest
from esmshard.data.store.token_store import TokenStore, is_store, keys
from esmshard.data.tracks.track_files import TrackFile
from esmshard.data.tracks.track_store import TrackStore, write_track
from esmshard.embed.store.parts import KEY_BYTES
from esmshard.errors import InputError
from esmshard.joined_chains import LINKER
from esmshard.progress import say
from esmshard.vocab import chain_spans

STDIN = Path("-")
CHAINS = "chains.tsv"
"""The file with the residues of each chain of the records that have several."""
_AT_ONCE = 1 << 14
_BUCKET = 1 << 18


class Column:
    """An array on disk of which slices are read. No page stays mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                self.shape, _, self.dtype = read(file)
                self._begin = file.tell()
            count = int(np.prod(self.shape))
            if path.stat().st_size != self._begin + count * self.dtype.itemsize:
                raise ValueError("it is truncated")
        except (OSError, ValueError, SyntaxError, tokenize.TokenError) as error:
            raise InputError(f"{path}: the index is damaged ({error}); copy it again, or embed again") from None
        self._width = int(np.prod(self.shape[1:]))

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        start, stop, _ = rows.indices(len(self))
        count, skip = max(0, stop - start) * self._width, start * self._width * self.dtype.itemsize
        values = np.fromfile(self.path, self.dtype, count, offset=self._begin + skip)
        return values.reshape(-1, *self.shape[1:])

    @property
    def mapped(self) -> npt.NDArray[Any]:
        """Return the whole array, memory-mapped. Pages that were read count as memory until the array is released."""
        values: npt.NDArray[Any] = np.load(self.path, mmap_mode="r")
        return values

    def at(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return some rows."""
        return np.array(self.mapped[rows])


class RowIndex:
    """The index of records and rows, known before anything is computed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        names = ("ids", "id_keys", "id_rows", "lengths", "rows", "first", "content", "content_keys", "content_rows")
        self._columns = {name: Column(path / f"{name}.npy") for name in names}
        self.bounds: list[int] = Column(path / "bounds.npy")[:].tolist()
        """First row of each part, and the number of rows."""

    def __getattr__(self, name: str) -> Column:
        columns: dict[str, Column] = self.__dict__.get("_columns", {})
        if name not in columns:
            raise AttributeError(name)
        return columns[name]

    @property
    def id_bytes(self) -> int:
        """Return the bytes of all ids, with a line end for each."""
        return (self.path / "ids.txt").stat().st_size

    def part_of(self, row: int) -> int:
        """Return the part of a row."""
        return bisect.bisect_right(self.bounds, row) - 1

    def lengths_of(self, part: int) -> npt.NDArray[np.int64]:
        """Return the residues of the sequences of a part, int64 [n]."""
        first_U = self.first[self.bounds[part] : self.bounds[part + 1]]
        return self.lengths.at(first_U).astype(np.int64)

    def id_list(self, start: int, stop: int) -> list[str]:
        """Return the ids of the records from `start` to `stop`."""
        at = self.ids[start : stop + 1].tolist()
        with open(self.path / "ids.txt", "rb") as file:
            file.seek(at[0])
            text = file.read(at[-1] - at[0])
        return [text[a - at[0] : b - at[0] - 1].decode() for a, b in itertools.pairwise(at)]

    def find(self, record_id: str) -> int | None:
        """Return the record of an id; None if there is none.

        The id may be a UniProt accession (`P69905` of `sp|P69905|HBA_HUMAN`) if exactly one record has it.
        """
        key_N, wanted = self._id_keys, keys([record_id.encode(errors="surrogatepass")])[0]
        place = int(key_N.searchsorted(wanted))
        while place < len(key_N) and key_N[place] == wanted:
            record = int(self.id_rows[place : place + 1][0])
            if self.id_list(record, record + 1) == [record_id]:
                return record
            place += 1
        key_M, record_M = self._accessions
        places = slice(*(int(key_M.searchsorted(wanted, side)) for side in ("left", "right")))  # type: ignore[call-overload]
        named = [k for k in record_M[places].tolist() if _accession(self.id_list(k, k + 1)[0]) == record_id]
        return named[0] if len(named) == 1 else None

    @functools.cached_property
    def _accessions(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Return the sorted keys of the accessions in UniProt's ids, and their records; 16 bytes for each record."""
        parts, records = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        for start in range(0, len(self.lengths), _AT_ONCE):
            ids = self.id_list(start, min(start + _AT_ONCE, len(self.lengths)))
            found = [(n, name) for n, one in enumerate(ids, start) if (name := _accession(one)) is not None]
            parts.append(keys([name.encode() for _, name in found]))
            records.append(np.array([n for n, _ in found], np.int64))
        key_M, record_M = np.concatenate(parts), np.concatenate(records)
        order = key_M.argsort(kind="stable")
        return key_M[order], record_M[order]

    @functools.cached_property
    def _id_keys(self) -> npt.NDArray[np.uint64]:
        return self.id_keys.mapped

    def rows_of(self, content_M16: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Return the row of each content key, or -1, int64 [M]."""
        sorted_U, row_U, content_U16 = self.content_keys.mapped, self.content_rows.mapped, self.content.mapped
        wanted_M = leading(content_M16)
        place_M, found_M = sorted_U.searchsorted(wanted_M), np.full(len(content_M16), -1, np.int64)
        open_M = np.arange(len(content_M16))
        while len(open_M):  # repeated only for keys that share eight bytes
            open_M = open_M[place_M[open_M] < len(sorted_U)]
            open_M = open_M[sorted_U[place_M[open_M]] == wanted_M[open_M]]
            open_M = open_M[row_U[place_M[open_M]] < len(content_U16)]  # larger rows come from a damaged index
            rows = row_U[place_M[open_M]]
            same = (content_U16[rows] == content_M16[open_M]).all(1)
            found_M[open_M[same]] = rows[same]
            open_M = open_M[~same]
            place_M[open_M] += 1
        return found_M


def _accession(record_id: str) -> str | None:
    found = UNIPROT.match(record_id)
    return found[1] if found else None


def chain_lengths(index: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield id and residues of each chain, of the records with several chains, in input order."""
    path = index / CHAINS
    if path.is_file():
        with open(path, encoding="utf-8") as file:
            for line in itertools.islice(file, 1, None):
                record_id, lengths = line.rstrip("\n").split("\t")
                yield record_id, tuple(map(int, lengths.split(",")))


def read_and_index(
    fasta: Path, store: Path, index: Path, tracks: Sequence[TrackFile] = (), linker: int = LINKER
) -> int:
    """Read the input, write `index` (see `esmshard.embed.store.embedding_store`), and count the different sequences.

    Args:
        fasta: a FASTA file, `-` or a token store.
        store: the directory of the token store that is made from the input, unless the input is one.
        index: the directory to create.
        tracks: tracks of the sequences, which are written to `track_directory`. Equal sequences with other tracks
            differ.
        linker: the number of tokens between two chains of a record.

    Raises:
        InputError: if the input cannot be read.
    """
    found = read_input(fasta, store, linker)
    written = []
    for one in tracks:
        assert one.path is not None
        written.append(write_track(one.track, one.path, found, track_directory(store.parent, one.track.name)))
    index.mkdir()
    return write_index(index, found, store.parent, written)


def track_directory(work: Path, name: str) -> Path:
    """Return the directory of the entries of a track, while its embedding store is not finished."""
    return work / "tracks" / name


def read_input(fasta: Path, store: Path, linker: int = LINKER) -> TokenStore:
    """Return the input as a token store: the input itself if it is one, else `store`, which is made if it does not
    exist. `InputError` if the chains of records are joined by another linker.
    """
    if is_store(fasta):
        found = TokenStore(fasta)
        found.check_linker(linker, fasta)
        return found
    if is_store(store):
        return TokenStore(store)
    found = ingest([fasta], store, Rules(linker=linker))
    for notice in found.notices:
        say(f"{fasta}: {notice}")
    return found


def write_index(index: Path, store: TokenStore, scratch: Path, tracks: Sequence[TrackStore] = ()) -> int:
    """Write the index of records and rows (see `esmshard.embed.store.embedding_store`), and return the number of rows.

    Args:
        index: an empty directory.
        store: the token store of the records.
        scratch: a directory for temporary files.
        tracks: the tracks of the records.
    """
    n = len(store)
    small = np.dtype(np.uint32 if n < 1 << 32 else np.uint64)
    with tempfile.TemporaryDirectory(prefix="keys-", dir=scratch) as temporary:

        def array(name: str, dtype: npt.DTypeLike, shape: tuple[int, ...], directory: Path = Path(temporary)) -> Any:
            path = directory / f"{name}.npy"
            mapped = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
            if hasattr(os, "posix_fallocate"):  # a full disk raises here, but would kill the process below
                with open(path, "r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            return mapped

        keys_N16 = array("keys", np.uint8, (n, KEY_BYTES))
        length_N = array("lengths", np.int32, (n,), index)
        id_N = array("ids", np.int64, (n + 1,), index)
        with open(index / "ids.txt", "wb") as ids, _chains_file(index, store) as add_chains:
            for first in range(0, n, _AT_ONCE):
                rows = range(first, min(first + _AT_ONCE, n))
                store = copy.copy(store)  # maps the files again, because mapped pages count as memory
                tracks = [TrackStore(one.path, one.track, store) for one in tracks]
                lines = [store.id(k).encode() + b"\n" for k in rows]
                ids.write(b"".join(lines))
                id_N[first + 1 : rows.stop + 1] = id_N[first] + np.cumsum([len(line) for line in lines])
                length_N[first : rows.stop] = np.diff(store.offsets[first : rows.stop + 1]) - 1
                for k in rows if store.linker is not None else ():
                    spans = chain_spans(store.residues(k))
                    length_N[k] = sum(end - start for start, end in spans)
                    add_chains(store.id(k), spans)
                digests = [_content_key(store, tracks, k) for k in rows]
                keys_N16[first : rows.stop] = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, KEY_BYTES)
        np.save(index / "id_keys.npy", store.keys)
        np.save(index / "id_rows.npy", store.rows)

        first_N, order = array("first", small, (n,)), array("order", small, (n,))
        unique = 0
        for group, members in _equal(keys_N16):
            begins = np.flatnonzero(np.diff(group, prepend=-1))
            firsts = members[begins]  # the first record of each group
            first_N[members] = np.repeat(firsts, np.diff(begins, append=len(group)))
            order[unique : unique + len(firsts)] = firsts
            unique += len(firsts)
        row_N, first_U = array("rows", small, (n,), index), array("first", small, (unique,), index)
        at = 0
        for start in range(0, n, _AT_ONCE):  # an equal sequence comes earlier, so its row is known
            own = np.arange(start, min(start + _AT_ONCE, n))
            first = first_N[start : start + len(own)].astype(np.int64)
            new = first == own
            numbers = np.cumsum(new) - 1 + at
            first_U[at : at + int(new.sum())] = own[new]
            block = np.where(new, numbers, 0)
            earlier, inside = first < start, (first >= start) & ~new
            block[inside] = block[first[inside] - start]
            block[earlier] = row_N[first[earlier]]
            row_N[start : start + len(own)] = block
            at += int(new.sum())
        content_U16 = array("content", np.uint8, (unique, KEY_BYTES), index)
        sorted_U = array("content_keys", np.uint64, (unique,), index)
        place_U = array("content_rows", small, (unique,), index)
        for start in range(0, unique, _AT_ONCE):
            content_U16[start : start + _AT_ONCE] = keys_N16[first_U[start : start + _AT_ONCE]]
            records = order[start : min(start + _AT_ONCE, unique)]
            sorted_U[start : start + _AT_ONCE] = leading(keys_N16[records])
            place_U[start : start + _AT_ONCE] = row_N[records]
    return unique


@contextmanager
def _chains_file(index: Path, store: TokenStore) -> Iterator[Callable[[str, list[tuple[int, int]]], None]]:
    """Open the file of the chains' lengths, if there are records with several, and provide a function that adds to
    it.
    """
    if store.linker is None:
        yield lambda record_id, spans: None
        return
    with open(index / CHAINS, "w", encoding="utf-8", newline="\n") as file:
        file.write("id\tresidues\n")

        def add(record_id: str, spans: list[tuple[int, int]]) -> None:
            if len(spans) > 1:
                file.write(f"{record_id}\t{','.join(str(end - start) for start, end in spans)}\n")

        yield add


def _content_key(store: TokenStore, tracks: Sequence[TrackStore], record: int) -> bytes:
    """Return the digest of a sequence with what is known of it besides. Where nothing is known, it is that of the
    sequence alone.
    """
    digest = hashlib.blake2b(store.residues(record).data, digest_size=KEY_BYTES)
    for one in tracks:
        if one.known_N[record]:
            digest.update(one.track.name.encode() + one[record].tobytes())
    return digest.digest()


def _equal(keys_N16: npt.NDArray[np.uint8]) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield groups of equal keys, for one bucket of leading bits at a time: the group's number and record of each key.

    Records ascend within a group. Keys ascend over all buckets.
    """
    n = len(keys_N16)
    bits = min(8, max(0, (n // _BUCKET).bit_length()))
    for bucket in range(1 << bits):
        found = []
        for start in range(0, n, _BUCKET):
            of_key = keys_N16[start : start + _BUCKET, 0].astype(np.int64) >> (8 - bits)
            found.append(np.flatnonzero(of_key == bucket) + start)
        members = np.concatenate(found)
        if not len(members):
            continue
        key_M16 = keys_N16[members]
        high, low = leading(key_M16), leading(key_M16[:, 8:])
        by = np.lexsort((members, low, high))
        high, low, members = high[by], low[by], members[by]
        new = np.ones(len(members), dtype=np.int64)
        new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        yield np.cumsum(new) - 1, members


def leading(key_M16: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return the first eight bytes of each key as a number."""
    return np.ascontiguousarray(key_M16[:, :8]).view(">u8").reshape(-1).astype(np.uint64)
