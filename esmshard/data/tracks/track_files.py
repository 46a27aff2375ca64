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
from esmshard.data.store.token_store import TokenStore, is_store
from esmshard.data.structures.structure_folder import holds_structures
from esmshard.data.tables import counted, shown
from esmshard.data.tracks.interleaved import cached_pair
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
    """The file or directory; None if the file of the sequences has the values: letters between the residues, or the
    coordinates of the structures that the sequences are read from."""
    inside: Path | None = None
    """The file of the sequences, if it had the values (`outside`)."""
    left_out: tuple[str, ...] = ()
    """Sentences on what was left out of that file."""

    @property
    def shown(self) -> str:
        """The source as the user named it, for messages."""
        return str(self.inside or self.path)


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
            raise UsageError(f"--track {option}: NAME=PATH is expected, with {INSIDE} for a track inside the sequences")
        if name in found:
            raise UsageError(f"--track {name}: is given twice; give one path")
        found[name] = path
    return found


def outside(path: Path, files: Sequence[TrackFile]) -> tuple[Path, list[TrackFile]]:
    """Return the path of the sequences alone, and tracks that all have a path of their own.

    Args:
        path: a path of sequences, which may have tracks inside.
        files: the tracks.

    Raises:
        InputError: the path has no such track inside.
    """
    sequences, found = path, []
    for one in files:
        track = one.track
        if one.path is not None:
            found.append(one)
        elif track.kind == "coordinates" and holds_structures(path):
            found.append(replace(one, path=path, inside=path))
        elif track.kind == "letters" and not is_store(path) and not holds_structures(path) and sequences == path:
            sequences, letters, notices = cached_pair(path, track)
            left_out = tuple(f"{path}: {notice}" for notice in notices)
            found.append(replace(one, path=letters, inside=path, left_out=left_out))
        else:
            expected = {
                "coordinates": "PDB or mmCIF files hold coordinates",
                "letters": "a FASTA file with one letter after each residue holds one such track",
                "codes": "codes are in an .npz file",
            }[track.kind]
            raise InputError(f"{path}: has no {track.title} inside ({expected}); give the path of the {track.title}")
    return sequences, found


def state_of(files: Sequence[TrackFile]) -> dict[str, dict[str, str]]:
    """Return facts, ready for JSON, that show quickly whether the sources are unchanged, by the name of the track."""
    found = {}
    for one in files:
        source = one.inside or one.path
        assert source is not None
        facts = [(name, size, written) for name, _, size, written, _ in states(source)]
        state = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        found[one.track.name] = {"path": source.name, "state": state}
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
        found: list[str] = [notice for one in self._files for notice in one.left_out]
        for store, source in zip(self._stores, (one.shown for one in self._files), strict=True):
            known_M = store.known_N[records_M].astype(np.int64)
            residues = f"{known_M.sum():,} of {store.lengths(records_M).sum():,} residues"
            records = f"{(known_M > 0).sum():,} of {counted(len(known_M), 'record')}"
            found.append(f"{store.track.title} of {records}, and {residues}, from {source}")
            found += [f"{source}: {notice}" for notice in store.notices]
        return found


def record_tracks(files: Sequence[TrackFile], store: TokenStore) -> RecordTracks:
    """Open the tracks of the records of a store. They are read on first use and kept in the user's cache.

    Args:
        files: the tracks, each with a path; see `outside`.
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
        left_out: see `TrackFile`.
    """

    def __init__(self, values: Sequence[tuple[Track, npt.NDArray[Any]]], left_out: Sequence[str] = ()) -> None:
        self._values, self._left_out = tuple(values), tuple(left_out)

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
        values = [(track, values[first : first + length]) for track, values in self._values]
        return ProteinTracks(values, self._left_out)

    def notices(self, records_M: npt.NDArray[np.int64] | None = None) -> list[str]:
        """Return sentences on what is known of the protein, whatever the variants."""
        return [*self._left_out] + [
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
        files: the tracks, each with a path; see `outside`.
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
    return ProteinTracks(found, [notice for one in files for notice in one.left_out])
