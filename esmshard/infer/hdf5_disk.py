"""The disk below an HDF5 file, which must not be full.

When a write fails, the HDF5 library complains at each object that is let go, and may crash minutes later (1.14: a
segmentation fault in a garbage collection). So no write fails here: from the first that the disk refuses on, all stay
in memory, and `check` says so to whoever writes rows. It costs a call of Python for each that the library makes.
"""

import io
import os
from pathlib import Path
from typing import Any


class Disk(io.RawIOBase):
    """A new file, as h5py wants a file object to be.

    Args:
        path: of it.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115  # closed in `close`
        self._at = 0
        self._error: OSError | None = None
        self._kept: list[tuple[int, bytes]] = []
        """What the disk did not take: where, and bytes."""

    def check(self) -> None:
        """`OSError` if the disk did not take all that was written."""
        if self._error is not None:
            raise self._error

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """As of any file."""
        if whence == os.SEEK_END:
            offset += max([os.fstat(self._file.fileno()).st_size, *(at + len(data) for at, data in self._kept)])
        elif whence == os.SEEK_CUR:
            offset += self._at
        self._at = offset
        return offset

    def tell(self) -> int:
        """As of any file."""
        return self._at

    def write(self, data: Any, /) -> int:
        """All of it, to the disk or into memory."""
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
        """What was written last; zeros where nothing was."""
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
        """As of any file."""
        size = self._at if size is None else size
        try:
            os.ftruncate(self._file.fileno(), size)
        except OSError as error:
            self._error = self._error or error
        return size

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """After the HDF5 file."""
        self._file.close()
        super().close()
