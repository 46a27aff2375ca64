"""Matches the rows of a table to the records of a FASTA file, and counts records without a label."""

import hashlib
import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError
from esmshard.io.sequences import ID_NAMES, SEQUENCE_NAMES
from esmshard.io.store import TokenStore
from esmshard.io.symbols import Edits
from esmshard.io.tables import Table, first_three, listed, shown
from esmshard.vocab import LINKER, encode_residues

NAME_LABEL = "set data.target=COLUMN"
UNIPROT = re.compile(r"(?:sp|tr)\|([^|]+)\|")
"""The beginning of a UniProt id, such as `sp|P69905|`. Group 1 is the accession, `P69905`."""
_LETTERS = str.maketrans(string.ascii_lowercase + "J", string.ascii_uppercase.replace("J", "X") + "X", "-.")


def label_column(table: Table, names: Sequence[str]) -> str:
    """Return the name of the only column with a name in `names`. Raises `InputError` if there are none or several."""
    column = table.only_column(names, NAME_LABEL)
    if column is None:
        raise InputError(f"{table.path}: has no column 'target' or 'label'; {listed(table.columns)}; {NAME_LABEL}")
    return column


def rows_of_records(
    table: Table,
    store: TokenStore,
    fasta: Path,
    *,
    id_column: str | None,
    same: Callable[[int, int], bool],
    labelled_R: npt.NDArray[np.bool_],
    what: Literal["label", "split"] = "label",
    required: bool,
    edits: Edits,
) -> npt.NDArray[np.int64]:
    """Return the table row of each record, int64 [N]; -1 for a record without a label.

    Rows are matched to records by id, or by sequence if the table has no ids. If the table has ids and sequences, both
    must agree with the record. For the record `sp|P69905|HBA_HUMAN`, the table may have the id `P69905`.

    Args:
        table: the table of R rows.
        store: the N records.
        fasta: the FASTA file of the records, for messages.
        id_column: the name of the id column; by default `table.ids`, else the only column with a name in ID_NAMES.
        same: returns whether the rows with two given indices have the same label.
        labelled_R: whether each row has a label, bool [R].
        what: whether the table has labels or splits. Splits without a record are counted in `edits`. Labels without a
            record are not counted, since one file may have the labels of several FASTA files.
        required: whether a record without a label is an error.
        edits: counts left-out records and repeated rows.

    Raises:
        InputError: two rows contradict each other, a cell is empty or not valid, no column has ids or sequences, or
            rows and records do not match.
    """
    fix = "name the column of ids in data.id_column"
    id_column = id_column or table.ids or table.only_column(ID_NAMES, fix)
    sequence_column = table.only_column(SEQUENCE_NAMES, fix) if id_column is None else _sequences(table, id_column)
    if table.ids is not None:  # The records were read from this table, so the sequences are equal.
        sequence_column = None
    column = id_column or sequence_column
    if column is None:
        raise InputError(
            f"{table.path}: has no column named id or sequence; set data.id_column; {listed(table.columns)}"
        )
    by_sequence = id_column is None or id_column == sequence_column
    linker = store.linker or LINKER
    rows: dict[str | bytes, int] = {}
    for row, cell in enumerate(table.column(column)):
        if not cell:
            raise InputError(f"{table.where(row)}: column {shown(column)} is empty; fill it in, or remove the row")
        first = rows.setdefault(_digest(_tokens(table, row, column, linker)) if by_sequence else cell, row)
        if first != row:
            if not same(first, row):
                line = table.lines[first]
                raise InputError(f"{table.where(row)}: {shown(cell)} has another {what} than in line {line}; keep one")
            edits.add(f"a row that came twice with the same {what} was read once", shown(cell, 20)[1:-1])

    row_N = np.full(len(store), -1, dtype=np.int64)
    used_R = np.zeros(len(table), dtype=np.bool_)
    for n in range(len(store)):
        if by_sequence:
            matching = rows.get(_digest(store.residues(n).tobytes()))
        else:
            record_id = store.id(n)
            matching = rows.get(record_id)
            accession = UNIPROT.match(record_id) if matching is None else None
            if accession and (matching := rows.get(accession[1])) is not None:
                edits.add("the UniProt accession was taken for the id", record_id)
            if matching is not None and sequence_column is not None:
                given = table.columns[sequence_column][matching]
                if given and _tokens(table, matching, sequence_column, linker) != store.residues(n).tobytes():
                    where = f"{table.where(matching)}: {shown(record_id)}"
                    raise InputError(f"{where} has another sequence in {fasta}; correct one sequence")
        if matching is not None:
            used_R[matching] = True
            row_N[n] = matching if labelled_R[matching] else -1
    cells = table.column(column)
    extra = [shown(cells[row], 20)[1:-1] for row in rows.values() if not used_R[row]]
    for name in extra if what == "split" else ():
        edits.add("a split of an unknown record was ignored", name)
    unmatched = () if used_R.any() else extra
    check_labelled(store, fasta, row_N >= 0, f"{what} in {table.path}", unmatched, edits, required=required)
    return row_N


def check_labelled(
    store: TokenStore,
    fasta: Path,
    labelled_N: npt.NDArray[np.bool_],
    lacks: str,
    extra: Sequence[str],
    edits: Edits,
    *,
    required: bool,
) -> None:
    """Add the number of records without a label to `edits`. `labelled_N`, bool [N], says which records have one.

    `lacks` is the name of the missing label in messages, such as `TARGET=`. If no record has a label, the message
    shows ids from `extra`, the ids of labels that belong to no record.

    Raises `InputError` if no record has a label, or `required` is true and a record has no label.
    """
    without: list[int] = np.flatnonzero(~labelled_N).tolist()
    ids = f"({first_three(without, store.id)})"
    if len(without) == len(store):
        others = f", which has other ids ({first_three(extra, str)})" if extra else ""
        raise InputError(f"{fasta}: no record {ids} has a {lacks}{others}; check that the files belong together")
    if without and required:
        count = f"{len(without):,} of {len(store):,} records"
        raise InputError(f"{fasta}: {count} have no {lacks} {ids}; add it, or remove the records")
    for n in without:
        edits.add(f"record(s) without {lacks} left out", store.id(n))


def _sequences(table: Table, id_column: str) -> str | None:
    """Return `id_column` if it has sequences, else the only sequence column; None if there are none or several."""
    columns = [column for column in table.columns if column.lower() in SEQUENCE_NAMES]
    return id_column if id_column in columns else columns[0] if len(columns) == 1 else None


def _tokens(table: Table, row: int, column: str, linker: int) -> bytes:
    """Convert the sequence in a cell to tokens, as the FASTA reader does. `linker` is the token between chains."""
    letters = "".join(table.columns[column][row].split()).removesuffix("*").translate(_LETTERS)
    try:
        return encode_residues(letters, linker)
    except ValueError as error:
        raise InputError(f"{table.where(row)}: column {shown(column)}: {error}") from None


def _digest(tokens: bytes) -> bytes:
    """Hash the tokens of a sequence to 16 bytes. A long protein then needs as little memory as a short one."""
    return hashlib.blake2b(tokens, digest_size=16).digest()
