"""Writes files with arrays for each record. Each file format has a class, and `FORMATS` lists the classes.

The commands `embed` and `predict` add one record after another (see `esmshard.io.writers.Writer`). Most writers keep
only a few records in memory. The h5ad writer keeps all records, and the safetensors writer keeps all ids.
"""

import csv
import hashlib
import io
import json
import math
import shutil
import tempfile
import zipfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError, UsageError
from esmshard.io.paths import check_replaced
from esmshard.io.writers import Writer, check, library
from esmshard.vocab import VOCAB_SIZE

Pool = Literal["mean", "max", "cls", "residue", "logits", "contacts", "attentions"]
POOLS: tuple[Pool, ...] = get_args(Pool)
Dtype = Literal["fp32", "fp16", "bf16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
NUMPY: Mapping[Dtype, npt.DTypeLike] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
"""The numpy type of each dtype. numpy has no bfloat16, so a uint16 array stores the bits; see `as_float`."""


@dataclass(frozen=True)
class Output:
    """A kind of array that a model computes for each sequence. L is the number of residues.

    `mean`, `max` and `cls` are [D], `residue` [L, D], `logits` [L, 33] over the tokens of `esmshard.vocab`, `contacts`
    [L, L] probabilities. `attentions` [H, L, L] has at [h, i, j] the share of attention that residue i gives to residue
    j in head h. `cls` is the vector of the token `<cls>`. The other arrays have no values of `<cls>` and `<eos>`. So a
    row of `attentions` sums to less than 1: the softmax of the model includes these two tokens.
    """

    pool: Pool
    layer: int | None
    """The layer: 0 is the embedding of the tokens, and n is transformer block n (from 1). The array is the output of
    this layer; for the pool `attentions`, the attentions of block n. None for `logits` and `contacts`.
    """
    heads: tuple[int, ...] = ()
    """The indices of the attention heads (from 0) for the pool `attentions`; empty for other pools."""

    @property
    def name(self) -> str:
        """The name in files, such as `mean_33` or `contacts`."""
        return self.pool if self.layer is None else f"{self.pool}_{self.layer}"

    @property
    def title(self) -> str:
        """The name for messages, with heads, such as `attentions_6 of heads 0,3`."""
        return f"{self.name} of heads {','.join(map(str, self.heads))}" if self.heads else self.name

    @property
    def pooled(self) -> bool:
        """Whether the array of a sequence is one vector of D numbers."""
        return self.pool in ("mean", "max", "cls")

    @property
    def paired(self) -> bool:
        """Whether the array of a sequence has a value for each pair of residues."""
        return self.pool in ("contacts", "attentions")

    def shape(self, length: Any, dim: int) -> tuple[Any, ...]:
        """Return the shape of the array for a sequence of `length` residues. `dim` is D."""
        if self.pooled:
            return (dim,)
        if self.paired:
            return (*([len(self.heads)] if self.pool == "attentions" else []), length, length)
        return (length, dim if self.pool == "residue" else VOCAB_SIZE)

    def numbers(self, length: npt.NDArray[np.int64], dim: int) -> npt.NDArray[np.int64]:
        """Return the number of values in each sequence's array, int64 [N]. `length` [N] is in residues, `dim` is D."""
        return math.prod(self.shape(length, dim), start=np.ones_like(length))


@dataclass(frozen=True)
class About:
    """The description of a file with arrays."""

    outputs: tuple[Output, ...]
    dim: int
    """D, the number of values in an embedding vector of the model."""
    dtype: Dtype
    n_records: int | None
    """The number of records; None if not known in advance."""
    attributes: Mapping[str, Any]
    """Texts and integers for the file: model, layers, pools, dtypes, and the treatment of long proteins."""


@dataclass(frozen=True)
class Row:
    """One record and its arrays."""

    id: str
    length: int
    """The number of residues in the record, even if the model has read only some of them."""
    chains: tuple[int, ...] = field(default=(), kw_only=True)
    """The number of residues in each chain; empty for a record of one chain. The arrays have no values of linkers."""
    values: Mapping[str, npt.NDArray[Any]]
    """The array of each output by `Output.name`. It has the shape `Output.shape` and the type `NUMPY[About.dtype]`."""
    residues: str = ""
    """The sequence if `FormatWriter.by_sequence` is true; otherwise empty."""


def as_float(values: npt.NDArray[Any], dtype: Dtype) -> npt.NDArray[Any]:
    """If `dtype` is `bf16`, convert the uint16 bits in `values` to float32. Otherwise return `values` unchanged."""
    if dtype != "bf16":
        return values
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


class FormatWriter(Writer):
    """The base class of the writers in `FORMATS`. The docstring of each writer describes its files."""

    default_pool: ClassVar[Pool]
    """The default of the option `--pool` for this format."""
    pools: ClassVar[tuple[Pool, ...]] = POOLS
    """The pools that the format can store."""
    dtypes: ClassVar[tuple[Dtype, ...]] = ("fp32", "fp16")
    """The dtypes that the format can store. HDF5 and Arrow have no bfloat16."""
    several: ClassVar[bool] = True
    """Whether the format can store more than one output."""
    by_sequence: ClassVar[bool] = False
    """Whether records with the same sequence are written only once, with the id of the first of these records."""
    number_bytes: ClassVar[Mapping[Dtype, int]] = {"fp32": 4, "fp16": 2, "bf16": 2}
    """The maximum size of a number in the file in bytes, for each dtype."""
    header: ClassVar[float] = float("inf")
    """The maximum size in bytes of a file's header, for a format whose header contains all ids; infinite for a format
    without such a limit."""
    extra: ClassVar[tuple[str, str] | None] = None
    """The Python module that writes the format, and the pip extra with this module; None if no extra is needed."""

    def __init__(self, out: Path, about: About) -> None:
        self.require(out)
        super().__init__(out)
        self.about = about
        self.attributes: dict[str, Any] = {**about.attributes, "dim": about.dim}
        if about.n_records is not None:
            self.attributes["records"] = about.n_records
        self.n = 0
        """The number of records that have been written."""

    @classmethod
    def require(cls, out: Path) -> None:
        """Raise a `UsageError` with the install command if the format's library is missing."""
        if cls.extra is not None:
            library(*cls.extra, out)

    @classmethod
    def check_place(cls, out: Path, *, overwrite: bool) -> None:
        """Raise `UsageError` if `out` exists and `overwrite` is false, and `InputError` if `out` is a directory."""
        check(out, overwrite=overwrite)

    def add(self, row: Row) -> None:
        """Check the arrays of a record, and write the record. Call this once for each record, in input order."""
        for output in self.about.outputs:
            values = row.values[output.name]
            assert values.dtype == NUMPY[self.about.dtype], f"{row.id}: {output.name} is {values.dtype}"
            assert not output.pooled or values.shape == (self.about.dim,), f"{row.id}: {output.name} is {values.shape}"
        self.write(row)
        self.n += 1

    @abstractmethod
    def write(self, row: Row) -> None:
        """Write one record in this format."""

    def finish(self) -> None:
        """Check that all records were added. Subclasses also write the remaining data."""
        assert self.about.n_records in (None, self.n), f"{self.n} rows came, not {self.about.n_records}"

    def named(self, row: Row) -> list[tuple[str, npt.NDArray[Any]]]:
        """Return the arrays of a record with their names: the id, or `OUTPUT/ID` if the file has several outputs."""
        names = [output.name for output in self.about.outputs]
        return [(f"{name}/{row.id}" if len(names) > 1 else row.id, row.values[name]) for name in names]


class Hdf5Format(FormatWriter):
    """`x.h5`: one data set for each record, in input order. The key is the id with `_` instead of `/`.

    If two ids give the same key, the second key ends in `_2`. With several outputs, each output has a group of data
    sets. Each data set has the attribute `original_id`. A record of several chains also has `chain_lengths`, the number
    of residues in each chain. The file has the HDF5 attributes `About.attributes`, `dim` and, if known, `records`. The
    same records always give the same bytes.
    """

    default_pool = "residue"
    extra = ("h5py", "h5")

    def open(self) -> None:
        import h5py

        self._file = self.files.enter_context(h5py.File(self.work, "w", track_order=True))
        self._file.attrs.update(self.attributes)
        several = len(self.about.outputs) > 1
        self._groups: dict[str, Any] = {
            output.name: self._file.create_group(output.name, track_order=True) if several else self._file
            for output in self.about.outputs
        }

    def write(self, row: Row) -> None:
        key = base = row.id.replace("/", "_") if row.id.strip("./") else f"id_{self.n}"
        number = 1
        while key in next(iter(self._groups.values())):
            number += 1
            key = f"{base}_{number}"
        for name, group in self._groups.items():
            # Time stamps would make two files of the same rows differ.
            data = group.create_dataset(key, data=row.values[name], track_times=False)
            data.attrs["original_id"] = row.id
            if row.chains:
                data.attrs["chain_lengths"] = row.chains


class BiotrainerFormat(Hdf5Format):
    """An HDF5 file for biotrainer 1.4: one data set for each distinct sequence. The key is a hash of the sequence.

    The key is the sha256 of a text with sequence and length, such as `MKV_3`. The attribute `original_id` is the id of
    the first record with this sequence. (Sources in biotrainer: `utilities.calculate_sequence_hash`,
    `embedders.services.EmbeddingService`.)
    """

    pools = ("mean", "max", "cls", "residue")
    several = False
    by_sequence = True

    def write(self, row: Row) -> None:
        key = hashlib.sha256(f"{row.residues}_{len(row.residues)}".encode()).hexdigest()
        (values,) = row.values.values()
        if key not in self._file:
            data = self._file.create_dataset(key, data=values, track_times=False)
            data.attrs["original_id"] = row.id
        elif not np.array_equal(self._file[key][()], values, equal_nan=True):
            raise InputError(
                f"{self.out}: record '{row.id}' has the same sequence as an earlier record but a different embedding, "
                "perhaps because their tracks differ, and biotrainer-h5 stores one embedding for each sequence; use "
                "--format h5"
            )


class NpyFormat(FormatWriter):
    """`x.npy` [N, D]: the vectors of one pooled output, in input order. `x.ids.txt` has one id on each line."""

    default_pool = "mean"
    pools = ("mean", "max", "cls")
    several = False

    @classmethod
    def check_place(cls, out: Path, *, overwrite: bool) -> None:
        check(out, out.with_suffix(".ids.txt"), overwrite=overwrite)

    def open(self) -> None:
        self._file = self.files.enter_context(open(self.work, "wb"))
        ids = open(self.work.with_suffix(".ids.txt"), "w", encoding="utf-8", newline="\n")
        self._ids = self.files.enter_context(ids)
        descr = np.lib.format.dtype_to_descr(np.dtype(NUMPY[self.about.dtype]))
        shape = (self.about.n_records or 0, self.about.dim)
        np.lib.format.write_array_header_1_0(self._file, {"descr": descr, "fortran_order": False, "shape": shape})

    def write(self, row: Row) -> None:
        (values,) = row.values.values()
        self._file.write(np.ascontiguousarray(values).data)
        self._ids.write(f"{row.id}\n")


class CsvFormat(FormatWriter):
    """`x.csv`: a line for each record in input order, with the id and the D numbers of one pooled output.

    The first line has an empty cell and the numbers 0 to D - 1, as `pandas.DataFrame.to_csv` writes tables and
    EVOLVEpro (https://github.com/mat10d/EvolvePro) reads them. The digits are enough to read each number back exactly.
    """

    default_pool = "mean"
    pools = ("mean", "max", "cls")
    several = False
    number_bytes: ClassVar[Mapping[Dtype, int]] = {"fp32": 16, "fp16": 12}  # Nine digits (fp16: five) and `-.e-05,`.

    def open(self) -> None:
        file = self.files.enter_context(open(self.work, "w", encoding="utf-8", newline=""))
        self._rows = csv.writer(file, lineterminator="\n")
        self._rows.writerow(["", *range(self.about.dim)])

    def write(self, row: Row) -> None:
        (values,), digits = row.values.values(), self.number_bytes[self.about.dtype] - len("-.e-05,")
        self._rows.writerow([row.id, *(f"{number:.{digits}g}" for number in values.tolist())])


class BlockFormat(FormatWriter):
    """The base class of writers that write many rows at once as a block."""

    BLOCK: ClassVar[float] = 1 << 20
    """A block is written when at least this number of values is in memory."""

    def open(self) -> None:
        self._waiting: list[Row] = []
        self._numbers = 0

    def write(self, row: Row) -> None:
        # A slice of a larger array would keep the larger array in memory.
        self._waiting.append(replace(row, values={name: values.copy() for name, values in row.values.items()}))
        self._numbers += sum(values.size for values in row.values.values())
        if self._numbers >= self.BLOCK:
            self._write_waiting()

    def _write_waiting(self) -> None:
        rows, self._waiting, self._numbers = self._waiting, [], 0
        if rows:
            self.write_block(rows)

    @abstractmethod
    def write_block(self, rows: Sequence[Row]) -> None: ...

    def finish(self) -> None:
        super().finish()
        self._write_waiting()


class ParquetFormat(BlockFormat):
    """`x.parquet`: one row for each record, with the columns `id` and `length`, and a column for each output.

    A pooled output is a list of D numbers. `residue` and `logits` are lists of L lists of D or 33 numbers. `contacts`
    is one list of L x L numbers, row by row. The schema's metadata has `About.attributes`.
    """

    default_pool = "mean"
    pools = ("mean", "max", "cls", "residue", "logits", "contacts")
    extra = ("pyarrow", "tables")
    BLOCK = 8 << 20

    def open(self) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        super().open()
        number = pa.float32() if self.about.dtype == "fp32" else pa.float16()
        types = {"id": pa.string(), "length": pa.int32()}
        for output in self.about.outputs:
            numbers = pa.list_(number, -1 if output.paired else output.shape(1, self.about.dim)[-1])
            types[output.name] = numbers if output.pooled or output.paired else pa.list_(numbers)
        schema = pa.schema(types, metadata={key: str(value) for key, value in self.attributes.items()})
        # Embeddings rarely have equal numbers, so dictionary, compression and statistics save no space.
        plain: dict[str, Any] = {"use_dictionary": False, "compression": "none", "write_statistics": ["id", "length"]}
        self._file = self.files.enter_context(parquet.ParquetWriter(self.work, schema, **plain))

    def write_block(self, rows: Sequence[Row]) -> None:
        import pyarrow as pa

        columns: dict[str, list[Any]] = {"id": [row.id for row in rows], "length": [row.length for row in rows]}
        for output in self.about.outputs:
            arrays = (row.values[output.name] for row in rows)
            columns[output.name] = [x.reshape(-1) if output.pooled or output.paired else list(x) for x in arrays]
        self._file.write_table(pa.table(columns, schema=self._file.schema), row_group_size=len(rows))


class NpzFormat(FormatWriter):
    """`x.npz`: a compressed array for each record. Its name is the id, or `OUTPUT/ID` for several outputs."""

    default_pool = "residue"

    def open(self) -> None:
        self._zip = self.files.enter_context(zipfile.ZipFile(self.work, "w", zipfile.ZIP_DEFLATED, allowZip64=True))

    def write(self, row: Row) -> None:
        for name, values in self.named(row):
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.ascontiguousarray(values), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy")  # The constant date gives the same rows the same bytes.
            self._zip.writestr(entry, buffer.getbuffer(), zipfile.ZIP_DEFLATED)


class AnnDataFormat(BlockFormat):
    """`x.h5ad`: an AnnData file. `X` [N, D] is the first output, and `obsm` has the other outputs.

    `obs` has the ids as index and a column `length`. `uns` has `About.attributes`. All rows stay in memory.
    """

    default_pool = "mean"
    pools = ("mean", "max", "cls")
    extra = ("anndata", "h5ad")
    BLOCK = float("inf")

    def write_block(self, rows: Sequence[Row]) -> None:
        import anndata
        import pandas  # The library anndata requires pandas.

        index = pandas.Index([row.id for row in rows], dtype=str)
        obs = pandas.DataFrame({"length": np.array([row.length for row in rows], np.int32)}, index=index)
        first, *others = (
            np.array([row.values[output.name] for row in rows], NUMPY[self.about.dtype]).reshape(-1, self.about.dim)
            for output in self.about.outputs
        )
        obsm = dict(zip([output.name for output in self.about.outputs[1:]], others, strict=True))
        anndata.AnnData(first, obs=obs, obsm=obsm, uns=self.attributes).write_h5ad(self.work)

    def finish(self) -> None:
        super().finish()
        if not self.n:
            self.write_block([])


class SafetensorsFormat(FormatWriter):
    """`x.safetensors`: one tensor for each record. Its name is the id, or `OUTPUT/ID` for several outputs.

    The library safetensors needs all tensors in memory, so this class writes the file itself: the header length (8
    bytes, little-endian), a JSON header, and the tensors (https://github.com/huggingface/safetensors). A temporary file
    has the tensors until the header is complete.
    """

    default_pool = "residue"
    dtypes = DTYPES
    header = 100_000_000  # The library reads no larger header.

    def open(self) -> None:
        metadata = {key: str(value) for key, value in self.attributes.items()}
        self._entries: dict[str, Any] = {"__metadata__": metadata}
        self._at = 0
        self._tensors = self.files.enter_context(tempfile.TemporaryFile(dir=self.work.parent))

    def write(self, row: Row) -> None:
        for name, values in self.named(row):
            if name == "__metadata__":
                raise UsageError(f"{self.out}: safetensors keeps the name '{name}' for itself; rename the record")
            end = self._at + values.nbytes
            code = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}[self.about.dtype]
            self._entries[name] = {"dtype": code, "shape": list(values.shape), "data_offsets": [self._at, end]}
            self._tensors.write(np.ascontiguousarray(values).data)
            self._at = end

    def finish(self) -> None:
        super().finish()
        header = json.dumps(self._entries, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)  # Spaces align the tensors to 8 bytes.
        if len(header) > self.header:
            raise UsageError(_NO_ROOM.format(self.out))
        self._tensors.seek(0)
        with open(self.work, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(self._tensors, file, 1 << 24)


class ZarrFormat(BlockFormat):
    """`x.zarr`: a Zarr group (format 3) with an array for each output, `ids` [N], `lengths` [N] and attributes.

    A pooled output is [N, D]. The arrays of all records are joined along the first axis for `residue` [L, D], `logits`
    [L, 33], and flat `contacts` and `attentions`. In the joined array, record n has the range `starts_OUTPUT[n]` to
    `starts_OUTPUT[n + 1]`.
    """

    default_pool = "mean"
    extra = ("zarr", "zarr")

    @classmethod
    def check_place(cls, out: Path, *, overwrite: bool) -> None:
        check_replaced(out, ["*"], marker="zarr.json")
        if out.exists() and not overwrite:
            raise UsageError(f"{out}: exists already; choose another name or pass --overwrite")

    def open(self) -> None:
        import zarr

        super().open()
        check_replaced(self.out, ["*"], marker="zarr.json")  # The directory may be new since the first check.
        self._group: Any = zarr.open_group(self.work, mode="w", zarr_format=3)
        self._group.attrs.update(self.attributes)
        self._ids: list[str] = []
        self._lengths: list[int] = []
        self._sizes: dict[str, list[int]] = {output.name: [0] for output in self.about.outputs if not output.pooled}

    def write_block(self, rows: Sequence[Row]) -> None:
        self._ids += [row.id for row in rows]
        self._lengths += [row.length for row in rows]
        for output in self.about.outputs:
            arrays, name = [row.values[output.name] for row in rows], output.name
            arrays = [x.reshape(-1) if output.paired else x[None] if output.pooled else x for x in arrays]
            values = np.concatenate(arrays)
            if name not in self._group:
                shape, chunk = values.shape[1:], max(1, int(self.BLOCK) // values[:1].size)
                self._group.create_array(name, shape=(0, *shape), dtype=values.dtype, chunks=(chunk, *shape))
            self._group[name].append(values)
            if not output.pooled:
                self._sizes[name] += map(len, arrays)

    def finish(self) -> None:
        super().finish()
        self._group.create_array("ids", shape=(len(self._ids),), dtype=str)[:] = np.array(self._ids, object)
        self._group.create_array("lengths", data=np.array(self._lengths, np.int32))
        for name, sizes in self._sizes.items():
            self._group.create_array(f"starts_{name}", data=np.cumsum(sizes, dtype=np.int64))


FORMATS: dict[str, type[FormatWriter]] = {
    "h5": Hdf5Format,
    "npy": NpyFormat,
    "npz": NpzFormat,
    "csv": CsvFormat,
    "parquet": ParquetFormat,
    "zarr": ZarrFormat,
    "h5ad": AnnDataFormat,
    "safetensors": SafetensorsFormat,
    "biotrainer-h5": BiotrainerFormat,
}
"""The writer class of each format. The keys are values of `--format`; all but `biotrainer-h5` are file extensions."""
_NO_ROOM = "{}: the header of a safetensors file has no room for the names of so many records; use --format h5"


def suits(fmt: str, outputs: Sequence[Output], dtype: Dtype, out: Path, *, records: int = 0, id_bytes: int = 0) -> None:
    """Raise a `UsageError` if `fmt` is no format or cannot store the outputs in `dtype`, or if its library is missing.

    The message begins with `out`, and gives suitable formats or the install command. `records` is the number of
    records, and `id_bytes` the size of all ids in bytes; 0 if not known.
    """
    if fmt not in FORMATS:
        raise UsageError(f"{out}: no format '{fmt}'; choose {', '.join(FORMATS)} by the file extension or --format")
    if reason := _reason(fmt, outputs, dtype):
        others = " or ".join(other for other in FORMATS if not _reason(other, outputs, dtype))
        raise UsageError(f"{out}: {reason}; use --format {others}")
    if len(outputs) * (60 * records + id_bytes) > FORMATS[fmt].header:  # The header has 60 bytes or more per record.
        raise UsageError(_NO_ROOM.format(out))
    FORMATS[fmt].require(out)


def _reason(fmt: str, outputs: Sequence[Output], dtype: Dtype) -> str:
    """Return the reason why a format cannot store the outputs; '' if it can store them."""
    writer = FORMATS[fmt]
    for output in outputs:
        if output.pool not in writer.pools:
            return f"{fmt} can store {', '.join(writer.pools)}, but not {output.name}"
    if len(outputs) > 1 and not writer.several:
        return f"{fmt} can store only one output, but {' and '.join(output.name for output in outputs)} are requested"
    if dtype not in writer.dtypes:
        return f"{fmt} stores numbers as {' or '.join(writer.dtypes)}, not {dtype}"
    return ""
