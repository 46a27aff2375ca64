"""FASTA records under ESM's symbol rules. Nothing is changed silently: every kind of edit is counted and named.

| in the file | becomes |
|---|---|
| lower-case letters | upper case, counted |
| `J` (leucine or isoleucine) | `X`, counted |
| `-` and `.` | removed, counted |
| one `*` at the end | removed, counted |
| spaces, carriage returns, blank lines, a byte-order mark | removed |
| `X B U Z O` | kept: ESM-2 saw them in training |
| anything else, an inner `*`, a record without residues | an error naming record, line and position |

The id is the first word of the header; `>` alone gets `seqnum000000004`, its line counted
from 0, as in fair-esm. An id that
comes twice with the same sequence is read once and counted; with another sequence it is an error.
"""

import hashlib
import lzma
import re
import string
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from Bio.SeqIO.FastaIO import SimpleFastaParser
from xopen import xopen

from esmshard.errors import InputError
from esmshard.vocab import RESIDUES

_FOREIGN = re.compile(f"[^{RESIDUES}]")
# ASCII only: str.upper() turns a German sharp s into two serines.
_UPPER = str.maketrans(string.ascii_lowercase, string.ascii_uppercase)
_GAPS = str.maketrans("", "", "-.")


@dataclass(frozen=True)
class Record:
    """One protein: letters of `vocab.RESIDUES` only."""

    id: str
    description: str
    """The whole header line without `>`."""
    sequence: str


Seen = dict[str, tuple[bytes, Path]]
"""Digest of the sequence and file of each id."""


@dataclass
class Edits:
    """What was changed while reading, by kind: how many records, and the ids of the first three."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, record_id: str) -> None:
        """Count one edit of a record."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        examples = self.first.setdefault(kind, [])
        if len(examples) < 3:
            examples.append(record_id)

    def notices(self) -> list[str]:
        """One sentence for each kind of edit."""
        return [
            f"{kind} in {count} record{'s' if count > 1 else ''} ({', '.join(self.first[kind])}"
            f"{', ...' if count > len(self.first[kind]) else ''})"
            for kind, count in self.counts.items()
        ]


def read_fasta(path: Path, edits: Edits | None = None, seen: Seen | None = None) -> Iterator[Record]:
    """Records of a FASTA file, plain or compressed (gz, bz2, xz, zst), in file order.

    Args:
        path: the file.
        edits: collects what was changed.
        seen: ids so far; the same dictionary for several files makes their ids one name space.

    Raises:
        InputError: naming file, line, record and position of what cannot be read, or that the file has no record.
    """
    edits = Edits() if edits is None else edits
    seen = {} if seen is None else seen
    none_yet = True
    try:
        with xopen(path, "rt", encoding="utf-8-sig", threads=0) as handle:
            parser = SimpleFastaParser(_checked(handle, path))  # type: ignore[no-untyped-call]
            for ordinal, (header, raw) in enumerate(parser):
                none_yet = False
                record_id = header.split(maxsplit=1)[0]
                sequence = _clean(raw, record_id, edits, path, ordinal)
                digest = hashlib.blake2b(sequence.encode(), digest_size=16).digest()
                if record_id in seen:
                    before, other = seen[record_id]
                    if before != digest:
                        at, there = f"{path}:{_line(path, ordinal)}", "" if other == path else f" in {other}"
                        raise InputError(
                            f"{at}: '{record_id}' was used before{there} with another sequence; rename one of them"
                        )
                    edits.add("a record that came twice was read once", record_id)
                    continue
                seen[record_id] = digest, path
                yield Record(record_id, header.strip(), sequence)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; a FASTA file is expected") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text (byte {_not_utf8(path)} is not UTF-8); a FASTA file is expected") from None
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise InputError(f"{path}: cannot be read to its end ({error}); copy or download it again") from None
    if none_yet:
        raise InputError(f"{path}: holds no record; a FASTA file has lines that begin with '>'")


def _checked(handle: TextIO, path: Path) -> Iterator[str]:
    """Lines from the first header on, `>` alone with its id. The parser would skip text before it without a word."""
    started = False
    for number, line in enumerate(handle):
        if line.startswith(">"):
            started = True
            yield line if line[1:].strip() else f">seqnum{number:09d}\n"
        elif started:
            yield line
        elif line.strip():
            raise InputError(f"{path}:{number + 1}: text before the first '>'; a FASTA record begins with '>ID'")


def _not_utf8(path: Path) -> int:
    """Place of the first byte that is not UTF-8. The decoder's own answer counts from its last block."""
    offset = 0
    with xopen(path, "rb", threads=0) as handle:
        for line in handle:
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return offset + error.start
            offset += len(line)
    return offset


def _clean(raw: str, record_id: str, edits: Edits, path: Path, ordinal: int) -> str:
    sequence = "".join(raw.split())
    if sequence.endswith("*"):
        sequence = sequence[:-1]
        edits.add("a '*' at the end was removed", record_id)
    if not _FOREIGN.search(sequence) and sequence:  # the common case: one scan, no copies
        return sequence
    upper = sequence.translate(_UPPER)
    if upper != sequence:
        edits.add("lower-case letters were read as upper case", record_id)
    without = upper.translate(_GAPS)
    if without != upper:
        edits.add("gaps were removed", record_id)
    if "J" in without:
        edits.add("J (Leu or Ile) was read as X", record_id)
        without = without.replace("J", "X")
    foreign = _FOREIGN.search(without)
    if foreign:
        at = [k for k, c in enumerate(upper) if c not in "-."][foreign.start()] + 1
        mend = "cut the sequence at the stop codon" if foreign[0] == "*" else "write X for an unknown residue"
        raise InputError(
            f"{path}:{_line(path, ordinal)}: record '{record_id}' has '{foreign[0]}' at position {at}, "
            f"which is not a residue; {mend}"
        )
    if not without:
        raise InputError(f"{path}:{_line(path, ordinal)}: record '{record_id}' has no residues; remove it")
    return without


def _line(path: Path, ordinal: int) -> int:
    """Line of the n-th header, counted from 1. The file is read again: only on the way to an error."""
    with xopen(path, "rt", encoding="utf-8-sig", threads=0) as handle:
        headers = (number for number, line in enumerate(handle, 1) if line.startswith(">"))
        return next(number for k, number in enumerate(headers) if k == ordinal)
