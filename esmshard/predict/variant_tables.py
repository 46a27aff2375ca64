"""Reads tables of variants and the records of runs about variants, and writes ranked tables."""

import csv
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from esmshard.data.batching.loader import SEEN as SEEN_FILE
from esmshard.data.mutations import Mutation, name_of, parse_variant
from esmshard.data.splits.variant_records import OUT_OF_FOLD as OUT_OF_FOLD_FILE
from esmshard.data.variants import SEVERAL_CHAINS, read_variants
from esmshard.errors import InputError, UsageError, reading, writing
from esmshard.io.paths import read_json, replace_json, without_directories
from esmshard.io.tables import Table, counted, first_three
from esmshard.io.writers import TableWriter, facts_file
from esmshard.tasks.metrics import LEAST, PREDICTIVE, Interval
from esmshard.tasks.registry import traits
from esmshard.tasks.variant_baselines import SHORT
from esmshard.vocab import STANDARD

Array = npt.NDArray[np.float64]
Variant = tuple[Mutation, ...]

SUMMARY = "summary.json"

# Tables of variants


@dataclass(frozen=True)
class VariantRows:
    """N variants of a protein, read from N of the R rows in a table."""

    protein: str
    columns: dict[str, list[str]]  # the columns of the table by name; each column has R cells
    mutations: list[Variant]  # the mutations of each variant, without synonymous changes
    rows: list[int]  # the index of each variant's row in the table, from 0
    left_out: dict[int, str]  # by the index of a row without a usable variant: the reason why
    notices: list[str]
    offset: int  # the number that was added to the table's positions to fit the wild type
    table: Table | None = None

    def leave_out(self, why: Callable[[Variant], str], what: str) -> "VariantRows":
        """Return a copy without the variants for which `why` returns a reason. The last notice of the copy begins with
        `what` and tells the reasons.
        """
        variant_of = dict(zip(self.rows, self.mutations, strict=True))
        reasons = {row: reason for row, variant in variant_of.items() if (reason := why(variant))}
        if not reasons:
            return self
        kept = {row: variant for row, variant in variant_of.items() if row not in reasons}
        places = f" ({first_three(list(reasons), self.table.at)})" if self.table else ""
        because = first_three(list(dict.fromkeys(reasons.values())), str)
        notices = [*self.notices, f"{what}: {counted(len(reasons), 'variant')}{places}, as {because}"]
        rows, mutations, left_out = list(kept), list(kept.values()), self.left_out | reasons
        return replace(self, rows=rows, mutations=mutations, left_out=left_out, notices=notices)

    def measured(self, column: str) -> Array:
        """Return the number that each variant has in the given column, float64 [N]; NaN for an empty cell."""
        assert self.table is not None
        return self.table.numbers(column)[self.rows]


def listed(protein: str, variants: Sequence[Variant]) -> VariantRows:
    """Return a table with a row for each of the given variants, which do not come from a file."""
    columns = {"mutant": [name_of(variant) for variant in variants]}
    return VariantRows(protein, columns, list(variants), list(range(len(variants))), {}, [], 0)


def read_rows(
    path: Path, protein: str | Path, mutant: str | None, offset: int | Literal["auto"], *, indels: bool = False
) -> VariantRows:
    """Read the variants of a table. Equal variants are not merged, and unusable rows are left out (`read_variants`)."""
    rules: Any = {"unusable": "drop", "keep_synonymous": True, "replicates": "keep", "indels": indels}
    read = read_variants(path, wild_type=protein, mutant=mutant, targets=None, offset=offset, **rules)
    if isinstance(protein, Path) and read.wild_types[""].breaks:  # a run knows the chains of its protein
        raise InputError(f"{protein}: {SEVERAL_CHAINS}")
    mutations = [tuple(m for m in variant if m.mutant != m.wild) for variant in read.mutations]
    rows, columns = [row for (row,) in read.rows], dict(read.table.columns)
    return VariantRows(read.wild_type, columns, mutations, rows, read.left_out, read.notices, read.offset, read.table)


def single_substitutions(protein: str) -> list[Variant]:
    """Return all single substitutions of residues by one of the 20 amino acids, sorted by position and then letter."""
    return [(Mutation(n, wild, to),) for n, wild in enumerate(protein) for to in STANDARD if to != wild]


def not_of_the_20(variant: Variant) -> str:
    """Return the reason why a variant cannot be scored, or an empty text.

    Language models hardly ever predict letters other than the 20 amino acids, so log p(mutant) - log p(X) would be high
    for every mutant.

    >>> not_of_the_20((Mutation(10, "X", "L"),))
    'the wild type has X at residue 11, which is none of the 20 amino acids'
    """
    for mutation in variant:
        if mutation.wild not in STANDARD:
            site = f"{mutation.wild} at residue {mutation.position + 1}"
            return f"the wild type has {site}, which is none of the 20 amino acids"
        if not set(mutation.mutant) <= set(STANDARD):
            return f"{mutation} puts {mutation.mutant} at the site, which is none of the 20 amino acids"
    return ""


def check_new(out: Path, columns: Mapping[str, object], new: Collection[str]) -> None:
    """Refuse to add columns with the names `new` to a table that already has one of these names."""
    if twice := [name for name in new if name in columns]:
        raise InputError(f"{out}: the table has a column '{twice[0]}' already; rename it in the input")


def write_table(
    out: Path, columns: dict[str, list[str]], new: Mapping[str, Sequence[str]], facts: Mapping[str, Any]
) -> None:
    """Write a table with `new` columns at its end, and write `facts` to the table's JSON file (`facts_file`)."""
    check_new(out, columns, new)
    cells = {**columns, **new}
    quoted = any("\r" in cell for name, column in cells.items() for cell in (name, *column))
    with writing(out), TableWriter(out, dict.fromkeys(cells, "string"), quoted=quoted) as writer:
        writer.add(cells)
        replace_json(facts_file(writer.work), without_directories(facts))


# The records of a run about variants


@dataclass(frozen=True)
class Known:
    """What the files of a run say about variants. Variants are named in the numbering of the wild type."""

    measured: Mapping[str, str]  # the first target's measured value for each variant, as text
    out_of_fold: Mapping[str, Sequence[float]]
    """For each variant, the predictions of T targets by models that were not trained on the variant."""
    fold: Mapping[str, int]  # the fold in which each variant of `out_of_fold` was tested
    deviation: Mapping[str, float]
    """For the head `gp`: the standard deviations that were expected of measurements out of fold, by variant."""
    seen: frozenset[str] | None
    """The variants that were used to train or select at least one model; None if a model has no list of them."""
    verdict: str | None
    """The run's sentence on whether fine-tuning was better than the best baseline; None before the run is finished."""

    def of_proteins(self, names: Collection[str]) -> "Known":
        """Return what is known about the variants of one protein. `names` are its names in a table of several proteins,
        which the names of variants then lack.
        """

        def part(values: Mapping[str, Any]) -> dict[str, Any]:
            return {of[1]: value for name, value in values.items() if (of := name.rpartition("/")[::2])[0] in names}

        seen = None if self.seen is None else frozenset(part(dict.fromkeys(self.seen)))
        found = replace(self, measured=part(self.measured), out_of_fold=part(self.out_of_fold), seen=seen)
        return replace(found, fold=part(self.fold), deviation=part(self.deviation))

    @cached_property
    def variants(self) -> list[Variant]:
        """The variants that were measured or used in training."""
        return [parse_variant(name) for name in dict.fromkeys([*self.measured, *sorted(self.seen or ())])]

    @cached_property
    def sites(self) -> frozenset[int]:
        """The positions, counted from 0, that at least one variant in `variants` changes."""
        return frozenset(mutation.position for variant in self.variants for mutation in variant)


def models_of(run: str) -> list[Path]:
    """Return the paths of the models of task `variant` in the directory `run` of a cross-validation, a run or a model.
    If there are none, return []. Raises `InputError` if a cross-validation lacks a model.
    """
    path = Path(run)
    if traits((summary := summary_of(path)).get("task")).reads_table:
        models = [path / name / "model" for name in summary["runs"]]
        if missing := [model for model in models if not (model / "esmshard.json").is_file()]:
            raise InputError(f"{missing[0]}: there is no model; repeat the finetune command with --resume auto")
        return models
    for model in (path / "model", path):
        if (about := model / "esmshard.json").is_file():
            with reading(str(about), "consolidate the run again"):
                recipe = read_json(about).get("recipe", {"task": {"name": None}})  # a converted model has no recipe
                return [model] if traits(recipe["task"]["name"]).reads_table else []
    return []


def summary_of(run: Path) -> dict[str, Any]:
    """Return the content of `summary.json`, or an empty dictionary without this file."""
    summary: dict[str, Any] = read_json(run / SUMMARY) if (run / SUMMARY).is_file() else {}
    return summary


def read_known(run: Path, models: Sequence[Path], targets: Sequence[str], method: str = "predicted") -> Known:
    """Read what the files of a run and of its models say about variants. With `method` = `predicted`, `out_of_fold` has
    predictions of the models; with the name of a baseline, its predictions of the first target.
    """
    files = [model / SEEN_FILE for model in models]
    trained_on = None
    if all(file.is_file() for file in files):
        trained_on = frozenset(name for file in files for name in file.read_text(encoding="utf-8").splitlines())
    rows = rows_of_run(run)
    columns = [f"{method} {name}" if len(targets) > 1 else method for name in targets]
    columns = columns if method == "predicted" else columns[:1]
    tested = [row for row in rows if any(row.get(column) for column in columns)]
    return Known(
        {row["variant"]: row["measured"] for row in rows if row["measured"]},
        {row["variant"]: [float(row[column] or "nan") for column in columns] for row in tested},
        {row["variant"]: int(row["fold"]) for row in tested if row["fold"]},
        {row["variant"]: float(row[PREDICTIVE]) for row in tested if row.get(PREDICTIVE)},
        trained_on,
        summary_of(run).get("verdict"),
    )


def rows_of_run(run: Path) -> list[dict[str, str]]:
    """Read the rows with a variant from the file `variants.csv` of a run; return an empty list without this file.

    Only the columns that the run added after the columns of the user's table are returned. If the user's table has the
    same names, the file has a prefix before the added names. The prefix is removed.
    """
    if not (path := run / OUT_OF_FOLD_FILE).is_file():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        head, *body = csv.reader(file)
    prefix = ""
    while f"esmshard {prefix}variant" in head:
        prefix += "esmshard "
    first = len(head) - 1 - head[::-1].index(f"{prefix}variant")
    names = [name.removeprefix(prefix) for name in head[first:]]
    return [dict(zip(names, row[first:], strict=True)) for row in body if row[first]]


def better_baseline(summary: Mapping[str, Any]) -> str | None:
    """Return the short name of the best baseline that was better than the fine-tuned model, or None.

    `summary` is the content of `summary.json`. A baseline was better if the interval of the difference (model minus
    baseline) is below 0. Without an interval, the difference itself must be below 0.
    """
    scores = summary.get("joint", {})
    better = {
        short: scores["metrics"][name]["value"]
        for short, name in SHORT.items()
        if (gain := scores.get("differences", {}).get(name))
        and ((gain["value"] if gain["high"] is None else gain["high"]) or 0.0) < 0
    }
    return max(better, key=better.__getitem__, default=None)


def positions(sites: str, length: int, offset: int = 0) -> Collection[int]:
    """Convert `--sites`, such as `39,40,41` or `all`, to positions of a protein, counted from 0. `offset` is added."""
    if sites == "all":
        return range(length)
    try:
        places = {int(word) - 1 + offset for word in sites.split(",")}
    except ValueError:
        raise UsageError(f"--sites {sites}: is not a list of positions; pass positions as 39,40,41, or all") from None
    if missing := [place + 1 - offset for place in sorted(places) if not 0 <= place < length]:
        numbers = f"residues have the numbers {1 - offset} to {length - offset}"
        raise UsageError(f"--sites {sites}: {missing[0]} is not in the wild type, whose {numbers}")
    return places


def spearman_sentence(rho: Interval, target: str, unit: str) -> str:
    """Return a text about Spearman's correlation: its value and interval, or the reason why it is undefined."""
    if np.isnan(rho.value):
        return f"Spearman with {target} undefined: it needs two different values and two different predictions"
    note = f"no interval, which needs {LEAST} {unit}s" if np.isnan(rho.low) else f"95% over {unit}s"
    return f"Spearman with {target} {rho} ({note})"
