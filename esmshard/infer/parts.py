"""One part of a product: a safetensors file of some sequences' arrays, written row by row in any order, and a note that
says it is whole. No torch.

    parts/000012-9f3c2e1a.safetensors   one tensor an output, rows end to end: `mean_6` [n, D], `residue_6`
                                        [sum of L, D], `logits` [sum of L, 33], `contacts` [sum of L^2]; `key`,
                                        `status` and `crc` of each row
    parts/000012.json                   names that file, and appears when it is whole: the part exists from then on

Where a row lies follows from lengths alone, so that it is written when it is computed, and nothing waits in memory.
`crc` is the CRC-32 of a row's bytes, begun with its key: a row in another's place shows, too.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError
from esmshard.infer.outputs import NUMPY, Dtype, Output

KEY_BYTES = 16
DONE, WINDOWED, FAILED = 0, 1, 2
"""Status of a row: as asked for; in windows for want of memory; without values."""

_SAFETENSORS: dict[Dtype, str] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_MARKS = (("crc", "I64", 8), ("key", "U8", 1), ("status", "U8", 1))


@dataclass(frozen=True)
class Kind:
    """What all parts of a product have in common."""

    outputs: tuple[Output, ...]
    dim: int
    dtype: Dtype

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return np.dtype(NUMPY[self.dtype]).itemsize

    def bytes_of(self, kept_U: npt.NDArray[np.int64]) -> int:
        """Of a part with rows of these lengths, its header not counted."""
        marks = (KEY_BYTES + 1 + 8 * len(self.outputs)) * len(kept_U)
        return marks + sum(int(one.numbers(kept_U, self.dim).sum()) for one in self.outputs) * self.itemsize


class Layout:
    """Where everything lies in the file of a part.

    Args:
        kind: of the product.
        kept_U: residues of each row of which there are values, int64 [n].
    """

    def __init__(self, kind: Kind, kept_U: npt.NDArray[np.int64]) -> None:
        self.kind, self.kept_U = kind, kept_U
        n, at = len(kept_U), 0
        header: dict[str, Any] = {}
        shapes = {"crc": [n, len(kind.outputs)], "key": [n, KEY_BYTES], "status": [n]}
        self._marks: dict[str, tuple[int, list[int]]] = {}
        self._begins: dict[str, npt.NDArray[np.int64]] = {}

        def mark(name: str, code: str, size: int) -> None:
            nonlocal at
            nbytes = int(np.prod(shapes[name])) * size
            header[name] = {"dtype": code, "shape": shapes[name], "data_offsets": [at, at + nbytes]}
            self._marks[name] = (at, shapes[name])
            at += nbytes

        mark(*_MARKS[0])
        for one in kind.outputs:
            numbers_U = one.numbers(kept_U, kind.dim)
            begins = np.concatenate([[0], np.cumsum(numbers_U)]) * kind.itemsize + at
            total = int(numbers_U.sum())
            width = 1 if one.pool == "contacts" else kind.dim if one.pool != "logits" else one.shape(1, 0)[1]
            shape = [total] if one.pool == "contacts" else [total // width, width]
            end = int(begins[-1])
            header[one.name] = {"dtype": _SAFETENSORS[kind.dtype], "shape": shape, "data_offsets": [at, end]}
            self._begins[one.name] = begins
            at = end
        mark(*_MARKS[1])
        mark(*_MARKS[2])
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.size = len(self.header) + at

    def __len__(self) -> int:
        return len(self.kept_U)

    def place(self, name: str, row: int) -> tuple[int, int]:
        """First byte and number of bytes of a row of an output."""
        begins = self._begins[name]
        return len(self.header) + int(begins[row]), int(begins[row + 1] - begins[row])

    def mark(self, name: str) -> tuple[int, list[int]]:
        """First byte and shape of `crc`, `key` or `status`."""
        at, shape = self._marks[name]
        return len(self.header) + at, shape


class PartWriter:
    """Writes the file of a part. Rows may come in any order; one that never comes has failed.

    Args:
        path: of the file, which nobody else writes.
        layout: of the part.
        key_U16: content keys of its rows, uint8 [n, 16].
    """

    def __init__(self, path: Path, layout: Layout, key_U16: npt.NDArray[np.uint8]) -> None:
        self.path, self._layout, self._key = path, layout, key_U16
        self._status = np.full(len(layout), FAILED, np.uint8)
        self._crc = np.zeros((len(layout), len(layout.kind.outputs)), np.int64)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            self._write(layout.header, 0)
            os.ftruncate(self._file, layout.size)
        except BaseException:
            self.discard()
            raise

    def add(self, row: int, values: Sequence[memoryview], status: int = DONE) -> None:
        """The bytes of a row, one buffer an output in their order."""
        start = zlib.crc32(self._key[row].data)
        for k, (one, data) in enumerate(zip(self._layout.kind.outputs, values, strict=True)):
            at, nbytes = self._layout.place(one.name, row)
            assert len(data) == nbytes, f"{one.name}: {len(data)} bytes for {nbytes}"
            self._write(data, at)
            self._crc[row, k] = zlib.crc32(data, start)
        self._status[row] = status

    def close(self) -> dict[str, Any]:
        """Everything to disk; what the note says of the file."""
        for name, array in (("crc", self._crc), ("key", self._key), ("status", self._status)):
            self._write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data, self._layout.mark(name)[0])
        os.fsync(self._file)
        os.close(self._file)
        self._file = -1
        return {
            "file": self.path.name,
            "rows": len(self._layout),
            "bytes": self._layout.size,
            "marks": marks_digest(self._crc, self._key, self._status),
        }

    def discard(self) -> None:
        """Remove the file."""
        if self._file >= 0:
            os.close(self._file)
        self.path.unlink(missing_ok=True)

    def _write(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, at)
            view, at = view[written:], at + written


class DamagedError(InputError):
    """A part does not hold what was written.

    Args:
        path: of its file, whose name begins with the number of the part.
        what: is wrong, in a clause.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.part = int(path.name.split("-")[0])


class PartReader:
    """Reads rows of a part as they are asked for; no page of the file stays mapped.

    Raises:
        DamagedError: the file is not there, is of another length, or does not hold the rows that were written.
    """

    def __init__(self, path: Path, layout: Layout, note: Mapping[str, Any]) -> None:
        self.path, self.layout = path, layout
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DamagedError(self.path, f"{(error.strerror or str(error)).lower()}") from None
        size = os.fstat(self._file).st_size
        if size != layout.size:
            self.close()
            raise DamagedError(self.path, f"has {size:,} bytes, {layout.size:,} were written")
        self._marks: dict[str, npt.NDArray[Any]] = {}
        if self._read(0, len(layout.header)) != layout.header:
            raise DamagedError(self.path, "its header is not what was written")
        digest = marks_digest(self.marks("crc"), self.marks("key"), self.marks("status"))
        if digest != note["marks"]:
            raise DamagedError(self.path, "its rows are not those that were written")

    @property
    def status_U(self) -> npt.NDArray[np.uint8]:
        """DONE, WINDOWED or FAILED of each row, uint8 [n]."""
        return self.marks("status")

    def marks(self, name: str) -> npt.NDArray[Any]:
        """`crc` int64 [n, outputs], `key` uint8 [n, 16] or `status` uint8 [n]."""
        if name not in self._marks:
            at, shape = self.layout.mark(name)
            dtype = np.dtype(np.int64 if name == "crc" else np.uint8)
            data = self._read(at, int(np.prod(shape)) * dtype.itemsize)
            self._marks[name] = np.frombuffer(data, dtype).reshape(shape)
        return self._marks[name]

    def values(self, row: int) -> dict[str, npt.NDArray[Any]] | None:
        """The arrays of a row by output, read-only, bf16 as uint16; None if it has failed. `DamagedError` if its bytes
        are not those that were written.
        """
        if self.status_U[row] == FAILED:
            return None
        kind, length = self.layout.kind, int(self.layout.kept_U[row])
        start, crc = zlib.crc32(self.marks("key")[row].data), self.marks("crc")[row]
        found = {}
        for k, one in enumerate(kind.outputs):
            data = self._read(*self.layout.place(one.name, row))
            if zlib.crc32(data, start) != crc[k]:
                raise DamagedError(self.path, f"{one.name} of row {row} is not what was written")
            found[one.name] = np.frombuffer(data, NUMPY[kind.dtype]).reshape(one.shape(length, kind.dim))
        return found

    def is_empty(self, row: int) -> bool:
        """Whether nothing was written where a row lies."""
        return not any(any(self._read(*self.layout.place(one.name, row))) for one in self.layout.kind.outputs)

    def close(self) -> None:
        """Give the file back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self, at: int, nbytes: int) -> bytes:
        data = os.pread(self._file, nbytes, at)
        while len(data) < nbytes:  # at most 2 GiB come at once
            more = os.pread(self._file, nbytes - len(data), at + len(data))
            if not more:
                raise DamagedError(self.path, "ends early")
            data += more
        return data


def marks_digest(crc: npt.NDArray[np.int64], key: npt.NDArray[np.uint8], status: npt.NDArray[np.uint8]) -> str:
    """sha256 over checksums, keys and statuses of all rows."""
    digest = hashlib.sha256()
    for array in (crc, key, status):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
