"""Variants that a table has in several rows: found, and averaged or kept apart."""

from collections import defaultdict
from typing import Literal

import numpy as np
import numpy.typing as npt

from esmshard.data.tables import Table, counted, first_three, shown
from esmshard.data.variants.substitutions import Mutation, name_of
from esmshard.errors import InputError

Replicates = Literal["error", "mean", "keep"]


def grouped(
    table: Table, parsed: dict[int, tuple[Mutation, ...]], replicates: Replicates, notices: list[str]
) -> list[tuple[tuple[Mutation, ...], tuple[int, ...]]]:
    """Return each variant with its rows: all rows of the same mutations, unless replicates are kept apart.

    Args:
        table: the table of the variants.
        parsed: the variant in each row.
        replicates: what happens to a variant in several rows.
        notices: gets a sentence about such variants.

    Raises:
        InputError: there are such variants, and `replicates` is `error`.
    """
    groups = defaultdict[tuple[Mutation, ...], list[int]](list)
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


def averaged(target_RT: npt.NDArray[np.float64], rows_N: list[tuple[int, ...]]) -> npt.NDArray[np.float64]:
    """Average each target over the rows of each variant that have it, float64 [N, T]; NaN if no row has it."""
    group_R = np.repeat(np.arange(len(rows_N)), [len(rows) for rows in rows_N])
    values_RT = target_RT[[row for rows in rows_N for row in rows]]
    sum_NT, count_NT = np.zeros((2, len(rows_N), target_RT.shape[1]))
    np.add.at(sum_NT, group_R, np.nan_to_num(values_RT))
    np.add.at(count_NT, group_R, ~np.isnan(values_RT))
    return np.divide(sum_NT, count_NT, out=np.full_like(sum_NT, np.nan), where=count_NT > 0)
