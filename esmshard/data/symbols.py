"""ESM's symbol rules. Nothing is changed silently: every kind of edit is counted and named.

| in the file | becomes |
|---|---|
| lower-case letters | upper case, counted; in A3M files insertions: removed, counted |
| `J` (leucine or isoleucine) | `X`, counted |
| `-` and `.` | removed, counted (`keep_gaps` keeps them; `.` of an A3M file is removed all the same) |
| one `*` at the end | removed, counted |
| spaces, carriage returns, blank lines, a byte-order mark | removed |
| `X B U Z O` | kept: ESM-2 saw them in training |
| anything else, an inner `*`, no residues at all | as `on_unknown` says: by default an error |
| `<mask>`, written out | one such symbol: `on_unknown` `mask` makes one `<mask>` of it |
"""

import hashlib
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from esmshard.errors import UsageError
from esmshard.vocab import GAPS, MASK, RESIDUES, TOKENS

BLANKS = b" \t\n\r\v\f"
STRANGE = 255
"""What `table` makes of bytes that need a closer look."""

_NO_BLANKS = str.maketrans("", "", BLANKS.decode())
# ASCII only: str.upper() turns a German sharp s into two serines.
_UPPER = str.maketrans(string.ascii_lowercase, string.ascii_uppercase)
_MASKED = "\0"
_MASK_TEXT = re.compile(re.escape(TOKENS[MASK]), re.IGNORECASE)
_MASK_SYMBOL = "\uf8ff"
"""Stands for a `<mask>` that is written out, while its sequence is looked at: the last code point for private use."""
_CHAINS = ":/|+"
"""What programs for complexes write between the chains of one record."""
LEFT_OUT = "a sequence with symbols that are no residues, or without any, was left out"


@dataclass(frozen=True)
class Rules:
    """What a reader may change. Every change is counted."""

    on_unknown: Literal["error", "mask", "drop"] = "error"
    """A symbol that is no residue: refuse it, read it as `<mask>`, or leave its record out. A record without residues
    is left out by `drop` and refused otherwise."""
    a3m: bool = False
    """Lower-case letters and `.` are insertions of an alignment and are removed."""
    keep_gaps: bool = False
    """Keep `-` (and `.`, but not in A3M files) as the gap tokens of the alphabet."""
    long: Literal["full", "crop", "window", "skip", "error"] = "full"
    """A sequence over `max_length`: `full` keeps it; `crop` keeps one window of it, its place drawn from the id and
    added to the header as `residues=FIRST-LAST`; `window` makes as few windows as cover it, evenly spread, each a
    record named `ID/FIRST-LAST`; `skip` leaves it out; `error` refuses it."""
    max_length: int | None = None
    """Residues. Nothing but `long` reads it."""
    on_nucleotides: Literal["error", "keep"] = "error"
    """Records that together look like DNA or RNA (`esmshard.data.nucleotides`): refuse them, or take them for the
    proteins that they are."""

    def __post_init__(self) -> None:
        if self.long != "full" and self.max_length is None:
            raise UsageError(f"--long {self.long}: needs --max-length")
        if self.max_length is not None and self.max_length < 1:
            raise UsageError(f"--max-length {self.max_length}: 1 or more is expected")


class Refused(Exception):
    """A record breaks the rules. The message goes on after `FILE:LINE: record 'ID' `.

    Args:
        what: is wrong with it.
        fix: what to do to the record.
        droppable: whether `on_unknown` is an option for it.
    """

    def __init__(self, what: str, fix: str, *, droppable: bool = False) -> None:
        super().__init__(f"{what}; {fix}")
        self.what, self.fix, self.droppable = what, fix, droppable


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
            examples.append(shown(record_id))

    def extend(self, later: "Edits") -> None:
        """Add the edits of records that come after these."""
        for kind, count in later.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
            self.first[kind] = (self.first.get(kind, []) + later.first[kind])[:3]

    def notices(self) -> list[str]:
        """One sentence for each kind of edit."""
        return [
            f"{kind} in {count:,} record{'s' if count > 1 else ''} ({', '.join(self.first[kind])}"
            f"{', ...' if count > len(self.first[kind]) else ''})"
            for kind, count in self.counts.items()
        ]


def shown(name: str) -> str:
    r"""An id as a message may hold it: at most 60 characters, all of them printable.

    >>> shown("a\x1bb")
    'a\\x1bb'
    """
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name[:61])
    return text if len(text) <= 60 else f"{text[:57]}..."


def table(rules: Rules, others: Mapping[str, int]) -> bytes:
    """For `bytes.translate`: letters that are taken as they are to their tokens, `others` too, the rest to STRANGE."""
    codes = bytearray([STRANGE]) * 256
    for letter in _kept(rules):
        codes[ord(letter)] = TOKENS.index(letter)
    for letter, code in others.items():
        codes[ord(letter)] = code
    return bytes(codes)


def mend(written: str, rules: Rules, edits: Edits, record_id: str) -> bytes | None:
    """Residue tokens of a sequence as it stands in the file; None where its record is left out.

    Raises:
        Refused: for a symbol that is no residue, with its position, and for a sequence without residues.
    """
    kinds: list[str] = []
    text = written = _MASK_TEXT.sub(_MASK_SYMBOL, written.translate(_NO_BLANKS))
    if text.endswith("*"):
        text = text[:-1]
        kinds.append("a '*' at the end was removed")
    if rules.a3m:
        aligned = re.sub(r"[a-z.]", "", text)
        if aligned != text:
            kinds.append("insertions were removed")
    else:
        aligned = text.translate(_UPPER)
        if aligned != text:
            kinds.append("lower-case letters were read as upper case")
    sequence = aligned if rules.keep_gaps else re.sub(r"[-.]", "", aligned)
    if sequence != aligned:
        kinds.append("gaps were removed")
    if "J" in sequence:
        kinds.append("J (Leu or Ile) was read as X")
        sequence = sequence.replace("J", "X")
    strange = re.compile(f"[^{re.escape(_kept(rules))}]")
    foreign = strange.search(sequence)
    if (foreign or not sequence) and rules.on_unknown == "drop":
        edits.add(LEFT_OUT, record_id)
        return None
    if not sequence:
        raise Refused("has no residues", "remove it", droppable=True)
    if foreign and rules.on_unknown == "error":
        removed = ("" if rules.keep_gaps else GAPS) + (string.ascii_lowercase + "." if rules.a3m else "")
        position = [k for k, symbol in enumerate(written) if symbol not in removed][foreign.start()] + 1
        symbol = TOKENS[MASK] if foreign[0] == _MASK_SYMBOL else shown(foreign[0])
        what = f"has '{symbol}' at position {position}, which is not a residue"
        raise Refused(what, _fix(foreign[0]), droppable=True)
    if foreign:
        kinds.append("symbols that are no residues were read as <mask>")
        sequence = strange.sub(_MASKED, sequence)
    for kind in kinds:
        edits.add(kind, record_id)
    return sequence.encode("ascii").translate(table(rules, {_MASKED: MASK}))


def _fix(symbol: str) -> str:
    """What to do about a symbol that is no residue."""
    if symbol == "*":
        return "cut the sequence at the stop codon"
    if symbol in _CHAINS:
        return "if it divides the chains of a complex, write each chain as a record of its own"
    return "write X for an unknown residue"


def cut(name: bytes, header: bytes, tokens: bytes, rules: Rules, edits: Edits) -> list[tuple[bytes, bytes, bytes]]:
    """(id, header, tokens) of each record that a sequence becomes under `rules.long`.

    Raises:
        Refused: for a sequence over `max_length` where these are errors.
    """
    length, most, record_id = len(tokens), rules.max_length, name.decode()
    if most is None or length <= most or rules.long == "full":
        return [(name, header, tokens)]
    if rules.long == "error":
        raise Refused(
            f"has {length:,} residues, over {most:,}", "raise the limit, or crop, window or skip long sequences"
        )
    if rules.long == "skip":
        edits.add(f"a sequence over {most:,} residues was left out", record_id)
        return []
    if rules.long == "crop":
        edits.add(f"a sequence over {most:,} residues was cropped", record_id)
        digest = hashlib.blake2b(name, digest_size=8).digest()
        start = int.from_bytes(digest, "little") % (length - most + 1)
        return [(name, header + b" residues=%d-%d" % (start + 1, start + most), tokens[start : start + most])]
    edits.add(f"a sequence over {most:,} residues was cut into windows", record_id)
    windows = -(-length // most)
    starts = [k * (length - most) // (windows - 1) for k in range(windows)]
    after = header.lstrip(BLANKS)[len(name) :]
    names = [name + b"/%d-%d" % (start + 1, start + most) for start in starts]
    return [(new, new + after, tokens[start : start + most]) for new, start in zip(names, starts, strict=True)]


def _kept(rules: Rules) -> str:
    gaps = "-" if rules.a3m else GAPS
    return RESIDUES + gaps if rules.keep_gaps else RESIDUES
