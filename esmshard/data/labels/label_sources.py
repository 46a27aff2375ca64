"""Opens the source of labels: a label file for all splits, an `.npz` file per FASTA file, or the records themselves.

A FASTA file of labels has labels in place of sequences. FLIP's `sampled.fasta` has a label letter for each residue,
FLIP's `mask.fasta` has 0 or 1 for each residue. White space is removed; no other character is changed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from esmshard.data.labels.coordinates import npz_beside, read_arrays
from esmshard.errors import InputError, UsageError
from esmshard.io import remote
from esmshard.io.headers import id_of
from esmshard.io.sequences import is_sequence_table, open_bytes, read_sequence_table
from esmshard.io.symbols import BLANKS, Rules
from esmshard.io.tables import Table, read_table, readable, shown
from esmshard.recipe.sections import DataSettings

_NO_BLANKS = str.maketrans("", "", BLANKS.decode())


@dataclass(frozen=True)
class LabelRecord:
    """A record in a FASTA file of labels."""

    id: str
    header: str
    """The header line without `>`."""
    text: str
    """The labels without white space."""
    line: int
    """The line number of the header in the file, counted from 1."""


def read_label_fasta(path: Path) -> Iterator[LabelRecord]:
    """Read the records of a FASTA file of labels, plain or compressed. Several records may have the same id. Raises
    `InputError` if the file cannot be read or has no record, or a record has no id or no labels.
    """
    header, start, pieces = "", 0, list[str]()
    with (
        readable(path, "a FASTA file of labels"),
        open_bytes(path) as stream,
        TextIOWrapper(stream, encoding="utf-8-sig") as handle,
    ):
        for number, line in enumerate(handle, 1):
            if line.startswith(">"):
                if header:
                    yield _record(path, header, pieces, start)
                header, start, pieces = line[1:].strip(), number, []
                if not header:
                    raise InputError(f"{path}:{number}: a record without an id; write the protein id after '>'")
            elif header:
                pieces.append(line)
            elif line.strip():
                raise InputError(f"{path}:{number}: text before the first '>'; a record begins with '>ID'")
        if not header:
            raise InputError(f"{path}: holds no record; a FASTA file of labels has lines that begin with '>'")
        yield _record(path, header, pieces, start)


def _record(path: Path, header: str, pieces: list[str], line: int) -> LabelRecord:
    record = LabelRecord(id_of(header), header, "".join(pieces).translate(_NO_BLANKS), line)
    if not record.text:
        raise InputError(f"{path}:{line}: record {shown(record.id)} has no labels; write them, or remove it")
    return record


_FASTA = re.compile(r"\.(fasta|faa|fa)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)


def label_source(fasta: Path, data: DataSettings) -> Table | Path | None:
    """Return the labels of a recipe: a table, or the path of a FASTA file of labels; None if the headers have labels.

    If `data.labels` is None, a table of sequences also has the labels. For a FASTA file, the labels are then in the
    `.npz` file with the same name, if this file has an array with the first name in `data.target`. Raises
    `UsageError` if `data.id_column` is set, but the labels are not in a table.
    """
    source: Table | Path | None = None
    if _labels_in_records(data, fasta) and is_sequence_table(fasta):
        source = read_sequence_table(fasta, data.sequence_column, data.id_column).rows
    elif data.labels is None:
        path = npz_beside(fasta)
        if data.target and path.exists() and data.target[0] in (table := read_npz(path)).columns:
            source = table
    else:
        source = table_or_fasta(remote.data_file(data.labels))
    if data.id_column is not None and not isinstance(source, Table):
        raise UsageError(
            f"data.id_column: {source or fasta} is no table; remove the key, or name a table in data.labels"
        )
    return source


def rules_of(fasta: Path, data: DataSettings) -> Rules:
    """Return the rules for reading a table of sequences. If labels are in another file, `data.id_column` names a column
    of that file, and the rules have no id column.
    """
    id_column = data.id_column if _labels_in_records(data, fasta) else None
    return Rules(sequence_column=data.sequence_column, id_column=id_column)


def _labels_in_records(data: DataSettings, fasta: Path) -> bool:
    return data.labels is None or remote.data_file(data.labels) == fasta


def table_or_fasta(path: Path) -> Table | Path:
    """Read a table or an `.npz` file as a table. Return the path itself if it is a FASTA file."""
    if _FASTA.search(path.name):
        return path
    return read_npz(path) if path.suffix == ".npz" else read_table(path)


def read_npz(path: Path) -> Table:
    """Make a table from an `.npz` file: each array with a string or number for each record becomes a column.

    The array `names` becomes the column `id`, and the array `seqs` the column `sequence`. Raises `InputError` if the
    file cannot be read, has no array `names` of strings, or `names` and `seqs` differ in size.
    """
    arrays = read_arrays(path)
    names = arrays.get("names")
    if names is None or names.ndim != 1 or names.dtype.kind != "U" or not len(names):
        raise InputError(f"{path}: has no array 'names' with the id of each record; add it")
    columns = {
        {"names": "id", "seqs": "sequence"}.get(name, name): list(map(str, values.tolist()))
        for name, values in arrays.items()
        if values.shape == names.shape and values.dtype.kind in "Ubiuf"
    }
    if "seqs" in arrays and "sequence" not in columns:
        raise InputError(f"{path}: the sizes of names and seqs do not fit each other; make the file again")
    return Table(path, columns, list(range(1, len(names) + 1)))
