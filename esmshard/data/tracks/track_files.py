"""The tracks that a recipe or `--track` names, checked against those that a model takes, and opened for its records."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard import remote
from esmshard.data.fasta.fasta_reader import read_fasta
from esmshard.data.fasta.symbols import Edits
from esmshard.data.store.token_store import TokenStore
from esmshard.data.structures.structure_folder import holds_structures
from esmshard.data.tables import counted, shown
from esmshard.data.tracks.track_entries import entries
from esmshard.data.tracks.track_store import TrackStore, cached_track, states
from esmshard.data.tracks.track_values import in_batches, known_residues
from esmshard.errors import InputError, UsageError
from esmshard.recipe.data_section import INSIDE
from esmshard.vocab import Track, encode_residues


@dataclass(frozen=True)
class TrackFile:
    """A track, and where its values are."""

    track: Track
    path: Path | None
    """The file or directory; None for the coordinates of the structures that the sequences are read from."""


def track_files(named: Mapping[str, str], takes: Sequence[Track], model: str, key: str) -> list[TrackFile]:
    """Return the tracks that a user named.

    Args:
        named: a path, or INSIDE, by the name of the track.
        takes: the tracks that the model takes.
        model: name of the model, for messages.
        key: how the user named a track: `data.tracks.`, or `--track `.

    Raises:
        UsageError: the model takes no track of a name.
    """
    known = {track.name: track for track in takes}
    for name in named:
        if name in known:
            continue
        if not known:
            raise UsageError(f"{key}{name}: {model} reads the sequence alone and takes no track; leave it out")
        what = " and ".join(f"{track.name} ({track.title})" for track in takes)
        raise UsageError(f"{key}{name}: {model} takes no such track; it takes {what}")
    # A shell leaves a ~ after = as it is.
    return [
        TrackFile(known[name], None if path == INSIDE else remote.data_file(path).expanduser())
        for name, path in named.items()
    ]


def named_tracks(options: Sequence[str]) -> dict[str, str]:
    """Return the paths of `--track NAME=PATH` by the name of the track.

    Raises:
        UsageError: an option is not of this form, or a track is named twice.
    """
    found: dict[str, str] = {}
    for option in options:
        name, equals, path = option.partition("=")
        if not name or not equals or not path:
            raise UsageError(f"--track {option}: NAME=PATH is expected, with {INSIDE} for coordinates of the input")
        if name in found:
            raise UsageError(f"--track {name}: is given twice; give one path")
        found[name] = path
    return found


def with_paths(path: Path, files: Sequence[TrackFile]) -> list[TrackFile]:
    """Return the tracks, each with a path. Coordinates `inside` the data have the path of the data.

    Args:
        path: the data: sequences, or structures, which have coordinates.
        files: the tracks.

    Raises:
        InputError: the data have no such track.
    """
    for file in files:
        if file.path is None and not (file.track.kind == "coordinates" and holds_structures(path)):
            raise InputError(
                f"{path}: has no {file.track.title} inside (only PDB and mmCIF files have a track inside, their "
                f"coordinates); give the path of the {file.track.title}"
            )
    return [replace(file, path=file.path or path) for file in files]


def state_of(files: Sequence[TrackFile]) -> dict[str, dict[str, str]]:
    """Return facts, ready for JSON, that show quickly whether the sources are unchanged, by the name of the track."""
    found = {}
    for one in files:
        assert one.path is not None
        facts = [(name, size, written) for name, _, size, written, _ in states(one.path)]
        state = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        found[one.track.name] = {"path": one.path.name, "state": state}
    return found


class RecordTracks:
    """The tracks of the records of a token store; see `esmshard.data.batching.loader.Tracks`.

    Args:
        stores: the opened tracks.
        files: where each was, for messages.
    """

    def __init__(self, stores: Sequence[TrackStore], files: Sequence[TrackFile] = ()) -> None:
        self._stores, self._files = tuple(stores), tuple(files)

    @property
    def digest(self) -> str:
        """A digest of all values."""
        text = " ".join(f"{store.track.name} {store.digest}" for store in self._stores)
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, n: int, part: slice) -> dict[str, npt.NDArray[Any]]:
        """Return the entries of a part of record n, with its ends."""
        return {store.track.name: in_batches(store.track, store[n][part]) for store in self._stores}

    def notices(self, records_M: npt.NDArray[np.int64]) -> list[str]:
        """Return sentences on what is known of some records."""
        found: list[str] = []
        for store, source in zip(self._stores, (file.path for file in self._files), strict=True):
            known_M = store.known_N[records_M].astype(np.int64)
            residues = f"{known_M.sum():,} of {store.lengths(records_M).sum():,} residues"
            records = f"{(known_M > 0).sum():,} of {counted(len(known_M), 'record')}"
            found.append(f"{store.track.title} of {records}, and {residues}, from {source}")
            found += [f"{source}: {notice}" for notice in store.notices]
        return found


def record_tracks(files: Sequence[TrackFile], store: TokenStore) -> RecordTracks:
    """Open the tracks of the records of a store. They are read on first use and kept in the user's cache.

    Args:
        files: the tracks, each with a path; see `with_paths`.
        store: the records.

    Raises:
        InputError: see `cached_track`.
    """
    stores = []
    for one in files:
        assert one.path is not None
        stores.append(cached_track(one.track, one.path, store))
    return RecordTracks(stores, files)


class ProteinTracks:
    """The tracks of one protein, which all variants of it have.

    Args:
        values: for each track its values, [L, ...].
    """

    def __init__(self, values: Sequence[tuple[Track, npt.NDArray[Any]]]) -> None:
        self._values = tuple(values)

    @property
    def digest(self) -> str:
        """A digest of all values."""
        digest = hashlib.sha256()
        for track, values in self._values:
            digest.update(track.name.encode() + np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()

    def get(self, n: int, part: slice) -> dict[str, npt.NDArray[Any]]:
        """Return the entries of a part of the protein, with its ends, whatever the variant."""
        return {track.name: in_batches(track, values[part]) for track, values in self._values}

    def part(self, first: int, length: int) -> "ProteinTracks":
        """Return the tracks of a part of the protein."""
        return ProteinTracks([(track, values[first : first + length]) for track, values in self._values])

    def notices(self, records_M: npt.NDArray[np.int64] | None = None) -> list[str]:
        """Return sentences on what is known of the protein, whatever the variants."""
        return [
            f"{track.title} of {known_residues(track, values):,} of {len(values):,} residues of the wild type"
            for track, values in self._values
        ]


class _OneProtein:
    """A protein in place of a token store."""

    def __init__(self, record_id: str, sequence: str) -> None:
        self._id, self._residues = record_id, np.frombuffer(encode_residues(sequence), np.uint8)

    def __len__(self) -> int:
        return 1

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return np.array([len(self._residues)], np.int32)

    def id(self, n: int) -> str:
        return self._id

    def find(self, record_id: str) -> int | None:
        return 0 if record_id == self._id else None

    def residues(self, n: int) -> npt.NDArray[np.uint8]:
        return self._residues


def protein_tracks(files: Sequence[TrackFile], fasta: Path) -> ProteinTracks:
    """Read the tracks of the protein in a FASTA file with one record.

    Args:
        files: the tracks, each with a path; see `with_paths`.
        fasta: the file.

    Raises:
        InputError: a track cannot be read, or has no entry of the protein.
    """
    record = next(iter(read_fasta(fasta, Edits())))
    protein, found = _OneProtein(record.id, record.sequence), []
    for one in files:
        assert one.path is not None
        values = [values for _, values in entries(one.track, one.path, protein, Edits())]
        if not values:
            raise InputError(
                f"{one.path}: has no {one.track.title} of {shown(record.id)}, the protein in {fasta}; give them its id"
            )
        found.append((one.track, values[0]))
    return ProteinTracks(found)
