"""Tracks in Python's forms: an entry for each sequence, a dictionary by id, or a file."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.api.sequence_inputs import SequenceInputs
from esmshard.data.fasta.symbols import Edits
from esmshard.data.tracks.track_entries import entries
from esmshard.data.tracks.track_files import track_files
from esmshard.data.tracks.track_values import in_batches, require_length, unknown_entry, values_of
from esmshard.errors import InputError, UsageError
from esmshard.vocab import SEPARATOR, Track

Tracks = Mapping[str, Any]
"""By the name of a track, what is known of the sequences: one entry for a single sequence, else a list with an entry
for each sequence, a dictionary of entries by id, or the path of a file. An entry is a string of letters, an array of
codes [L], or an array of coordinates [L, 3, 3]; None, or an id that is absent, says that nothing is known.
"""


def tracks_of_inputs(
    given: Tracks | None, asked: SequenceInputs, takes: Sequence[Track], model: str
) -> list[dict[str, npt.NDArray[Any]]]:
    """Return the arrays of each sequence by the name of the track, [L + 2, ...].

    Args:
        given: the tracks, if there are any.
        asked: the N sequences.
        takes: the tracks that the model takes.
        model: name of the model, for messages.

    Raises:
        UsageError: the model takes no track of a name, or the entries do not fit the form of the sequences.
        InputError: an entry does not fit its sequence.
    """
    found: list[dict[str, npt.NDArray[Any]]] = [{} for _ in asked.tokens]
    given = given or {}
    for name, tokens in zip(asked.names, asked.tokens, strict=True):
        if given and SEPARATOR in tokens:
            raise InputError(f"{name} has several chains, and tracks are for one; give each chain, or leave them out")
    for track in [one.track for one in track_files(dict.fromkeys(given, ""), takes, model, "tracks: ")]:
        for n, values in enumerate(_values(track, given[track.name], asked)):
            known = unknown_entry(track, len(asked.tokens[n]) - 2) if values is None else values
            found[n][track.name] = in_batches(track, known)
    return found


def _values(track: Track, given: Any, asked: SequenceInputs) -> list[npt.NDArray[Any] | None]:
    """Return the values of each sequence, [L, ...]; None where nothing is known."""
    what = f"tracks: {track.name}"
    if isinstance(given, os.PathLike):
        if asked.ids is None:
            raise UsageError(
                f"{what}: a file has its entries by id, and the sequences have no ids; give a dictionary of sequences "
                "by id, or the entries themselves"
            )
        by_number = dict(entries(track, Path(given), _Records(asked), Edits()))
        return [by_number.get(n) for n in range(len(asked.tokens))]
    if asked.single:
        entry_of = [given]
    elif isinstance(given, Mapping):
        if asked.ids is None:
            raise UsageError(f"{what}: is a dictionary by id, and the sequences have no ids; give a list of entries")
        entry_of = [given.get(name) for name in asked.ids]
    else:
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != len(asked.tokens):
            raise UsageError(f"{what}: give a list with an entry for each of the {len(asked.tokens):,} sequences")
        entry_of = list(given)
    found: list[npt.NDArray[Any] | None] = []
    for entry, tokens, name in zip(entry_of, asked.tokens, asked.names, strict=True):
        if entry is None:
            found.append(None)
            continue
        where = f"tracks[{track.name!r}] of {name}"
        values = values_of(track, entry, where)
        require_length(track, values, len(tokens) - 2, where)
        found.append(values)
    return found


class _Records:
    """Sequences with ids, as readers of tracks take them."""

    def __init__(self, asked: SequenceInputs) -> None:
        assert asked.ids is not None
        self._tokens, self._ids = asked.tokens, asked.ids
        self._numbers = {name: n for n, name in enumerate(asked.ids)}

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return np.array([len(tokens) - 2 for tokens in self._tokens], np.int32)

    def id(self, n: int) -> str:
        return self._ids[n]

    def find(self, record_id: str) -> int | None:
        return self._numbers.get(record_id)

    def residues(self, n: int) -> npt.NDArray[np.uint8]:
        return self._tokens[n][1:-1]
