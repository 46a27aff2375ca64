"""Tables of variants: reading them, and writing them with a few more columns."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from esmshard.data.variants.mutations import Variants, read_variants
from esmshard.errors import InputError, writing
from esmshard.io.paths import replacing, without_directories
from esmshard.io.tables import counted
from esmshard.io.writers import TableWriter
from esmshard.tasks import metrics


def read(
    path: Path,
    protein: str | Path,
    *,
    mutant: str | None = None,
    targets: Sequence[str] | None = None,
    offset: int | Literal["auto"] = "auto",
) -> Variants:
    """Read the variants of a table, with one variant for each row. Unusable rows, up to a tenth, are left out and
    listed.

    Args:
        path: see `tables.read_table`.
        protein: the sequence of the wild type, or a FASTA file with it.
        mutant: see `read_variants`.
        targets: see `read_variants`; None reads no values.
        offset: see `read_variants`.

    Raises:
        InputError: the table does not fit the protein with this numbering.
        InputError: the table cannot be read.
    """
    return read_variants(
        path,
        wild_type=protein,
        mutant=mutant,
        targets=targets,
        offset=offset,
        on_unusable="drop",
        on_stop="drop",
        on_synonymous="keep",
        replicates="keep",
    )


def facts_file(out: Path) -> Path:
    """Return the path of the facts about a table that is written to `out`: `x.json` beside `x.csv`.

    >>> facts_file(Path("next.csv")).name
    'next.json'
    """
    return out.with_suffix(".json")


def write_facts(out: Path, facts: Mapping[str, Any]) -> None:
    """Write beside a table how it was made, and how far it can be trusted. NaN becomes null."""
    path = facts_file(out)
    with writing(path), replacing(path) as file:
        file.write(json.dumps(without_directories(facts), indent=1, allow_nan=False) + "\n")


def check_new(out: Path, columns: Iterable[str], new: Iterable[str]) -> None:
    """Refuse a table that already has a column of a new name."""
    known = set(columns)
    if twice := [name for name in new if name in known]:
        raise InputError(f"{out}: the table has a column '{twice[0]}' already; rename it in the input")


def write(out: Path, columns: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> None:
    """Write a table of R rows with new columns at its end. The file appears only when it is complete.

    Raises:
        InputError: the table already has a column of a new name.
    """
    check_new(out, columns, new)
    cells = {**columns, **new}
    quoted = any("\r" in cell for name, column in cells.items() for cell in (name, *column))
    with writing(out), TableWriter(out, dict.fromkeys(cells, "string"), quoted=quoted) as writer:
        writer.add(cells)


def spearman(
    said_N: npt.NDArray[np.floating], measured_N: npt.NDArray[np.float64], name: str, what: str = "variant"
) -> str:
    """Describe how predictions agree with measured values: Spearman's correlation, or why it is undefined.

    Args:
        said_N: predictions.
        measured_N: what they are compared with.
        name: the column of the latter.
        what: the noun for a row.
    """
    known = ~np.isnan(measured_N) & ~np.isnan(said_N)
    rho, count = metrics.spearman(said_N[known].astype(np.float64), measured_N[known]), int(known.sum())
    if np.isnan(rho):
        return (
            f"Spearman NaN with {name}: {'all values, or all predictions, are equal' if count > 1 else 'no two values'}"
        )
    return f"Spearman {rho:.3f} with {name} over {counted(count, what)}"
