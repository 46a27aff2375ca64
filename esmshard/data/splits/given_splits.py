"""Splits that a file gives: `SET=` in FASTA headers, a column of a table, or the headers of a label file."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from esmshard.data.fasta.headers import Split, attributes, id_of, split_of
from esmshard.data.fasta.symbols import Edits
from esmshard.data.labels.coordinates import CoordinateRecords, Policy
from esmshard.data.labels.label_fasta import read_label_fasta
from esmshard.data.labels.pairing import Tally, only_column, rows_of_records, settle
from esmshard.data.tables import Table, listed, shown
from esmshard.errors import InputError

_NAMES: Sequence[Split] = get_args(Split)
_NONE = -1
"""The number for a record or row without a split."""


def given_splits(
    store: CoordinateRecords,
    fasta: Path,
    source: Table | Path | None = None,
    *,
    id_column: str | None = None,
    set_column: str | None = None,
    validation_column: str | None = None,
    missing: Policy = "error",
    surplus: Policy = "error",
    edits: Edits | None = None,
) -> list[Split | None]:
    """Return the split of each of N records; None for a record that `missing="drop"` leaves out.

    Args:
        store: the records.
        fasta: the file of the records.
        source: a table with a column `set` or `split`, and perhaps a column `validation`; or the path of a label file
            whose headers hold SET and VALIDATION; None for the headers of the FASTA file itself.
        id_column: column of the ids; see `rows_of_records`.
        set_column: column of the sets, if it has another name.
        validation_column: column of validation marks, if it has another name.
        missing: what happens to records without a split.
        surplus: what happens to rows or labels without a record.
        edits: collects what was changed or left out.

    Raises:
        InputError: a split is missing, unknown, or given in two ways; the message names record or line.
    """
    edits = Edits() if edits is None else edits
    if isinstance(source, Table):
        split_R = _of_rows(source, set_column, validation_column)
        row_N = rows_of_records(
            source,
            store,
            fasta,
            id_column=id_column,
            same=lambda a, b: bool(split_R[a] == split_R[b]),
            labelled_R=split_R != _NONE,
            what="split",
            missing=missing,
            surplus=surplus,
            edits=edits,
        )
        return [None if row < 0 else _NAMES[split_R[row]] for row in row_N.tolist()]
    extra = Tally()
    if source is None:
        split_N = np.full(len(store), _NONE, dtype=np.int8)
        for n in range(len(store)):
            split_N[n] = _of_header(store.description(n), str(fasta), edits)
        lacks = "SET="
    else:
        split_N = _of_label_file(store, source, extra, edits)
        lacks = f"SET= in {source}"
    settle(store, fasta, split_N != _NONE, lacks, extra, source or fasta, missing=missing, surplus=surplus, edits=edits)
    return [None if split == _NONE else _NAMES[split] for split in split_N.tolist()]


def _of_header(header: str, where: str, edits: Edits) -> int:
    found = attributes(header, ("SET", "VALIDATION"), where, edits)
    if "SET" not in found:
        return _NONE
    record = f"{where}: record {shown(id_of(header))}"
    return _NAMES.index(split_of(found["SET"], found.get("VALIDATION", ""), record))


def _of_label_file(store: CoordinateRecords, path: Path, extra: Tally, edits: Edits) -> npt.NDArray[np.int8]:
    split_N = np.full(len(store), _NONE, dtype=np.int8)
    line_N = np.zeros(len(store), dtype=np.int64)
    for record in read_label_fasta(path):
        where = f"{path}:{record.line}"
        split, n = _of_header(record.header, where, edits), store.find(record.id)
        if n is None:
            extra.add(record.id)
            edits.add("a split of no record was passed over", record.id)
            continue
        if line_N[n] and split_N[n] != split:
            raise InputError(
                f"{where}: {shown(record.id)} has another split than in line {line_N[n]}; leave one of them out"
            )
        line_N[n], split_N[n] = record.line, split
    return split_N


def _of_rows(table: Table, set_column: str | None, validation_column: str | None) -> npt.NDArray[np.int8]:
    set_column = set_column or only_column(table, ("set", "split"), "set_column")
    if set_column is None:
        raise InputError(f"{table.path}: has no column 'set' or 'split'; {listed(table.columns)}")
    validation_column = validation_column or only_column(table, ("validation",), "validation_column")
    set_R = table.column(set_column)
    validation_R = table.column(validation_column) if validation_column else [""] * len(table)
    split_R = np.full(len(table), _NONE, dtype=np.int8)
    for row, (text, validation) in enumerate(zip(set_R, validation_R, strict=True)):
        if text:
            split_R[row] = _NAMES.index(split_of(text, validation, table.where(row)))
    return split_R
