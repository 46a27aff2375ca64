"""Measured variants of one protein, from tables as laboratories have them; cells as in `substitutions`."""

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from esmshard.data import nucleotides
from esmshard.data.fasta import read_fasta
from esmshard.data.numbering import placed
from esmshard.data.substitutions import LOWER, STOP, Mutation, Refused, compare, name_of, parse_variant, renumbered
from esmshard.data.symbols import Edits
from esmshard.data.tables import Table, counted, first_three, listed, read_table, shown
from esmshard.errors import InputError, UsageError
from esmshard.vocab import RESIDUES, encode_residues

MUTANT_COLUMNS = ("mutant", "mutation", "mutations", "variant", "hgvs_pro", "hgvs_p", "mut")
SEQUENCE_COLUMNS = ("mutated_sequence", "sequence")
TARGET_COLUMNS = ("DMS_score", "score", "fitness", "target", "effect")
NAME_MUTANT = "set data.mutant=COLUMN in a recipe, or pass --mutant COLUMN"
NAME_TARGET = "set data.target=COLUMN in a recipe, or pass --target COLUMN"
"""How a user says which column is meant."""

Refusal = Literal["error", "drop"]
MOST_UNUSABLE = 0.1
"""Share of the rows that may be left out as unusable: of more, the file is not what its reader takes it for."""
Synonymous = Literal["error", "drop", "keep"]
Replicates = Literal["error", "mean", "keep"]

_SMALL = re.compile("[a-z]")


@dataclass(frozen=True, eq=False)
class Variants:
    """N variants of one protein with T measured targets, in the order of the table."""

    wild_type: str
    mutations: list[tuple[Mutation, ...]]
    """Of each variant, by position; empty for the wild type. Positions count residues of `wild_type` from 0."""
    target_NT: npt.NDArray[np.float64]
    """NaN where one of several targets is missing; never all of a row."""
    target_names: tuple[str, ...]
    weight_N: npt.NDArray[np.float64]
    """Rows of the table that were averaged."""
    rows: list[tuple[int, ...]]
    """Rows of `table` behind each variant."""
    table: Table
    notices: list[str]
    """One sentence for everything that was changed, left out or averaged."""
    offset: int
    """What was added to the positions of the table, which gives those of `wild_type` from 1."""
    left_out: dict[int, str]
    """Rows of `table` that no variant was made of, and why."""

    def __len__(self) -> int:
        return len(self.mutations)

    def sequences(self) -> list[str]:
        """The protein of each variant."""
        wild_type, sequences = self.wild_type.encode(), []
        for mutations in self.mutations:
            sequence = bytearray(wild_type)
            for mutation in mutations:
                sequence[mutation.position] = ord(mutation.mutant)
            sequences.append(sequence.decode())
        return sequences

    def names(self) -> list[str]:
        """`A24G:V30L`, in the numbering of `wild_type` from 1; `WT` for the wild type."""
        return [name_of(mutations) for mutations in self.mutations]

    def names_in_table(self) -> list[str]:
        """The same in the numbering of the table."""
        return [name_of(renumbered(mutations, -self.offset)) for mutations in self.mutations]

    def positions(self) -> list[frozenset[int]]:
        """The mutated positions of each variant, counted from 0."""
        return [frozenset(mutation.position for mutation in mutations) for mutations in self.mutations]


def read_variants(
    path: Path,
    *,
    wild_type: Path | str | None = None,
    mutant: str | None = None,
    targets: Sequence[str] | None = (),
    sequence: str | None = None,
    wild_type_column: str | None = None,
    offset: int | Literal["auto"] = 0,
    on_unusable: Refusal = "error",
    on_stop: Refusal = "error",
    on_synonymous: Synonymous = "error",
    replicates: Replicates = "error",
    empty_is_wild_type: bool = False,
) -> Variants:
    """The variants of a table, each of their mutations checked against the wild type.

    Args:
        path: see `tables.read_table`.
        wild_type: a FASTA file with one record (a Path), or the sequence itself (a str).
        mutant: column of mutations; by default the only one with a usual name (MUTANT_COLUMNS, in any case).
        targets: columns of measured values; by default the only one with a usual name (TARGET_COLUMNS); None reads no
            values, for variants that are to be predicted.
        sequence: column of whole mutated sequences. Alone, mutations follow from comparing them with the wild type;
            beside `mutant`, both must agree. By default one of SEQUENCE_COLUMNS where no column has mutations.
        wild_type_column: instead of `wild_type`, a column that holds its sequence in every row.
        offset: added to the positions of the table. "auto" looks for the shift that fits the wild type.
        on_unusable: what to do with cells that name no substitutions, and mutations of a residue that the wild type
            has not; of more than a tenth of the rows it is an error all the same.
        on_stop: what to do with variants that have a stop codon.
        on_synonymous: what to do with variants that have a change to the same residue; `keep` leaves it in the names
            and positions.
        replicates: what to do with a variant in several rows; `mean` averages each target over the rows that have it.
        empty_is_wild_type: an empty mutation cell is the wild type, not an error.

    Raises:
        UsageError: arguments that do not fit each other.
        InputError: what cannot be read or does not fit, with the first three lines of each kind.
    """
    for name, value, choices in (
        ("on_unusable", on_unusable, get_args(Refusal)),
        ("on_stop", on_stop, get_args(Refusal)),
        ("on_synonymous", on_synonymous, get_args(Synonymous)),
        ("replicates", replicates, get_args(Replicates)),
    ):
        if value not in choices:
            raise UsageError(f"{name} is {value!r}; it is one of {', '.join(choices)}")
    if offset != "auto" and not isinstance(offset, int):
        raise UsageError(f"offset is {offset!r}; it is a whole number or 'auto'")
    if (wild_type is None) == (wild_type_column is None):
        raise UsageError(f"{path}: give either wild_type (a FASTA file or a sequence) or wild_type_column")

    table, notices, offset_used, left_out = read_table(path), list[str](), 0, dict[int, str]()
    protein, protein_name = _wild_type(table, wild_type, wild_type_column, notices)
    if mutant is None and sequence is None:
        mutant, sequence = _columns(table)
    if mutant is None and offset not in (0, "auto"):
        raise UsageError(f"{path}: offset shifts numbered mutations, but column {shown(sequence or '')} has sequences")
    target_names, target_RT = _targets(table, targets, notices)
    rows = list(range(len(table)))
    if target_names:
        empty_R = np.isnan(target_RT).all(1)
        rows = np.flatnonzero(~empty_R).tolist()
        empty, why = np.flatnonzero(empty_R).tolist(), f"without a value in {_joined(target_names)}"
        _tell(notices, table, empty, why)
        left_out |= dict.fromkeys(empty, why)

    read_cell = functools.partial(parse_variant, empty_is_wild_type=empty_is_wild_type)
    compare_cell = functools.partial(compare, wild_type=protein)
    if mutant is None:
        assert sequence is not None
        parsed = _parsed(table, sequence, rows, compare_cell, _SMALL, on_unusable, notices, left_out)
    else:
        parsed = _parsed(table, mutant, rows, read_cell, LOWER, on_unusable, notices, left_out)
        most = MOST_UNUSABLE if on_unusable == "drop" else 0.0
        parsed, offset_used = placed(table, parsed, protein, protein_name, offset, notices, left_out, most)
    stops = _having(parsed, lambda mutation: mutation.mutant == STOP)
    parsed = _without(table, parsed, stops, "a stop codon", on_stop, "set data.unusable=drop", notices, left_out)
    same = _having(parsed, lambda mutation: mutation.mutant == mutation.wild)
    parsed = _without(
        table, parsed, same, "a synonymous change", on_synonymous, "set data.unusable=drop", notices, left_out
    )
    if not parsed:
        raise InputError(f"{path}: no variant is left of {counted(len(table), 'row')} ({'; '.join(notices)})")
    if mutant is not None and sequence is not None:
        compared = _parsed(table, sequence, list(parsed), compare_cell, _SMALL, "error", notices, left_out)
        _agree(table, parsed, compared, f"{shown(mutant)} and {shown(sequence)}")
    groups = _grouped(table, parsed, replicates, notices)
    target_NT = _averaged(target_RT, [rows for _, rows in groups])
    return Variants(
        wild_type=protein,
        mutations=[mutations for mutations, _ in groups],
        target_NT=target_NT,
        target_names=target_names,
        weight_N=np.array([len(rows) for _, rows in groups], np.float64),
        rows=[rows for _, rows in groups],
        table=table,
        notices=notices,
        offset=offset_used,
        left_out=left_out,
    )


def _joined(names: Sequence[str]) -> str:
    return " or ".join(map(shown, names))


def _tell(notices: list[str], table: Table, rows: Sequence[int], what: str, verb: str = "left out") -> None:
    if rows:
        notices.append(f"{table.path}: {verb} {counted(len(rows), 'row')} {what} ({first_three(rows, table.at)})")


def _wild_type(table: Table, wild_type: Path | str | None, column: str | None, notices: list[str]) -> tuple[str, str]:
    """The sequence, and what messages call it."""
    if column is not None:
        first: dict[str, int] = {}
        for row, cell in enumerate(table.column(column)):
            first.setdefault(cell, row)
        if len(first) > 1:
            one, other = list(first.values())[:2]
            raise InputError(
                f"{table.path}: column {shown(column)} has {len(first):,} wild types, first in {table.at(one)} and "
                f"{table.at(other)}; give one protein at a time"
            )
        where = f"{table.where(0)}: column {shown(column)}"
        return _protein(next(iter(first)), where, notices), f"column {shown(column)}"
    if isinstance(wild_type, str):
        return _protein(wild_type, "wild_type", notices), "the wild type"
    assert wild_type is not None
    return protein_of(wild_type, notices), str(wild_type)


def protein_of(fasta: Path, notices: list[str] | None = None) -> str:
    """The sequence in a FASTA file with one record; `notices` gets what was changed in it."""
    edits = Edits()
    records = list(read_fasta(fasta, edits))
    if len(records) > 1:
        raise InputError(
            f"{fasta}: has {len(records):,} records ({first_three(records, lambda record: record.id)}); "
            "the wild type is a file with one"
        )
    residues = np.frombuffer(encode_residues(records[0].sequence), np.uint8)
    if found := nucleotides.finding([residues], "1 record"):
        raise InputError(f"{fasta}: {found}; give the protein that it codes for")
    if notices is not None:
        notices.extend(f"{fasta}: {notice}" for notice in edits.notices())
    return records[0].sequence


def _protein(text: str, where: str, notices: list[str]) -> str:
    """A sequence that was given as text."""
    sequence = "".join(text.split())
    if _SMALL.search(sequence):
        sequence = sequence.encode().upper().decode()  # of bytes: ASCII only, and never one letter into two
        notices.append(f"{where}: lower-case letters were read as upper case")
    foreign = re.search(f"[^{RESIDUES}]", sequence)
    if foreign:
        raise InputError(
            f"{where} has {shown(foreign[0])} at position {foreign.start() + 1}, which is not a residue in one-letter "
            "code; a FASTA file is given as a Path"
        )
    if not sequence:
        raise InputError(f"{where} is empty; the sequence of the wild type is expected")
    return sequence


def _columns(table: Table) -> tuple[str | None, str | None]:
    """The column of mutations, or else that of mutated sequences."""
    mutant = _usual(table, MUTANT_COLUMNS, NAME_MUTANT)
    sequence = None if mutant else _usual(table, SEQUENCE_COLUMNS, "rename the one that is not")
    if mutant is None and sequence is None:
        raise InputError(
            f"{table.path}: has no column with a usual name for mutations ({', '.join(MUTANT_COLUMNS)}) or mutated "
            f"sequences ({', '.join(SEQUENCE_COLUMNS)}); {listed(table.columns)}; name one: "
            f"{NAME_MUTANT}"
        )
    return mutant, sequence


def _usual(table: Table, usual: Sequence[str], mend: str) -> str | None:
    """The only column with one of the usual names, in any case; None where there is none. `mend` says how to choose."""
    lower = {name.lower() for name in usual}
    found = [name for name in table.columns if name.lower() in lower]
    if len(found) > 1:
        raise InputError(f"{table.path}: columns {' and '.join(map(shown, found))} may both be meant; {mend}")
    return found[0] if found else None


def _targets(
    table: Table, targets: Sequence[str] | None, notices: list[str]
) -> tuple[tuple[str, ...], npt.NDArray[np.float64]]:
    """Names of the T targets and their values in the R rows, float64 [R, T]."""
    if targets is None:
        return (), np.empty((len(table), 0))
    names = (targets,) if isinstance(targets, str) else tuple(targets)
    if not names:
        usual = _usual(table, TARGET_COLUMNS, NAME_TARGET)
        if usual is None:
            raise InputError(
                f"{table.path}: has no column with a usual name for measured values ({', '.join(TARGET_COLUMNS)}); "
                f"{listed(table.columns)}; name one: {NAME_TARGET}"
            )
        names = (usual,)
    if len(set(names)) < len(names):
        raise UsageError(f"data.target: names a column twice: {', '.join(names)}")
    target_RT = np.stack([table.numbers(name) for name in names], axis=1)
    for name in names:
        commas = [row for row, cell in enumerate(table.column(name)) if "," in cell]
        _tell(notices, table, commas, f"of {shown(name)} with a decimal comma", "read")
    missing_R = np.isnan(target_RT)
    some = np.flatnonzero(missing_R.any(1) & ~missing_R.all(1)).tolist()
    _tell(notices, table, some, f"without a value in one of {', '.join(map(shown, names))}", "kept")
    return names, target_RT


def _parsed(
    table: Table,
    column: str,
    rows: list[int],
    read: Callable[[str], tuple[Mutation, ...]],
    small: re.Pattern[str],
    on_unusable: Refusal,
    notices: list[str],
    left_out: dict[int, str],
) -> dict[int, tuple[Mutation, ...]]:
    """The variant in each of the rows that have one."""
    cells = table.column(column)
    parsed: dict[int, tuple[Mutation, ...]] = {}
    refused: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for row in rows:
        try:
            parsed[row] = read(cells[row])
        except Refused as error:
            refused[error.mend].append((row, error.problem))
    unusable = len(rows) - len(parsed)
    if refused and on_unusable == "drop" and unusable <= MOST_UNUSABLE * len(rows):
        for cases in refused.values():
            named = first_three(cases, lambda case: f"{table.at(case[0])} {case[1]}")
            what = f"whose {shown(column)} names no substitutions"
            notices.append(f"{table.path}: left out {counted(len(cases), 'row')} {what}: {named}")
            left_out |= dict(cases)
    elif refused:
        mend, cases = next(iter(refused.items()))
        others = len(rows) - len(parsed) - len(cases)
        named = first_three(cases, lambda case: f"{table.at(case[0])} {case[1]}")
        raise InputError(
            f"{table.path}: {len(cases):,} of {counted(len(rows), 'cell')} of column {shown(column)} cannot be used: "
            f"{named}; {mend}{f' ({others:,} more for other reasons)' if others else ''}"
        )
    lower = [row for row in parsed if small.search(cells[row])]
    _tell(notices, table, lower, f"of {shown(column)} in lower case as upper case", "read")
    return parsed


def _agree(
    table: Table, named: dict[int, tuple[Mutation, ...]], compared: dict[int, tuple[Mutation, ...]], columns: str
) -> None:
    """Raise where mutations and sequence of a row are not the same protein."""
    wrong = [row for row, variant in named.items() if tuple(m for m in variant if m.mutant != m.wild) != compared[row]]
    if wrong:
        rows = first_three(wrong, lambda row: f"{table.at(row)} ({name_of(named[row])} and {name_of(compared[row])})")
        raise InputError(
            f"{table.path}: columns {columns} name different proteins in {counted(len(wrong), 'row')}: {rows}; correct "
            "them, or read one of the two columns"
        )


def _having(parsed: dict[int, tuple[Mutation, ...]], test: Callable[[Mutation], bool]) -> set[int]:
    """Rows with such a mutation. There are thousands of mutations, but there may be a hundred thousand rows."""
    such = {mutation for mutation in set(chain.from_iterable(parsed.values())) if test(mutation)}
    return {row for row, mutations in parsed.items() if not such.isdisjoint(mutations)} if such else set()


def _without(
    table: Table,
    parsed: dict[int, tuple[Mutation, ...]],
    rows: set[int],
    what: str,
    policy: Synonymous,
    mend: str,
    notices: list[str],
    left_out: dict[int, str],
) -> dict[int, tuple[Mutation, ...]]:
    """The variants without these rows; an error if the policy is that there are none."""
    if policy == "keep" or not rows:
        return parsed
    if policy == "error":
        named = first_three(sorted(rows), lambda row: f"{table.at(row)} {shown(name_of(parsed[row]))}")
        share = f"{len(rows):,} of {counted(len(parsed), 'variant')}"
        raise InputError(f"{table.path}: {what} in {share}: {named}; remove these rows, or {mend}")
    _tell(notices, table, sorted(rows), f"with {what}")
    left_out |= dict.fromkeys(rows, what)
    return {row: mutations for row, mutations in parsed.items() if row not in rows}


def _grouped(
    table: Table, parsed: dict[int, tuple[Mutation, ...]], replicates: Replicates, notices: list[str]
) -> list[tuple[tuple[Mutation, ...], tuple[int, ...]]]:
    """Each variant with its rows: all those of the same mutations, unless replicates are kept apart."""
    groups: dict[tuple[Mutation, ...], list[int]] = defaultdict(list)
    for row, mutations in parsed.items():
        groups[mutations].append(row)
    several = [mutations for mutations, rows in groups.items() if len(rows) > 1]
    if several:
        named = first_three(several, lambda key: f"{shown(name_of(key))} in {first_three(groups[key], table.at)}")
        found = f"{counted(len(several), 'variant')} in several rows: {named}"
        if replicates == "error":
            raise InputError(f"{table.path}: {found}; set data.replicates=mean, or remove all but one row")
        notices.append(f"{table.path}: {'averaged' if replicates == 'mean' else 'kept apart'} {found}")
    if replicates == "keep":
        return [(mutations, (row,)) for row, mutations in parsed.items()]
    return [(mutations, tuple(rows)) for mutations, rows in groups.items()]


def _averaged(target_RT: npt.NDArray[np.float64], rows_N: list[tuple[int, ...]]) -> npt.NDArray[np.float64]:
    """The mean of each target over the rows of each variant that have it, [N, T]; NaN where none has."""
    group_R = np.repeat(np.arange(len(rows_N)), [len(rows) for rows in rows_N])
    values_RT = target_RT[[row for rows in rows_N for row in rows]]
    sum_NT, count_NT = np.zeros((2, len(rows_N), target_RT.shape[1]))
    np.add.at(sum_NT, group_R, np.nan_to_num(values_RT))
    np.add.at(count_NT, group_R, ~np.isnan(values_RT))
    return np.divide(sum_NT, count_NT, out=np.full_like(sum_NT, np.nan), where=count_NT > 0)
