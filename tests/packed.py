"""Compressed bytes, for which Python 3.11 itself has no module."""

import tempfile
from pathlib import Path

from xopen import xopen


def zstd(data: bytes) -> bytes:
    """By the library that also reads it, so that no program is needed."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "packed.zst")
        with xopen(path, "wb", threads=0) as file:
            file.write(data)
        return path.read_bytes()
