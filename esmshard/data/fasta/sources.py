"""Opens files of sequences, plain or compressed, and the standard input. Tables and files of other formats become FASTA
text here, and nowhere else.
"""

import io
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Literal, cast

from xopen import xopen

from esmshard.data.fasta.sequence_tables import read_sequence_table
from esmshard.data.fasta.symbols import BLANKS, Edits, Rules
from esmshard.data.tables import read_text, readable
from esmshard.errors import InputError

STDIN = Path("-")
CONVERSION = 3
"""The version of the rules by which other files become FASTA text. After a change, all such files are read again."""

_MAGIC = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz", b"(\xb5/\xfd": "zst"}
_TEXT_TABLE = re.compile(r"\.(csv|tsv|tab)(\.(gz|bgz|bz2|xz|zst))?$", re.IGNORECASE)
_BINARY_TABLES = {".parquet": b"PAR1", ".xlsx": b"PK\x03\x04"}
_HEAD = 4096


@dataclass(frozen=True)
class SequenceFormat:
    """A format of files of sequences."""

    name: str
    """The name in `Bio.SeqIO`."""
    title: str
    head: re.Pattern[bytes]
    """The beginning of every file."""
    record: re.Pattern[str]
    """The beginning of the first line of a record. Of an alignment in blocks, later blocks match it, too."""


FORMATS = tuple(
    SequenceFormat(name, title, re.compile(head), re.compile(record, re.MULTILINE))
    for name, title, head, record in (
        ("genbank", "a GenBank file", rb"LOCUS ", r"^LOCUS "),
        ("swiss", "a UniProt text file", rb"ID   [^\r\n]* AA\.", r"^ID   "),
        ("uniprot-xml", "a UniProt XML file", rb"<\?xml[^>]*>\s*(<!--.*?-->\s*)?<uniprot[\s>]", r"<entry[\s>]"),
        ("stockholm", "a Stockholm alignment", rb"# STOCKHOLM", r"^[^#/\s]"),
        ("clustal", "a Clustal alignment", rb"CLUSTAL", r"^(?!CLUSTAL)\S"),
    )
)


def format_of(head: bytes) -> SequenceFormat | None:
    r"""Recognise a format by the first bytes of a file, without leading blanks.

    >>> format_of(b"# STOCKHOLM 1.0\n").title, format_of(b">a\nMKT\n")
    ('a Stockholm alignment', None)
    """
    return next((known for known in FORMATS if known.head.match(head)), None)


class ConvertedSource(io.BytesIO):
    """FASTA text made from another file: one line for each header, one for each sequence.

    Args:
        headers: the header of each record.
        sequences: the sequence of each record.
        lines: the line of each record in the file.
        edits: what was left out.
    """

    def __init__(self, headers: Sequence[str], sequences: Sequence[str], lines: Sequence[int], edits: Edits) -> None:
        records = zip(headers, sequences, strict=True)
        super().__init__("".join(f">{header}\n{sequence}\n" for header, sequence in records).encode())
        self.edits = edits
        self._lines = lines

    def line_in_file(self, line: int) -> int:
        """Return the line of the file from which a line of the text was made, both counted from 1."""
        return self._lines[(line - 1) // 2]


def read_format(path: Path, kind: SequenceFormat) -> ConvertedSource:
    """Read the proteins of a file, plain or compressed.

    Raises:
        InputError: the file cannot be read, or a record has no sequence.
    """
    from Bio import SeqIO

    text = read_text(path, kind.title).replace("\r\n", "\n").replace("\r", "\n")
    if kind.record.search(text) is None:  # Biopython reads a Clustal file without a record for ever.
        raise InputError(f"{path}: is {kind.title} without a record; download or make it again")
    edits, body = Edits(), text.lstrip()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            # The reader of XML takes bytes, since such a file names its encoding. `read_text` has checked for UTF-8.
            source = io.BytesIO(body.encode()) if kind.name == "uniprot-xml" else io.StringIO(body)
            records = list(SeqIO.parse(source, kind.name))  # type: ignore[no-untyped-call]
            sequences = ["".join(str(record.seq).split()) for record in records]
    except Exception as error:  # The reader of each format has errors of its own.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: cannot be read as {kind.title} ({reason}); download or make it again") from None
    if not records:
        raise InputError(f"{path}: is {kind.title} without a record; download or make it again")
    for warning in warned:
        edits.add(f"Biopython warned of this: {' '.join(str(warning.message).split())}", path.name)
    headers = []
    for record in records:
        described = "" if record.description in ("<unknown description>", record.id) else f" {record.description}"
        headers.append(" ".join(f"{record.id}{described}".split()))
    return ConvertedSource(headers, sequences, _lines(text, kind, len(records)), edits)


def _lines(text: str, kind: SequenceFormat, count: int) -> list[int]:
    """Return the line at which each record begins."""
    lines, at, line = list[int](), 0, 1
    for found in kind.record.finditer(text):
        line, at = line + text.count("\n", at, found.start()), found.start()
        lines.append(line)
        if len(lines) == count:
            break
    return lines + lines[-1:] * (count - len(lines))


def is_plain(path: Path) -> bool:
    """Return whether a file is FASTA text that is not compressed. Its first bytes decide, since names are often
    wrong.
    """
    if path == STDIN:
        return False
    with readable(path, "a FASTA file"), _open(path) as file:
        return not file.read(6).startswith(tuple(_MAGIC)) and other_kind(path) is None


def other_kind(path: Path) -> SequenceFormat | Literal["table"] | None:
    """Return what a file of sequences is if it is no FASTA file: a table, or one of `sequence_formats.FORMATS`.

    The first bytes decide, for tables with the ending of the name: .parquet, .xlsx, or, for text that does not begin
    with `>`, .csv, .tsv or .tab. None for a FASTA file, the standard input, and everything else.
    """
    if path == STDIN or not path.is_file():
        return None
    with readable(path, "a FASTA file"), open_bytes(path) as stream:
        head = read_block(stream, _HEAD).removeprefix(b"\xef\xbb\xbf").lstrip(BLANKS)
    if head.startswith(b">"):
        return None
    binary = any(head.startswith(begin) and path.suffix.lower() == end for end, begin in _BINARY_TABLES.items())
    return format_of(head) or ("table" if binary or _TEXT_TABLE.search(path.name) else None)


def is_sequence_table(path: Path) -> bool:
    """Return whether a path is a table of sequences."""
    return other_kind(path) == "table"


def open_source(path: Path, rules: Rules = Rules()) -> BinaryIO:  # noqa: B008  # frozen
    """Open a file of sequences or the standard input, and return its FASTA text as a stream of uncompressed bytes. It
    is a `ConvertedSource` if the file is no FASTA file.

    Args:
        path: the file.
        rules: these name the columns of a table.

    Raises:
        InputError: the file is a table or of another format, and cannot be read as such.
    """
    kind = other_kind(path)
    if kind is None:
        return open_bytes(path)
    if kind == "table":
        table = read_sequence_table(path, rules.sequence_column, rules.id_column)
        return ConvertedSource(table.headers, table.sequences, table.rows.lines, table.edits)
    return read_format(path, kind)


def open_bytes(path: Path) -> BinaryIO:
    """Open a file or the standard input, and return its uncompressed bytes as a stream."""
    raw = cast(BufferedReader, sys.stdin.buffer) if path == STDIN else _open(path)
    head = raw.peek(6)[:6]
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    if kind is None:
        return raw
    # xopen decompresses gzip in a separate thread while this thread encodes.
    return xopen(raw, "rb", format=kind, threads=1 if kind == "gz" else 0)  # type: ignore[no-any-return]


def read_block(stream: BinaryIO, size: int) -> bytes:
    """Read the next bytes of a stream. Damaged compressed data are an OSError."""
    try:
        return stream.read(size)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # each decompression library has errors of its own
        raise OSError(str(error)) from None


def _open(path: Path) -> BufferedReader:
    if path.is_fifo() or path.is_char_device():  # Files are read several times, a pipe only once.
        raise InputError(f"{path}: is a pipe, not a file; pipe it into the standard input and name that, as -")
    return open(path, "rb")
