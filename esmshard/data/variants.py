"""Reads measured variants of one or several proteins from tables in the formats that laboratories use.

In many tables, position 1 is the start of the mature protein, of a construct or of a crystal structure, not residue 1
of the sequence. So each wild-type letter is compared with the sequence.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from esmshard.data.mutations import (
    STOP,
    Mutation,
    RefusedVariant,
    WildType,
    WildTypes,
    compare,
    name_of,
    parse_variant,
    renumbered,
    wild_type_of,
)
from esmshard.errors import InputError, UsageError
from esmshard.io.sequences import is_sequence_table, read_fasta
from esmshard.io.symbols import Edits, nucleotides
from esmshard.io.tables import Table, counted, first_three, listed, read_table, shown
from esmshard.vocab import BETWEEN, RESIDUES, encode_residues

_HOW = "write A24G, A24G:V30L or p.Ala24Gly, and WT for the wild type; remove rows of other changes"
"""The end of error messages about unusable cells of the mutation column: how to write a valid cell."""
_OR_INDELS = ", or set task.head=likelihood task.context=sequence, which reads insertions and deletions"
_ENOUGH = 0.99  # An automatic shift fits at least this share of the mutations.
_FEWEST = 5  # An automatic shift fits at least this number of sites (1 letter in 17 matches by chance).
_PROPOSED = 3  # A shift that an error message proposes fits at least this number of sites.

MUTANT_COLUMNS = ("mutant", "mutation", "mutations", "variant", "hgvs_pro", "hgvs_p", "mut", "mut_type")
SEQUENCE_COLUMNS = ("mutated_sequence", "sequence", "aa_seq")
TARGET_COLUMNS = (
    *("DMS_score", "score", "fitness", "target", "effect", "activity", "value", "label", "y"),
    *("log_fitness", "enrichment", "ddG", "dms", "y_true"),
)
NAME_MUTANT = "pass data.mutant=COLUMN to finetune, or --mutant COLUMN to score, predict and split"
NAME_TARGET = "pass data.target=COLUMN to finetune, or --target COLUMN to score and split"

SEVERAL_CHAINS = "the wild type has several chains; give only the chain that the variants change"

Replicates = Literal["error", "mean", "keep"]
Unusable = Literal["error", "drop"]
MOST_UNUSABLE = 0.1
"""A table is refused if more than this share of its rows has no valid variant, or does not fit the wild type."""

FEW_SITES, COMBINED = 10, 0.1
"""Variants are a combinatorial library if they change at most FEW_SITES sites in total, and if more than the share
COMBINED of them change several sites.
"""


@dataclass(frozen=True, eq=False)
class Variants:
    """N variants of one or several proteins with T measured targets, in the order of their first rows in the table."""

    wild_types: WildTypes
    proteins: list[str]
    """The name of each variant's protein, a key of `wild_types`."""
    mutations: list[tuple[Mutation, ...]]
    """The mutations of each variant, sorted by position; () for the wild type. Position 0 is the first residue."""
    target_NT: npt.NDArray[np.float64]
    """The measured values, float64 [N, T]. A missing value is NaN. If T > 0, every variant has at least one value."""
    target_names: tuple[str, ...]
    rows: list[tuple[int, ...]]
    """The row indices of each variant in `table`."""
    table: Table
    notices: list[str]
    """Sentences about changed, averaged and left-out rows."""
    offset: int
    """The number that was added to each position in the table."""
    left_out: dict[int, str]
    """The reason for each left-out row, by the row index in `table`."""
    left_out_groups: dict[str, list[int]]
    """The left-out rows of each kind of reason, such as `with a stop codon`."""
    readings: list[dict[str, Any]]
    """How each table was read: `file`, `kind` (`mutations` or `sequences`), their `column`, and `offset`."""
    alignment: list[dict[str, Any]] = field(default_factory=list)
    """How the values of several tables were aligned; see `plates.read_plates`."""

    def __len__(self) -> int:
        return len(self.mutations)

    @property
    def wild_type(self) -> str:
        """The residues of the only protein."""
        return self.wild_types[""].residues

    def sequences(self) -> list[str]:
        """Return the whole sequence of each variant, with `:` between chains."""
        pairs = zip(self.proteins, self.mutations, strict=True)
        return [self.wild_types[protein].mutated(mutations) for protein, mutations in pairs]

    def names(self) -> list[str]:
        """Return the name of each variant, such as `A24G:V30L` or `WT`; see `name_of`."""
        return [name_of(mutations, protein) for protein, mutations in zip(self.proteins, self.mutations, strict=True)]

    def positions(self) -> list[frozenset[int]]:
        """Return the mutated positions of each variant, counted from 0."""
        return [frozenset(mutation.position for mutation in mutations) for mutations in self.mutations]


def read_variants(
    path: Path,
    *,
    wild_type: Path | str,
    protein: str | None = None,
    mutant: str | None = None,
    targets: Sequence[str] | None = (),
    offset: int | Literal["auto"] = 0,
    unusable: Unusable = "error",
    keep_synonymous: bool = False,
    indels: bool = False,
    replicates: Replicates = "error",
) -> Variants:
    """Read the variants of a table, and check each mutation against the wild type.

    Args:
        path: the path of the table; see the function `tables.read_table`.
        wild_type: the path of a FASTA file, or of a table (see `wild_types_of_table`); or the sequence of the only
            protein in upper case (a str).
        protein: the column with the name of each row's protein; None for a table of one protein.
        mutant: the column of mutations; by default the only column with a name in MUTANT_COLUMNS, in upper or lower
            case. Without such a column, a column of sequences (SEQUENCE_COLUMNS) is compared with the wild type.
        targets: the columns of measured values; by default the only column with a name in TARGET_COLUMNS. None reads no
            values.
        offset: the number to add to each position in the table. If the positions do not fit the wild type, "auto"
            searches for a number with which at least five sites and nearly all mutations fit. There is no search in a
            table of several proteins.
        unusable: `drop` leaves out unusable rows, `error` refuses the table. A row is unusable if it has a stop codon,
            a synonymous change or no valid mutation, or does not fit the wild type. Even with `drop`, the table is
            refused if over a tenth of the rows have no valid mutation, or if over a tenth do not fit the wild type.
        keep_synonymous: whether rows with synonymous changes are kept, with names such as `A24A`.
        indels: whether rows with insertions and deletions are valid.
        replicates: if a variant is in several rows, `error` refuses the table, `mean` averages the values, and `keep`
            makes a variant of each row.

    Raises:
        UsageError: arguments contradict each other.
        InputError: the table or the wild type cannot be read, the table does not fit the wild type, or no row is left.
    """
    reading = read_rows(path, wild_type, protein, mutant, targets, offset, unusable, keep_synonymous, indels)
    return reading.merged(replicates)


def read_rows(
    path: Path,
    wild_type: Path | str,
    protein: str | None = None,
    mutant: str | None = None,
    targets: Sequence[str] | None = (),
    offset: int | Literal["auto"] = 0,
    unusable: Unusable = "error",
    keep_synonymous: bool = False,
    indels: bool = False,
) -> "Reading":
    """Read the rows of a table of variants. For arguments and errors see `read_variants`."""
    table, notices = read_table(path), list[str]()
    proteins = [""] * len(table) if protein is None else table.column(protein, "name another column in data.protein")
    if isinstance(wild_type, str):
        wild_types = {"": wild_type_of(wild_type)}
    elif is_sequence_table(wild_type):
        wild_types = wild_types_of_table(wild_type, table, proteins, mutant, notices)
    else:
        wild_types = wild_types_of(wild_type, table, proteins, notices)
    name = "the wild type" if isinstance(wild_type, str) else str(wild_type)
    reading = Reading(table, wild_types, proteins, name, unusable, notices, indels=indels)
    column, has_sequences = (mutant, False) if mutant is not None else _column(table)
    if has_sequences and offset not in (0, "auto"):
        raise UsageError(f"{path}: offset shifts numbered mutations; leave it out, as {shown(column)} has sequences")
    reading.read_targets(targets)
    reading.parse(column, has_sequences=has_sequences)
    if not has_sequences:
        reading.place(offset)
    reading.remove(lambda mutation: STOP in mutation.mutant, "a stop codon")
    if not keep_synonymous:
        reading.remove(lambda mutation: mutation.mutant == mutation.wild, "a synonymous change")
    if not reading.variants:
        reasons = "; ".join(notice.removeprefix(f"{path}: ") for notice in notices)
        raise InputError(f"{path}: no variant is left of {counted(len(table), 'row')} ({reasons})")
    return reading


def is_library(variants: Sequence[tuple[Mutation, ...]]) -> bool:
    """Return whether many of the variants combine changes at the same few sites (FEW_SITES, COMBINED).

    >>> a, b = Mutation(0, "M", "A"), Mutation(4, "K", "C")
    >>> is_library([(a,), (b,), (a, b)]), is_library([(a,), (b,)])
    (True, False)
    """
    sites = {mutation.position for mutations in variants for mutation in mutations}
    return len(sites) <= FEW_SITES and sum(len(mutations) > 1 for mutations in variants) > COMBINED * len(variants)


@dataclass
class Reading:
    """The rows of a table of variants while they are read, before rows of the same variant are merged."""

    table: Table
    wild_types: WildTypes
    proteins: Sequence[str]
    """The name of each row's protein, a key of `wild_types`."""
    source: str
    """The path of the wild types, or `the wild type`."""
    unusable: Unusable
    notices: list[str]
    indels: bool = False
    left_out: dict[int, str] = field(default_factory=dict)
    left_out_groups: dict[str, list[int]] = field(default_factory=dict)
    variants: dict[int, tuple[Mutation, ...]] = field(default_factory=dict)
    """The mutations of each row that is not left out."""
    target_names: tuple[str, ...] = ()
    target_RT: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    """The values of T targets in each row of the table."""
    offset: int = 0
    """The number that was added to each position in the table."""
    facts: dict[str, Any] = field(default_factory=dict)
    """How the table was read; see `Variants.readings`."""

    @property
    def max_unusable(self) -> float:
        """The largest share of unusable rows that is not an error."""
        return MOST_UNUSABLE if self.unusable == "drop" else 0.0

    def note(self, rows: Sequence[int], what: str, verb: str) -> None:
        """Add a notice `VERB 2 rows WHAT (LINES)`, unless `rows` is empty."""
        if rows:
            lines = first_three(rows, self.table.at)
            self.notices.append(f"{self.table.path}: {verb} {counted(len(rows), 'row')} {what} ({lines})")

    def leave_out(self, reason_of: dict[int, str], what: str, *, each: bool = False) -> None:
        """Leave out the rows in `reason_of`, and add the notice `left out 2 rows WHAT`. If `each` is true, the notice
        has the first three reasons.
        """
        if reason_of and each:
            count = counted(len(reason_of), "row")
            self.notices.append(f"{self.table.path}: left out {count} {what}: {self.reasons(reason_of)}")
        else:
            self.note(list(reason_of), what, "left out")
        self.left_out_groups |= {what: list(reason_of)} if reason_of else {}
        self.left_out.update(reason_of)
        self.variants = {row: variant for row, variant in self.variants.items() if row not in reason_of}

    def reasons(self, reason_of: dict[int, str]) -> str:
        """Format the first three of the rows in `reason_of` with their reasons."""
        return first_three(list(reason_of), lambda row: f"{self.table.at(row)} {reason_of[row]}")

    def read_targets(self, targets: Sequence[str] | None) -> None:
        """Read the values of T targets, and leave out rows without any value."""
        table = self.table
        if targets is None:
            self.target_RT = np.empty((len(table), 0))
            return
        names = tuple(targets)
        if not names:
            usual = table.only_column(TARGET_COLUMNS, NAME_TARGET)
            if usual is None:
                raise InputError(
                    f"{table.path}: has no column with a usual name for measured values ({', '.join(TARGET_COLUMNS)}); "
                    f"{listed(table.columns)}; name the column: {NAME_TARGET}"
                )
            names = (usual,)
        if len(set(names)) < len(names):
            raise UsageError(f"data.target: names a column twice: {', '.join(names)}; leave one of them out")
        target_RT = np.stack([table.numbers(name) for name in names], axis=1)
        for name in names:
            commas = [row for row, cell in enumerate(table.column(name)) if "," in cell]
            self.note(commas, f"of {shown(name)} with a decimal comma", "read")
        missing_RT = np.isnan(target_RT)
        incomplete = np.flatnonzero(missing_RT.any(1) & ~missing_RT.all(1)).tolist()
        self.note(incomplete, f"without a value in one of {', '.join(map(shown, names))}", "kept")
        why = f"without a value in {' or '.join(map(shown, names))}"
        self.leave_out(dict.fromkeys(np.flatnonzero(missing_RT.all(1)).tolist(), why), why)
        self.target_names, self.target_RT = names, target_RT

    def parse(self, column: str, *, has_sequences: bool) -> None:
        """Parse the mutations or sequences in `column`, except in left-out rows. Rows without a valid variant are left
        out too. If their share is above `max_unusable`, `InputError` names the first three.
        """
        kind = "sequences" if has_sequences else "mutations"
        self.facts = {"file": self.table.path.name, "kind": kind, "column": column, "offset": 0}
        rows = [row for row in range(len(self.table)) if row not in self.left_out]
        cells, refused, changes_length = self.table.column(column), dict[int, str](), False
        for row in rows:
            try:
                if has_sequences:
                    variant = compare(cells[row], self.wild_types[self.proteins[row]].residues, indels=self.indels)
                else:
                    variant = parse_variant(cells[row])
                if not self.indels and not all(mutation.is_substitution for mutation in variant):
                    changes_length = True
                    raise RefusedVariant(f"{shown(cells[row])} is no substitution")
                self.variants[row] = variant
            except RefusedVariant as error:
                refused[row] = str(error)
        if len(refused) > self.max_unusable * len(rows):
            share = f"{len(refused):,} of {counted(len(rows), 'cell')} of column {shown(column)}"
            raise InputError(
                f"{self.table.path}: {share} cannot be used: {self.reasons(refused)}; {_HOW}"
                + _OR_INDELS * changes_length
            )
        self.leave_out(refused, f"whose {shown(column)} names no substitutions", each=True)

    def place(self, offset: int | Literal["auto"]) -> None:
        """Add `offset` (for `auto`, a shift that fits the only wild type) to all positions. Leave out variants that do
        not fit. If their share is above `max_unusable`, `InputError` names the first three.
        """
        path, name = self.table.path, self.source
        counts = Counter((self.proteins[row], change) for row, variant in self.variants.items() for change in variant)
        shift, total = 0 if offset == "auto" else offset, counts.total()

        def residue(protein: str, mutation: Mutation) -> str:
            place, residues = mutation.position + shift, self.wild_types[protein].residues
            return residues[place] if 0 <= place < len(residues) else ""

        def misfits() -> dict[int, list[Mutation]]:
            # The wild letters inside a longer deletion are not known.
            wrong = {key for key in counts if not (letter := residue(*key)) or key[1].wild not in ("", letter)}
            bad = {row: [m for m in each if (self.proteins[row], m) in wrong] for row, each in self.variants.items()}
            return {row: mutations for row, mutations in bad.items() if mutations}

        def reasons() -> dict[int, str]:
            has = {row: residue(self.proteins[row], bad[0]) or "no such position" for row, bad in wrong.items()}
            return {row: f"{bad[0]} (the wild type has {has[row]})" for row, bad in wrong.items()}

        wrong = misfits()
        if wrong and len(self.wild_types) == 1:
            best, fit, sites = _best_shift(
                Counter({key[1]: count for key, count in counts.items()}), next(iter(self.wild_types.values())).residues
            )
            how = "as numbered" if shift == 0 else f"with offset={shift}"
            fitting = total - sum(map(len, wrong.values()))
            shifted = (
                f"{path}: {fitting:,} of {counted(total, 'mutation')} fit {name} {how}, {fit:,} fit when shifted by "
                f"{best:+d}"
            )
            if (
                offset == "auto"
                and sites >= _FEWEST
                and best != shift
                and fit >= min(_ENOUGH, 1 - self.max_unusable) * total
            ):
                self.notices.append(f"{shifted}, which was done")
                shift = best
                wrong = misfits()
            elif sites >= _PROPOSED and best != shift and fit > max(fitting, total / 2):
                raise InputError(
                    f"{shifted}; set data.offset={best} in a recipe, pass --offset {best} to other commands, or fix "
                    f"{self.reasons(reasons())}"
                )
        if len(wrong) > self.max_unusable * len(self.variants):
            how = f"mutations shifted by {shift:+d}" if shift else "mutations"
            length = sum(len(wild_type.residues) for wild_type in self.wild_types.values())
            raise InputError(
                f"{path}: {sum(map(len, wrong.values())):,} of {total:,} {how} do not fit {name} with "
                f"{counted(length, 'residue')}: {self.reasons(reasons())}; correct the rows, the wild type or the "
                "offset"
            )
        self.leave_out(reasons(), f"with another residue than {name} has", each=True)
        for row, variant in self.variants.items():
            known = (m if m.wild else m._replace(wild=residue(self.proteins[row], m)) for m in variant)
            self.variants[row] = renumbered(tuple(known), shift)
        self.offset = self.facts["offset"] = shift

    def remove(self, test: Callable[[Mutation], bool], what: str) -> None:
        """Leave out (or refuse, if `unusable` is `error`) the rows that have a mutation for which `test` is true."""
        rows = [row for row, mutations in self.variants.items() if any(map(test, mutations))]
        if rows and self.unusable == "error":
            lines = first_three(rows, lambda row: f"{self.table.at(row)} {shown(name_of(self.variants[row]))}")
            share = f"{len(rows):,} of {counted(len(self.variants), 'variant')}"
            raise InputError(
                f"{self.table.path}: {what} in {share}: {lines}; remove these rows, or set data.unusable=drop"
            )
        self.leave_out(dict.fromkeys(rows, what), f"with {what}")

    def merged(self, replicates: Replicates) -> Variants:
        """Return the variants, after rows of the same variant were averaged, kept apart or refused."""
        table, groups = self.table, defaultdict[tuple[str, tuple[Mutation, ...]], list[int]](list)
        for row, mutations in self.variants.items():
            groups[self.proteins[row], mutations].append(row)
        several = [key for key, rows in groups.items() if len(rows) > 1]
        if several:
            named = first_three(
                several, lambda key: f"{shown(name_of(key[1], key[0]))} in {first_three(groups[key], table.at)}"
            )
            rows_of = f"{counted(len(several), 'variant')} in several rows: {named}"
            if replicates == "error":
                raise InputError(f"{table.path}: {rows_of}; set data.replicates=mean, or remove all but one row")
            self.notices.append(f"{table.path}: {'averaged' if replicates == 'mean' else 'kept apart'} {rows_of}")
        pairs = [(key, tuple(rows)) for key, rows in groups.items()]
        if replicates == "keep":
            pairs = [((self.proteins[row], mutations), (row,)) for row, mutations in self.variants.items()]
        rows_N = [rows for _, rows in pairs]
        return Variants(
            wild_types=self.wild_types,
            proteins=[protein for (protein, _), _ in pairs],
            mutations=[mutations for (_, mutations), _ in pairs],
            target_NT=averaged(self.target_RT, rows_N),
            target_names=self.target_names,
            rows=rows_N,
            table=table,
            notices=self.notices,
            offset=self.offset,
            left_out=self.left_out,
            left_out_groups=self.left_out_groups,
            readings=[self.facts],
        )


def protein_of(fasta: Path) -> str:
    """Return the only sequence in a FASTA file, which has one chain."""
    wild_type = read_wild_type(fasta)
    if wild_type.breaks:
        raise InputError(f"{fasta}: {SEVERAL_CHAINS}")
    return wild_type.residues


def read_wild_type(fasta: Path) -> WildType:
    """Read the only record of a FASTA file, which may have several chains."""
    return _of_fasta(fasta, [])[""]


def wild_types_of(fasta: Path, measured: Table, proteins: Sequence[str], notices: list[str]) -> WildTypes:
    """Return the wild type of each of `proteins`, the names of the proteins of R rows, from a FASTA file. Sentences
    about changed letters are appended to `notices`.
    """
    names = set(proteins)
    records = _of_fasta(fasta, notices, names)
    if missing := sorted(names - records.keys()):
        row = proteins.index(missing[0])
        raise InputError(
            f"{measured.where(row)}: {fasta} has no record {shown(missing[0])}, and {len(missing):,} of "
            f"{counted(len(names), 'protein')} have none; add these records, or remove their rows"
        )
    return {name: records[name] for name in dict.fromkeys(proteins)}


def _of_fasta(fasta: Path, notices: list[str], names: Collection[str] = ("",)) -> WildTypes:
    """Return the records of a FASTA file by id. If `names` has only an empty name, the only record gets this name."""
    edits = Edits()
    records = list(read_fasta(fasta, edits))
    if "" in names and len(records) > 1:
        ids = first_three(records, lambda record: record.id)
        raise InputError(
            f"{fasta}: has {len(records):,} records ({ids}); leave only the record of the wild type, or name the "
            "column of proteins in data.protein"
        )
    residues = [np.frombuffer(encode_residues(record.sequence), np.uint8) for record in records]
    if suspicion := nucleotides(residues, "1 record" if len(records) == 1 else f"{len(records):,} records"):
        raise InputError(f"{fasta}: {suspicion}; give the protein that it codes for")
    notices.extend(f"{fasta}: {notice}" for notice in edits.notices())
    each = {record.id: wild_type_of(record.sequence)._replace(name=record.id) for record in records}
    return {"": next(iter(each.values()))} if "" in names else each


def wild_types_of_table(
    path: Path, measured: Table, proteins: Sequence[str], mutant: str | None, notices: list[str]
) -> WildTypes:
    """Return the wild types of the table `measured` from the table at `path`, and append a sentence to `notices`.
    `proteins` has the name of the protein of each row of `measured`.

    - ProteinGym's reference file has the columns `DMS_id` and `target_seq`. `DMS_id` is the name of the protein, or for
      a table of one protein its file name without the ending. `DMS_filename` may have the file name with the ending.
    - In a table with mutations and mutated sequences, as ProteinGym's assays have them, substitutions are undone.

    Raises `InputError` if there is no such row, or if the rows of a protein do not agree on the wild type.
    """
    table, fix = measured if path == measured.path else read_table(path), "set data.wild_type=wt.fasta, a FASTA file"
    if "target_seq" in table.columns:
        ids, file = table.column("DMS_id"), measured.path.name
        row_of = {name: row for row, name in enumerate(ids)}
        rows = [row for row in range(len(table)) if file.startswith(f"{ids[row]}.")]
        rows += [row for row, name in enumerate(table.columns.get("DMS_filename", ())) if name == file]
        row_of |= {"": rows[0]} if rows else {}
        wild_types = {}
        for name in dict.fromkeys(proteins):
            if name not in row_of:
                what = f"is {shown(name)}" if name else f"is the name of {file} without its ending"
                raise InputError(f"{path}: no DMS_id {what}; rename {'it' if name else file}, or {fix}")
            sequence = table.columns["target_seq"][row_of[name]].upper()
            if not sequence or set(sequence) - set(RESIDUES):
                raise InputError(f"{table.where(row_of[name])}: 'target_seq' is no sequence of residues; {fix}")
            wild_types[name] = WildType(sequence, name=ids[row_of[name]])
        if "" in wild_types:
            notices.append(f"{path}: the wild type is 'target_seq' of {ids[row_of['']]} ({table.at(row_of[''])})")
        return wild_types
    mutant = mutant or table.only_column(MUTANT_COLUMNS, NAME_MUTANT)
    sequences = table.only_column(SEQUENCE_COLUMNS, "rename one of them")
    if mutant is None or sequences is None:
        raise InputError(f"{path}: tells no wild type, as it lacks mutations or mutated sequences; {fix}")
    rows_of = defaultdict[str, dict[str, int]](dict)  # for each protein, the first row of each wild type
    names = proteins if table is measured else [""] * len(table)
    for row, (cell, sequence) in enumerate(zip(table.column(mutant), table.columns[sequences], strict=True)):
        with suppress(RefusedVariant):  # `Reading.parse` reports such cells
            variant = parse_variant(cell)
            if not all(mutation.is_substitution for mutation in variant):
                continue
            letters = list(sequence.upper().replace(BETWEEN, ""))
            for place, wild, letter in variant:
                if letters[place : place + 1] != [letter]:
                    raise InputError(f"{table.where(row)}: {shown(cell)} does not fit {shown(sequences)}; {fix}")
                letters[place] = wild
            breaks = wild_type_of(sequence).breaks
            rows_of[names[row]].setdefault(WildType("".join(letters), breaks).mutated(()), row)
    for name in dict.fromkeys(proteins):
        if len(rows_of[name]) != 1:
            rows, of = [*rows_of[name].values()], f" of {shown(name)}" if name else ""
            what = f"rows{of} have different wild types ({first_three(rows, table.at)})" if rows else f"no row{of} fits"
            raise InputError(f"{path}: {what}; {fix}")
    notices.append(f"{path}: the wild type follows from {shown(mutant)} and {shown(sequences)}")
    return {name: wild_type_of(next(iter(rows_of[name]))) for name in dict.fromkeys(proteins)}


def _column(table: Table) -> tuple[str, bool]:
    """Return the name of the column of mutations or sequences, and whether it has sequences."""
    mutant = table.only_column(MUTANT_COLUMNS, NAME_MUTANT)
    column = mutant or table.only_column(SEQUENCE_COLUMNS, "rename one of them")
    if column is None:
        raise InputError(
            f"{table.path}: has no column with a usual name for mutations ({', '.join(MUTANT_COLUMNS)}) or mutated "
            f"sequences ({', '.join(SEQUENCE_COLUMNS)}); {listed(table.columns)}; name the column: {NAME_MUTANT}"
        )
    return column, mutant is None


def _best_shift(counts: Counter[Mutation], protein: str) -> tuple[int, int, int]:
    """Return the shift with which the largest number of mutations fits `protein`, the number of mutations that fit, and
    the number of sites that fit. If more than half as many sites fit with another shift, the last number is 0. `counts`
    has the number of times that each mutation occurs.
    """
    sites: Counter[tuple[int, str]] = Counter()
    for mutation, count in counts.items():
        sites[mutation.position, mutation.wild] += count
    places = {letter: np.array([k for k, c in enumerate(protein) if c == letter], np.int64) for letter in set(protein)}
    lowest, highest = min(position for position, _ in sites), max(position for position, _ in sites)
    mutations_S = np.zeros(highest - lowest + len(protein), np.int64)  # for shifts -highest, -highest + 1, ...
    sites_S = np.zeros_like(mutations_S)
    for (position, wild), count in sites.items():
        if wild in places:
            mutations_S[places[wild] - position + highest] += count
            sites_S[places[wild] - position + highest] += 1
    best = int(mutations_S.argmax())
    others = np.delete(sites_S, best).max(initial=0)
    return best - highest, int(mutations_S[best]), int(sites_S[best]) if 2 * others <= sites_S[best] else 0


def averaged(target_RT: npt.NDArray[np.float64], rows_N: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """Average the target values of each variant over its rows, float64 [N, T]; NaN if no row has a value."""
    group_R = np.repeat(np.arange(len(rows_N)), [len(rows) for rows in rows_N])
    values_RT = target_RT[[row for rows in rows_N for row in rows]]
    sum_NT, count_NT = np.zeros((2, len(rows_N), target_RT.shape[1]))
    np.add.at(sum_NT, group_R, np.nan_to_num(values_RT))
    np.add.at(count_NT, group_R, ~np.isnan(values_RT))
    return np.divide(sum_NT, count_NT, out=np.full_like(sum_NT, np.nan), where=count_NT > 0)
