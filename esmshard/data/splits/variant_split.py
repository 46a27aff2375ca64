"""Splits of the variants of one protein, and the tables of their sets."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from esmshard.data.splits import assignment, leakage
from esmshard.data.splits.assignment import LEFT_OUT, Numbers, check_given
from esmshard.data.splits.given_splits import sets_of_rows
from esmshard.data.splits.split_method import Method
from esmshard.data.tables import counted, first_three, write_rows
from esmshard.data.variants.mutations import read_variants
from esmshard.data.variants.numbering import Misnumbered
from esmshard.data.variants.substitutions import name_of
from esmshard.errors import InputError, UsageError


class VariantRows:
    """N rows of a table of variants. Rows with a stop codon or without the target are left out.

    A row with only synonymous changes counts as the wild type.

    Args:
        source: the table.
        wild_type: FASTA file of the protein.
        mutant: column of the mutations; see `read_variants`.
        targets: columns of values; None if no values are needed.
        offset: number added to the positions of the table; see `read_variants`.

    Raises:
        InputError: the table or the wild type cannot be read, or they do not fit each other.
    """

    sizes = ("variants", "positions")
    """The names of the counts in `count`: rows, and the positions that they change."""

    def __init__(
        self, source: Path, wild_type: Path, mutant: str | None, targets: Sequence[str] | None, offset: int
    ) -> None:
        how: dict[str, Any] = {"on_stop": "drop", "on_synonymous": "keep", "replicates": "keep"}
        try:
            variants = read_variants(source, wild_type=wild_type, mutant=mutant, targets=targets, offset=offset, **how)
        except Misnumbered as error:
            raise InputError(error.spelled("--offset ")) from None
        self.source, self.notices = source, list(variants.notices)
        self.facts = {"source": source.resolve().name, "wild_type": wild_type.resolve().name}
        self._ids, self._table, self._target_NT = variants.names(), variants.table, variants.target_NT
        self._rows = [rows[0] for rows in variants.rows]
        changes = [tuple(m for m in mutations if m.mutant != m.wild) for mutations in variants.mutations]
        self._names = [name_of(mutations) for mutations in changes]
        self._positions = [frozenset(m.position for m in mutations) for mutations in changes]

    def divide(self, method: Method, _directory: Path, _say: Callable[[str], None]) -> Numbers:
        """Return the set or fold of each row, int64 [N]. Rows of one variant stay together.

        Raises:
            InputError: the rows cannot be divided by this method.
            UsageError: the limit of the training set cannot be read.
        """
        number_N = self._number(method)
        left = [self._names[n] for n in np.flatnonzero(number_N == LEFT_OUT)]
        if left:
            why = "without a set" if method.by == "given" else "that change positions of several sets"
            self.notices.append(
                f"{self.source}: left out {counted(len(left), 'variant')} {why} ({first_three(left, str)})"
            )
        return number_N

    def _number(self, method: Method) -> Numbers:
        if method.by == "given":
            number_N = sets_of_rows(self._table, self._rows)
            check_given(number_N, self.source)
            return number_N
        if method.by == "low-to-high":
            value_N = self._target_NT[:, 0]
            return assignment.low_to_high(value_N, self._names, self._limit(method), method.ratios, method.seed)
        most = method.train_max or "1"
        if not most.isdecimal() or int(most) < 1:
            raise UsageError(f"--train-max {most}: a number of mutations is expected, as 2")
        options = (method.ratios, method.seed, method.folds, int(most))
        return assignment.of_variants(method.by, self._names, self._positions, *options)

    def _limit(self, method: Method) -> float:
        """Return the highest value to train on."""
        value_N, limit = self._target_NT[:, 0], method.train_max
        if limit is None:
            wild = [n for n, name in enumerate(self._names) if name == "WT"]
            if not wild:
                raise UsageError(
                    f"{self.source}: has no row of the wild type, whose value would be the limit; pass --train-max "
                    "with a value, or with a share of the values as 50%"
                )
            return float(value_N[wild].mean())
        try:
            number = float(limit.removesuffix("%"))
            return float(np.quantile(value_N, number / 100)) if limit.endswith("%") else number
        except ValueError:
            raise UsageError(f"--train-max {limit}: a value, or a share of the values as 50%, is expected") from None

    def columns(self) -> dict[str, Sequence[object]]:
        """Return the columns of `splits.tsv` beside the set, N cells each."""
        return {"id": self._ids, "line": [self._table.lines[row] for row in self._rows]}

    def count(self, number_M: Numbers) -> list[int]:
        """Return the sizes of a set: rows and positions."""
        return [len(number_M), len(frozenset().union(*(self._positions[n] for n in number_M)))]

    def write(self, stem: Path, number_M: Numbers) -> None:
        """Write `STEM.csv`, with all columns of the table."""
        cells = list(self._table.columns.values())
        with open(stem.with_name(f"{stem.name}.csv"), "w", encoding="utf-8", newline="") as file:
            rows = [[column[self._rows[n]] for column in cells] for n in number_M.tolist()]
            write_rows(file, [[*self._table.columns], *rows])

    def check(self, sets: Mapping[str, Numbers], _most: int) -> leakage.Leakage:
        """Compare the sets with the training set; see `leakage.check_variants`."""
        return leakage.check_variants(self._names, self._positions, sets)
