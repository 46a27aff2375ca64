"""Files of arrays by record: the registry of formats, and one writer for each.

`embed` and `predict` write through it. Rows are added one by one, and a file gets its name when it is complete. The
memory of a writer does not grow with the number of records, except for a header that must be complete, and for h5ad.
"""

import csv
import hashlib
import importlib
import io
import json
import shutil
import zipfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, TextIO, get_args

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError, UsageError
from esmshard.io.paths import check_replaced
from esmshard.io.writers import Writer, check, ids_file
from esmshard.vocab import VOCAB_SIZE

Pool = Literal["mean", "max", "cls", "residue", "logits", "contacts", "attentions"]
POOLS: tuple[Pool, ...] = get_args(Pool)
Dtype = Literal["fp32", "fp16", "bf16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
NUMPY: Mapping[Dtype, npt.DTypeLike] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
"""The numpy type of each dtype. numpy has no bfloat16, so its bits are kept as uint16; see `as_float`."""


@dataclass(frozen=True)
class Output:
    """One array for each sequence of L residues.

    `mean`, `max` and `cls` are [D], `residue` [L, D], `logits` [L, 33] over the tokens of `esmshard.vocab`, `contacts`
    [L, L] probabilities, `attentions` [H, L, L] probabilities of H heads, a row for each residue that attends. `<cls>`
    and `<eos>` are used for `cls` only. The softmax of `attentions` is over them, too, so rows sum to less than 1.
    """

    pool: Pool
    layer: int | None
    """The layer, from 0 (embedding) to the number of layers; None for `logits` and `contacts`. `attentions` of layer n
    are those of the n-th block, whose output is representation n, so there are none of layer 0.
    """
    heads: tuple[int, ...] = ()
    """The heads of `attentions`, from 0; empty for every other pool."""

    @property
    def name(self) -> str:
        """Return the name that files use.

        >>> Output("mean", 33).name, Output("contacts", None).name
        ('mean_33', 'contacts')
        """
        return self.pool if self.layer is None else f"{self.pool}_{self.layer}"

    @property
    def title(self) -> str:
        """Return the name, with the heads if there are any, for messages.

        >>> Output("attentions", 6, (0, 3)).title
        'attentions_6 of heads 0,3'
        """
        return f"{self.name} of heads {','.join(map(str, self.heads))}" if self.heads else self.name

    @property
    def pooled(self) -> bool:
        """Whether each sequence has one vector, whatever its length."""
        return self.pool in ("mean", "max", "cls")

    @property
    def paired(self) -> bool:
        """Whether each pair of residues has a value."""
        return self.pool in ("contacts", "attentions")

    def shape(self, length: int, dim: int) -> tuple[int, ...]:
        """Return the shape of the array for a sequence of `length` residues."""
        if self.pooled:
            return (dim,)
        if self.paired:
            return (*([len(self.heads)] if self.pool == "attentions" else []), length, length)
        return (length, dim if self.pool == "residue" else VOCAB_SIZE)

    def numbers(self, length: npt.NDArray[np.int64], dim: int) -> npt.NDArray[np.int64]:
        """Return the number of values of the array, for many lengths."""
        if self.pooled:
            return np.full_like(length, dim)
        if self.paired:
            return length * length * max(1, len(self.heads))
        return length * (dim if self.pool == "residue" else VOCAB_SIZE)


@dataclass(frozen=True)
class About:
    """The description of a file of embeddings."""

    outputs: tuple[Output, ...]
    dim: int
    """The dimension D."""
    dtype: Dtype
    """The dtype of the stored numbers."""
    n_records: int | None
    """The number of records that have a row; None if it is not known in advance."""
    attributes: Mapping[str, Any]
    """Facts for people and programs: model and its hash, layers, pools, dtypes, treatment of long proteins. Strings and
    integers.
    """


@dataclass(frozen=True)
class Row:
    """One record of an embedding store."""

    id: str
    length: int
    """Residues of the record, also where it was truncated before it was computed."""
    chains: tuple[int, ...] = field(default=(), kw_only=True)
    """Residues of each chain of a record with several; empty for one chain. Rows are those of one chain after the
    other, without linkers."""
    values: Mapping[str, npt.NDArray[Any]]
    """The arrays by output name, each of `Output.shape` and of type `NUMPY[About.dtype]`."""
    residues: str = ""
    """The whole sequence, for formats that store rows by their sequences; empty for others."""


def as_float(values: npt.NDArray[Any], dtype: Dtype) -> npt.NDArray[Any]:
    """Convert to numbers that numpy can compute with. bf16 bits become float32; other types do not change."""
    if dtype != "bf16":
        return values
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


class FormatWriter(Writer):
    """A writer that collects rows under a temporary name beside `out`.

    `add` is called `about.n_records` times, in input order.
    """

    default_pool: ClassVar[Pool]
    """The pool that is computed without `--pool`."""
    pools: ClassVar[tuple[Pool, ...]] = POOLS
    """The pools that the format can hold."""
    dtypes: ClassVar[tuple[Dtype, ...]] = ("fp32", "fp16")
    """The dtypes that the format can hold. numpy, HDF5 and Arrow have no bfloat16."""
    several: ClassVar[bool] = True
    """Whether the format can hold more than one output."""
    by_sequence: ClassVar[bool] = False
    """Whether rows are stored by their sequences, so that each sequence is stored once, with its first id."""
    extra: ClassVar[tuple[str, str] | None] = None
    """The module that writes the format, and the extra of this package that installs the module."""

    def __init__(self, out: Path, about: About) -> None:
        self.require(out)
        super().__init__(out)
        self.about = about
        self.attributes: dict[str, Any] = {**about.attributes, "dim": about.dim}
        if about.n_records is not None:
            self.attributes["records"] = about.n_records
        self.n = 0
        """The number of rows so far. While a row is written, this is its number, counted from 0."""

    @classmethod
    def number_bytes(cls, dtype: Dtype) -> int:
        """Return the bytes of a number in the file; the most bytes, if the numbers differ in this."""
        return np.dtype(NUMPY[dtype]).itemsize

    @classmethod
    def require(cls, out: Path) -> Any:
        """Return the library, or raise a `UsageError` that says how to install it."""
        if cls.extra is None:
            return None
        module, extra = cls.extra
        try:
            return importlib.import_module(module)
        except ImportError:
            raise UsageError(f"{out}: writing it needs {module}; pip install 'esmshard[{extra}]'") from None

    @classmethod
    def check_place(cls, out: Path, *, overwrite: bool) -> None:
        """Refuse to replace an existing file without `overwrite`."""
        check(out, overwrite=overwrite)

    @classmethod  # most formats have no limit
    def check_size(cls, out: Path, outputs: int, records: int, id_bytes: int) -> None:
        """Refuse more records, or longer ids, than a file can hold. Counted are the outputs, the records, and the bytes
        of all ids.
        """

    def add(self, row: Row) -> None:
        """Write one record."""
        for output in self.about.outputs:
            values = row.values[output.name]
            assert values.dtype == NUMPY[self.about.dtype], f"{row.id}: {output.name} is {values.dtype}"
            assert not output.pooled or values.shape == (self.about.dim,), f"{row.id}: {output.name} is {values.shape}"
        self.write(row)
        self.n += 1

    @abstractmethod
    def write(self, row: Row) -> None:
        """Write a row that `add` has checked."""

    def finish(self) -> None:
        """Check the number of rows. Formats write their remaining data after that."""
        announced = self.about.n_records
        assert announced in (None, self.n), f"{self.n} rows came, {announced} were announced"

    def named(self, row: Row) -> list[tuple[str, npt.NDArray[Any]]]:
        """Return the arrays of a row, named ID, or `OUTPUT/ID` with several outputs."""
        several = len(self.about.outputs) > 1
        return [(f"{one.name}/{row.id}" if several else row.id, row.values[one.name]) for one in self.about.outputs]


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


class NpyFormat(FormatWriter):
    """`x.npy` [N, D] holds one pooled output in input order, and `x.ids.txt` one id on each line."""

    default_pool = "mean"
    pools = ("mean", "max", "cls")
    several = False

    def __init__(self, out: Path, about: About) -> None:
        super().__init__(out, about)
        self.ids_work = self.work.with_name(f"{self.work.name}.ids")

    @classmethod
    def check_place(cls, out: Path, *, overwrite: bool) -> None:
        """Check both files."""
        check(out, ids_file(out), overwrite=overwrite)

    def open(self) -> None:
        """Create both files, the matrix with its header."""
        self._file: BinaryIO = open(self.work, "wb")  # noqa: SIM115  # `close` closes the file
        descr = np.lib.format.dtype_to_descr(np.dtype(NUMPY[self.about.dtype]))
        shape = (self.about.n_records or 0, self.about.dim)
        np.lib.format.write_array_header_1_0(self._file, {"descr": descr, "fortran_order": False, "shape": shape})
        self._ids: TextIO = open(self.ids_work, "w", encoding="utf-8", newline="\n")  # noqa: SIM115

    def write(self, row: Row) -> None:
        """Write a row and a line."""
        (output,) = self.about.outputs
        self._file.write(np.ascontiguousarray(row.values[output.name]).data)
        self._ids.write(f"{row.id}\n")

    def close(self) -> None:
        """Flush to disk and close."""
        self._file.close()
        self._ids.close()

    def commit(self) -> None:
        """Rename the file of ids first, so that the matrix never exists without its ids."""
        self.ids_work.replace(ids_file(self.out))
        super().commit()

    def discard(self) -> None:
        """Remove both files."""
        super().discard()
        self.ids_work.unlink(missing_ok=True)


class CsvFormat(FormatWriter):
    """`x.csv`: a line for each record in input order, with the id and the D numbers of one pooled output.

    The first line has an empty cell and the numbers of the columns, 0 to D - 1, as `pandas.DataFrame.to_csv` writes
    them. EVOLVEpro (https://github.com/mat10d/EvolvePro) reads such files. Numbers have as many digits as their type
    needs to be read back exactly.
    """

    default_pool = "mean"
    pools = ("mean", "max", "cls")
    several = False

    DIGITS: ClassVar[Mapping[Dtype, int]] = {"fp32": 9, "fp16": 5}

    @classmethod
    def number_bytes(cls, dtype: Dtype) -> int:
        """Return the digits of a number, and the bytes of sign, point, exponent and comma, as in `-1.5e-05,`."""
        return cls.DIGITS[dtype] + 7

    def open(self) -> None:
        """Create the file with its first line."""
        self._file: TextIO = open(self.work, "w", encoding="utf-8", newline="")  # noqa: SIM115  # `close` closes it
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._rows.writerow(["", *range(self.about.dim)])

    def write(self, row: Row) -> None:
        """Write a line."""
        (output,) = self.about.outputs
        digits = self.DIGITS[self.about.dtype]
        self._rows.writerow([row.id, *(f"{number:.{digits}g}" for number in row.values[output.name].tolist())])

    def close(self) -> None:
        """Flush to disk and close."""
        self._file.close()


class ParquetFormat(FormatWriter):
    """`x.parquet`: one row for each record, with the columns `id`, `length` and one for each output, named after it.

    A pooled output is a list of D numbers. `residue` and `logits` are lists of lists of D and 33 numbers. `contacts` is
    one list of the L x L numbers, row by row. A row group is written when it is full. Attributes are in the schema's
    metadata.
    """

    default_pool = "mean"
    pools = ("mean", "max", "cls", "residue", "logits", "contacts")
    extra = ("pyarrow", "tables")

    GROUP: ClassVar[int] = 32 << 20
    """Bytes of a row group. A number counts as four bytes whatever its type, because the memory for encoding depends on
    the number of values. Encoding takes up to nine times as much memory.
    """

    PLACES: ClassVar[int] = 2**31 - 1
    """The largest number of list entries, which is enough for a map of 46,250 residues."""

    def open(self) -> None:
        """Create the file with the schema."""
        pa = self.require(self.out)
        from pyarrow import parquet

        number = pa.float32() if self.about.dtype == "fp32" else pa.float16()
        types = {}
        for output in self.about.outputs:
            if output.pool == "contacts":
                types[output.name] = pa.list_(number)
            elif output.pooled:
                types[output.name] = pa.list_(number, self.about.dim)
            else:
                types[output.name] = pa.list_(pa.list_(number, self._width(output)))
        self._number, self._types = number, types
        self._schema = pa.schema(
            {"id": pa.string(), "length": pa.int32(), **types},
            metadata={key: str(value) for key, value in self.attributes.items()},
        )
        self._writer = parquet.ParquetWriter(
            self.work,
            self._schema,
            # The outputs of a network are all different numbers: dictionary, compression and statistics (least and
            # greatest value) would cost time and save nothing.
            use_dictionary=False,
            compression="none",
            write_statistics=["id", "length"],
        )
        self._begin()

    def _begin(self) -> None:
        self._ids: list[str] = []
        self._lengths: list[int] = []
        self._numbers = {output.name: bytearray() for output in self.about.outputs}
        self._sizes: dict[str, list[int]] = {output.name: [] for output in self.about.outputs}
        self._bytes = 0

    def _width(self, output: Output) -> int:
        return VOCAB_SIZE if output.pool == "logits" else self.about.dim

    def write(self, row: Row) -> None:
        """Add the row to the row group, which is written when it is full."""
        self._ids.append(row.id)
        self._lengths.append(row.length)
        self._bytes += len(row.id) + 64  # `length` and the ends of lists
        for output in self.about.outputs:
            values = np.ascontiguousarray(row.values[output.name])
            # Positions are counted through a row group, which has at most GROUP / 4 numbers before its last row.
            if output.pool == "contacts" and values.size > self.PLACES - self.GROUP // 4:
                raise InputError(
                    f"{self.out}: record '{row.id}': a list of Parquet has no place for contacts of {len(values):,} "
                    "residues; write them with --format h5"
                )
            self._numbers[output.name] += values.data.cast("B")
            self._sizes[output.name].append(values.size if output.pool == "contacts" else len(values))
            self._bytes += 4 * values.size
        if self._bytes >= self.GROUP:
            self._write_group()

    def _write_group(self) -> None:
        import pyarrow as pa

        columns = [pa.array(self._ids, pa.string()), pa.array(self._lengths, pa.int32())]
        for output in self.about.outputs:
            flat = self._numbers[output.name]
            size = len(flat) // np.dtype(NUMPY[self.about.dtype]).itemsize
            column = pa.Array.from_buffers(self._number, size, [None, pa.py_buffer(flat)])  # no copy
            if output.pool != "contacts":
                column = pa.FixedSizeListArray.from_arrays(column, self._width(output))
            if not output.pooled:
                ends = np.cumsum([0, *self._sizes[output.name]])
                column = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), column)
            columns.append(column)
        self._writer.write_batch(
            pa.RecordBatch.from_arrays(columns, schema=self._schema), row_group_size=len(self._ids)
        )
        self._begin()

    def finish(self) -> None:
        """Write the last row group."""
        super().finish()
        if self._ids:
            self._write_group()

    def close(self) -> None:
        """Write the footer and close."""
        self._writer.close()


class NpzFormat(FormatWriter):
    """`x.npz`: an array for each record under its id, or `OUTPUT/ID` with several outputs, compressed."""

    default_pool = "residue"

    def open(self) -> None:
        """Create the archive."""
        self._zip = zipfile.ZipFile(self.work, "w", zipfile.ZIP_DEFLATED, allowZip64=True)

    def write(self, row: Row) -> None:
        """Write the arrays of a record."""
        for name, values in self.named(row):
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.ascontiguousarray(values), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy")  # with one date for all, so that the same rows give the same bytes
            self._zip.writestr(entry, buffer.getbuffer(), zipfile.ZIP_DEFLATED)

    def close(self) -> None:
        """Write the directory of the archive."""
        self._zip.close()


class AnnDataFormat(FormatWriter):
    """`x.h5ad`: an AnnData file. X is the first output [N, D], `obsm` has the others by name.

    `obs` has the ids as index and a column `length`; `uns` has the attributes. All rows are in memory until the end.
    """

    default_pool = "mean"
    pools = ("mean", "max", "cls")
    extra = ("anndata", "h5ad")

    def open(self) -> None:
        """Begin without rows."""
        self._ids: list[str] = []
        self._lengths: list[int] = []
        n, dim = self.about.n_records or 0, self.about.dim
        self._values = {one.name: np.empty((n, dim), NUMPY[self.about.dtype]) for one in self.about.outputs}

    def write(self, row: Row) -> None:
        """Keep a row."""
        self._ids.append(row.id)
        self._lengths.append(row.length)
        for name, values_ND in self._values.items():
            values_ND[self.n] = row.values[name]

    def finish(self) -> None:
        """Write the file."""
        super().finish()
        import anndata
        import pandas  # anndata needs it

        obs = pandas.DataFrame({"length": np.array(self._lengths, np.int32)}, index=pandas.Index(self._ids, dtype=str))
        first, *others = self._values
        obsm = {name: self._values[name] for name in others}
        anndata.AnnData(self._values[first], obs=obs, obsm=obsm, uns=self.attributes).write_h5ad(self.work)

    def close(self) -> None:
        """Do nothing, since no file stays open."""


class SafetensorsFormat(FormatWriter):
    """`x.safetensors`: one tensor for each record, named ID, or `OUTPUT/ID` with several outputs.

    The format is the header's length (8 bytes, little-endian), a JSON header, and the tensors
    (https://github.com/huggingface/safetensors). The library writes only tensors that are all in memory. Here they
    wait in a second file, because the header comes first and is known last.
    """

    default_pool = "residue"
    dtypes = DTYPES

    HEADER_LIMIT: ClassVar[int] = 100_000_000
    """The largest header that the library reads."""
    CODES: ClassVar[dict[Dtype, str]] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}

    @classmethod
    def check_size(cls, out: Path, outputs: int, records: int, id_bytes: int) -> None:
        """Refuse records whose names cannot fit into the header: each entry takes its id and at least 60 bytes."""
        if outputs * (60 * records + id_bytes) > cls.HEADER_LIMIT:
            raise UsageError(
                f"{out}: the names of so many records do not fit into the header of a safetensors file, which may have "
                f"{cls.HEADER_LIMIT // 1_000_000} MB; write it with --format parquet, or embed the FASTA file in parts"
            )

    def open(self) -> None:
        """Create the file of the tensors."""
        metadata = {key: str(value) for key, value in self.attributes.items()}
        self._entries: dict[str, Any] = {"__metadata__": metadata}
        self._at = 0
        self._tensors_path = self.work.with_name(f"{self.work.name}.tensors")
        self._tensors: BinaryIO = open(self._tensors_path, "wb")  # noqa: SIM115  # `close` closes the file

    def write(self, row: Row) -> None:
        """Write all outputs, one after the other."""
        for name, values in self.named(row):
            if name == "__metadata__":
                raise UsageError(f"{self.out}: a safetensors file keeps the name '{name}' for itself; use --format h5")
            end = self._at + values.nbytes
            shape, code = list(values.shape), self.CODES[self.about.dtype]
            self._entries[name] = {"dtype": code, "shape": shape, "data_offsets": [self._at, end]}
            self._tensors.write(np.ascontiguousarray(values).data)
            self._at = end

    def finish(self) -> None:
        """Write the header and, after it, the tensors."""
        super().finish()
        self._tensors.close()
        header = json.dumps(self._entries, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)  # tensors are aligned
        if len(header) > self.HEADER_LIMIT:
            self.check_size(self.out, 1, self.HEADER_LIMIT, 0)
        with open(self.work, "wb") as file, open(self._tensors_path, "rb") as tensors:
            file.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(tensors, file, 1 << 24)

    def close(self) -> None:
        """Close the file of the tensors."""
        self._tensors.close()

    def discard(self) -> None:
        """Remove both files."""
        super().discard()
        self.work.with_name(f"{self.work.name}.tensors").unlink(missing_ok=True)


class ZarrFormat(FormatWriter):
    """`x.zarr`: a Zarr group (format 3) with one array for each output, which grows along its first axis.

    A pooled output is [N, D]. Rows of `residue` [L, D] and `logits` [L, 33] follow each other, and so do the L x L
    numbers of maps, flat; `starts_OUTPUT` [N + 1] has the first row of each record. `ids` and `lengths` are [N].
    The attributes describe what was computed.
    """

    default_pool = "mean"
    extra = ("zarr", "zarr")

    BLOCK: ClassVar[int] = 1 << 22
    """Bytes of a chunk, and of the rows that wait in memory."""

    def open(self) -> None:
        """Create the group; the arrays are created with the first rows."""
        self.discard()  # the rest of a killed process with the same id
        self._group = self.require(self.out).open_group(self.work, mode="w", zarr_format=3)
        self._group.attrs.update(self.attributes)
        self._ids: list[str] = []
        self._lengths: list[int] = []
        self._waiting: dict[str, list[npt.NDArray[Any]]] = {one.name: [] for one in self.about.outputs}
        self._starts: dict[str, list[int]] = {one.name: [0] for one in self.about.outputs if not one.pooled}
        self._bytes = 0

    def write(self, row: Row) -> None:
        """Add a row to those that wait."""
        self._ids.append(row.id)
        self._lengths.append(row.length)
        for one in self.about.outputs:
            values = np.array(row.values[one.name])
            values = values.reshape(-1) if one.paired else values[None] if one.pooled else values
            self._waiting[one.name].append(values)
            self._bytes += values.nbytes
            if not one.pooled:
                self._starts[one.name].append(self._starts[one.name][-1] + len(values))
        if self._bytes >= self.BLOCK:
            self._write_rows()

    def _write_rows(self) -> None:
        self._bytes = 0
        for name, rows in self._waiting.items():
            values = np.concatenate(rows)
            rows.clear()
            if name in self._group:
                self._group[name].append(values)
            else:
                width = max(1, values[:1].nbytes)
                chunks = (max(1, self.BLOCK // width), *values.shape[1:])
                self._group.create_array(name, data=values, chunks=chunks)

    def finish(self) -> None:
        """Write the last rows, the ids and the lengths."""
        super().finish()
        if self._bytes:
            self._write_rows()
        self._group.create_array("ids", shape=(len(self._ids),), dtype=str)[:] = np.array(self._ids, object)
        self._group.create_array("lengths", data=np.array(self._lengths, np.int32))
        for name, starts in self._starts.items():
            self._group.create_array(f"starts_{name}", data=np.array(starts, np.int64))

    @classmethod
    def check_place(cls, out: Path, *, overwrite: bool) -> None:
        """Refuse to replace a directory that is no Zarr group."""
        check_replaced(out, ["*"], marker="zarr.json")
        if out.exists() and not overwrite:
            raise UsageError(f"{out}: exists already; choose another name or pass --overwrite")

    def close(self) -> None:
        """Do nothing, since no file stays open."""

    def commit(self) -> None:
        """Rename the directory, after an old one was removed."""
        self.check_place(self.out, overwrite=True)
        shutil.rmtree(self.out, ignore_errors=True)
        super().commit()

    def discard(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.work, ignore_errors=True)


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
"""The writer of each format, by the name of `--format` and the ending of the file."""


def suits(fmt: str, outputs: Sequence[Output], dtype: Dtype, out: Path, *, records: int = 0, id_bytes: int = 0) -> None:
    """Refuse, before anything is computed, outputs that a format cannot hold, and a format whose library is missing.

    Args:
        fmt: a key of FORMATS.
        outputs: the outputs to write, at least one.
        dtype: the dtype of the stored numbers.
        out: the file, for the message.
        records: the number of records to write, if known.
        id_bytes: the bytes of all ids together, in UTF-8, if known.

    Raises:
        UsageError: with a format that can hold the outputs.
    """
    if fmt not in FORMATS:
        raise UsageError(f"{out}: no format '{fmt}'; there are {', '.join(FORMATS)} (by ending, or --format)")
    if reason := _reason(fmt, outputs, dtype):
        others = " or ".join(other for other in FORMATS if not _reason(other, outputs, dtype))
        raise UsageError(f"{out}: {reason}; write it with --format {others}")
    FORMATS[fmt].require(out)
    FORMATS[fmt].check_size(out, len(outputs), records, id_bytes)


def _reason(fmt: str, outputs: Sequence[Output], dtype: Dtype) -> str:
    """Return why a format cannot hold the outputs; empty if it can."""
    writer = FORMATS[fmt]
    for output in outputs:
        if output.pool not in writer.pools:
            return f"{fmt} has a place for {', '.join(writer.pools)}, and none for {output.name}"
    if len(outputs) > 1 and not writer.several:
        return f"{fmt} holds one output, and {' and '.join(output.name for output in outputs)} are asked for"
    if dtype not in writer.dtypes:
        return f"{fmt} holds {' and '.join(writer.dtypes)}, and not {dtype}"
    return ""
