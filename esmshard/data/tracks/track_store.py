"""A track on disk: the entries of all residues of a token store, memory-mapped, in the order of the store.

A directory that is written under another name and renamed when it is complete:

    values.npy      [R, ...]: the entries of the R residues of all records end to end
    known.npy       int32 [N]: of how many residues of each record something is known
    manifest.json   sha256 of both, and notices

Memory does not grow with the number of records, and every process reads the same pages.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.fasta.symbols import Edits
from esmshard.data.store.token_store import TokenStore
from esmshard.data.structures.structure_folder import listed_files
from esmshard.data.tables import first_three
from esmshard.data.tracks.track_entries import entries
from esmshard.data.tracks.track_values import known_residues, shape_of
from esmshard.errors import InputError
from esmshard.files import cache_directory, read_json, sha256, state, whole_directory
from esmshard.vocab import Track

VERSION = 2
"""The version of the rules by which a source becomes a track. After a change, all sources are read again."""
_AT_ONCE = 1 << 20
"""Residues whose entries are written at once."""


class TrackStore:
    """A track of the N records of a token store, opened for reading."""

    def __init__(self, path: Path, track: Track, store: TokenStore) -> None:
        self.path, self.track, self._offsets = path, track, store.offsets
        try:
            about = read_json(path / "manifest.json")
            self._sha256: dict[str, str] = about["sha256"]
            self.digest = self._sha256["values.npy"]
            """The sha256 of the values."""
            self.notices: list[str] = about["notices"]
            """Sentences about what the source holds."""
            self.known_N: npt.NDArray[np.int32] = np.load(path / "known.npy", mmap_mode="r", allow_pickle=False)
            """Of how many residues of each record something is known."""
            self._values = np.load(path / "values.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise InputError(f"{path}: the {track.title} are damaged ({error}); delete it and start again") from None

    def __getitem__(self, n: int) -> npt.NDArray[Any]:
        """Return the entries of the residues of record n, [L, ...]."""
        begin, end = int(self._offsets[n]) - n, int(self._offsets[n + 1]) - n - 1
        values: npt.NDArray[Any] = self._values[begin:end]
        return values

    def verify(self) -> None:
        """Compare both files with their sha256, which opening does not do. `InputError` names an altered file."""
        for name, digest in self._sha256.items():
            if sha256(self.path / name) != digest:
                raise InputError(f"{self.path}/{name}: is not as it was written; delete {self.path} and start again")

    def lengths(self, records_M: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of residues of some records, int64 [M]."""
        lengths_M: npt.NDArray[np.int64] = self._offsets[records_M + 1] - self._offsets[records_M] - 1
        return lengths_M


def write_track(track: Track, source: Path, store: TokenStore, out: Path) -> TrackStore:
    """Read a track for the records of a store, and write it to a new directory.

    Raises:
        InputError: see `entries`; no record has an entry, or some records have several chains.
    """
    if store.linker is not None:
        raise InputError(
            f"{source}: {track.title} are read for records of one chain, and some records have several; make each "
            "chain a record, or leave the track out"
        )
    edits, found, known_N = Edits(), False, np.zeros(len(store), np.int32)
    with whole_directory(out) as work:
        residues = int(store.offsets[-1]) - len(store)
        shape, dtype = (residues, *shape_of(track)), _kept_dtype(track)
        values = np.lib.format.open_memmap(work / "values.npy", mode="w+", dtype=dtype, shape=shape)
        for first in range(0, residues, _AT_ONCE):
            values[first : first + _AT_ONCE] = track.unknown
        for n, entry in entries(track, source, store, edits):
            begin = int(store.offsets[n]) - n
            values[begin : begin + len(entry)] = entry
            known_N[n], found = known_residues(track, entry), True
        if not found:
            some = first_three(range(min(len(store), 4)), store.id)
            raise InputError(
                f"{source}: has {track.title} of none of the {len(store):,} records ({some}); give them the ids of the "
                "sequences"
            )
        values.flush()
        del values
        np.save(work / "known.npy", known_N)
        hashes = {name: sha256(work / name) for name in ("values.npy", "known.npy")}
        about = {"sha256": hashes, "notices": edits.notices()}
        (work / "manifest.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return TrackStore(out, track, store)


def _kept_dtype(track: Track) -> np.dtype[Any]:
    """Return the smallest dtype that holds every entry."""
    if track.kind == "coordinates":
        return np.dtype(np.float32)
    return np.min_scalar_type(max(track.n_codes, len(track.letters), int(track.unknown)))


def cached_track(track: Track, source: Path, store: TokenStore) -> TrackStore:
    """Open a track for the records of a store. It is read on first use and kept in the user's cache.

    The key is the path and `files.state` of the source, or of all files of a directory, and the digests of the store.
    Processes that ask at the same time wait for the one that reads.

    Raises:
        InputError: see `write_track`.
    """
    from filelock import FileLock  # slow to import

    key = json.dumps([VERSION, dataclasses.asdict(track), str(source.resolve()), states(source), _content(store)])
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    out, locks = cache_directory() / "tracks" / digest, cache_directory() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{digest}.lock"):
        if out.is_dir():
            try:
                kept = TrackStore(out, track, store)
                kept.verify()
                return kept
            except InputError:
                pass  # This is a damaged copy of what the source still has.
        return write_track(track, source, store, out)


def states(source: Path) -> list[Any]:
    """Return, ready for JSON, what changes when a file or a directory of structures changes.

    Raises:
        InputError: it cannot be read.
    """
    try:
        files = listed_files(source, Edits()) if source.is_dir() else [source]
        return [(path.name, *state(path)) for path in files]
    except OSError as error:
        raise InputError(f"{source}: {(error.strerror or 'cannot be read').lower()}") from None


def _content(store: TokenStore) -> dict[str, str]:
    """Return the digests of sequences and ids."""
    hashes: dict[str, str] = store.manifest["sha256"]
    return hashes
