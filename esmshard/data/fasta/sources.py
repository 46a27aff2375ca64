"""Opens files of sequences, plain or compressed, and the standard input. Tables and files of other formats become FASTA
text here, and nowhere else.
"""

import io
import re
import sys
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Literal, cast

from xopen import xopen

from esmshard.data.fasta.sequence_formats import SequenceFormat, format_of, read_format
from esmshard.data.fasta.sequence_tables import read_sequence_table
from esmshard.data.fasta.symbols import BLANKS, Edits, Rules
from esmshard.data.tables import readable
from esmshard.errors import InputError

STDIN = Path("-")
CONVERSION = 3
"""The version of the rules by which other files become FASTA text. After a change, all such files are read again."""

_MAGIC = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz", b"(\xb5/\xfd": "zst"}
_TEXT_TABLE = re.compile(r"\.(csv|tsv|tab)(\.(gz|bgz|bz2|xz|zst))?$", re.IGNORECASE)
_BINARY_TABLES = {".parquet": b"PAR1", ".xlsx": b"PK\x03\x04"}
_HEAD = 4096


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
    found = read_format(path, kind)
    return ConvertedSource(found.headers, found.sequences, found.lines, found.edits)


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
