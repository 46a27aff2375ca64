"""Embeddings as rows of a table: numpy's matrix, CSV, Parquet, and AnnData."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TextIO

import numpy as np

from esmshard.embed.compute.outputs import NUMPY, About, Dtype, Output, Row
from esmshard.embed.formats.format_writer import FormatWriter
from esmshard.errors import InputError
from esmshard.predict.writers import check, ids_file
from esmshard.vocab import VOCAB_SIZE


class NpyFormat(FormatWriter):
    """`x.npy` [N, D] holds one pooled output in input order, and `x.ids.txt` one id on each line."""

    default_pool = "mean"
    pools = ("mean", "max", "cls")
    several = False

    def __init__(self, out: Path, about: About) -> None:
        super().__init__(out, about)
        ids = ids_file(out)
        self.ids_work = ids.with_name(f".tmp-{os.getpid()}-{ids.name}")

    @classmethod
    def check_place(cls, out: Path, *, overwrite: bool) -> None:
        """Check both files."""
        check(out, ids_file(out), overwrite=overwrite)

    def open(self) -> None:
        """Create both files, the matrix with its header."""
        self._file: BinaryIO = open(self.work, "wb")  # noqa: SIM115  # `close` closes the file
        descr = np.lib.format.dtype_to_descr(np.dtype(NUMPY[self.about.dtype]))
        shape = (self.about.n_records, self.about.dim)
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
    exact = False

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


class AnnDataFormat(FormatWriter):
    """`x.h5ad`: an AnnData file, https://anndata.readthedocs.io/en/stable/fileformat-prose.html.

    X is the first output [N, D]. Further outputs are in `obsm` under their names. `obs` has the ids as index and a
    column `length`; `uns` has the attributes. Rows are written in chunks of about a megabyte.
    """

    default_pool = "mean"
    pools = ("mean", "max", "cls")
    extra = ("h5py", "h5")

    CHUNK_BYTES: ClassVar[int] = 1 << 20

    def open(self) -> None:
        """Create the file with everything but the rows."""
        h5py = self.require(self.out)
        self._file = h5py.File(self.work, "w")
        n, dim, dtype = self.about.n_records, self.about.dim, np.dtype(NUMPY[self.about.dtype])
        self._rows = max(1, min(self.CHUNK_BYTES // (dim * dtype.itemsize), n))  # of a chunk
        text = h5py.string_dtype()
        _encode(self._file, "anndata", "0.1.0")
        for name in ("layers", "obsm", "obsp", "uns", "varm", "varp"):
            _encode(self._file.create_group(name), "dict", "0.1.0")
        for name, columns in (("obs", ["length"]), ("var", [])):
            frame = _encode(self._file.create_group(name), "dataframe", "0.2.0")
            frame.attrs["_index"] = "_index"
            frame.attrs.create("column-order", columns, shape=(len(columns),), dtype=text)
        _array(self._file["var"], "_index", text, "string-array", data=[str(i) for i in range(dim)])

        def column(where: Any, name: str, dtype: Any, kind: str, *width: int) -> Any:
            chunks = (self._rows, *width) if n else None  # HDF5 refuses a chunk that is larger than the array
            return _array(where, name, dtype, kind, shape=(n, *width), chunks=chunks)

        self._of_rows = {
            "id": column(self._file["obs"], "_index", text, "string-array"),
            "length": column(self._file["obs"], "length", np.int32, "array"),
        }
        for k, output in enumerate(self.about.outputs):
            where, name = (self._file["obsm"], output.name) if k else (self._file, "X")
            self._of_rows[output.name] = column(where, name, dtype, "array", dim)
        for key, value in self.attributes.items():
            kind = "string" if isinstance(value, str) else "numeric-scalar"
            data = self._file["uns"].create_dataset(key, data=value, track_times=False)
            _encode(data, kind, "0.2.0")
        self._waiting: dict[str, list[Any]] = {name: [] for name in self._of_rows}

    def write(self, row: Row) -> None:
        """Add the row to the chunk, which is written when it is full."""
        self._waiting["id"].append(row.id)
        self._waiting["length"].append(row.length)
        for output in self.about.outputs:
            self._waiting[output.name].append(np.array(row.values[output.name]))
        if len(self._waiting["id"]) == self._rows:
            self._write_rows(self.n + 1)

    def _write_rows(self, end: int) -> None:
        for name, values in self._waiting.items():
            self._of_rows[name][end - len(values) : end] = np.stack(values) if name not in ("id", "length") else values
            values.clear()

    def finish(self) -> None:
        """Write the last rows, and flush to disk."""
        super().finish()
        if self._waiting["id"]:
            self._write_rows(self.n)
        self._file.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _array(group: Any, name: str, dtype: Any, kind: str, **how: Any) -> Any:
    """Create a data set without a creation time, which would make two files of the same rows differ."""
    return _encode(group.create_dataset(name, dtype=dtype, track_times=False, **how), kind, "0.2.0")


def _encode(element: Any, kind: str, version: str) -> Any:
    """Write the attributes that define how an element is read."""
    element.attrs["encoding-type"], element.attrs["encoding-version"] = kind, version
    return element
