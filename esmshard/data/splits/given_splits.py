"""Splits that a file gives: `SET=` in FASTA headers, a column of a table, or the headers of a label file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from esmshard.data.labels.label_sources import read_label_fasta
from esmshard.data.labels.pairing import check_labelled, rows_of_records
from esmshard.data.splits.assignment import LEFT_OUT, SETS, Numbers
from esmshard.errors import InputError
from esmshard.io.headers import attributes, id_of, split_of
from esmshard.io.store import TokenStore
from esmshard.io.symbols import Edits
from esmshard.io.tables import Table, listed, shown


def given_splits(
    store: TokenStore,
    fasta: Path,
    source: Table | Path | None,
    edits: Edits,
    *,
    id_column: str | None = None,
    required: bool = True,
) -> Numbers:
    """Return the number in `SETS` of the split of each record, int64 [N]; LEFT_OUT for a record without a split.

    `SET=` in the headers of the records counts, and so does the set in `source`. Where both name one, they must agree.

    Args:
        store: the records.
        fasta: their file.
        source: a table with a column `set` or `split`, and perhaps a column `validation`; or the path of a label file
            whose headers hold SET and VALIDATION; None for the headers of the FASTA file alone.
        edits: collects what was changed or left out, such as splits of no record.
        id_column: column of the ids; see `rows_of_records`.
        required: whether a record without a split is an error.

    Raises:
        InputError: a split is missing, unknown, or given in two ways; the message names record or line.
    """
    headers = (_of_header(store.description(n), str(fasta), edits) for n in range(len(store)))
    number_N: Numbers = np.fromiter(headers, np.int64, len(store))
    marked_N, lacks = number_N != LEFT_OUT, "SET="
    if isinstance(source, Table):
        number_R = sets_of_rows(source, range(len(source)))
        row_N = rows_of_records(
            source,
            store,
            fasta,
            id_column=id_column,
            same=lambda a, b: bool(number_R[a] == number_R[b]),
            labelled_R=number_R != LEFT_OUT,
            what="split",
            required=required and not marked_N.any(),
            edits=Edits() if marked_N.any() else edits,
        )
        given_N = np.where(row_N < 0, LEFT_OUT, number_R[row_N])
        lacks = f"SET= here or set in {source.path}"
        if not marked_N.any():
            return given_N
    elif source is not None:
        given_N, lacks = _of_label_file(store, source, edits), f"SET= here or in {source}"
    else:
        given_N = number_N
    both_N = marked_N & (given_N != LEFT_OUT) & (given_N != number_N)
    if both_N.any():
        n = int(both_N.argmax())
        other = source.path if isinstance(source, Table) else source
        raise InputError(
            f"{fasta}: record {shown(store.id(n))} is of {SETS[number_N[n]]}, and {other} says {SETS[given_N[n]]}; "
            "correct one of the two"
        )
    number_N = np.where(marked_N, number_N, given_N)
    check_labelled(store, fasta, number_N != LEFT_OUT, lacks, (), edits, required=required)
    return number_N


def sets_of_rows(table: Table, rows: Sequence[int]) -> Numbers:
    """Return the set of some rows, int64 [N], as column `set` or `split` says. FLIP's tables also have a column
    `validation`.

    Raises:
        InputError: there is no such column, or a name in these rows is no set.
    """
    column = table.only_column(("set", "split"), "rename the one that is not")
    if column is None:
        raise InputError(f"{table.path}: has no column 'set' or 'split'; {listed(table.columns)}")
    validation = table.only_column(("validation",), "rename the one that is not")
    sets, truths = table.columns[column], table.columns[validation] if validation else [""] * len(table)
    numbers = [
        SETS.index(split_of(sets[row], truths[row], table.where(row))) if sets[row] else LEFT_OUT for row in rows
    ]
    return np.array(numbers, dtype=np.int64)


def has_set(header: str, path: Path) -> bool:
    """Return whether a header has the attribute SET."""
    return "SET=" in header.upper() and "SET" in attributes(header, ("SET",), str(path))  # The first test is quick.


def _of_header(header: str, where: str, edits: Edits) -> int:
    found = attributes(header, ("SET", "VALIDATION"), where, edits)
    if "SET" not in found:
        return LEFT_OUT
    record = f"{where}: record {shown(id_of(header))}"
    return SETS.index(split_of(found["SET"], found.get("VALIDATION", ""), record))


def _of_label_file(store: TokenStore, path: Path, edits: Edits) -> Numbers:
    """Return the split of each record, LEFT_OUT for a record without one."""
    number_N = np.full(len(store), LEFT_OUT, dtype=np.int64)
    line_N = np.zeros(len(store), dtype=np.int64)
    for record in read_label_fasta(path):
        where = f"{path}:{record.line}"
        number, n = _of_header(record.header, where, edits), store.find(record.id)
        if n is None:
            if number != LEFT_OUT:
                edits.add("a split of no record was passed over", record.id)
            continue
        if line_N[n] and number_N[n] != number:
            raise InputError(
                f"{where}: {shown(record.id)} has another split than in line {line_N[n]}; leave one of them out"
            )
        line_N[n], number_N[n] = record.line, number
    return number_N
