"""Reads several tables of measured variants of one protein, such as the plates of several rounds, as one table."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from esmshard.data.mutations import Mutation, name_of
from esmshard.data.variants import Reading, Replicates, Variants, averaged, read_rows
from esmshard.errors import InputError
from esmshard.io.tables import Table, counted, first_three, shown

Align = Literal["shift", "none"]
PLATE = "plate"
"""The column that names the file of each row."""
ENOUGH = 5
"""How many shared variants the correlation between tables needs."""


@dataclass(frozen=True)
class Plates(Table):
    """Several tables, one below the other. The column PLATE has the name of each row's file."""

    places: list[tuple[Table, int]] = field(default_factory=list)
    """The table of each row, and the row's index there."""

    def where(self, row: int) -> str:
        """Return the file and line of a row, such as `r2.csv:17`."""
        table, row_there = self.places[row]
        return table.where(row_there)

    def at(self, row: int) -> str:
        """Return the file and line of a row as words, such as `r2.csv line 17`."""
        table, row_there = self.places[row]
        return f"{table.path.name} {table.at(row_there)}"


def read_plates(
    paths: Sequence[Path], *, wild_type: Path | str, align: Align, log: bool, replicates: Replicates, **rules: Any
) -> Variants:
    """Read tables of variants in the order of their measurement; a single table is read as by `read_variants`.

    With `align` = `shift`, the values of each later table are shifted by the median difference of the variants that
    earlier tables contain too; with `log`, they are multiplied by the median ratio. The wild type is such a variant.
    Then rows of the same variant are merged over all tables. The alignment is in `notices` and `alignment`.

    Raises `InputError` if the tables have different targets, or if there is no shared variant. For `rules` and other
    errors see `read_variants`.
    """
    first = read_rows(paths[0], wild_type, **rules)
    if len(paths) == 1:
        return first.merged(replicates)
    plates = [first, *(read_rows(path, first.wild_types[""].mutated(()), **rules) for path in paths[1:])]
    for plate in plates:
        if plate.target_names != first.target_names:
            names, of_first = (", ".join(map(shown, each.target_names)) for each in (plate, first))
            raise InputError(
                f"{plate.table.path}: has values of {names}, but {paths[0]} of {of_first}; rename the column, or name "
                "a column of both in data.target"
            )
    facts = _align(plates, log) if align == "shift" else []
    starts = np.cumsum([0, *(len(plate.table) for plate in plates)]).tolist()
    table = _joined([plate.table for plate in plates])
    joint = Reading(table, first.wild_types, [""] * len(table), first.source, first.unusable, [])
    for start, plate in zip(starts, plates, strict=False):
        joint.variants |= {start + row: variant for row, variant in plate.variants.items()}
        joint.left_out |= {start + row: reason for row, reason in plate.left_out.items()}
        for group, rows in plate.left_out_groups.items():
            joint.left_out_groups.setdefault(group, []).extend(start + row for row in rows)
        joint.notices += plate.notices
    joint.target_names, joint.offset = first.target_names, first.offset
    joint.target_RT = np.concatenate([plate.target_RT for plate in plates])
    return replace(joint.merged(replicates), readings=[plate.facts for plate in plates], alignment=facts)


def _align(plates: Sequence[Reading], log: bool) -> list[dict[str, Any]]:
    """Change the values of all plates but the first, and add a notice to each. Return the facts for a JSON file."""
    facts: list[dict[str, Any]] = []
    earlier_RT, earlier = np.empty((0, len(plates[0].target_names))), defaultdict[tuple[Mutation, ...], list[int]](list)
    for plate in plates:
        table, of_variant = plate.table, defaultdict[tuple[Mutation, ...], list[int]](list)
        for row, variant in plate.variants.items():
            of_variant[variant].append(row)
        scaled_RT = _logarithms(plate.target_RT) if log else plate.target_RT.copy()
        shared = [variant for variant in of_variant if variant in earlier]
        before_KT = averaged(earlier_RT, [earlier[variant] for variant in shared])
        here_KT = averaged(scaled_RT, [of_variant[variant] for variant in shared])
        for t, name in enumerate(plate.target_names if plate is not plates[0] else ()):
            known = np.flatnonzero(np.isfinite(before_KT[:, t] - here_KT[:, t])).tolist()
            if not known:
                raise InputError(
                    f"{table.path}: no variant with a value of {shown(name)} is also in an earlier table, so the "
                    "tables cannot be aligned; add rows of the wild type to both, or set data.align=none"
                )
            before_K, here_K = before_KT[known, t], here_KT[known, t]
            shift = float(np.median(before_K - here_K))
            spread = len(known) >= ENOUGH and before_K.std() > 0 and here_K.std() > 0
            correlation = float(np.corrcoef(before_K, here_K)[0, 1]) if spread else None
            scaled_RT[:, t] += shift
            plate.target_RT[:, t] = plate.target_RT[:, t] * np.exp(shift) if log else plate.target_RT[:, t] + shift
            did, what = (
                (f"multiplied by {np.exp(shift):.4g}", "ratio") if log else (f"shifted by {shift:+.4g}", "difference")
            )
            names = first_three([name_of(shared[k]) for k in known], str)
            plate.notices.append(
                f"{table.path}: values of {shown(name)} were {did}, the median {what} of "
                f"{counted(len(known), 'variant')} that earlier tables have too ({names})"
                + ("" if correlation is None else f"; the correlation of these is {correlation:.2f}")
            )
            facts.append({"table": table.path.name, "target": name, "shared": len(known), "correlation": correlation})
            facts[-1] |= {"factor": float(np.exp(shift))} if log else {"shift": shift}
        for variant, rows in of_variant.items():
            earlier[variant] += [len(earlier_RT) + row for row in rows]
        earlier_RT = np.concatenate([earlier_RT, scaled_RT])
    return facts


def _logarithms(value_RT: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return logarithms, and NaN for values of 0 or less, which the recipe refuses later."""
    return np.log(np.where(value_RT > 0, value_RT, np.nan))


def _joined(tables: Sequence[Table]) -> Plates:
    paths = [table.path for table in tables]
    names = [path.name for path in paths] if len({path.name for path in paths}) == len(paths) else [*map(str, paths)]
    columns: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for table in tables for name in table.columns):
        columns[name] = [cell for table in tables for cell in table.columns.get(name, [""] * len(table))]
    key = PLATE
    while key in columns:
        key = f"esmshard {key}"  # the user's columns keep their names
    columns[key] = [name for name, table in zip(names, tables, strict=True) for _ in range(len(table))]
    return Plates(
        paths[0].with_name(", ".join(path.name for path in paths)),
        columns,
        [line for table in tables for line in table.lines],
        places=[(table, row) for table in tables for row in range(len(table))],
    )
