"""Converts the symbols in a sequence to ESM tokens by rules, and counts every change.

| in the file | becomes |
|---|---|
| lower-case letters | upper case, counted; in A3M files they are insertions: removed, counted |
| alternating upper and lower case, as `MdEvVp` | an error, since SaProt writes structure letters in lower case |
| `J` (leucine or isoleucine) | `X`, counted |
| `-` and `.` | removed, counted; `keep_gaps` keeps them, except `.` in A3M files |
| one `*` at the end of a chain | removed, counted |
| `:` between two chains, but not in A3M files | `SEPARATOR` tokens, as many as `Rules.linker`, counted |
| spaces, carriage returns, blank lines, a byte-order mark | removed |
| `X B U Z O` | kept: they are in the training data of ESM-2 |
| other symbols, an inner `*`, the text `<mask>` | an error; `on_unknown=mask`: `<mask>`; `on_unknown=drop`: no record |
| no residues in a chain | an error; `on_unknown=drop`: no record |
"""

import hashlib
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError, UsageError
from esmshard.vocab import BETWEEN, GAPS, LINKER, MASK, RESIDUES, SEPARATOR, TOKENS, chain_spans


@dataclass(frozen=True)
class ChainWindows:
    """Windows of a record with too many tokens. Each window has one range of every chain, and all linkers."""

    spans: tuple[tuple[int, int], ...]
    """The begin and the end (exclusive) of each chain in the tokens of the record."""
    sizes: tuple[int, ...]
    """The number of residues that a window has of each chain."""

    @property
    def rooms(self) -> list[int]:
        """The number of residues that a window leaves out of each chain."""
        return [end - start - size for (start, end), size in zip(self.spans, self.sizes, strict=True)]

    @property
    def count(self) -> int:
        """The smallest number of windows that together have every residue of the record."""
        lengths = [end - start for start, end in self.spans]
        return max(-(-length // size) for length, size in zip(lengths, self.sizes, strict=True))

    def spread(self, place: int) -> list[int]:
        """Return the offset of window `place` (from 0) in each chain. The `count` windows are spread evenly."""
        return [place * room // max(self.count - 1, 1) for room in self.rooms]

    def drawn(self, key: str) -> list[int]:
        """Return the offset of a random window in each chain. The same `key` always gives the same window."""
        keys = [key] if len(self.spans) == 1 else [f"{key}:{k}" for k in range(len(self.spans))]
        numbers = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") for name in keys]
        return [number % (room + 1) for number, room in zip(numbers, self.rooms, strict=True)]

    def kept(self, starts: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the indices of the W tokens of a window, int64 [W]. `starts` has the window's offset in each chain."""
        ranges, linker = list[npt.NDArray[np.int64]](), self.spans[0][0]
        for (begin, end), size, start in zip(self.spans, self.sizes, starts, strict=True):
            ranges += [np.arange(linker, begin), np.arange(begin + start, begin + start + size)]
            linker = end
        return np.concatenate(ranges)

    def name(self, starts: Sequence[int]) -> str:
        """Return the name of a window: its residue range in each chain, from 1, such as `1-300:5-204`."""
        return ":".join(f"{start + 1}-{start + size}" for start, size in zip(starts, self.sizes, strict=True))


def chain_windows(tokens: npt.NDArray[np.uint8], most: int) -> ChainWindows:
    """Divide a record into windows of at most `most` tokens. `<cls>` and `<eos>` do not count.

    Raise `InputError` if a window has no room for all linkers and one residue of each chain.

    >>> from esmshard.vocab import encode_residues
    >>> tokens = np.frombuffer(encode_residues("MKTAYIAKQR:GQI", linker=2), np.uint8)
    >>> chain_windows(tokens, 11).sizes
    (6, 3)
    """
    spans = chain_spans(tokens)
    lengths = [end - start for start, end in spans]
    linkers = len(tokens) - sum(lengths)
    room = most - linkers
    if room < len(spans):
        raise InputError(
            f"a limit of {most:,} residues has no room for {len(spans)} chains and {linkers:,} linker residues; raise "
            "the limit, or use a shorter linker"
        )
    sizes = [0] * len(spans)
    by_length = sorted(range(len(spans)), key=lengths.__getitem__)
    for done, k in enumerate(by_length):
        sizes[k] = min(lengths[k], room // (len(spans) - done))
        room -= sizes[k]
    return ChainWindows(tuple(spans), tuple(sizes))


BLANKS = b" \t\n\r\v\f"
STRANGE = 255
"""The code of a byte that is neither a residue letter nor a kept gap. `clean` encodes sequences with such bytes."""

_NO_BLANKS = str.maketrans("", "", BLANKS.decode())
# Only ASCII letters change, since str.upper() turns a German sharp s into two serines.
_UPPER = str.maketrans(string.ascii_lowercase, string.ascii_uppercase)
_MASKED = "\0"
_MASK_TEXT = re.compile(re.escape(TOKENS[MASK]), re.IGNORECASE)
_MASK_SYMBOL = "\uf8ff"
"""Replaces the text `<mask>` in a sequence by one character, which Unicode reserves for private use."""
_IN_TURNS = re.compile(r"(?:[A-Z][a-z#]){3,}")
"""Matches residues with a structure letter after each residue, as `MdEvVp`. `#` is an unknown structure."""
_STOP = re.compile(r"\*(?=:|\Z)")
JOINED = "chains were joined by a linker"
LEFT_OUT = "a sequence with symbols that are no residues, or without any, was left out"


@dataclass(frozen=True)
class Rules:
    """The settings of a sequence reader: the allowed changes, and the columns of a table."""

    on_unknown: Literal["error", "mask", "drop"] = "error"
    """The treatment of a symbol that is no residue. `error` raises an error, `mask` reads the symbol as `<mask>`, and
    `drop` leaves out the record. `drop` also leaves out a record with an empty chain.
    """
    a3m: bool = False
    """Whether the file is an A3M alignment, in which lower-case letters and `.` are insertions."""
    keep_gaps: bool = False
    """Whether to keep `-` (and `.`, but not in A3M files) as the gap tokens of the alphabet."""
    long: Literal["full", "crop", "window", "skip", "error"] = "full"
    """The treatment of a sequence over `max_length`. `full` keeps the sequence. `crop` keeps one random window (the id
    is the seed), and adds `residues=FIRST-LAST` to the header. `window` covers the sequence by the smallest number of
    windows, and each window becomes a record `ID/FIRST-LAST`. `skip` leaves out the record. `error` raises an error.
    """
    max_length: int | None = None
    """The maximum number of residues of a sequence, with linkers; None for no maximum."""
    on_nucleotides: Literal["error", "keep"] = "error"
    """The treatment of a file that seems to be DNA or RNA: `error` raises an error, `keep` reads the file."""
    linker: int = LINKER
    """The number of `SEPARATOR` tokens between two chains of a record."""
    sequence_column: str | None = None
    """The name of the sequence column in a table; None to find the column as `esmshard.io.sequences` describes."""
    id_column: str | None = None
    """The name of the id column in a table; None to find the column as `esmshard.io.sequences` describes."""

    def __post_init__(self) -> None:
        if self.long != "full" and self.max_length is None:
            raise UsageError(f"--long {self.long}: needs --max-length")
        if self.max_length is not None and self.max_length < 1:
            raise UsageError(f"--max-length {self.max_length}: 1 or more is expected")

    def recorded(self) -> dict[str, Any]:
        """Return the rules as a dictionary for the manifest of a store, without column names that are None."""
        return {key: value for key, value in asdict(self).items() if value is not None or not key.endswith("_column")}


class RefusedSymbols(Exception):
    """The error for a record that breaks the rules. `what` is the problem, and `fix` says how to correct it.

    The caller writes `FILE:LINE: record 'ID' ` in front, and proposes `on_unknown=drop` if `droppable` is true.
    """

    def __init__(self, what: str, fix: str, *, droppable: bool = False) -> None:
        super().__init__(f"{what}; {fix}")
        self.what, self.fix, self.droppable = what, fix, droppable


@dataclass
class Edits:
    """Counts of the changes and omissions of a reader, by kind.

    Each kind is a text. Most kinds count records, such as `gaps were removed`. A kind that counts other items has `(s)`
    after its noun, as in `chain(s) left out`.
    """

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[str]] = field(default_factory=dict)
    """The names of the first four records, files or chains with each kind of edit. A message shows three names."""

    def add(self, kind: str, name: str, count: int = 1) -> None:
        """Count an edit of the record `name`, or `count` edits in the file or chain `name`."""
        if count:
            self.counts[kind] = self.counts.get(kind, 0) + count
            names = self.first.setdefault(kind, [])
            if len(names) < 4:
                names.append(shown(name))

    def extend(self, later: "Edits") -> None:
        """Add the counts and names of `later`, which has the edits of records that follow in the input."""
        for kind, count in later.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
            self.first[kind] = (self.first.get(kind, []) + later.first[kind])[:4]

    def notices(self) -> list[str]:
        """Return a sentence for each kind of edit, with its count and up to three names."""
        sentences = []
        for kind, count in self.counts.items():
            names, plural, is_item = self.first[kind], "s" if count > 1 else "", "(s)" in kind
            what = f"{count:,} {kind.replace('(s)', plural)}" if is_item else f"{kind} in {count:,} record{plural}"
            more = ", ..." if len(names) > 3 or (count > len(names) and not is_item) else ""
            sentences.append(f"{what} ({', '.join(names[:3])}{more})")
        return sentences


def in_a_store(option: str) -> str:
    """Return the end of a message: the advice to make a store by `esmshard ingest` with this option."""
    return f"run `esmshard ingest FILE -o NAME.store {option}`, and use NAME.store instead of the file"


def shown(name: str) -> str:
    """Format an id for a message, with at most 60 printable characters."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name[:61])
    return text if len(text) <= 60 else f"{text[:57]}..."


def table(rules: Rules, others: Mapping[str, int]) -> bytes:
    """Return a table for `bytes.translate` that turns residue letters, and gaps that `rules` keep, into tokens.

    `others` gives codes for characters that are neither, such as `>`. All bytes without a code become `STRANGE`.
    """
    codes = bytearray([STRANGE]) * 256
    for letter in _kept(rules):
        codes[ord(letter)] = TOKENS.index(letter)
    for letter, code in others.items():
        codes[ord(letter)] = code
    return bytes(codes)


def clean(written: str, rules: Rules, edits: Edits, record_id: str) -> bytes | None:
    """Convert the sequence text `written` to residue tokens. Return None if `rules.on_unknown` leaves out the record.

    Raise `RefusedSymbols` for a symbol that is no residue, for SaProt's structure letters, or for an empty chain.
    """
    kinds: list[str] = []
    written = _MASK_TEXT.sub(_MASK_SYMBOL, written.translate(_NO_BLANKS))
    text = _STOP.sub("", written)
    if not rules.a3m and _IN_TURNS.fullmatch(text):
        raise RefusedSymbols(
            "has a structure letter after each residue, as SaProt writes sequences",
            "in a FASTA file remove these letters by `sed '/^>/!s/[a-z#]//g' FILE > NEW`, and give them to SaProt as "
            "a track (docs/tracks.md)",
        )
    if text != written:
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
    strange = re.compile(f"[^{re.escape(_kept(rules) + ('' if rules.a3m else BETWEEN))}]")
    foreign = strange.search(sequence)
    chains = [sequence] if rules.a3m else sequence.split(BETWEEN)
    if (foreign or not all(chains)) and rules.on_unknown == "drop":
        edits.add(LEFT_OUT, record_id)
        return None
    if not sequence:
        raise RefusedSymbols("has no residues", "remove the record")
    if not all(chains):
        what = f"has no residues in chain {chains.index('') + 1} of {len(chains)}"
        raise RefusedSymbols(what, "write one ':' between two chains")
    if foreign and rules.on_unknown == "error":
        removed = ("" if rules.keep_gaps else GAPS) + (string.ascii_lowercase + "." if rules.a3m else "")
        places = [k for k, symbol in enumerate(written) if symbol not in removed and not _STOP.match(written, k)]
        position = places[foreign.start()] + 1
        symbol = TOKENS[MASK] if foreign[0] == _MASK_SYMBOL else shown(foreign[0])
        what = f"has '{symbol}' at position {position}, which is not a residue"
        raise RefusedSymbols(what, "write X for an unknown residue", droppable=True)
    if foreign:
        kinds.append("symbols that are no residues were read as <mask>")
        sequence = strange.sub(_MASKED, sequence)
    if len(chains) > 1:
        kinds.append(f"{JOINED} of {rules.linker}")
    for kind in kinds:
        edits.add(kind, record_id)
    tokens = sequence.encode("ascii").translate(table(rules, {_MASKED: MASK, BETWEEN: SEPARATOR}))
    return tokens.replace(bytes([SEPARATOR]), bytes([SEPARATOR]) * rules.linker)


def cut(name: bytes, header: bytes, tokens: bytes, rules: Rules, edits: Edits) -> list[tuple[bytes, bytes, bytes]]:
    """Apply `rules.long` to a sequence. Return the id, header and tokens of each resulting record.

    Raise `RefusedSymbols` if the sequence is too long and `rules.long` is `error`, or if `chain_windows` fails.
    """
    length, most, record_id = len(tokens), rules.max_length, name.decode()
    if most is None or length <= most or rules.long == "full":
        return [(name, header, tokens)]
    if rules.long == "error":
        raise RefusedSymbols(
            f"has {length:,} residues, over {most:,}", "raise --max-length, or set --long to crop, window or skip"
        )
    if rules.long == "skip":
        edits.add(f"a sequence over {most:,} residues was left out", record_id)
        return []
    token_L = np.frombuffer(tokens, np.uint8)
    try:
        windows = chain_windows(token_L, most)
    except InputError as error:
        raise RefusedSymbols(f"has {length:,} residues with linkers, and {error}", "or set --long skip") from None
    crop = rules.long == "crop"
    edits.add(f"a sequence over {most:,} residues was {'cropped' if crop else 'cut into windows'}", record_id)
    places = [windows.drawn(record_id)] if crop else [windows.spread(k) for k in range(windows.count)]
    pieces = [(windows.name(starts).encode(), token_L[windows.kept(starts)].tobytes()) for starts in places]
    if crop:
        return [(name, header + b" residues=" + span, kept) for span, kept in pieces]
    rest = header.lstrip(BLANKS)[len(name) :]
    return [(name + b"/" + span, name + b"/" + span + rest, kept) for span, kept in pieces]


def _kept(rules: Rules) -> str:
    gaps = "-" if rules.a3m else GAPS
    return RESIDUES + gaps if rules.keep_gaps else RESIDUES


NUCLEOTIDE_LETTERS, NUCLEOTIDE_SHARE, EACH_SHARE = 100, 0.95, 0.05


def nucleotides(tokens: Iterable[npt.NDArray[np.uint8]], count: str) -> str | None:
    """Return the reason why sequences seem to be DNA or RNA; None if they seem to be proteins.

    Nucleotide letters are also residue letters, so their frequencies decide. DNA or RNA has at least
    `NUCLEOTIDE_LETTERS` letters in total, and at least `NUCLEOTIDE_SHARE` of them are A, C, G, T, U or N. Each of A, C,
    G and T (or U) must also be at least `EACH_SHARE` of these four letters, since proteins with much alanine, glycine
    and threonine have almost no cysteine. `count` is a text such as `3 records`.
    """
    counts = np.zeros(len(TOKENS), np.int64)
    for token_L in tokens:
        counts += np.bincount(token_L, minlength=len(TOKENS))
    count_of = {letter: int(counts[TOKENS.index(letter)]) for letter in RESIDUES}
    total = sum(count_of.values())
    acgt = [count_of["A"], count_of["C"], count_of["G"], count_of["T"] + count_of["U"]]
    share = (sum(acgt) + count_of["N"]) / max(total, 1)
    if total < NUCLEOTIDE_LETTERS or share < NUCLEOTIDE_SHARE or min(acgt) < EACH_SHARE * sum(acgt):
        return None
    return (
        f"seems to have {count} of DNA or RNA, since {100 * share:.0f}% of the letters are A, C, G, T, U or N, but "
        "proteins are expected"
    )
