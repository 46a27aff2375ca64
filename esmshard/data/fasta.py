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

The id is the first word of the header; `>` alone gets `seqnum000000004` (counted from 0), as in fair-esm. An id that
comes twice with the same sequence is read once and counted; with another sequence it is an error.
"""

import hashlib
import lzma
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TextIO

from Bio.SeqIO.FastaIO import SimpleFastaParser
from xopen import xopen

from esmshard.errors import InputError
from esmshard.vocab import RESIDUES

_FOREIGN = re.compile(f"[^{RESIDUES}]")
_GAPS = str.maketrans("", "", "-.")


@dataclass(frozen=True)
class Record:
    """One protein: letters of `vocab.RESIDUES` only."""

    id: str
    description: str
    """The whole header line without `>`."""
    sequence: str


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


def read_fasta(path: Path, edits: Edits | None = None) -> Iterator[Record]:
    """Records of a FASTA file, plain or compressed (gz, bz2, xz, zst), in file order.

    Args:
        path: the file.
        edits: collects what was changed.

    Raises:
        InputError: naming file, line, record and position of what cannot be read, or that the file has no record.
    """
    edits = Edits() if edits is None else edits
    seen: dict[str, bytes] = {}
    try:
        with xopen(path, "rt", encoding="utf-8-sig", threads=0) as handle:
            parser = SimpleFastaParser(_checked(handle, path))  # type: ignore[no-untyped-call]
            for ordinal, (header, raw) in enumerate(parser):
                record_id = header.split(maxsplit=1)[0] if header.strip() else f"seqnum{ordinal:09d}"
                sequence = _clean(raw, record_id, edits, path, ordinal)
                digest = hashlib.blake2b(sequence.encode(), digest_size=16).digest()
                if record_id in seen:
                    if seen[record_id] != digest:
                        raise InputError(
                            f"{path}:{_line(path, ordinal)}: '{record_id}' was used before with another sequence; "
                            "rename one of the two"
                        )
                    edits.add("a record that came twice was read once", record_id)
                    continue
                seen[record_id] = digest
                yield Record(record_id, header.strip(), sequence)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; a FASTA file is expected") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not text (byte {error.start} is not UTF-8); a FASTA file is expected") from None
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise InputError(f"{path}: cannot be read to its end ({error}); copy or download it again") from None
    if not seen:
        raise InputError(f"{path}: holds no record; a FASTA file has lines that begin with '>'")


def _checked(handle: TextIO, path: Path) -> Iterator[str]:
    """Lines from the first header on. The parser would skip text before it without a word."""
    for number, line in enumerate(handle, 1):
        if line.startswith(">"):
            return chain([line], handle)
        if line.strip():
            raise InputError(f"{path}:{number}: text before the first '>'; a FASTA record begins with '>ID'")
    return iter(())


def _clean(raw: str, record_id: str, edits: Edits, path: Path, ordinal: int) -> str:
    sequence = "".join(raw.split())
    if sequence.endswith("*"):
        sequence = sequence[:-1]
        edits.add("a '*' at the end was removed", record_id)
    if not _FOREIGN.search(sequence) and sequence:  # the common case: one scan, no copies
        return sequence
    upper = sequence.upper()
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
