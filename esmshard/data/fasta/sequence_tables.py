"""Tables as files of sequences: the columns of sequences, ids and sets, and the rows that become records.

| column | names, in upper or lower case |
|---|---|
| sequences | one of SEQUENCE_NAMES; else a pair of CHAIN_NAMES; else `protein`, as in the tables of SaprotHub |
| ids | `id`, else one of ID_NAMES; else a record is called `row_` and the number of its line |
| sets | `set` or `split`, with `validation` as in FLIP's tables; else a `stage` that holds names of sets alone |
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from esmshard.data.fasta.headers import is_split
from esmshard.data.fasta.symbols import Edits
from esmshard.data.tables import MISSING, Table, listed, read_table, shown
from esmshard.errors import InputError
from esmshard.joined_chains import BETWEEN

SEQUENCE_NAMES = ("sequence", "sequences", "seq", "protein_sequence", "mutated_sequence")
CHAIN_NAMES = (
    ("heavy", "light"),
    ("heavy_chain", "light_chain"),
    ("heavy_sequence", "light_sequence"),
    ("sequence_heavy", "sequence_light"),
    ("sequence_alignment_aa_heavy", "sequence_alignment_aa_light"),
    ("vh", "vl"),
    ("alpha_chain", "beta_chain"),
    ("chain_a", "chain_b"),
    ("sequence_a", "sequence_b"),
    ("seq_a", "seq_b"),
    ("sequence_1", "sequence_2"),
    ("sequence1", "sequence2"),
    ("seq1", "seq2"),
)
"""Pairs of columns that hold the two chains of a record. `sequence_alignment_aa_heavy` is of the Observed Antibody
Space."""
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
ONE_CHAIN = "row(s) with one chain of two read as that chain"

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
    of_chains = [sequences] if sequences is not None else sequence_columns(table)
    if not of_chains:
        raise InputError(
            f"{path}: has no column of sequences that is known; {listed(table.columns)}; call the one with the amino "
            "acids 'sequence', or name it (data.sequence_column in a recipe, --sequence-column of `ingest` and `split`)"
        )
    edits, kept, joined = Edits(), list[int](), list[str]()
    for row, cells in enumerate(zip(*(table.columns[name] for name in of_chains), strict=True)):
        chains = ["".join(cell.split()) for cell in cells if cell.lower() not in MISSING]
        if not chains:
            edits.add(NO_SEQUENCE, table.at(row))
            continue
        if len(chains) < len(of_chains):
            edits.add(ONE_CHAIN, table.at(row))
        kept.append(row)
        joined.append(BETWEEN.join(chains))
    if not kept:
        raise InputError(
            f"{path}: column {shown(of_chains[0])} holds nothing; sequences of amino acids are expected there"
        )
    ids = names or id_column(table, of_chains)
    columns = {name: [texts[row] for row in kept] for name, texts in table.columns.items()}
    lines = [table.lines[row] for row in kept]
    if ids is None:
        ids, columns = "id", {"id": [f"row_{line}" for line in lines], **columns}
    rows = replace(table, columns=columns, lines=lines, ids=ids)
    _check_ids(rows, ids)
    marks = _marks(rows)
    headers = [f"{name}{mark}" for name, mark in zip(columns[ids], marks, strict=True)]
    return SequenceTable(rows, headers, joined, edits)


def sequence_columns(table: Table) -> tuple[str, ...]:
    """Return the column of sequences, or the two columns of their chains; nothing if there is none.

    Raises:
        InputError: several columns may be meant.
    """
    if column := table.only_column(SEQUENCE_NAMES, _RENAME):
        return (column,)
    lower = {name.lower() for name in table.columns}
    pairs = [pair for pair in CHAIN_NAMES if lower.issuperset(pair)]
    if len(pairs) > 1:
        said = " and ".join(", ".join(pair) for pair in pairs)
        raise InputError(f"{table.path}: has two pairs of columns of chains ({said}); {_RENAME}")
    if pairs:
        found = [table.only_column((name,), _RENAME) for name in pairs[0]]
        return tuple(name for name in found if name is not None)
    column = table.only_column(("protein",), _RENAME)
    return () if column is None else (column,)


def id_column(table: Table, sequences: Sequence[str]) -> str | None:
    """Return the column of ids; None if there is none.

    Args:
        table: the table.
        sequences: its columns of sequences, which are none of ids, whatever their names.

    Raises:
        InputError: several columns may be meant.
    """
    others = [name for name in ID_NAMES if name not in [one.lower() for one in sequences]]
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
