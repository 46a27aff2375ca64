"""Tables as files of sequences: the columns of sequences, ids and sets, and the rows that become records.

| column | names, in upper or lower case |
|---|---|
| sequences | one of SEQUENCE_NAMES; else `protein`, as in the tables of SaprotHub |
| ids | `id`, else one of ID_NAMES; else a record is called `row_` and the number of its line |
| sets | `set` or `split`, with `validation` as in FLIP's tables; else a `stage` that holds names of sets alone |
"""

from dataclasses import dataclass, replace
from pathlib import Path

from esmshard.data.fasta.headers import is_split
from esmshard.data.fasta.symbols import Edits
from esmshard.data.tables import MISSING, NUMBER, Table, listed, read_table, shown
from esmshard.errors import InputError

SEQUENCE_NAMES = ("sequence", "sequences", "seq", "protein_sequence", "mutated_sequence")
ID_NAMES = (
    "id",
    "name",
    "entry",
    "identifier",
    "accession",
    "protein",
    "protein_id",
    "sequence_id",
    "seq_id",
    "uniprot_id",
)
NO_SEQUENCE = "row(s) without a sequence left out"

_RENAME = "rename the one that is not"


@dataclass(frozen=True)
class SequenceTable:
    """The rows of a table that have a sequence. All lists are in the order of the rows."""

    rows: Table
    """All columns of these rows; `rows.ids` names the column of ids."""
    headers: list[str]
    """The header of each record: its id, and `SET=` and `VALIDATION=` if the table has a column of sets."""
    sequences: list[str]
    edits: Edits
    """The rows that were left out."""


def read_sequence_table(path: Path, sequences: str | None = None, names: str | None = None) -> SequenceTable:
    """Read the records of a table.

    Args:
        path: the table.
        sequences: the column of sequences; by default it is found by its name.
        names: the column of ids, likewise.

    Raises:
        InputError: the table cannot be read, has no column of sequences or several, or an id cannot be one; the message
            names the columns, or the line.
    """
    table = read_table(path)
    for name in (sequences, names):
        if name is not None:
            table.column(name)  # raises if there is none
    column = sequences or sequence_column(table)
    if column is None:
        raise InputError(
            f"{path}: has no column of sequences that is known; {listed(table.columns)}; call the one with the amino "
            "acids 'sequence', or name it (data.sequence_column in a recipe, `ingest --sequence-column`)"
        )
    cells = table.columns[column]
    edits, kept = Edits(), list[int]()
    for row, cell in enumerate(cells):
        if cell.lower() in MISSING:
            edits.add(NO_SEQUENCE, table.at(row))
        else:
            kept.append(row)
    if all(NUMBER.fullmatch(cells[row]) for row in kept):
        what = f"numbers, as {shown(cells[kept[0]])}" if kept else "nothing"
        raise InputError(f"{path}: column {shown(column)} holds {what}; sequences of amino acids are expected there")
    ids = names or id_column(table, column)
    columns = {name: [texts[row] for row in kept] for name, texts in table.columns.items()}
    lines = [table.lines[row] for row in kept]
    if ids is None:
        ids, columns = "id", {"id": [f"row_{line}" for line in lines], **columns}
    rows = replace(table, columns=columns, lines=lines, ids=ids)
    _check_ids(rows, ids)
    marks = _marks(rows)
    headers = [f"{name}{mark}" for name, mark in zip(columns[ids], marks, strict=True)]
    return SequenceTable(rows, headers, ["".join(cell.split()) for cell in columns[column]], edits)


def sequence_column(table: Table) -> str | None:
    """Return the column of sequences; None if there is none.

    Raises:
        InputError: several columns may be meant.
    """
    return table.only_column(SEQUENCE_NAMES, _RENAME) or table.only_column(("protein",), _RENAME)


def id_column(table: Table, sequences: str) -> str | None:
    """Return the column of ids; None if there is none.

    Args:
        table: the table.
        sequences: its column of sequences, which is none of ids, whatever its name.

    Raises:
        InputError: several columns may be meant.
    """
    others = [name for name in ID_NAMES if name != sequences.lower()]
    return table.only_column(("id",), _RENAME) or table.only_column(others, "call the one with the ids 'id'")


def _check_ids(table: Table, column: str) -> None:
    """Refuse ids that a FASTA header could not hold, since all outputs name records by their ids."""
    for row, cell in enumerate(table.columns[column]):
        if not cell:
            raise InputError(f"{table.where(row)}: column {shown(column)} is empty; fill it in, or remove the row")
        if len(cell.split()) > 1:
            raise InputError(
                f"{table.where(row)}: column {shown(column)} has {shown(cell)}, and an id has no spaces; put another "
                "sign there, or, if the column holds no ids, give it another name, such as 'title'"
            )


def _marks(table: Table) -> list[str]:
    """Return what the header of each record says of its set."""
    column = table.only_column(("set", "split"), _RENAME)
    if column is None:
        column = table.only_column(("stage",), _RENAME)
        if column is None or not all(is_split(cell) for cell in table.columns[column] if cell):
            return [""] * len(table)
    validation = table.only_column(("validation",), _RENAME)
    truths = table.columns[validation] if validation else [""] * len(table)
    return [
        _mark("SET", name) + _mark("VALIDATION", truth)
        for name, truth in zip(table.columns[column], truths, strict=True)
    ]


def _mark(key: str, cell: str) -> str:
    """Write an attribute as one word. A name of two words is no set, and is refused where sets are read."""
    return "" if cell.lower() in MISSING else f" {key}={'_'.join(cell.split())}"
