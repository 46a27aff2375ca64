"""Opens input files, plain or compressed, and the standard input."""

import sys
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

from xopen import xopen

from esmshard.data.tables import readable
from esmshard.errors import InputError

STDIN = Path("-")

_MAGIC = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz", b"(\xb5/\xfd": "zst"}


def is_plain(path: Path) -> bool:
    """Return whether a file is not compressed. Its first bytes decide, since names are often wrong."""
    if path == STDIN:
        return False
    with readable(path, "a FASTA file"), _open(path) as file:
        return not file.read(6).startswith(tuple(_MAGIC))


def open_source(path: Path) -> BinaryIO:
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
