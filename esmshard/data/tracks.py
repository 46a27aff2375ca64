"""Reads tracks: additional model inputs for each residue, such as 3Di letters.

Letters are read from FASTA files, codes from `.npz` files, and coordinates from PDB and mmCIF files. Each source is
read once, and its values are saved in a cache directory, in the order of the token store:

    values.npy      [R, ...]: the values of all R residues, record after record
    known.npy       int32 [N]: how many residues of each record have a known value
    manifest.json   the sha256 of both array files, and notices about the source
"""

import dataclasses
import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.labels.coordinates import read_arrays
from esmshard.data.labels.label_sources import read_label_fasta
from esmshard.data.labels.pairing import UNIPROT
from esmshard.data.structures.chains import Chain, chain_prefix, read_chains
from esmshard.data.structures.structure_folder import MANY, holds_structures, listed_files, states
from esmshard.errors import InputError, UsageError
from esmshard.io import remote
from esmshard.io.paths import cached_directory, read_json, sealed_directory
from esmshard.io.store import TokenStore, cached
from esmshard.io.symbols import Edits
from esmshard.io.tables import counted, first_three, shown
from esmshard.progress import Progress
from esmshard.recipe.sections import INSIDE
from esmshard.vocab import Track, decode

UNKNOWN_LETTER = "#"
"""The letter that stands for an unknown value in the text of a track, as in SaProt."""
_DTYPE: dict[str, npt.DTypeLike] = {"letters": np.uint8, "codes": np.int64, "coordinates": np.float32}
_INVALID = 255


def _value_shape(track: Track) -> tuple[int, ...]:
    return (3, 3) if track.kind == "coordinates" else ()


def in_batches(track: Track, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Add the unknown value for `<cls>` and `<eos>` to the track values of a protein: [L, ...] becomes [L + 2, ...].

    >>> dssp = Track("dssp", "DSSP letters", "letters", unknown=3, letters="HEC")
    >>> in_batches(dssp, values_of(dssp, "HC", "here")).tolist()
    [3, 0, 2, 3]
    """
    end = np.full((1, *values.shape[1:]), track.unknown)
    return np.concatenate([end, values, end], dtype=_DTYPE[track.kind], casting="unsafe")


def unknown_entry(track: Track, length: int) -> npt.NDArray[Any]:
    """Return the unknown value of the track for each of L residues, [L, ...]."""
    return np.full((length, *_value_shape(track)), track.unknown, dtype=_DTYPE[track.kind])


def _known_residues(track: Track, values: npt.NDArray[Any]) -> int:
    if track.kind == "coordinates":
        return int(np.isfinite(values).all((1, 2)).sum())
    return int((values != track.unknown).sum())


def values_of(track: Track, given: Any, where: str) -> npt.NDArray[Any]:
    """Check the track values of one protein, and return an array of numbers, [L, ...].

    `given` is a string for a track of kind `letters` (in upper or lower case, `#` for an unknown value), else an array.
    Raises `InputError` if a value, the type or the shape is not valid. `where` begins the message.
    """
    if track.kind == "letters":
        return _letters(track, given, where)
    values = np.asarray(given)
    expected = f"{where} is {values.dtype} {list(values.shape)}; {track.title} are"
    if track.kind == "coordinates":
        if values.ndim != 3 or values.shape[1:] != (3, 3) or values.dtype.kind not in "fiu":
            shape = "of shape [residues, 3, 3]: N, CA and C in Angstrom"
            raise InputError(f"{expected} numbers {shape}, and nan for unknown values")
        return values.astype(np.float32)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InputError(f"{expected} whole numbers, one for each residue")
    wrong = ((values < 0) | (values >= track.n_codes)) & (values != track.unknown)
    if wrong.any():
        at = int(wrong.argmax())
        raise InputError(
            f"{where} has {values[at]} at position {at + 1}, but {track.title} are 0 to {track.n_codes - 1}, and "
            f"{track.unknown:g} for an unknown value; make the codes again with the encoder of this model"
        )
    return values.astype(np.int64)


def require_length(track: Track, values: npt.NDArray[Any], length: int, where: str) -> None:
    """Raise `InputError` if `values` does not have `length` values, one per residue. `where` begins the message."""
    if len(values) != length:
        unknown = UNKNOWN_LETTER if track.kind == "letters" else f"{track.unknown:g}"
        hint = " (structure files list the whole sequence in SEQRES or _entity_poly_seq)"
        raise InputError(
            f"{where} has {track.title} of {len(values):,} residues, but its sequence has {length:,} residues; give "
            f"one value for each residue of the whole sequence, and {unknown} for an unknown value"
            f"{hint if track.kind == 'coordinates' else ''}"
        )


@functools.cache
def _numbers(letters: str, unknown: int) -> npt.NDArray[np.uint8]:
    """Return the track value of each ASCII code, uint8 [256]: for a letter of `letters` (in upper or lower case), its
    index in `letters`; for `#`, `unknown`; for all other characters, `_INVALID`.
    """
    numbers = np.full(256, _INVALID, np.uint8)
    for number, letter in enumerate(letters):
        numbers[[ord(letter.lower()), ord(letter.upper())]] = number
    numbers[ord(UNKNOWN_LETTER)] = unknown
    return numbers


def _letters(track: Track, given: Any, where: str) -> npt.NDArray[np.uint8]:
    if not isinstance(given, str):
        raise InputError(f"{where} is of type {type(given).__name__}; a string of {track.title} is expected")
    codes_L = np.frombuffer(given.encode("ascii", errors="replace"), np.uint8)
    values_L: npt.NDArray[np.uint8] = _numbers(track.letters, int(track.unknown))[codes_L]
    if (invalid := np.flatnonzero(values_L == _INVALID)).size:
        at = int(invalid[0])
        raise InputError(
            f"{where} has {shown(given[at])} at position {at + 1}, which is none of the {track.title} "
            f"({track.letters}); write {UNKNOWN_LETTER} for an unknown value"
        )
    return values_L


def entries(track: Track, source: Path, records: TokenStore, edits: Edits) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield the record index and the track values, [L, ...], of each record in a source, in the order of the source.

    Proteins that are not in the store are skipped. `edits` collects notices. Raises `InputError` if the source cannot
    be read, values do not fit their record, or a record has values twice.
    """
    given: Iterable[tuple[int, Any, str, str]]  # record number, values, file and line, beginning of a message
    if track.kind == "coordinates":
        given = _structure_entries(source, records, edits)
    elif track.kind == "letters":
        given = _by_id(records, ((r.id, r.text, f"{source}:{r.line}") for r in read_label_fasta(source)))
    elif source.suffix == ".npz":
        given = _by_id(records, ((name, values, str(source)) for name, values in read_arrays(source).items()))
    else:
        raise InputError(f"{source}: {track.title} are read from an .npz file with an array for each record id")
    places: dict[int, str] = {}
    for n, value, place, where in given:
        if n in places:
            raise InputError(f"{where} is in {places[n]} too; leave one of them out")
        places[n] = place
        values_L = values_of(track, value, where)
        require_length(track, values_L, int(records.lengths[n]), where)
        yield n, values_L


def _by_id(records: TokenStore, given: Iterable[tuple[str, Any, str]]) -> Iterator[tuple[int, Any, str, str]]:
    for record_id, value, place in given:
        if (n := records.find(record_id)) is not None:
            yield n, value, place, f"{place}: record {shown(record_id)}"


def _structure_entries(source: Path, records: TokenStore, edits: Edits) -> Iterator[tuple[int, Any, str, str]]:
    """Yield the index, coordinates, file and beginning of a message for each record with a structure file. `1abc.cif`
    belongs to the records `1abc`, `1ABC`, `1abc_A` and `sp|1ABC|X`.
    """
    records_of_name: dict[str, list[int]] = defaultdict(list)
    for n in range(len(records)):
        name = records.id(n).lower()
        accession = UNIPROT.match(name)
        for file_name in {name, name.rpartition("_")[0], accession[1] if accession else ""} - {""}:
            records_of_name[file_name].append(n)
    files = [path for path in listed_files(source, edits) if chain_prefix(path) in records_of_name]
    with Progress(f"structures in {source.name}", len(files), show=len(files) >= MANY) as progress:
        for done, path in enumerate(files, 1):
            prefix = chain_prefix(path)
            chains = read_chains(path, edits=Edits())
            for n in records_of_name[prefix]:
                chain = _chain_of(path, chains, prefix, n, records)
                if chain is not None:
                    where = f"{path}: chain '{chain.id}' of record {shown(records.id(n))}"
                    yield n, chain.backbone_L33, str(path), where
                    if chain.sequence != decode(records.residues(n)):
                        edits.add("the structure has other residues than the sequence", records.id(n))
            progress.update(done, path.name)


def _chain_of(path: Path, chains: list[Chain], prefix: str, n: int, records: TokenStore) -> Chain | None:
    """Return the chain of a structure file that belongs to record n.

    The record `1abc_A` gets chain A of `1abc.cif`, or None if the file has no chain A. The record `1abc` gets the chain
    with the same sequence, or the only chain of the file even if its sequence differs. Without such a chain,
    `InputError` is raised.
    """
    record_id = records.id(n)
    name, _, chain_name = record_id.rpartition("_")
    if name.lower() == prefix:
        return next((chain for chain in chains if chain.id == f"{prefix}_{chain_name}"), None)
    sequence = decode(records.residues(n))
    same = [chain for chain in chains if chain.sequence == sequence] or (chains if len(chains) == 1 else [])
    if not same:
        record = f"record {shown(record_id)}; rename the record to {prefix}_CHAIN"
        raise InputError(f"{path}: has {len(chains)} protein chains, and none has the sequence of {record}")
    return same[0]


VERSION = 3
"""The version of the code that reads tracks. When this number changes, all sources are read again."""


class TrackStore:
    """The values of one track for the N records of a token store, read from the directory that `write_track` made."""

    def __init__(self, path: Path, track: Track, store: TokenStore) -> None:
        self.path, self.track, self.records = path, track, store
        about = read_json(path / "manifest.json")
        self.sha256: dict[str, str] = about["sha256"]
        """The sha256 of `values.npy` and `known.npy`, by file name."""
        self.notices: list[str] = about["notices"]
        self.known_N: npt.NDArray[np.int32] = np.load(path / "known.npy", mmap_mode="r", allow_pickle=False)
        """How many residues of each record have a known value, int32 [N]."""
        self._values = np.load(path / "values.npy", mmap_mode="r", allow_pickle=False)

    def __getitem__(self, n: int) -> npt.NDArray[Any]:
        """Return the track values of the residues of record n, [L, ...]."""
        offsets = self.records.offsets
        begin, end = int(offsets[n]) - n, int(offsets[n + 1]) - n - 1
        values: npt.NDArray[Any] = self._values[begin:end]
        return values


def write_track(track: Track, source: Path, store: TokenStore, out: Path) -> TrackStore:
    """Read a track from its source, and write its values for all records of a token store to the new directory `out`.
    For errors see the function `entries`. `InputError` is also raised if no record has values, or if a record has
    several chains.
    """
    sealed_directory(out, functools.partial(_write, track, source, store))
    return TrackStore(out, track, store)


def _write(track: Track, source: Path, store: TokenStore, directory: Path) -> list[str]:
    if store.linker is not None:
        raise InputError(
            f"{source}: {track.title} are read for records of one chain, and some records have several chains; make "
            "each chain a record, or leave the track out"
        )
    edits, known_N, residues = Edits(), np.zeros(len(store), np.int32), int(store.offsets[-1]) - len(store)
    dtype = np.dtype(np.float32)
    if track.kind != "coordinates":
        dtype = np.min_scalar_type(max(track.n_codes, len(track.letters), int(track.unknown)))
    shape = (residues, *_value_shape(track))
    values = np.lib.format.open_memmap(directory / "values.npy", mode="w+", dtype=dtype, shape=shape)
    values[:] = track.unknown
    n_records = 0
    for n, values_L in entries(track, source, store, edits):
        begin = int(store.offsets[n]) - n
        values[begin : begin + len(values_L)] = values_L
        known_N[n] = _known_residues(track, values_L)
        n_records += 1
    if not n_records:
        ids = first_three(range(min(len(store), 4)), store.id)
        raise InputError(f"{source}: has no {track.title} for any of {len(store):,} records ({ids}); correct the ids")
    values.flush()
    np.save(directory / "known.npy", known_N)
    return edits.notices()


def cached_track(track: Track, source: Path, store: TokenStore) -> TrackStore:
    """Open a track for the records of a token store. The first call reads the source and writes to the user's cache.

    The source is read again if its path, one of its files, the track definition or the records change. While one
    process reads the source, other processes wait. For errors see the function `write_track`.
    """
    key = [VERSION, dataclasses.asdict(track), str(source.resolve()), states(source), store.manifest["sha256"]]
    out = cached_directory("tracks", json.dumps(key), functools.partial(_write, track, source, store))
    return TrackStore(out, track, store)


@dataclass(frozen=True)
class TrackFile:
    """A track, and the path of its file or directory.

    The path INSIDE means that the coordinates are in the structure files from which the sequences are read.
    """

    track: Track
    path: Path


def track_files(named: Mapping[str, str], takes: Sequence[Track], model: str, key: str) -> list[TrackFile]:
    """Return the track and the path for each track name that the user gave.

    `takes` has all tracks that the model can read. Raises `UsageError` for a name that is not among them. `model` and
    `key` (`data.tracks.` or `--track `) are for the message.
    """
    known = {track.name: track for track in takes}
    if unknown := [name for name in named if name not in known]:
        what = " and ".join(f"{track.name} ({track.title})" for track in takes)
        reason = f"takes no such track; it takes {what}" if takes else "reads the sequence alone and takes no track"
        raise UsageError(f"{key}{unknown[0]}: {model} {reason}; leave it out")
    # In `--track NAME=~/FILE`, the shell does not expand `~`, since it follows `=`.
    return [
        TrackFile(known[name], Path(path) if path == INSIDE else remote.data_file(path).expanduser())
        for name, path in named.items()
    ]


def named_tracks(options: Sequence[str]) -> dict[str, str]:
    """Parse the values of the option `--track NAME=PATH`. Return a dict from track name to path. Raises `UsageError` if
    a value has another form, or a name is given twice.
    """
    paths: dict[str, str] = {}
    for option in options:
        name, equals, path = option.partition("=")
        if not name or not equals or not path:
            raise UsageError(
                f"--track {option}: write NAME=PATH, or NAME={INSIDE} if the input files have the coordinates"
            )
        if name in paths:
            raise UsageError(f"--track {name}: is given twice; give one path")
        paths[name] = path
    return paths


def with_paths(path: Path, files: Sequence[TrackFile]) -> list[TrackFile]:
    """Replace the path INSIDE in `files` by `path`, the path of the data. Raises `InputError` if a track with the path
    INSIDE is not of kind `coordinates`, or the data are not structure files.
    """
    resolved = []
    for file in files:
        inside = file.path == Path(INSIDE)
        if inside and not (file.track.kind == "coordinates" and holds_structures(path)):
            raise InputError(f"{path}: has no {file.track.title} inside; give the path of the {file.track.title}")
        resolved.append(TrackFile(file.track, path) if inside else file)
    return resolved


def state_of(files: Sequence[TrackFile]) -> dict[str, dict[str, str]]:
    """Return for each track the name of its file or directory (`path`), and a hash (`state`) of the names, sizes and
    modification times of its files.
    """
    state_by_name = {}
    for file in files:
        facts = [(name, size, written) for name, _, size, written, _ in states(file.path)]
        state = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        state_by_name[file.track.name] = {"path": file.path.name, "state": state}
    return state_by_name


class RecordTracks:
    """All tracks of the records of a token store. `files` has the path of each track, for notices.

    If the records are variants of one protein, all get the values of record 0, and `protein` is the part of record 0
    that the model reads; else `protein` is None.
    """

    def __init__(
        self, stores: Sequence[TrackStore], files: Sequence[TrackFile] = (), protein: slice | None = None
    ) -> None:
        self._stores, self._files, self._protein = tuple(stores), tuple(files), protein

    @property
    def digest(self) -> str:
        """A hash of all track values and of `protein`."""
        text = " ".join(f"{store.track.name} {store.sha256['values.npy']}" for store in self._stores)
        if self._protein is not None:
            text += f" {self._protein}"
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, n: int, part: slice | npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Return the track values of the residues `part` of record n by track name, as `in_batches` returns them."""
        record, protein = (n, slice(None)) if self._protein is None else (0, self._protein)
        return {store.track.name: in_batches(store.track, store[record][protein][part]) for store in self._stores}

    def notices(self, records_M: npt.NDArray[np.int64]) -> list[str]:
        """Return sentences about how many of M records, and of their residues, have known track values. For variants of
        one protein, only the residues of the wild type are counted.
        """
        sentences: list[str] = []
        for store, source in zip(self._stores, (file.path for file in self._files), strict=True):
            if self._protein is not None:
                values = store[0][self._protein]
                known = f"{_known_residues(store.track, values):,} of {len(values):,} residues of the wild type"
                sentences.append(f"{store.track.title} of {known}, from {source}")
            else:
                known_M = store.known_N[records_M].astype(np.int64)
                residues = f"{known_M.sum():,} of {store.records.lengths[records_M].sum(dtype=np.int64):,} residues"
                records = f"{(known_M > 0).sum():,} of {counted(len(known_M), 'record')}"
                sentences.append(f"{store.track.title} of {records}, and {residues}, from {source}")
            sentences += [f"{source}: {notice}" for notice in store.notices]
        return sentences


def record_tracks(files: Sequence[TrackFile], store: TokenStore, protein: slice | None = None) -> RecordTracks:
    """Open the tracks of all records of a token store. No path may be INSIDE: call `with_paths` first."""
    return RecordTracks([cached_track(file.track, file.path, store) for file in files], files, protein)


def protein_tracks(files: Sequence[TrackFile], fasta: Path, protein: slice = slice(None)) -> RecordTracks:
    """Open the tracks of the only protein in a FASTA file, for all variants of this protein."""
    return record_tracks(files, cached(fasta), protein) if files else RecordTracks(())
