"""FASTA files, plain or compressed, in blocks of whole records.

A file is read in blocks of about a mebibyte that begin and end with a record. Where a block holds nothing unusual, all
its records are encoded by one `bytes.translate`; only unusual records are looked at one by one
(`esmshard.data.fasta.symbols` has the rules).

The id is the first word of the header; `>` alone gets `seqnum000000004`, its line counted from 0, as in fair-esm.
"""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from esmshard.data.fasta.sources import STDIN, ConvertedSource, open_source, read_block
from esmshard.data.fasta.symbols import (
    BLANKS,
    STRANGE,
    Edits,
    RefusedSymbols,
    Rules,
    clean,
    cut,
    in_a_store,
    shown,
    table,
)
from esmshard.data.tables import readable
from esmshard.errors import InputError
from esmshard.vocab import EOS

BLOCK = 1 << 20
"""Bytes read at once. Blocks that fit into the cache of a core are translated twice as fast as large blocks."""
LONGEST = 1 << 26
"""Most bytes of a record, line ends included: nature's longest protein has 36,000 residues, a chromosome has 10^8
bases.
"""

_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Block:
    """Consecutive whole records of a file, in file order."""

    ids: list[bytes]
    headers: list[bytes]
    """Header lines without `>`, as they stand in the file."""
    tokens: bytes
    """The residue tokens of all records; each record is followed by `<eos>`."""
    lengths: npt.NDArray[np.int64]
    """Number of residues of each record, int64 [N]."""
    at: int
    """Byte of the uncompressed file at which the block begins."""
    chunk: bytes
    """The text of the block."""
    origin: npt.NDArray[np.int64] | None = None
    """The number of each record among the records of the text, int64 [N]. None if every record of the text was kept
    once.
    """

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Position of the `>` of each record in the uncompressed file, in bytes, int64 [N]."""
        marks = self.at + _marks(self.chunk)
        return marks if self.origin is None else marks[self.origin]


def read_blocks(
    path: Path,
    edits: Edits,
    rules: Rules = Rules(),  # noqa: B008  # frozen
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Block]:
    """Read the records of a file that begin at bytes `start` to `stop` (exclusive), in blocks. Ids may repeat.

    Ranges are for plain files. Ranges that touch each other share no record and lose none. Errors are those of
    `fasta_reader.read_fasta`.
    """
    with readable(path, "a FASTA file"), open_source(path, rules) as stream:
        reader = _Reader(path, edits, rules)
        if isinstance(stream, ConvertedSource):
            edits.extend(stream.edits)
        for at, chunk in reader.chunks(stream, start, stop):
            block = reader.block(at, chunk, stop)
            if block.ids:
                yield block


class _Reader:
    """A reader of the blocks of one file that also finds line numbers in the file."""

    def __init__(self, path: Path, edits: Edits, rules: Rules) -> None:
        self._path, self._edits, self._rules = path, edits, rules
        self._table = table(rules, {">": EOS})  # '>' separates the records.
        # `self._lines` is the number of lines before byte `self._counted`. A file is read again when a line number is
        # needed; standard input cannot be read again, so its lines are counted from the start.
        self._lines, self._counted = 0, 0 if path == STDIN else -1
        self._converted: ConvertedSource | None = None

    def chunks(self, stream: BinaryIO, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
        """Read (offset, bytes) of whole records. Each chunk but the last has about BLOCK bytes."""
        at, rest = self._first(stream) if start <= len(_MARK) else (0, b"")
        if at < start:
            at, rest = self._next(stream, start)
        while rest and (stop is None or at < stop):
            data = read_block(stream, BLOCK)
            whole = rest + data
            cut = _last_record(whole) if data else len(whole)
            if cut == 0:
                rest = whole
                if len(whole) > LONGEST:
                    line = self.line(at, whole, 0)
                    words = re.split(rb"[\r\n]", whole[1:201], maxsplit=1)[0].split(None, 1)
                    name = (words[0] if words else _numbered(line - 1)).decode(errors="replace")
                    raise InputError(
                        f"{self._path}:{line}: record '{shown(name)}' is longer than {LONGEST:,} bytes; proteins are "
                        "expected, not a genome"
                    )
                continue
            yield at, whole[:cut]
            if self._counted == at:
                self._lines, self._counted = self._lines + _newlines(whole[:cut]), at + cut
            at, rest = at + cut, whole[cut:]

    def _first(self, stream: BinaryIO) -> tuple[int, bytes]:
        """Find the first record: its offset, and the text read from there on."""
        at, data = 0, read_block(stream, BLOCK)
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise InputError(f"{self._path}: is UTF-16 text; save it as UTF-8")
        if data.startswith(_MARK):
            at, data = len(_MARK), data[len(_MARK) :]
        lines, before = 0, b"\n"
        while data:
            text = data.lstrip(BLANKS)
            blank = data[: len(data) - len(text)]
            lines += _newlines(blank) - (before + blank[:1] == b"\r\n")
            at, before = at + len(blank), blank[-1:] or before
            if text:
                if not text.startswith(b">") or before not in b"\r\n":
                    self._check_text(at, text, whole=False)
                    raise InputError(
                        f"{self._path}:{lines + 1}: text before the first '>'; a FASTA record begins with '>ID', and "
                        "the name of a table ends in .csv, .tsv, .parquet or .xlsx"
                    )
                if self._path == STDIN:
                    self._lines, self._counted = lines, at
                return at, text
            data = read_block(stream, BLOCK)
        raise InputError(f"{self._path}: holds no record; a FASTA file has lines that begin with '>'")

    def _next(self, stream: BinaryIO, start: int) -> tuple[int, bytes]:
        """Find the first record at or after a byte of the file: its offset and text, or an empty text if there is no
        record.
        """
        at = start - 1
        stream.seek(at)
        data = read_block(stream, BLOCK)
        while data:
            found = re.search(rb"[\r\n]>", data)
            if found:
                return at + found.start() + 1, data[found.start() + 1 :]
            more = read_block(stream, BLOCK)
            at, data = at + len(data) - 1, data[-1:] + more if more else b""
        return at, b""

    def block(self, at: int, chunk: bytes, stop: int | None) -> Block:
        """Encode the records of a chunk that begin before `stop`."""
        if stop is not None and at + len(chunk) > stop:
            marks = _marks(chunk)
            inside = int(np.searchsorted(marks, stop - at))
            if inside < len(marks):
                chunk = chunk[: marks[inside]]
        self._check_text(at, chunk)
        text = chunk
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        letters = np.frombuffer(text, np.uint8)
        if (letters[np.flatnonzero(letters == ord(">"))[1:] - 1] == ord("\n")).all():
            pieces = text.split(b">")[1:]
        else:  # A '>' is inside a line.
            pieces = re.split(rb"^>", text, flags=re.M)[1:]
        headers, _, bodies = map(list, zip(*[piece.partition(b"\n") for piece in pieces], strict=True))
        if b"\0" in chunk:
            self._check_headers(at, chunk, headers)
        try:
            ids = [header.split(None, 1)[0] for header in headers]
        except IndexError:  # The header is '>' alone.
            headers = self._named(at, chunk, headers)
            ids = [header.split(None, 1)[0] for header in headers]
        codes = b">".join([*bodies, b""]).translate(self._table, BLANKS)
        code_T = np.frombuffer(codes, np.uint8)
        stops = np.flatnonzero(code_T == EOS)
        if len(stops) == len(ids):
            lengths = np.diff(stops, prepend=-1) - 1
            unusual = lengths == 0
            if self._rules.max_length is not None:
                unusual |= lengths > self._rules.max_length
            if code_T.max() == STRANGE:
                unusual[np.searchsorted(stops, np.flatnonzero(code_T == STRANGE))] = True
            if not unusual.any():
                return Block(ids, headers, codes, lengths, at, chunk)
        else:  # A '>' is inside a sequence.
            unusual = np.ones(len(ids), dtype=bool)
        marks = _marks(chunk)
        rows: list[tuple[bytes, bytes, bytes]] = []
        origin: list[int] = []
        begins = [0, *(stops + 1).tolist()]
        for k, strange in enumerate(unusual.tolist()):
            if strange:
                rows += self._unusual(ids[k], headers[k], bodies[k], (at, chunk, int(marks[k])))
            else:
                rows.append((ids[k], headers[k], codes[begins[k] : begins[k + 1] - 1]))
            origin += [k] * (len(rows) - len(origin))
        parts = [tokens for _, _, tokens in rows]
        return Block(
            ids=[name for name, _, _ in rows],
            headers=[header for _, header, _ in rows],
            tokens=bytes([EOS]).join([*parts, b""]),
            lengths=np.array([len(part) for part in parts], np.int64),
            at=at,
            chunk=chunk,
            origin=np.array(origin, np.int64),
        )

    def _named(self, at: int, chunk: bytes, headers: list[bytes]) -> list[bytes]:
        """Return the header lines of a chunk, with generated ids for headers that have none."""
        line, before, named = self.line(at, chunk, 0) - 1, 0, []
        for header, mark in zip(headers, _marks(chunk).tolist(), strict=True):
            line, before = line + _newlines(chunk[before:mark]), mark
            named.append(header if header.strip() else _numbered(line))
        return named

    def _unusual(
        self, name: bytes, header: bytes, body: bytes, where: tuple[int, bytes, int]
    ) -> list[tuple[bytes, bytes, bytes]]:
        """Apply the rules to an unusual record, and return (id, header, residue tokens) of each
        record that it becomes.
        """
        record_id = name.decode()
        try:
            tokens = clean(body.decode(), self._rules, self._edits, record_id)
            return [] if tokens is None else cut(name, header, tokens, self._rules, self._edits)
        except RefusedSymbols as refused:
            place = f"{self._path}:{self.line(*where)}: record '{shown(record_id)}' {refused.what}"
            if not refused.droppable:
                raise InputError(f"{place}; {refused.fix}") from None
            raise InputError(f"{place}; {refused.fix}, or {in_a_store('--on-unknown drop')}") from None

    def _check_headers(self, at: int, chunk: bytes, headers: list[bytes]) -> None:
        """Refuse a NUL in a header, since no file name, HDF5 string or environment variable can hold one."""
        for header, mark in zip(headers, _marks(chunk).tolist(), strict=True):
            if b"\0" in header:
                name = shown(header.decode().strip())
                raise InputError(
                    f"{self._path}:{self.line(at, chunk, mark)}: the header '{name}' holds a NUL character, so the "
                    "file is damaged; remove it, as with `tr -d '\\000' < FILE > NEW`"
                )

    def _check_text(self, at: int, chunk: bytes, whole: bool = True) -> None:
        if not chunk.isascii():
            try:
                codecs.utf_8_decode(chunk, "strict", whole)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{self._path}: not text (byte {at + error.start} is not UTF-8); a FASTA file is expected"
                ) from None

    def line(self, at: int, chunk: bytes, place: int) -> int:
        """Return the line of the file, counted from 1, of byte `place` of the chunk that begins at byte `at` of its
        text.
        """
        if self._counted != at:
            with open_source(self._path, self._rules) as stream:
                self._converted = stream if isinstance(stream, ConvertedSource) else None
                self._lines, left, before = 0, at, b""
                while left and (data := stream.read(min(left, BLOCK))):
                    self._lines += _newlines(data) - (before + data[:1] == b"\r\n")
                    left, before = left - len(data), data[-1:]
            self._counted = at
        line = self._lines + _newlines(chunk[:place]) + 1
        return line if self._converted is None else self._converted.line_in_file(line)


def _newlines(text: bytes) -> int:
    """Count the line ends of all three kinds: LF, CR and CRLF."""
    ends = text.count(b"\n")
    return ends + text.count(b"\r") - text.count(b"\r\n") if b"\r" in text else ends


def _last_record(text: bytes) -> int:
    """Return the byte at which the last record begins; 0 if the text has only one record."""
    at = text.rfind(b">")
    if at > 0 and text[at - 1] not in b"\r\n":  # This '>' is inside a line.
        at = max(text.rfind(b"\n>"), text.rfind(b"\r>")) + 1
    return max(at, 0)


def _marks(chunk: bytes) -> npt.NDArray[np.int64]:
    """Return the bytes of a chunk at which its records begin, int64 [N]."""
    letters = np.frombuffer(chunk, np.uint8)
    marks: npt.NDArray[np.int64] = np.flatnonzero(letters == ord(">"))
    before = letters[marks - 1]
    begin: npt.NDArray[np.bool_] = (marks == 0) | (before == 10) | (before == 13)
    return marks[begin]


def _numbered(line: int) -> bytes:
    return b"seqnum%09d" % line
