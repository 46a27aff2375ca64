"""One part of an embedding store: a safetensors file of some sequences' arrays, and a note that the file is complete.

Rows are written one by one, in any order. No torch.

    parts/000012-9f3c2e1a.safetensors   one tensor for each output, rows end to end: `mean_6` [n, D], `residue_6`
                                        [sum of L, D], `logits` [sum of L, 33], `contacts` [sum of L^2],
                                        `attentions_6` [sum of H x L^2]; `key`, `status` and `crc` of each row
    parts/000012.json                   names that file. The part is finished once this note exists

The position of a row follows from the lengths, so a row is written as soon as it is computed, and no row waits in
memory. `crc` is the CRC-32 of a row's key and bytes, so a row at the wrong position is noticed, too.
"""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.embed.compute.outputs import NUMPY, Dtype, Output
from esmshard.errors import InputError

KEY_BYTES = 16
DONE, WINDOWED, FAILED = 0, 1, 2
"""The status of a row: computed as requested; in windows for lack of memory; without values."""

_SAFETENSORS: dict[Dtype, str] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


@dataclass(frozen=True)
class Kind:
    """The properties that all parts of an embedding store share."""

    outputs: tuple[Output, ...]
    dim: int
    dtype: Dtype

    @property
    def itemsize(self) -> int:
        """Return the bytes of a number."""
        return np.dtype(NUMPY[self.dtype]).itemsize

    def numbers_bytes(self, kept: npt.NDArray[np.int64]) -> int:
        """Return the bytes of all numbers of rows of these lengths."""
        return sum(int(one.numbers(kept, self.dim).sum()) for one in self.outputs) * self.itemsize

    def part_bytes(self, kept_U: npt.NDArray[np.int64]) -> int:
        """Return the bytes of a part with rows of these lengths, without its header."""
        return (KEY_BYTES + 1 + 8 * len(self.outputs)) * len(kept_U) + self.numbers_bytes(kept_U)


class PartLayout:
    """The position of everything in the file of a part.

    Args:
        kind: the properties of the store.
        kept_U: the residues of each row that have values, int64 [n].
    """

    def __init__(self, kind: Kind, kept_U: npt.NDArray[np.int64]) -> None:
        self.kind, self.kept_U = kind, kept_U
        self._tensors: dict[str, Any] = {}
        """The entries of the safetensors header."""
        self._begins: dict[str, npt.NDArray[np.int64]] = {}
        """The first byte of each row of an output, and the end of the last row, counted from the end of the header."""
        n, self._end = len(kept_U), 0
        self._add("crc", "I64", [n, len(kind.outputs)], 8)
        for one in kind.outputs:
            numbers_U = one.numbers(kept_U, kind.dim)
            total, width = int(numbers_U.sum()), one.shape(1, kind.dim)[-1]
            self._begins[one.name] = np.concatenate([[0], np.cumsum(numbers_U)]) * kind.itemsize + self._end
            shape = [total] if one.paired else [total // width, width]
            self._add(one.name, _SAFETENSORS[kind.dtype], shape, kind.itemsize)
        self._add("key", "U8", [n, KEY_BYTES], 1)
        self._add("status", "U8", [n], 1)
        text = json.dumps(self._tensors).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.size = len(self.header) + self._end

    def _add(self, name: str, dtype: str, shape: list[int], itemsize: int) -> None:
        """Give a tensor its position after those that were added before."""
        start, self._end = self._end, self._end + math.prod(shape) * itemsize
        self._tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, self._end]}

    def __len__(self) -> int:
        return len(self.kept_U)

    def place(self, name: str, row: int) -> tuple[int, int]:
        """Return first byte and number of bytes of a row of an output."""
        begins = self._begins[name]
        return len(self.header) + int(begins[row]), int(begins[row + 1] - begins[row])

    def mark(self, name: str) -> tuple[int, list[int]]:
        """Return first byte and shape of `crc`, `key` or `status`."""
        tensor = self._tensors[name]
        return len(self.header) + tensor["data_offsets"][0], tensor["shape"]


class PartWriter:
    """The writer of a part's file. Rows may come in any order. A row that never comes has the status FAILED.

    Args:
        path: the file, which no other process writes.
        layout: the layout of the part.
        key_U16: the content keys of its rows, uint8 [n, 16].
    """

    def __init__(self, path: Path, layout: PartLayout, key_U16: npt.NDArray[np.uint8]) -> None:
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
        """Write the bytes of a row: one buffer for each output, in the order of the outputs."""
        start = zlib.crc32(self._key[row].data)
        for k, (one, data) in enumerate(zip(self._layout.kind.outputs, values, strict=True)):
            at, nbytes = self._layout.place(one.name, row)
            assert len(data) == nbytes, f"{one.name}: {len(data)} bytes for {nbytes}"
            self._write(data, at)
            self._crc[row, k] = zlib.crc32(data, start)
        self._status[row] = status

    def close(self) -> dict[str, Any]:
        """Flush everything to disk, and return the facts for the note."""
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
    """A part does not hold the data that was written.

    Args:
        path: the file, whose name begins with the number of the part.
        what: what is wrong, as a clause.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.part = int(path.name.split("-")[0])


class PartReader:
    """The reader of a part. It reads rows when they are requested, and no page of the file stays mapped.

    Raises:
        DamagedError: if the file is missing, has another length, or does not hold the rows that were written.
    """

    def __init__(self, path: Path, layout: PartLayout, note: Mapping[str, Any]) -> None:
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
        """Return the status of each row: DONE, WINDOWED or FAILED, uint8 [n]."""
        return self.marks("status")

    def marks(self, name: str) -> npt.NDArray[Any]:
        """Return `crc` int64 [n, outputs], `key` uint8 [n, 16] or `status` uint8 [n]."""
        if name not in self._marks:
            at, shape = self.layout.mark(name)
            dtype = np.dtype(np.int64 if name == "crc" else np.uint8)
            data = self._read(at, int(np.prod(shape)) * dtype.itemsize)
            self._marks[name] = np.frombuffer(data, dtype).reshape(shape)
        return self._marks[name]

    def values(self, row: int) -> dict[str, npt.NDArray[Any]] | None:
        """Return the arrays of a row by output, read-only, bf16 as uint16; None if the row failed.

        Raises `DamagedError` if the bytes are not those that were written.
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
        """Whether nothing was written at the position of a row."""
        return not any(any(self._read(*self.layout.place(one.name, row))) for one in self.layout.kind.outputs)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self, at: int, nbytes: int) -> bytes:
        data = os.pread(self._file, nbytes, at)
        while len(data) < nbytes:  # one read returns at most 2 GiB
            more = os.pread(self._file, nbytes - len(data), at + len(data))
            if not more:
                raise DamagedError(self.path, "ends early")
            data += more
        return data


def marks_digest(crc: npt.NDArray[np.int64], key: npt.NDArray[np.uint8], status: npt.NDArray[np.uint8]) -> str:
    """Return the sha256 over checksums, keys and statuses of all rows."""
    digest = hashlib.sha256()
    for array in (crc, key, status):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
