"""Reads measured variants of one protein from tables in the formats that laboratories use.

A cell of the mutation column has one of these forms. Cells with other forms are refused.

| cell | meaning |
|---|---|
| `A24G`, `p.A24G`, `p.Ala24Gly`, `p.(Ala24Gly)`, `NP_000509.1:p.Ala24Gly` | one substitution |
| `A24G:V30L`, or `;`, `,`, `/`, `+` or spaces as separators, `p.[Ala24Gly;Val30Leu]` | several substitutions |
| `WT`, `_wt`, `wild-type`, `p.=` | the wild type |
| `A24*`, `p.Ala24Ter` | a stop codon: an error, or the row is left out |
| `A24A`, `p.Ala24=` | a synonymous change: an error, or the row is left out or kept |

Three-letter codes and brackets are from HGVS (den Dunnen et al. 2016, https://hgvs-nomenclature.org); `_wt` is from
Enrich2 (Rubin et al. 2017). Lower case is accepted too.

In many tables, position 1 is the start of the mature protein, of a construct or of a crystal structure, not residue 1
of the sequence. So each wild-type letter is compared with the sequence.
"""

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from Bio.Data.IUPACData import protein_letters_3to1_extended

from esmshard.errors import InputError, UsageError
from esmshard.io.sequences import is_sequence_table, read_fasta
from esmshard.io.symbols import Edits, nucleotides
from esmshard.io.tables import Table, counted, first_three, listed, read_table, shown
from esmshard.vocab import BETWEEN, RESIDUES, STANDARD, encode_residues

STOP = "*"

_WILD = frozenset(RESIDUES)
_MUTANT = frozenset(STANDARD + "UO" + STOP)
_LETTER = {name.upper(): letter for name, letter in protein_letters_3to1_extended.items()} | {"TER": STOP}
_WILD_TYPE = frozenset({"wt", "_wt", "wildtype", "wild-type", "wild_type", "wild type", "=", "p.=", "p.(=)", "p.[=]"})
_ACCESSION = re.compile(r"([NX]P_\d+|[A-Z][A-Z0-9_]*\d\.\d+):(?=p\.)")
_JOINED = re.compile(r"\s*[:;,/+]\s*|\s+")
_SUBSTITUTION = re.compile(r"([A-Z]{3}|[A-Z])(-?\d{1,6})([A-Z]{3}|[A-Z]|\*|=)", re.ASCII | re.IGNORECASE)
_HOW = "write A24G, A24G:V30L or p.Ala24Gly, and WT for the wild type; remove rows of other changes"
"""The end of error messages about unusable cells of the mutation column: how to write a valid cell."""


class RefusedVariant(InputError):
    """The error for a cell of a table that does not name a valid variant."""


# A named tuple sorts and hashes ten times faster than a dataclass, and tables have hundreds of thousands of mutations.
class Mutation(NamedTuple):
    """A change of one residue of a protein, such as `A24G`: residue 24 changes from A to G.

    >>> print(Mutation(23, "A", "G"))
    A24G
    """

    position: int
    """The position in the protein, counted from 0."""
    wild: str
    mutant: str
    """The letter of the new residue. `*` is a stop codon. The same letter as in `wild` is a synonymous change."""

    def __str__(self) -> str:
        return f"{self.wild}{self.position + 1}{self.mutant}"


def name_of(mutations: tuple[Mutation, ...]) -> str:
    """Return the name of a variant: its mutations as `A24G:V30L`, or `WT` without mutations."""
    return ":".join(map(str, mutations)) or "WT"


def renumbered(mutations: tuple[Mutation, ...], shift: int) -> tuple[Mutation, ...]:
    """Add `shift` to the position of each mutation.

    >>> name_of(renumbered((Mutation(0, "M", "L"),), 23))
    'M24L'
    """
    return tuple(Mutation(m.position + shift, m.wild, m.mutant) for m in mutations)


def parse_variant(cell: str) -> tuple[Mutation, ...]:
    """Parse a cell of the mutation column. Return its mutations, sorted by position; () for the wild type. Raises
    `RefusedVariant` if the cell is empty, has another form, or changes a position twice.

    >>> [str(mutation) for mutation in parse_variant("p.[Val30Leu;Ala24Gly]")]
    ['A24G', 'V30L']
    >>> parse_variant("WT")
    ()
    """
    cell = cell.strip()
    if cell.lower() in _WILD_TYPE:
        return ()
    if not cell:
        raise RefusedVariant("an empty cell")
    body = _ACCESSION.sub("", cell, count=1) if "p." in cell else cell
    if body[:2].lower() == "p.":
        body = body[2:]
        for opening, closing in ("[]", "()"):
            if body.startswith(opening) and body.find(closing) == len(body) - 1:
                body = body[1:-1]
    mutations = tuple(sorted(_substitution(word) for word in _JOINED.split(body)))
    for mutation, following in itertools.pairwise(mutations):
        if mutation.position == following.position:
            raise RefusedVariant(f"{shown(cell)} changes position {mutation.position + 1} twice")
    return mutations


@functools.lru_cache(maxsize=1 << 16)
def _substitution(word: str) -> Mutation:
    code = word.removeprefix("p.")
    if code.startswith("(") and code.endswith(")"):
        code = code[1:-1]
    match = _SUBSTITUTION.fullmatch(code)
    if match:
        before, number, after = match[1].upper(), match[2], match[3].upper()
        wild = _LETTER.get(before, before)
        mutant = wild if after == "=" else _LETTER.get(after, after)
        if wild in _WILD and (mutant in _MUTANT or mutant == wild):
            return Mutation(int(number) - 1, wild, mutant)
    raise RefusedVariant(f"{shown(word)} is no substitution")


def compare(sequence: str, wild_type: str) -> tuple[Mutation, ...]:
    """Return the substitutions that turn `wild_type` into `sequence`. Raises `RefusedVariant` if the lengths differ, or
    if `sequence` has a character that is no residue, such as a gap.

    >>> [str(mutation) for mutation in compare("MKV", "MKT")]
    ['T3V']
    """
    text = "".join(sequence.split())
    if len(text) == len(wild_type) + 1:
        text = text.removesuffix(STOP)
    if len(text) != len(wild_type):
        raise RefusedVariant(f"{shown(sequence)} has {counted(len(text), 'residue')}, the wild type {len(wild_type):,}")
    if not text.isascii():  # `upper` turns some of the other letters into two letters.
        raise RefusedVariant(f"{shown(sequence)} is no sequence in one-letter codes")
    text = text.upper()
    differ_L = np.frombuffer(text.encode(), np.uint8) != np.frombuffer(wild_type.encode(), np.uint8)
    mutations = tuple(Mutation(k, wild_type[k], text[k]) for k in np.flatnonzero(differ_L).tolist())
    for mutation in mutations:
        if mutation.mutant not in _MUTANT:
            raise RefusedVariant(f"{shown(mutation.mutant)} at position {mutation.position + 1} is not one residue")
    return mutations


_ENOUGH = 0.99  # An automatic shift fits at least this share of the mutations.
_FEWEST = 5  # An automatic shift fits at least this number of sites (1 letter in 17 matches by chance).
_PROPOSED = 3  # A shift that an error message proposes fits at least this number of sites.

MUTANT_COLUMNS = ("mutant", "mutation", "mutations", "variant", "hgvs_pro", "hgvs_p", "mut")
SEQUENCE_COLUMNS = ("mutated_sequence", "sequence")
TARGET_COLUMNS = (
    *("DMS_score", "score", "fitness", "target", "effect", "activity", "value", "label", "y"),
    *("log_fitness", "enrichment", "ddG", "dms", "y_true"),
)
NAME_MUTANT = "pass data.mutant=COLUMN to finetune, or --mutant COLUMN to score, predict and split"
NAME_TARGET = "pass data.target=COLUMN to finetune, or --target COLUMN to score and split"

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
    """N variants of one protein with T measured targets, in the order of their first rows in the table."""

    wild_type: str
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
    alignment: list[dict[str, Any]] = field(default_factory=list)
    """How the values of several tables were aligned; see `plates.read_plates`."""

    def __len__(self) -> int:
        return len(self.mutations)

    def sequences(self) -> list[str]:
        """Return the whole sequence of each variant."""
        wild_type, sequences = self.wild_type.encode(), []
        for mutations in self.mutations:
            sequence = bytearray(wild_type)
            for mutation in mutations:
                sequence[mutation.position] = ord(mutation.mutant)
            sequences.append(sequence.decode())
        return sequences

    def names(self) -> list[str]:
        """Return the name of each variant, such as `A24G:V30L` or `WT`."""
        return [name_of(mutations) for mutations in self.mutations]

    def positions(self) -> list[frozenset[int]]:
        """Return the mutated positions of each variant, counted from 0."""
        return [frozenset(mutation.position for mutation in mutations) for mutations in self.mutations]


def read_variants(
    path: Path,
    *,
    wild_type: Path | str,
    mutant: str | None = None,
    targets: Sequence[str] | None = (),
    offset: int | Literal["auto"] = 0,
    unusable: Unusable = "error",
    keep_synonymous: bool = False,
    replicates: Replicates = "error",
) -> Variants:
    """Read the variants of a table, and check each mutation against the wild type.

    Args:
        path: the path of the table; see the function `tables.read_table`.
        wild_type: the path of a FASTA file with one record, or of a table (see `protein_of_table`); or the sequence in
            upper case (a str).
        mutant: the column of mutations; by default the only column with a name in MUTANT_COLUMNS, in upper or lower
            case. Without such a column, a column of sequences (SEQUENCE_COLUMNS) is compared with the wild type.
        targets: the columns of measured values; by default the only column with a name in TARGET_COLUMNS. None reads no
            values.
        offset: the number to add to each position in the table. If the positions do not fit the wild type, "auto"
            searches for a number with which at least five sites and nearly all mutations fit.
        unusable: `drop` leaves out unusable rows, `error` refuses the table. A row is unusable if it has a stop codon,
            a synonymous change or no valid mutation, or does not fit the wild type. Even with `drop`, the table is
            refused if over a tenth of the rows have no valid mutation, or if over a tenth do not fit the wild type.
        keep_synonymous: whether rows with synonymous changes are kept, with names such as `A24A`.
        replicates: if a variant is in several rows, `error` refuses the table, `mean` averages the values, and `keep`
            makes a variant of each row.

    Raises:
        UsageError: arguments contradict each other.
        InputError: the table or the wild type cannot be read, the table does not fit the wild type, or no row is left.
    """
    reading = read_rows(path, wild_type, mutant, targets, offset, unusable, keep_synonymous)
    return reading.merged(replicates)


def read_rows(
    path: Path,
    wild_type: Path | str,
    mutant: str | None = None,
    targets: Sequence[str] | None = (),
    offset: int | Literal["auto"] = 0,
    unusable: Unusable = "error",
    keep_synonymous: bool = False,
) -> "Reading":
    """Read the rows of a table of variants. For arguments and errors see `read_variants`."""
    table, notices = read_table(path), list[str]()
    if isinstance(wild_type, Path):
        of_table = is_sequence_table(wild_type)
        protein = protein_of_table(wild_type, table, mutant, notices) if of_table else protein_of(wild_type, notices)
    else:
        protein = wild_type
    name = "the wild type" if isinstance(wild_type, str) else str(wild_type)
    reading = Reading(table, protein, name, unusable, notices)
    column, has_sequences = (mutant, False) if mutant is not None else _column(table)
    if has_sequences and offset not in (0, "auto"):
        raise UsageError(f"{path}: offset shifts numbered mutations; leave it out, as {shown(column)} has sequences")
    reading.read_targets(targets)
    if has_sequences:
        reading.parse(column, functools.partial(compare, wild_type=protein))
    else:
        reading.parse(column, parse_variant)
        reading.place(offset)
    reading.remove(lambda mutation: mutation.mutant == STOP, "a stop codon")
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
    protein: str
    protein_name: str
    unusable: Unusable
    notices: list[str]
    left_out: dict[int, str] = field(default_factory=dict)
    variants: dict[int, tuple[Mutation, ...]] = field(default_factory=dict)
    """The mutations of each row that is not left out."""
    target_names: tuple[str, ...] = ()
    target_RT: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    """The values of T targets in each row of the table."""
    offset: int = 0
    """The number that was added to each position in the table."""

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

    def parse(self, column: str, read: Callable[[str], tuple[Mutation, ...]]) -> None:
        """Parse the cells of `column` with the function `read`, except in left-out rows. Rows that `read` refuses are
        left out too. If the share of refused rows is above `max_unusable`, `InputError` names the first three.
        """
        rows = [row for row in range(len(self.table)) if row not in self.left_out]
        cells, refused = self.table.column(column), dict[int, str]()
        for row in rows:
            try:
                self.variants[row] = read(cells[row])
            except RefusedVariant as error:
                refused[row] = str(error)
        if len(refused) > self.max_unusable * len(rows):
            share = f"{len(refused):,} of {counted(len(rows), 'cell')} of column {shown(column)}"
            raise InputError(f"{self.table.path}: {share} cannot be used: {self.reasons(refused)}; {_HOW}")
        self.leave_out(refused, f"whose {shown(column)} names no substitutions", each=True)

    def place(self, offset: int | Literal["auto"]) -> None:
        """Add `offset` (for `auto`, a shift that fits the wild type) to all positions. Leave out variants that do not
        fit. If their share is above `max_unusable`, `InputError` names the first three.
        """
        path, protein, name = self.table.path, self.protein, self.protein_name
        counts = Counter(itertools.chain.from_iterable(self.variants.values()))
        shift, total = 0 if offset == "auto" else offset, counts.total()

        def residue(mutation: Mutation) -> str:
            place = mutation.position + shift
            return protein[place] if 0 <= place < len(protein) else ""

        def misfits() -> dict[int, list[Mutation]]:
            wrong = {mutation for mutation in counts if residue(mutation) != mutation.wild}
            return {row: bad for row, variant in self.variants.items() if (bad := [m for m in variant if m in wrong])}

        def reasons() -> dict[int, str]:
            has = {row: residue(bad[0]) or "no such position" for row, bad in wrong.items()}
            return {row: f"{bad[0]} (the wild type has {has[row]})" for row, bad in wrong.items()}

        wrong = misfits()
        if wrong:
            best, fit, sites = _best_shift(counts, protein)
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
            raise InputError(
                f"{path}: {sum(map(len, wrong.values())):,} of {total:,} {how} do not fit {name} with "
                f"{counted(len(protein), 'residue')}: {self.reasons(reasons())}; correct the rows, the wild type or "
                "the offset"
            )
        self.leave_out(reasons(), f"with another residue than {name} has", each=True)
        self.variants = {row: renumbered(variant, shift) for row, variant in self.variants.items()}
        self.offset = shift

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
        table, groups = self.table, defaultdict[tuple[Mutation, ...], list[int]](list)
        for row, mutations in self.variants.items():
            groups[mutations].append(row)
        several = [mutations for mutations, rows in groups.items() if len(rows) > 1]
        if several:
            named = first_three(several, lambda key: f"{shown(name_of(key))} in {first_three(groups[key], table.at)}")
            rows_of = f"{counted(len(several), 'variant')} in several rows: {named}"
            if replicates == "error":
                raise InputError(f"{table.path}: {rows_of}; set data.replicates=mean, or remove all but one row")
            self.notices.append(f"{table.path}: {'averaged' if replicates == 'mean' else 'kept apart'} {rows_of}")
        pairs = [(mutations, tuple(rows)) for mutations, rows in groups.items()]
        if replicates == "keep":
            pairs = [(mutations, (row,)) for row, mutations in self.variants.items()]
        rows_N = [rows for _, rows in pairs]
        return Variants(
            wild_type=self.protein,
            mutations=[mutations for mutations, _ in pairs],
            target_NT=averaged(self.target_RT, rows_N),
            target_names=self.target_names,
            rows=rows_N,
            table=table,
            notices=self.notices,
            offset=self.offset,
            left_out=self.left_out,
        )


def protein_of(fasta: Path, notices: list[str] | None = None) -> str:
    """Return the only sequence in a FASTA file. Sentences about changed letters are appended to `notices`."""
    edits = Edits()
    records = list(read_fasta(fasta, edits))
    if len(records) > 1:
        ids = first_three(records, lambda record: record.id)
        raise InputError(f"{fasta}: has {len(records):,} records ({ids}); leave only the record of the wild type")
    if BETWEEN in records[0].sequence:
        raise InputError(f"{fasta}: the wild type has several chains; give only the chain that the variants change")
    residues = np.frombuffer(encode_residues(records[0].sequence), np.uint8)
    if suspicion := nucleotides([residues], "1 record"):
        raise InputError(f"{fasta}: {suspicion}; give the protein that it codes for")
    if notices is not None:
        notices.extend(f"{fasta}: {notice}" for notice in edits.notices())
    return records[0].sequence


def protein_of_table(path: Path, measured: Table, mutant: str | None, notices: list[str]) -> str:
    """Return the wild type of the table `measured` from the table at `path`, and append a sentence to `notices`.

    - ProteinGym's reference file has the columns `DMS_id` and `target_seq`. The row of `measured` has its file name,
      without the ending, in `DMS_id`, or with it in `DMS_filename`.
    - In a table with mutations and mutated sequences, as ProteinGym's assays have them, substitutions are undone.

    Raises `InputError` if there is no such row, or if the rows do not agree on the wild type.
    """
    table, fix = measured if path == measured.path else read_table(path), "set data.wild_type=wt.fasta, a FASTA file"
    if "target_seq" in table.columns:
        ids, name = table.column("DMS_id"), measured.path.name
        rows = [row for row in range(len(table)) if name.startswith(f"{ids[row]}.")]
        rows += [row for row, file in enumerate(table.columns.get("DMS_filename", ())) if file == name]
        if not rows:
            raise InputError(f"{path}: no DMS_id is the name of {name} without its ending; rename {name}, or {fix}")
        protein = table.columns["target_seq"][rows[0]].upper()
        if not protein or set(protein) - _WILD:
            raise InputError(f"{table.where(rows[0])}: 'target_seq' is no sequence of residues; {fix}")
        notices.append(f"{path}: the wild type is 'target_seq' of {ids[rows[0]]} ({table.at(rows[0])})")
        return protein
    mutant = mutant or table.only_column(MUTANT_COLUMNS, NAME_MUTANT)
    sequences = table.only_column(SEQUENCE_COLUMNS, "rename one of them")
    if mutant is None or sequences is None:
        raise InputError(f"{path}: tells no wild type, as it lacks mutations or mutated sequences; {fix}")
    row_of = dict[str, int]()
    for row, (cell, sequence) in enumerate(zip(table.column(mutant), table.columns[sequences], strict=True)):
        with suppress(RefusedVariant):  # `Reading.parse` reports such cells
            letters = list(sequence.upper())
            for place, wild, letter in parse_variant(cell):
                if letters[place : place + 1] != [letter]:
                    raise InputError(f"{table.where(row)}: {shown(cell)} does not fit {shown(sequences)}; {fix}")
                letters[place] = wild
            row_of.setdefault("".join(letters), row)
    if len(row_of) != 1:
        raise InputError(f"{path}: rows have different wild types ({first_three([*row_of.values()], table.at)}); {fix}")
    notices.append(f"{path}: the wild type follows from {shown(mutant)} and {shown(sequences)}")
    return next(iter(row_of))


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
