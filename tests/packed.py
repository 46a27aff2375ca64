"""Compressed bytes in formats that Python 3.11 lacks."""

import tempfile
from pathlib import Path

from xopen import xopen


def zstd(data: bytes) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "packed.zst")
        with xopen(path, "wb", threads=0) as file:
            file.write(data)
        return path.read_bytes()
