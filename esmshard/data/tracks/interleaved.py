"""FASTA files in which residues and letters of a track stand in turns, as `MdEvVp` of SaProt's authors.

Such a file becomes two FASTA files with the same headers, one of the sequences and one of the letters, which are read
like any others.
"""

import hashlib
import json
from pathlib import Path

from esmshard.data.fasta.sources import STDIN
from esmshard.data.fasta.symbols import Edits
from esmshard.data.labels.label_fasta import LabelRecord, read_label_fasta
from esmshard.data.tables import shown
from esmshard.data.tracks.track_values import UNKNOWN_LETTER
from esmshard.errors import InputError
from esmshard.files import cache_directory, read_json, state, whole_directory
from esmshard.vocab import RESIDUES, Track

VERSION = 2
"""The version of the rules of `separate`. After a change, all files are read again."""


def cached_pair(source: Path, track: Track) -> tuple[Path, Path, list[str]]:
    """Return the FASTA file of the sequences and that of the letters, which are kept in the user's cache, and sentences
    on what was left out of them.

    Raises:
        InputError: see `separate`.
    """
    from filelock import FileLock  # slow to import

    if source == STDIN:
        raise InputError(f"-: {track.title} between residues are read from a file; name one")
    try:
        now = state(source)
    except OSError as error:
        raise InputError(f"{source}: {(error.strerror or 'cannot be read').lower()}") from None
    key = json.dumps([VERSION, track.letters, str(source.resolve()), now])
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    out, locks = cache_directory() / "interleaved" / digest, cache_directory() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{digest}.lock"):
        if not out.is_dir():
            with whole_directory(out) as work:
                notices = separate(source, track, work / "sequences.fasta", work / "letters.fasta")
                (work / "notices.json").write_text(json.dumps(notices), encoding="utf-8")
    return out / "sequences.fasta", out / "letters.fasta", read_json(out / "notices.json")


def separate(source: Path, track: Track, sequences: Path, letters: Path) -> list[str]:
    """Write the residues and the letters of an interleaved FASTA file, plain or compressed, to two files. Return
    sentences on the rows of a table that were left out, since they have no sequence.

    Raises:
        InputError: a record is not interleaved; the message names file, line and position.
    """
    known, edits = frozenset(track.letters.lower() + UNKNOWN_LETTER), Edits()
    with open(sequences, "w", encoding="utf-8") as of_residues, open(letters, "w", encoding="utf-8") as of_letters:
        for record in read_label_fasta(source, edits):
            _check(record, source, track, known)
            of_residues.write(f">{record.header}\n{record.text[::2]}\n")
            of_letters.write(f">{record.header}\n{record.text[1::2]}\n")
    return edits.notices()


def _check(record: LabelRecord, source: Path, track: Track, known: frozenset[str]) -> None:
    """Refuse a record whose residues in upper case and letters in lower case do not stand in turns."""
    text = record.text
    if len(text) % 2 == 0 and known.issuperset(text[1::2]) and _RESIDUES.issuperset(text[::2]):
        return
    where = f"{source}:{record.line}: record {shown(record.id)}"
    form = f"residues in upper case and {track.title} in lower case ({UNKNOWN_LETTER} where nothing is known) in turns"
    for place, letter in enumerate(text):
        if letter not in (known if place % 2 else _RESIDUES):
            raise InputError(f"{where} has {shown(letter)} at position {place + 1}; write {form}, as {_example(track)}")
    raise InputError(f"{where} ends with a residue without its letter; write {form}, as {_example(track)}")


def _example(track: Track) -> str:
    letters = track.letters.lower() * 3
    return f"M{letters[0]}E{letters[1]}V{letters[2]}"


_RESIDUES = frozenset(RESIDUES)
