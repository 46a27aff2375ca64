"""The registry of file formats, by the name of `--format` and the file's ending: what each can hold."""

from collections.abc import Sequence
from pathlib import Path

from esmshard.embed.compute.outputs import Dtype, Output
from esmshard.embed.formats.format_writer import FormatWriter
from esmshard.embed.formats.record_formats import BiotrainerFormat, FairEsmFormat, Hdf5Format, SafetensorsFormat
from esmshard.embed.formats.table_formats import AnnDataFormat, CsvFormat, NpyFormat, ParquetFormat
from esmshard.errors import UsageError

FORMATS: dict[str, type[FormatWriter]] = {
    "h5": Hdf5Format,
    "npy": NpyFormat,
    "csv": CsvFormat,
    "parquet": ParquetFormat,
    "h5ad": AnnDataFormat,
    "safetensors": SafetensorsFormat,
    "fair-esm-pt": FairEsmFormat,
    "biotrainer-h5": BiotrainerFormat,
}


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
