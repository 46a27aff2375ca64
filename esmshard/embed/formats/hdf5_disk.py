"""A file below the HDF5 library for which no write fails, also when the disk is full.

When a write fails, the HDF5 library prints an error for each object that is closed, and may crash minutes later (1.14:
a segmentation fault in a garbage collection). So the first data that the disk refuses, and all later data, stay in
memory, and `check` reports this to the writer of the rows. The cost is one call of Python for each call of the library.
"""

import io
import os
from pathlib import Path
from typing import Any


class Disk(io.RawIOBase):
    """A new file, with the interface that h5py requires of a file object.

    Args:
        path: the path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115  # `close` closes the file
        self._at = 0
        self._error: OSError | None = None
        self._kept: list[tuple[int, bytes]] = []
        """Data that the disk refused, each with its position."""

    def check(self) -> None:
        """Raise `OSError` if the disk refused any data."""
        if self._error is not None:
            raise self._error

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to a position, as for any file."""
        if whence == os.SEEK_END:
            offset += max([os.fstat(self._file.fileno()).st_size, *(at + len(data) for at, data in self._kept)])
        elif whence == os.SEEK_CUR:
            offset += self._at
        self._at = offset
        return offset

    def tell(self) -> int:
        """Return the position, as for any file."""
        return self._at

    def write(self, data: Any, /) -> int:
        """Write all of the data, to the disk or into memory."""
        left = memoryview(data).cast("B")
        try:
            while left and self._error is None:
                written = os.pwrite(self._file.fileno(), left, self._at)
                left, self._at = left[written:], self._at + written
        except OSError as error:
            self._error = error
        if left:
            self._kept.append((self._at, bytes(left)))
            self._at += len(left)
        return memoryview(data).nbytes

    def readinto(self, buffer: Any, /) -> int:
        """Read the newest data; positions that were never written are zeros."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and (data := os.pread(self._file.fileno(), len(view) - done, self._at + done)):
            view[done : done + len(data)] = data
            done += len(data)
        view[done:] = bytes(len(view) - done)
        for at, data in self._kept:
            begin, end = max(at, self._at), min(at + len(data), self._at + len(view))
            if begin < end:
                view[begin - self._at : end - self._at] = data[begin - at : end - at]
        self._at += len(view)
        return len(view)

    def truncate(self, size: int | None = None, /) -> int:
        """Change the size, as for any file."""
        size = self._at if size is None else size
        try:
            os.ftruncate(self._file.fileno(), size)
        except OSError as error:
            self._error = self._error or error
        return size

    def flush(self) -> None:
        """Do nothing, since no data is buffered."""

    def close(self) -> None:
        """Close the file. Close the HDF5 file first."""
        self._file.close()
        super().close()
