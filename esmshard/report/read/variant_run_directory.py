"""The files of a cross-validated run of variants, read for a report."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, TypeAdapter, ValidationError

from esmshard.data.splits.variant_records import OUT_OF_FOLD
from esmshard.data.variants.substitutions import Mutation, parse_variant
from esmshard.errors import InputError
from esmshard.recipe.sections import Recipe
from esmshard.report.read.run_directory import RunFiles, Values, intervals, json_object, number, read
from esmshard.tasks.base import MAIN
from esmshard.tasks.metrics import Interval
from esmshard.tasks.registry import traits
from esmshard.train.cross_validation import CURVE, SUMMARY
from esmshard.train.evaluate import strongest

RANKED = "ranked.csv"
AGAIN = "repeat its `esmshard finetune` command with --resume auto, which writes it anew"


Number = Annotated[float, BeforeValidator(number)]
Intervals = Annotated[dict[str, Interval], BeforeValidator(intervals)]


@dataclass(frozen=True)
class Best:
    """How good the variants with the highest predictions are, chosen within folds."""

    target: str
    count: int
    """The number of chosen variants of all folds."""
    recall: Intervals
    mean_of_chosen: Intervals
    mean_of_all: Number


@dataclass(frozen=True)
class Joint:
    """The joint scores of all test variants. Undefined values are NaN."""

    statistic: str
    targets: str
    interval: str
    variants: int
    positions: int
    split: str
    seeds: list[int]
    metrics: Intervals
    differences: Intervals
    """The differences fine-tuned minus each baseline."""
    of_each_seed: dict[str, list[Number]]
    best: Best
    verdict: str

    def __post_init__(self) -> None:
        if not {MAIN, *self.differences} <= self.metrics.keys():
            raise ValueError("a method has a difference and no value")

    @property
    def strongest(self) -> str | None:
        """Return the baseline with the highest Spearman correlation."""
        return strongest(self.metrics, self.differences, lower_is_better=False)


@dataclass(frozen=True)
class Tested:
    """The content of `variants.csv`: N variants with a prediction, each once, and T targets."""

    mutations: Sequence[tuple[Mutation, ...]]
    targets: Sequence[str]
    measured_NT: Values
    predicted_NT: Values
    fold_N: npt.NDArray[np.int64]
    rows: int
    """The number of rows of the user's table."""
    rows_tested: int
    """The number of rows of tested variants. It exceeds the number of variants if some were measured several times."""


@dataclass(frozen=True)
class Ranked:
    """The content of `ranked.csv`: single substitutions."""

    rows: Sequence[Mapping[str, str]]
    """The rows, by rank."""
    mutations: Sequence[Mutation]
    prediction_NT: Values


@dataclass(frozen=True)
class Curve:
    """The content of `learning_curve.json`."""

    tested_on: int
    fold: int
    seed: int
    points: list[tuple[int, Intervals]]
    """The number of training variants at each point, and the intervals by method."""


@dataclass(frozen=True)
class GivenTable:
    """The user's table as it was read, and the changes made to it."""

    path: str
    rows: int
    rows_left_out: int
    offset: int
    """The number that was added to the table's positions to get those of the wild type."""
    notices: list[str]
    """A sentence for each change."""


@dataclass(frozen=True)
class CrossValidated:
    """All data of the report. Missing data are None."""

    path: Path
    raw: Mapping[str, Any]
    """The content of `summary.json`."""
    recipe: Recipe | None
    """The recipe; None if this version cannot use it."""
    given: GivenTable | None
    """The user's table; None until the runs are taken together, like `joint`."""
    joint: Joint | None
    runs: Mapping[str, RunFiles | None]
    tested: Tested | None
    ranked: Ranked | None
    curve: Curve | None

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return the facts of the protein and the targets; empty if no run was evaluated."""
        found = (run.evaluation.raw.get("facts") for run in self.runs.values() if run and run.evaluation)
        return next((facts for facts in found if facts), {})

    @property
    def targets(self) -> Sequence[str]:
        """Return the names of the measured values."""
        known = self.facts.get("targets") or (self.tested.targets if self.tested else ())
        return [str(name) for name in known] or ["value"]

    @property
    def wild_type(self) -> Mapping[int, str]:
        """Return the letter of each known residue, counted from 0."""
        letters = dict(enumerate(str(self.facts.get("protein", ""))))
        variants = self.tested.mutations if self.tested else []
        named = [*(m for one in variants for m in one), *(self.ranked.mutations if self.ranked else ())]
        return letters | {mutation.position: mutation.wild for mutation in named}


def is_cross_validated(run: Path) -> bool:
    """Whether a directory holds several runs of task `variant`, and not a single run.

    Raises:
        InputError: if its summary is damaged.
    """
    if (run / "recipe.yaml").is_file() or not (run / SUMMARY).is_file():
        return False
    return traits(_object(run / SUMMARY).get("task")).reads_table


def read_variants(run: Path) -> CrossValidated:
    """Read the directory of a cross-validated run of variants.

    Raises:
        InputError: if a file is damaged.
    """
    raw = _object(run / SUMMARY)
    names = raw.get("runs")
    if not isinstance(names, list) or not isinstance(raw.get("recipe"), dict):
        raise _damaged(run / SUMMARY, "it names no runs, or has no recipe")
    try:
        recipe = Recipe.model_validate(raw["recipe"])
    except ValidationError:  # a recipe of another version; the results are still readable
        recipe = None
    runs = {str(name): read(run / str(name)) if (run / str(name)).is_dir() else None for name in names}
    given, joint = None, None
    if "table" in raw:
        with _checked(run / SUMMARY, "what it says of the table is not whole"):
            given = TypeAdapter(GivenTable).validate_python(raw["table"])
    if "joint" in raw:
        with _checked(run / SUMMARY, "its joint results are not whole"):
            joint = TypeAdapter(Joint).validate_python(raw["joint"] | {"verdict": raw["verdict"]})
    return CrossValidated(
        path=run,
        raw=raw,
        recipe=recipe,
        given=given,
        joint=joint,
        runs=runs,
        tested=_tested(run / OUT_OF_FOLD),
        ranked=_ranked(run / RANKED),
        curve=_curve(run / CURVE),
    )


def _damaged(path: Path, why: object) -> InputError:
    return InputError(f"{path}: damaged ({why}); {AGAIN}")


@contextmanager
def _checked(path: Path, why: str) -> Iterator[None]:
    """Turn any missing or unexpected value that a `with` block meets into one sentence."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError):
        raise _damaged(path, why) from None


def _object(path: Path) -> dict[str, Any]:
    try:
        return json_object(path) or {}
    except InputError:
        raise _damaged(path, "not a JSON object") from None


def _table(path: Path) -> tuple[list[str], list[list[str]]] | None:
    """Read header and rows."""
    if not path.is_file():
        return None
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = csv.reader(file, strict=True)
            head, body = next(rows, []), list(rows)
    except (csv.Error, UnicodeDecodeError):
        raise _damaged(path, "not a CSV table") from None
    if uneven := [n for n, row in enumerate(body, 1) if len(row) != len(head)]:
        raise _damaged(path, f"row {uneven[0]:,} has not as many cells as the header")
    return head, body


def _mutations(path: Path, names: Sequence[str]) -> list[tuple[Mutation, ...]]:
    try:
        return [parse_variant(name) for name in names]
    except InputError as error:
        raise _damaged(path, error) from None


def _tested(path: Path) -> Tested | None:
    found = _table(path)
    if found is None:
        return None
    head, body = found
    # The columns of the user's table come first. If one of them has a name of ours, all our columns have a prefix.
    prefix = "esmshard " if "esmshard variant" in head else ""
    if f"{prefix}variant" not in head:
        raise _damaged(path, "no column 'variant'")
    first = len(head) - 1 - head[::-1].index(f"{prefix}variant")
    place = {name.removeprefix(prefix): first + n for n, name in enumerate(head[first:])}
    several = [name.removeprefix("predicted ") for name in place if name.startswith("predicted ")]
    keys = (
        [("measured", "predicted")] if "predicted" in place else [(f"measured {n}", f"predicted {n}") for n in several]
    )
    if not keys or not {"fold", *(key for pair in keys for key in pair)} <= place.keys():
        raise _damaged(path, "no columns 'fold', 'measured' and 'predicted'")
    has_one = [row for row in body if any(row[place[said]] for _, said in keys)]
    # a variant that was measured in several rows has the same values in each
    once = {row[first]: row for row in has_one}
    measured_NT, predicted_NT = (
        np.array([[number(row[place[pair[k]]]) for pair in keys] for row in once.values()]).reshape(-1, len(keys))
        for k in (0, 1)
    )
    mutations = _mutations(path, list(once))
    with _checked(path, "a predicted variant has no fold"):
        fold_N = np.array([int(row[place["fold"]]) for row in once.values()], dtype=np.int64)
    return Tested(mutations, several, measured_NT, predicted_NT, fold_N, len(body), len(has_one))


def _ranked(path: Path) -> Ranked | None:
    found = _table(path)
    if found is None:
        return None
    head, body = found
    keys = [name for name in head if name == "prediction" or name.startswith("prediction ")]
    if not keys or not {"mutant", "rank"} <= set(head):
        raise _damaged(path, "no columns 'mutant', 'prediction' and 'rank'")
    rows = [dict(zip(head, row, strict=True)) for row in body]
    ranks = [number(row["rank"]) for row in rows]
    if not np.isfinite(ranks).all():
        raise _damaged(path, "a row has no rank")
    rows = [rows[n] for n in np.argsort(ranks, kind="stable")]
    variants = _mutations(path, [row["mutant"] for row in rows])
    if any(len(one) != 1 for one in variants):
        raise _damaged(path, "a row is no single substitution")
    values_NT = np.array([[number(row[key]) for key in keys] for row in rows]).reshape(-1, len(keys))
    return Ranked(rows, [one[0] for one in variants], values_NT)


def _curve(path: Path) -> Curve | None:
    if not path.is_file():
        return None
    raw = _object(path)
    with _checked(path, "its points are not whole"):
        points = sorted(((point["variants"], point["metrics"]) for point in raw["points"]), key=lambda point: point[0])
        return TypeAdapter(Curve).validate_python(raw | {"points": points})
