"""Reads FASTA files, and converts tables and other sequence formats to FASTA text.

A FASTA file is read in blocks of about 1 MiB, each with complete records. One call of `bytes.translate` encodes all
records of a block that have only residue letters. Records that are empty, too long or have other characters are
encoded one by one, by the rules of `esmshard.io.symbols`.

The id is the first word of the header. An empty header gets an id with its line number in the file (from 0), such as
`seqnum000000004`, as in fair-esm.

The columns of a table are found by these names, in upper or lower case:

| content | column names |
|---|---|
| sequences | one of `SEQUENCE_NAMES`, else a pair of `CHAIN_NAMES`, else `protein` as in SaprotHub's tables |
| ids | `id`, else one of `ID_NAMES`; without an id column, the record in line 17 gets the id `row_17` |
| splits | `set` or `split`, with `validation` as in FLIP's tables; else `stage`, if all its cells are split names |
"""

import codecs
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
from xopen import xopen

from esmshard.errors import InputError
from esmshard.io.headers import is_split
from esmshard.io.symbols import BLANKS, STRANGE, Edits, RefusedSymbols, Rules, clean, cut, in_a_store, shown, table
from esmshard.io.tables import MISSING, Table, listed, read_table, read_text, readable
from esmshard.io.tables import shown as quoted
from esmshard.vocab import BETWEEN, EOS, decode

SEQUENCE_NAMES = ("sequence", "sequences", "seq", "protein_sequence", "mutated_sequence")
CHAIN_NAMES = (
    ("heavy", "light"), ("heavy_chain", "light_chain"), ("heavy_sequence", "light_sequence"),
    ("sequence_heavy", "sequence_light"), ("sequence_alignment_aa_heavy", "sequence_alignment_aa_light"),
    ("vh", "vl"), ("alpha_chain", "beta_chain"), ("chain_a", "chain_b"), ("sequence_a", "sequence_b"),
    ("seq_a", "seq_b"), ("sequence_1", "sequence_2"), ("sequence1", "sequence2"), ("seq1", "seq2"),
)  # fmt: skip
"""Pairs of column names; each column has one chain. Some of the names come from the Observed Antibody Space."""
ID_NAMES = (
    "id", "name", "entry", "identifier", "accession", "protein", "protein_id", "sequence_id", "seq_id", "uniprot_id",
)  # fmt: skip
NO_SEQUENCE = "row(s) without a sequence left out"
ONE_CHAIN = "row(s) with only one of the two chains, read as one chain"

_RENAME = "rename the unwanted one"


@dataclass(frozen=True)
class SequenceTable:
    """The rows of a table that have a sequence. All lists are in row order."""

    rows: Table
    """The table with only the rows that have a sequence. `rows.ids` is the name of the id column."""
    headers: list[str]
    """The header of each record: the id, with `SET=` and `VALIDATION=` if the table has a split column."""
    sequences: list[str]
    edits: Edits
    """Counts of the rows without a sequence, and of the rows with only one of two chains."""


def read_sequence_table(path: Path, sequences: str | None = None, names: str | None = None) -> SequenceTable:
    """Read the records of a table.

    `sequences` is the name of the sequence column, and `names` the name of the id column; None to find the column by
    the names in the docstring of this module. Raise `InputError` if the table cannot be read, has no sequences or an
    invalid id, or if several columns have names of a sequence column or of an id column.
    """
    table = read_table(path)
    for name in (sequences, names):
        if name is not None:
            table.column(name)
    chain_columns = [sequences] if sequences is not None else _sequence_columns(table)
    if not chain_columns:
        raise InputError(
            f"{path}: has no known sequence column; {listed(table.columns)}; rename the column of amino acid sequences "
            "to 'sequence', or give its name (data.sequence_column, or --sequence-column of `ingest` and `split`)"
        )
    edits, kept, joined = Edits(), list[int](), list[str]()
    for row, cells in enumerate(zip(*(table.columns[name] for name in chain_columns), strict=True)):
        chains = ["".join(cell.split()) for cell in cells if cell.lower() not in MISSING]
        if not chains:
            edits.add(NO_SEQUENCE, table.at(row))
            continue
        if len(chains) < len(chain_columns):
            edits.add(ONE_CHAIN, table.at(row))
        kept.append(row)
        joined.append(BETWEEN.join(chains))
    if not kept:
        raise InputError(
            f"{path}: column {quoted(chain_columns[0])} has only empty cells; amino acid sequences are expected"
        )
    others = [name for name in ID_NAMES if name not in [column.lower() for column in chain_columns]]
    ids = names or table.only_column(("id",), _RENAME) or table.only_column(others, "rename the id column to 'id'")
    columns = {name: [texts[row] for row in kept] for name, texts in table.columns.items()}
    lines = [table.lines[row] for row in kept]
    if ids is None:
        ids, columns = "id", {"id": [f"row_{line}" for line in lines], **columns}
    rows = replace(table, columns=columns, lines=lines, ids=ids)
    for row, cell in enumerate(columns[ids]):  # An id must be one word without spaces, as in a FASTA header.
        if not cell:
            raise InputError(f"{rows.where(row)}: column {quoted(ids)} is empty; fill it in, or remove the row")
        if len(cell.split()) > 1:
            raise InputError(
                f"{rows.where(row)}: column {quoted(ids)} has {quoted(cell)}, but ids must not have spaces; remove the "
                "spaces, or rename the column (for example to 'title') if it does not contain ids"
            )
    headers = [f"{name}{attributes}" for name, attributes in zip(columns[ids], _set_attributes(rows), strict=True)]
    return SequenceTable(rows, headers, joined, edits)


def _sequence_columns(table: Table) -> tuple[str, ...]:
    if column := table.only_column(SEQUENCE_NAMES, _RENAME):
        return (column,)
    lower = {name.lower() for name in table.columns}
    pairs = [pair for pair in CHAIN_NAMES if lower.issuperset(pair)]
    if len(pairs) > 1:
        names = " and ".join(", ".join(pair) for pair in pairs)
        raise InputError(f"{table.path}: has several pairs of chain columns ({names}); rename the unwanted pairs")
    columns = [table.only_column((name,), _RENAME) for name in (pairs[0] if pairs else ("protein",))]
    return tuple(name for name in columns if name is not None)


def _set_attributes(table: Table) -> list[str]:
    """Return ` SET=... VALIDATION=...` for the header of each record; '' if the table has no split column."""

    def attribute(key: str, cell: str) -> str:
        # A value must be one word. If the cell has two words, `split_of` refuses them as an unknown split name.
        return "" if cell.lower() in MISSING else f" {key}={'_'.join(cell.split())}"

    column = table.only_column(("set", "split"), _RENAME)
    if column is None:
        column = table.only_column(("stage",), _RENAME)
        if column is None or not all(is_split(cell) for cell in table.columns[column] if cell):
            return [""] * len(table)
    validation = table.only_column(("validation",), _RENAME)
    truths = table.columns[validation] if validation else [""] * len(table)
    cells = zip(table.columns[column], truths, strict=True)
    return [attribute("SET", name) + attribute("VALIDATION", truth) for name, truth in cells]


STDIN = Path("-")
CONVERSION = 3
"""The version of the conversion to FASTA text. If the version changes, files are converted and cached again."""

_MAGIC = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz", b"(\xb5/\xfd": "zst"}
_NUL_HEADER = re.compile(rb"(?<![^\r\n])>([^\r\n]*\0[^\r\n]*)")
"""Matches a header with a NUL character, which file names and HDF5 strings do not allow."""
_TEXT_TABLE = re.compile(r"\.(csv|tsv|tab)(\.(gz|bgz|bz2|xz|zst))?$", re.IGNORECASE)
_BINARY_TABLES = {".parquet": b"PAR1", ".xlsx": b"PK\x03\x04"}
_HEAD, _MARK, _NUMBERED = 4096, b"\xef\xbb\xbf", b"seqnum%09d"
FORMATS = {
    "genbank": ("a GenBank file", re.compile(rb"LOCUS ")),
    "swiss": ("a UniProt text file", re.compile(rb"ID   [^\r\n]* AA\.")),
    "uniprot-xml": ("a UniProt XML file", re.compile(rb"<\?xml[^>]*>\s*(<!--.*?-->\s*)?<uniprot[\s>]")),
    "stockholm": ("a Stockholm alignment", re.compile(rb"# STOCKHOLM")),
    "clustal": ("a Clustal alignment", re.compile(rb"CLUSTAL")),
}
"""Formats that Biopython reads, by name in `Bio.SeqIO`: a title for messages, and a pattern of a file's first bytes."""


class ConvertedSource(io.BytesIO):
    """FASTA text that was made from another format. Each header and each sequence is one line.

    `edits` counts changes and omissions. `lines` has the line of each record in the original file, if known.
    """

    def __init__(
        self, headers: Sequence[str], sequences: Sequence[str], edits: Edits, lines: Sequence[int] | None = None
    ) -> None:
        records = zip(headers, sequences, strict=True)
        super().__init__("".join(f">{header}\n{sequence}\n" for header, sequence in records).encode())
        self.edits = edits
        self._lines = lines

    def line_in_file(self, at: int) -> int:
        """Return the line (from 1) in the original file of the record at byte `at` of the FASTA text; 0 if unknown."""
        return 0 if self._lines is None else self._lines[self.getvalue().count(b"\n", 0, at) // 2]


def read_format(path: Path, kind: str) -> ConvertedSource:
    """Convert a plain or compressed file in the format `kind` (a key of `FORMATS`) to FASTA text.

    Raise `InputError` if the file cannot be read or has no record.
    """
    from Bio import SeqIO

    title, _ = FORMATS[kind]
    text = read_text(path, title).replace("\r\n", "\n").replace("\r", "\n")
    edits, body = Edits(), text.strip()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            source = io.BytesIO(body.encode()) if kind == "uniprot-xml" else io.StringIO(body)
            # Biopython never stops reading a Clustal file without a record.
            is_empty = kind == "clustal" and re.search(r"\n\S", body) is None
            records = [] if is_empty else list(SeqIO.parse(source, kind))  # type: ignore[no-untyped-call]
            sequences = ["".join(str(record.seq).split()) for record in records]
    except Exception as error:  # The readers of Biopython raise different error classes.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: cannot be read as {title} ({reason}); download or make it again") from None
    if not records:
        raise InputError(f"{path}: is {title} without a record; download or make it again")
    for warning in warned:
        edits.add(f"Biopython warned: {' '.join(str(warning.message).split())}", path.name)
    headers = []
    for record in records:
        description = "" if record.description in ("<unknown description>", record.id) else record.description
        headers.append(" ".join(f"{record.id} {description}".split()))
    return ConvertedSource(headers, sequences, edits)


def is_plain(path: Path) -> bool:
    """Return whether a file is uncompressed FASTA text, by its first bytes, since file names are often wrong."""
    if path == STDIN:
        return False
    with readable(path, "a FASTA file"), _open(path) as file:
        return not file.read(6).startswith(tuple(_MAGIC)) and other_kind(path) is None


def other_kind(path: Path) -> str | None:
    """Return the kind of a file: `table` or a key of `FORMATS`; None for FASTA, unknown kinds and the standard input.

    The first bytes decide. A table must also have the extension .parquet, .xlsx, .csv, .tsv or .tab.
    """
    if path == STDIN or not path.is_file():
        return None
    with readable(path, "a FASTA file"), open_bytes(path) as stream:
        head = stream.read(_HEAD).removeprefix(_MARK).lstrip(BLANKS)
    if head.startswith(b">"):
        return None
    for name, (_, beginning) in FORMATS.items():
        if beginning.match(head):
            return name
    binary = any(head.startswith(begin) and path.suffix.lower() == end for end, begin in _BINARY_TABLES.items())
    return "table" if binary or _TEXT_TABLE.search(path.name) else None


def is_sequence_table(path: Path) -> bool:
    """Return whether a file is a table (see `other_kind`)."""
    return other_kind(path) == "table"


def open_source(path: Path, rules: Rules = Rules()) -> BinaryIO:  # noqa: B008  # frozen
    """Open a sequence file or the standard input as FASTA text. If it is not FASTA, return a `ConvertedSource`.

    `rules` may name the columns of a table. Raise `InputError` if the file cannot be converted.
    """
    kind = other_kind(path)
    if kind is None:
        return open_bytes(path)
    if kind == "table":
        table = read_sequence_table(path, rules.sequence_column, rules.id_column)
        return ConvertedSource(table.headers, table.sequences, table.edits, table.rows.lines)
    return read_format(path, kind)


def open_bytes(path: Path) -> BinaryIO:
    """Open a file or the standard input as a stream of its uncompressed bytes."""
    raw = cast(BufferedReader, sys.stdin.buffer) if path == STDIN else _open(path)
    head = raw.peek(6)[:6]
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    if kind is None:
        return raw
    # xopen decompresses gzip in another thread while this thread encodes the text.
    return xopen(raw, "rb", format=kind, threads=1 if kind == "gz" else 0)  # type: ignore[no-any-return]


def _open(path: Path) -> BufferedReader:
    if path.is_fifo() or path.is_char_device():  # Files are read several times, but a pipe can be read only once.
        raise InputError(f"{path}: is a pipe, not a file; pipe the data into the standard input, and use - as the file")
    return open(path, "rb")


BLOCK = 1 << 20
"""The size of a block in bytes. `bytes.translate` is twice as fast if a block fits into the cache of a CPU core."""
LONGEST = 1 << 26
"""The maximum record size in bytes, with line ends. The longest known protein has 36,000 residues."""


@dataclass(frozen=True)
class Block:
    """Consecutive complete records of a file, in file order."""

    ids: list[bytes]
    headers: list[bytes]
    """The header lines without `>`."""
    tokens: bytes
    """The residue tokens of all records, one byte for each token, with `<eos>` after each record."""
    lengths: npt.NDArray[np.int64]
    """The number of tokens of each record without `<eos>`, int64 [N]."""


def read_blocks(
    path: Path,
    edits: Edits,
    rules: Rules = Rules(),  # noqa: B008  # frozen
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Block]:
    """Yield the records of a file in blocks. Raise the errors of `read_fasta`, except the error about repeated ids.

    `start` and `stop` (exclusive) are byte offsets in a plain file. They select the records that begin between them, so
    adjacent ranges give every record exactly once. By default, all records are read.
    """
    with readable(path, "a FASTA file"), open_source(path, rules) as stream:
        converted = stream if isinstance(stream, ConvertedSource) else None
        reader = _Reader(path, edits, rules, converted)
        if converted is not None:
            edits.extend(converted.edits)
        for at, chunk in reader.chunks(stream, start, stop):
            block = reader.block(at, chunk, stop)
            if block.ids:
                yield block


class _Reader:
    """Reads the blocks of one file, and finds line numbers for messages."""

    def __init__(self, path: Path, edits: Edits, rules: Rules, converted: ConvertedSource | None) -> None:
        self._path, self._edits, self._rules, self._converted = path, edits, rules, converted
        self._table = table(rules, {">": EOS})  # '>' separates the records.
        # `self._lines` lines come before byte `self._counted`. Only for a message, a file is read again to count its
        # lines. The standard input cannot be read again, so its lines are always counted.
        self._lines, self._counted = 0, 0 if path == STDIN else -1

    def chunks(self, stream: BinaryIO, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
        """Yield the offset in the file and the bytes of each chunk: complete records with about `BLOCK` bytes."""
        at, rest = self._first(stream) if start <= len(_MARK) else (0, b"")
        if at < start:
            at, rest = self._next(stream, start)
        while rest and (stop is None or at < stop):
            data = stream.read(BLOCK)
            text = rest + data
            end = _last_record(text) if data else len(text)
            if end == 0:
                rest = text
                if len(text) > LONGEST:
                    words = re.split(rb"[\r\n]", text[1:201], maxsplit=1)[0].split(None, 1)
                    name = (words[0] if words else _NUMBERED % (self.line(at, text, 0) - 1)).decode(errors="replace")
                    raise InputError(
                        f"{self._where(at, text, 0)}: record '{shown(name)}' is longer than {LONGEST:,} bytes; "
                        "proteins are expected, not a genome"
                    )
                continue
            yield at, text[:end]
            if self._counted == at:
                self._lines, self._counted = self._lines + _newlines(text[:end]), at + end
            at, rest = at + end, text[end:]

    def _first(self, stream: BinaryIO) -> tuple[int, bytes]:
        """Return the offset of the first record, and the bytes that have been read from this offset on."""
        at, data = 0, stream.read(BLOCK)
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
            data = stream.read(BLOCK)
        raise InputError(f"{self._path}: holds no record; a FASTA file has lines that begin with '>'")

    def _next(self, stream: BinaryIO, start: int) -> tuple[int, bytes]:
        """Return the offset of the first record that begins at byte `start` or later, and the bytes that were read from
        this offset on. If there is no such record, return no bytes.
        """
        at = start - 1
        stream.seek(at)
        data = stream.read(BLOCK)
        while data:
            if match := re.search(rb"[\r\n]>", data):
                return at + match.start() + 1, data[match.start() + 1 :]
            more = stream.read(BLOCK)
            at, data = at + len(data) - 1, data[-1:] + more if more else b""
        return at, b""

    def block(self, at: int, chunk: bytes, stop: int | None) -> Block:
        """Encode the records of a chunk that begin before byte `stop`. The chunk begins at byte `at` of the file."""
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
        if b"\0" in chunk and (damaged := _NUL_HEADER.search(chunk)):
            name = shown(damaged[1].decode().strip())
            raise InputError(
                f"{self._where(at, chunk, damaged.start())}: the header '{name}' has a NUL character, so the file is "
                "damaged; remove the character by `tr -d '\\000' < FILE > NEW`"
            )
        try:
            ids = [header.split(None, 1)[0] for header in headers]
        except IndexError:  # A header has no text after '>'.
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
                return Block(ids, headers, codes, lengths)
        else:  # A '>' is inside a sequence line.
            unusual = np.ones(len(ids), dtype=bool)
        marks = _marks(chunk)
        rows: list[tuple[bytes, bytes, bytes]] = []
        begins = [0, *(stops + 1).tolist()]
        for k, strange in enumerate(unusual.tolist()):
            if strange:
                rows += self._unusual(ids[k], headers[k], bodies[k], (at, chunk, int(marks[k])))
            else:
                rows.append((ids[k], headers[k], codes[begins[k] : begins[k + 1] - 1]))
        parts = [tokens for _, _, tokens in rows]
        return Block(
            ids=[name for name, _, _ in rows],
            headers=[header for _, header, _ in rows],
            tokens=bytes([EOS]).join([*parts, b""]),
            lengths=np.array([len(part) for part in parts], np.int64),
        )

    def _named(self, at: int, chunk: bytes, headers: list[bytes]) -> list[bytes]:
        """Return the headers of a chunk. An empty header becomes `seqnum` with the line number (from 0)."""
        line, before, named = self.line(at, chunk, 0) - 1, 0, []
        for header, mark in zip(headers, _marks(chunk).tolist(), strict=True):
            line, before = line + _newlines(chunk[before:mark]), mark
            named.append(header if header.strip() else _NUMBERED % line)
        return named

    def _unusual(
        self, name: bytes, header: bytes, body: bytes, where: tuple[int, bytes, int]
    ) -> list[tuple[bytes, bytes, bytes]]:
        record_id = name.decode()
        try:
            tokens = clean(body.decode(), self._rules, self._edits, record_id)
            return [] if tokens is None else cut(name, header, tokens, self._rules, self._edits)
        except RefusedSymbols as refused:
            place = f"{self._where(*where)}: record '{shown(record_id)}' {refused.what}"
            if not refused.droppable:
                raise InputError(f"{place}; {refused.fix}") from None
            raise InputError(f"{place}; {refused.fix}, or {in_a_store('--on-unknown drop')}") from None

    def _check_text(self, at: int, chunk: bytes, whole: bool = True) -> None:
        if not chunk.isascii():
            try:
                codecs.utf_8_decode(chunk, "strict", whole)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{self._path}: not text (byte {at + error.start} is not UTF-8); a FASTA file is expected"
                ) from None

    def line(self, at: int, chunk: bytes, place: int) -> int:
        """Return the line (from 1) of byte `place` in a chunk. The chunk begins at byte `at` of the text."""
        if self._counted != at:
            text = None if self._converted is None else io.BytesIO(self._converted.getvalue())
            with text or open_bytes(self._path) as stream:
                self._lines, left, before = 0, at, b""
                while left and (data := stream.read(min(left, BLOCK))):
                    self._lines += _newlines(data) - (before + data[:1] == b"\r\n")
                    left, before = left - len(data), data[-1:]
            self._counted = at
        return self._lines + _newlines(chunk[:place]) + 1

    def _where(self, at: int, chunk: bytes, place: int) -> str:
        """Return `FILE:LINE` of a byte for a message; `FILE` if the line is not known. For the arguments see `line`."""
        if self._converted is None:
            return f"{self._path}:{self.line(at, chunk, place)}"
        line = self._converted.line_in_file(at + place)
        return f"{self._path}:{line}" if line else str(self._path)


def _newlines(text: bytes) -> int:
    ends = text.count(b"\n")
    return ends + text.count(b"\r") - text.count(b"\r\n") if b"\r" in text else ends


def _last_record(text: bytes) -> int:
    """Return the offset of the last record in `text`; 0 if `text` has only one record."""
    at = text.rfind(b">")
    if at > 0 and text[at - 1] not in b"\r\n":  # The last '>' is inside a line.
        at = max(text.rfind(b"\n>"), text.rfind(b"\r>")) + 1
    return max(at, 0)


def _marks(chunk: bytes) -> npt.NDArray[np.int64]:
    """Return the offset of each record in a chunk, int64 [N]."""
    letters = np.frombuffer(chunk, np.uint8)
    marks: npt.NDArray[np.int64] = np.flatnonzero(letters == ord(">"))
    before = letters[marks - 1]
    begin: npt.NDArray[np.bool_] = (marks == 0) | (before == 10) | (before == 13)
    return marks[begin]


@dataclass(frozen=True)
class Record:
    """A record. `sequence` has letters of `vocab.RESIDUES`, `:` between chains, and gaps and masks if `Rules` allow."""

    id: str
    description: str
    """The header line without `>`."""
    sequence: str


def read_fasta(path: str | os.PathLike[str], edits: Edits | None = None, rules: Rules = Rules()) -> Iterator[Record]:  # noqa: B008  # frozen
    """Read the records of a sequence file in file order, plain or compressed (gz, bgz, bz2, xz, zst).

    The path `-` is the standard input. A record that repeats an earlier id and sequence is left out. All sequences stay
    in memory; for more than a few million records, use a token store. `edits` counts all changes and omissions.

    Raise `InputError` with file and line or record if the file cannot be read or has no record, a record breaks the
    rules, or two records with one id have different sequences.
    """
    path = Path(path)
    edits = Edits() if edits is None else edits
    tokens_of: dict[bytes, bytes] = {}
    for block in read_blocks(path, edits, rules):
        end = 0
        for name, header, length in zip(block.ids, block.headers, block.lengths.tolist(), strict=True):
            tokens, end = block.tokens[end : end + length], end + length + 1
            if name in tokens_of:
                if tokens_of[name] != tokens:
                    raise InputError(repeated(name.decode(), str(path)))
                edits.add(READ_ONCE, name.decode())
                continue
            tokens_of[name] = tokens
            yield Record(name.decode(), header.strip().decode(), decode(np.frombuffer(tokens, np.uint8)))


READ_ONCE = "a record that came twice was read once"


def repeated(name: str, files: str) -> str:
    """Return the error message for two records with the same id `name` and different sequences."""
    return (
        f"{files}: id '{shown(name)}' has two different sequences; rename one of the two records, or "
        f"{in_a_store('--on-duplicate suffix')}"
    )
