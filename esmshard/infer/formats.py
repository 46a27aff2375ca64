"""File formats of embeddings, by the name of `--format` and the ending of the file: what each takes, and its size."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from esmshard.errors import UsageError
from esmshard.infer.format_writer import FormatWriter
from esmshard.infer.outputs import NUMPY, Dtype, Output, Pool
from esmshard.infer.record_formats import FairEsmFormat, Hdf5Format, SafetensorsFormat
from esmshard.infer.table_formats import AnnDataFormat, NpyFormat, ParquetFormat

FORMATS: dict[str, type[FormatWriter]] = {
    "h5": Hdf5Format,
    "npy": NpyFormat,
    "parquet": ParquetFormat,
    "h5ad": AnnDataFormat,
    "safetensors": SafetensorsFormat,
    "fair-esm-pt": FairEsmFormat,
}

DEFAULT_POOL: dict[str, Pool] = {name: writer.default_pool for name, writer in FORMATS.items()}


def suits(fmt: str, outputs: Sequence[Output], dtype: Dtype, out: Path, *, records: int = 0, id_bytes: int = 0) -> None:
    """Refuse, before anything is computed, what a format cannot hold; and to write without the library for it.

    Args:
        fmt: a key of FORMATS.
        outputs: to be written, at least one.
        dtype: of the stored numbers.
        out: named in the error.
        records: so many will be written, where that is known.
        id_bytes: of all ids together, in UTF-8, where that is known.

    Raises:
        UsageError: one sentence, with what holds it.
    """
    if fmt not in FORMATS:
        raise UsageError(f"{out}: no format '{fmt}'; there are {', '.join(FORMATS)} (by ending, or --format)")
    if reason := _reason(fmt, outputs, dtype):
        others = " or ".join(other for other in FORMATS if not _reason(other, outputs, dtype))
        raise UsageError(f"{out}: {reason}; write it with --format {others}")
    writer = FORMATS[fmt]
    writer.require(out)
    # Every entry of the header takes this much and more: what is refused here would be refused in the end.
    if writer is SafetensorsFormat and (
        SafetensorsFormat.header_bytes(outputs, records, id_bytes, 60) > SafetensorsFormat.HEADER_LIMIT
    ):
        raise SafetensorsFormat.too_long(out)


def check_place(fmt: str, out: Path, *, overwrite: bool) -> None:
    """Refuse to replace the file, files or directory of a format unless told to, and others' directories always."""
    FORMATS[fmt].check_place(out, overwrite=overwrite)


def bytes_of(
    fmt: str, outputs: Sequence[Output], dtype: Dtype, dim: int, lengths: npt.NDArray[np.int64], id_bytes: int
) -> int:
    """About how large the file will be; within 3 % for files above a megabyte.

    Args:
        fmt: a key of FORMATS.
        outputs: that it holds.
        dtype: of the stored numbers.
        dim: D.
        lengths: residues of each record that are computed.
        id_bytes: of all ids together, in UTF-8.
    """
    size = np.dtype(NUMPY[dtype]).itemsize
    numbers = sum(int(output.numbers(lengths.astype(np.int64), dim).sum()) for output in outputs)
    beside = FORMATS[fmt].overhead(outputs, dim * size, len(lengths), int(lengths.sum(dtype=np.int64)), id_bytes)
    return numbers * size + beside


def _reason(fmt: str, outputs: Sequence[Output], dtype: Dtype) -> str:
    """Why a format does not hold that; empty if it does."""
    writer = FORMATS[fmt]
    for output in outputs:
        if output.pool not in writer.pools:
            return f"{fmt} has a place for {', '.join(writer.pools)}, and none for {output.name}"
    if len(outputs) > 1 and not writer.several:
        return f"{fmt} holds one output, and {' and '.join(output.name for output in outputs)} are asked for"
    if dtype not in writer.dtypes:
        return f"{fmt} holds {' and '.join(writer.dtypes)}, and not {dtype}"
    return ""
