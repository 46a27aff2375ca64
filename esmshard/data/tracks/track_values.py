"""The entry of one protein in a track: its letters, codes or coordinates, checked and turned into numbers."""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.tables import shown
from esmshard.errors import InputError
from esmshard.vocab import Track

UNKNOWN_LETTER = "#"
"""The letter of a residue of which nothing is known, as SaProt's authors write it."""
_DTYPE: dict[str, npt.DTypeLike] = {"letters": np.uint8, "codes": np.int64, "coordinates": np.float32}
_STRANGE = 255


def shape_of(track: Track) -> tuple[int, ...]:
    """Return the dimensions of the entry of one residue."""
    return (3, 3) if track.kind == "coordinates" else ()


def in_batches(track: Track, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the entries of the residues of a protein [L, ...] as batches have them: in the dtype of `Track.kind`, and
    with an unknown entry at `<cls>` and one at `<eos>`, [L + 2, ...].

    >>> dssp = Track("dssp", "DSSP letters", "letters", unknown=3, letters="HEC")
    >>> in_batches(dssp, values_of(dssp, "HC", "here")).tolist()
    [3, 0, 2, 3]
    """
    end = np.full((1, *values.shape[1:]), track.unknown)
    return np.concatenate([end, values, end], dtype=_DTYPE[track.kind], casting="unsafe")


def unknown_entry(track: Track, length: int) -> npt.NDArray[Any]:
    """Return the entry of a protein of which nothing is known, [L, ...]."""
    return np.full((length, *shape_of(track)), track.unknown, dtype=_DTYPE[track.kind])


def known_residues(track: Track, values: npt.NDArray[Any]) -> int:
    """Return of how many residues something is known."""
    if track.kind == "coordinates":
        return int(np.isfinite(values).all((1, 2)).sum())
    return int((values != track.unknown).sum())


def values_of(track: Track, given: Any, where: str) -> npt.NDArray[Any]:
    """Check the entry of one protein, and return it as numbers, [L, ...].

    Args:
        track: the track.
        given: a text for `letters`, in upper or lower case, with `#` where nothing is known; an array for the others.
        where: the beginning of messages, such as `x.fasta:3: record 'P01308'`.

    Raises:
        InputError: it is no such text or array, or a value is none of the track.
    """
    if track.kind == "letters":
        return _letters(track, given, where)
    return _codes(track, given, where) if track.kind == "codes" else _coordinates(track, given, where)


def require_length(track: Track, values: npt.NDArray[Any], length: int, where: str, fix: str = "") -> None:
    """Refuse an entry that has not one value for each residue.

    Args:
        track: the track.
        values: the entry, [L, ...].
        length: the number of residues of the sequence.
        where: the beginning of messages.
        fix: what to do about it; by default one value for each residue is asked for.
    """
    if len(values) != length:
        unknown = UNKNOWN_LETTER if track.kind == "letters" else f"{track.unknown:g}"
        fix = fix or f"give one for each residue of the whole sequence, {unknown} where nothing is known"
        raise InputError(
            f"{where} has {track.title} of {len(values):,} residues, and its sequence has {length:,} residues; {fix}"
        )


@functools.cache
def _numbers(letters: str, unknown: int) -> npt.NDArray[np.uint8]:
    """Return the number of each ASCII letter, uint8 [256]."""
    numbers = np.full(256, _STRANGE, np.uint8)
    for number, letter in enumerate(letters):
        numbers[[ord(letter.lower()), ord(letter.upper())]] = number
    numbers[ord(UNKNOWN_LETTER)] = unknown
    return numbers


def _letters(track: Track, given: Any, where: str) -> npt.NDArray[np.uint8]:
    if not isinstance(given, str):
        raise InputError(f"{where} is of type {type(given).__name__}; a string of {track.title} is expected")
    codes_L = np.frombuffer(given.encode("ascii", errors="replace"), np.uint8)
    values_L: npt.NDArray[np.uint8] = _numbers(track.letters, int(track.unknown))[codes_L]
    if (strange := np.flatnonzero(values_L == _STRANGE)).size:
        at = int(strange[0])
        raise InputError(
            f"{where} has {shown(given[at])} at position {at + 1}, which is none of the {track.title} "
            f"({track.letters}); write {UNKNOWN_LETTER} where nothing is known"
        )
    return values_L


def _codes(track: Track, given: Any, where: str) -> npt.NDArray[np.int64]:
    values_L = np.asarray(given)
    if values_L.ndim != 1 or values_L.dtype.kind not in "iu":
        raise InputError(
            f"{where} is {values_L.dtype} {list(values_L.shape)}; {track.title} are whole numbers, one for each residue"
        )
    wrong = ((values_L < 0) | (values_L >= track.n_codes)) & (values_L != track.unknown)
    if wrong.any():
        at = int(wrong.argmax())
        raise InputError(
            f"{where} has {values_L[at]} at position {at + 1}, but {track.title} are 0 to {track.n_codes - 1}, and "
            f"{track.unknown:g} where nothing is known; make it again with the encoder of this model"
        )
    return values_L.astype(np.int64)


def _coordinates(track: Track, given: Any, where: str) -> npt.NDArray[np.float32]:
    values_L33 = np.asarray(given)
    if values_L33.ndim != 3 or values_L33.shape[1:] != (3, 3) or values_L33.dtype.kind not in "fiu":
        raise InputError(
            f"{where} is {values_L33.dtype} {list(values_L33.shape)}; {track.title} are numbers of shape [residues, 3, "
            "3]: N, CA and C of each residue in Angstrom, nan where nothing is known"
        )
    return values_L33.astype(np.float32)
