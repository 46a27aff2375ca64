"""Embeddings record by record: HDF5 by id or sequence, safetensors, and the `.pt` files of fair-esm's `extract.py`."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar

import numpy as np

from esmshard.embed.compute.outputs import DTYPES, About, Dtype, Pool, Row
from esmshard.embed.formats.format_writer import FormatWriter
from esmshard.errors import InputError, UsageError
from esmshard.files import check_replaced

_BLOCK = 1 << 24
"""Bytes that are moved at once."""


class Hdf5Format(FormatWriter):
    """`x.h5`: one data set for each record, in input order. The key is the id with `_` for `/`; `original_id` is the
    id.

    With several outputs there is a group for each output, which holds its data sets in the same way. The residues of
    each chain of a record with several chains are its attribute `chain_lengths`. If two ids give
    the same key, the later key gets a number. The file's attributes describe what was computed. The same rows give the
    same bytes.
    """

    default_pool = "residue"
    extra = ("h5py", "h5")

    def open(self) -> None:
        """Create the file with its attributes and groups."""
        h5py = self.require(self.out)
        self._file = h5py.File(self.work, "w", track_order=True)
        self._file.attrs.update(self.attributes)
        names = [output.name for output in self.about.outputs]
        self._groups: dict[str, Any] = (
            {names[0]: self._file}
            if len(names) == 1
            else {name: self._file.create_group(name, track_order=True) for name in names}
        )

    def write(self, row: Row) -> None:
        """Write the row under the same key in all groups."""
        key = base = row.id.replace("/", "_") if row.id.strip("./") else f"id_{self.n}"
        number = 1
        group = next(iter(self._groups.values()))
        while key in group:
            number += 1
            key = f"{base}_{number}"
        for name, group in self._groups.items():
            # A creation time would make two files of the same rows differ.
            data = group.create_dataset(key, data=row.values[name], track_times=False)
            data.attrs["original_id"] = row.id
            if row.chains:
                data.attrs["chain_lengths"] = row.chains

    def finish(self) -> None:
        """Write everything to disk."""
        super().finish()
        self._file.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class BiotrainerFormat(Hdf5Format):
    """An HDF5 file as biotrainer 1.4 reads it: one data set for each sequence, under a hash of the sequence.

    The key is the sha256 of the letters, a `_` and their number, in hexadecimal digits; `original_id` is the id of the
    first record with this sequence (`biotrainer.utilities.calculate_sequence_hash` and
    `biotrainer.embedders.services.EmbeddingService`). biotrainer compresses its data sets, which no reader requires.
    """

    default_pool = "residue"
    pools = ("mean", "max", "cls", "residue")
    several = False
    by_sequence = True
    exact = False

    def open(self) -> None:
        """Create the file."""
        super().open()
        self._contents: dict[str, bytes] = {}
        """A digest of the values of each key. HDF5 may not have written them yet."""

    def write(self, row: Row) -> None:
        """Write the row, unless its sequence came before."""
        assert row.residues, f"{row.id}: came without its sequence"
        key = hashlib.sha256(f"{row.residues}_{len(row.residues)}".encode()).hexdigest()
        (output,) = self.about.outputs
        values = row.values[output.name]
        content = hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=16).digest()
        if self._contents.setdefault(key, content) != content:
            raise InputError(
                f"{self.out}: record '{row.id}' has the sequence of an earlier record and other tracks, and "
                "biotrainer-h5 has one place for a sequence; write it with --format h5"
            )
        if key in self._file:
            return
        data = self._file.create_dataset(key, data=values, track_times=False)
        data.attrs["original_id"] = row.id


class SafetensorsFormat(FormatWriter):
    """`x.safetensors`: one tensor for each record, named ID, or `OUTPUT/ID` with several outputs.

    The format is the header's length (8 bytes, little-endian), a JSON header that may end in spaces, and the tensors
    (https://github.com/huggingface/safetensors). The header comes first, but its size is known last. So room is left
    for the header, and the tensors are moved if long names need more room.
    """

    default_pool = "residue"
    dtypes = DTYPES

    HEADER_LIMIT: ClassVar[int] = 100_000_000
    """The largest header that the library reads."""
    ROOM: ClassVar[int] = 128
    """Bytes for a tensor's entry in the header: about 80, and its name."""

    CODES: ClassVar[dict[Dtype, str]] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}

    @classmethod
    def check_size(cls, out: Path, outputs: int, records: int, id_bytes: int) -> None:
        """Refuse records whose names cannot fit into the header: each entry takes its id and at least 60 bytes."""
        if outputs * (60 * records + id_bytes) > cls.HEADER_LIMIT:
            raise cls.too_long(out)

    @classmethod
    def too_long(cls, out: Path) -> UsageError:
        """Return the error for too many records."""
        return UsageError(
            f"{out}: the names of so many records do not fit into the header of a safetensors file, which may have "
            f"{cls.HEADER_LIMIT // 1_000_000} MB; write it with --format parquet, or embed the FASTA file in parts"
        )

    def open(self) -> None:
        """Create the file, and leave room for the header."""
        metadata = {key: str(value) for key, value in self.attributes.items()}
        self._header = bytearray(_json({"__metadata__": metadata})[:-1])
        room = len(self._header) + 1 + self.ROOM * self.about.n_records * len(self.about.outputs)
        self._room = min(room + -room % 8, self.HEADER_LIMIT)
        self._at = 0
        self._file: BinaryIO = open(self.work, "w+b")  # noqa: SIM115  # `close` closes the file
        self._file.seek(8 + self._room)

    def write(self, row: Row) -> None:
        """Write all outputs, one after the other."""
        several = len(self.about.outputs) > 1
        for output in self.about.outputs:
            values = np.ascontiguousarray(row.values[output.name])
            end = self._at + values.nbytes
            name = f"{output.name}/{row.id}" if several else row.id
            if name == "__metadata__":
                raise UsageError(f"{self.out}: a safetensors file keeps the name '{name}' for itself; use --format h5")
            entry = {
                "dtype": self.CODES[self.about.dtype],
                "shape": values.shape,
                "data_offsets": [self._at, end],
            }
            self._header += b"," + _json({name: entry})[1:-1]
            if len(self._header) + 1 > self.HEADER_LIMIT:
                raise self.too_long(self.out)
            self._file.write(values.data)
            self._at = end

    def finish(self) -> None:
        """Write the header into its room, which is enlarged first where names are long."""
        super().finish()
        self._header += b"}"
        more = max(len(self._header) - self._room, 0)
        more += -more % 8  # tensors stay aligned
        if more:
            _move(self._file, 8 + self._room, more)
        self._file.seek(0)
        self._file.write((self._room + more).to_bytes(8, "little"))
        self._file.write(self._header)
        self._file.write(b" " * (self._room + more - len(self._header)))

    def close(self) -> None:
        """Flush to disk and close."""
        self._file.close()


class FairEsmFormat(FormatWriter):
    """A directory with `ID.pt` for each record, as fair-esm 2.0.0's `scripts/extract.py` writes them.

    Each file holds a dict: `label` and, as far as requested, `representations` {layer: [L, D]}, `mean_representations`
    {layer: [D]}, `bos_representations` {layer: [D]} (pool `cls`) and `contacts` [L, L]. `logits` [L, 33] has the name
    that fair-esm's model uses. `extract.py` has no maximum. `embeddings.json` describes what was computed.

    An id with `/` makes directories. If an id cannot be a path within the directory, or its file already exists, the
    file is `id_N.pt`, N counted from 0. `label` always holds the id.
    """

    default_pool = "residue"
    pools = ("mean", "cls", "residue", "logits", "contacts")
    dtypes = DTYPES

    KEYS: ClassVar[dict[Pool, str]] = {
        "residue": "representations",
        "mean": "mean_representations",
        "cls": "bos_representations",
        "logits": "logits",
        "contacts": "contacts",
    }
    ABOUT: ClassVar[str] = "embeddings.json"

    def __init__(self, out: Path, about: About) -> None:
        super().__init__(out, about)
        self.check_place(out, overwrite=True)
        self.old = out.with_name(f".old-{os.getpid()}-{out.name}")

    @classmethod
    def check_place(cls, out: Path, *, overwrite: bool) -> None:
        """Refuse to replace any directory that this format did not write."""
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return
        check_replaced(out, [cls.ABOUT, "*.pt"], marker=cls.ABOUT)
        if not overwrite:
            raise UsageError(f"{out}: exists already; choose another name or pass --overwrite")

    def open(self) -> None:
        """Create the directory and its description."""
        self.discard()  # remove the rest of a killed process with the same id
        self.work.mkdir()
        text = json.dumps(self.attributes, indent=1, ensure_ascii=False)
        (self.work / self.ABOUT).write_text(text + "\n", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Write one file."""
        import torch

        found: dict[str, Any] = {"label": row.id}
        for output in self.about.outputs:
            # The array is copied, since a view is saved together with the whole array that it belongs to.
            tensor = torch.from_numpy(np.array(row.values[output.name]))
            if self.about.dtype == "bf16":
                tensor = tensor.view(torch.bfloat16)
            key = self.KEYS[output.pool]
            if output.layer is None:
                found[key] = tensor
            else:
                found.setdefault(key, {})[output.layer] = tensor
        path = next(path for path in self._paths(row.id) if _free(self.work, path))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, path)

    def _paths(self, record_id: str) -> Iterator[Path]:
        """Yield the possible paths of a record, the best first."""
        name = f"{record_id}.pt"
        parts = name.split("/")
        # An empty part would make an absolute path, or the path of another id.
        if not {"", ".", ".."} & set(parts) and "\0" not in name and max(len(part.encode()) for part in parts) <= 255:
            yield self.work / PurePosixPath(name)
        yield self.work / f"id_{self.n}.pt"
        number = 1
        while True:
            number += 1
            yield self.work / f"id_{self.n}_{number}.pt"

    def close(self) -> None:
        """Do nothing, since no file stays open."""

    def commit(self) -> None:
        """Rename the directory. An old directory cannot be replaced directly: it is moved first, and back if this
        fails.
        """
        before = self.out.exists()
        if before:
            self.out.rename(self.old)
        try:
            self.work.rename(self.out)
        except BaseException:
            if before:
                self.old.rename(self.out)
            raise
        if self.old.is_symlink():
            self.old.unlink()
        elif before:
            shutil.rmtree(self.old, ignore_errors=True)

    def discard(self) -> None:
        """Remove the directory with its content."""
        shutil.rmtree(self.work, ignore_errors=True)


def _free(top: Path, path: Path) -> bool:
    """Whether a file can be created: no other file has its name or the name of one of its directories."""
    between = path.parents[: len(path.relative_to(top).parts) - 1]
    return not path.exists() and all(parent.is_dir() or not parent.exists() for parent in between)


def _move(file: BinaryIO, start: int, by: int) -> None:
    """Move the bytes from `start` to the end of the file by `by` bytes, in place, the last block first."""
    at = file.seek(0, os.SEEK_END)
    while at > start:
        size = min(_BLOCK, at - start)
        at -= size
        file.seek(at)
        moved = file.read(size)
        file.seek(at + by)
        file.write(moved)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
