"""The files of a run, of a cross-validated run of variants and of a sweep, read for a report. An unfinished run has
fewer files than a finished run.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, TypeAdapter, ValidationError

from esmshard.data.splits.variant_records import OUT_OF_FOLD
from esmshard.data.variants.substitutions import Mutation, parse_variant
from esmshard.errors import InputError, UsageError, reading
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe
from esmshard.tasks.base import MAIN
from esmshard.tasks.metrics import Interval
from esmshard.tasks.registry import new_task, traits
from esmshard.train.cross_validation import CURVE, SUMMARY
from esmshard.train.evaluate import strongest
from esmshard.train.run_dir import METRICS, SWEEP, Goodput, Status, goodput, is_step, metrics_of, read_status

Values = npt.NDArray[np.float64]

STEP_COLUMNS = (
    *("step", "loss", "lr", "grad_norm", "records", "residues"),
    *("step_s", "residues_per_s", "peak_memory_bytes"),
)
"""The columns of steps that a report shows."""


@dataclass(frozen=True)
class Evaluation:
    """The checked content of `evaluation.json`."""

    metrics: Mapping[str, Mapping[str, Interval]]
    """Intervals by method and metric. The fine-tuned model is the first method."""
    differences: Mapping[str, Mapping[str, Interval]]
    """The differences fine-tuned minus each baseline, paired."""
    raw: Mapping[str, Any]

    @property
    def main(self) -> str:
        """Return the method that the others are compared with."""
        return next(iter(self.metrics))


@dataclass(frozen=True)
class Proteins:
    """The content of `per_protein.csv`."""

    ids: Sequence[str]
    length_N: Values
    columns: Mapping[str, Values]
    """Values by column, float64 [N]; NaN where a protein has no value."""


@dataclass(frozen=True)
class Headline:
    """The metric that models are chosen by."""

    name: str
    lower_is_better: bool | None
    """Whether lower values are better; None if unknown."""


@dataclass(frozen=True)
class RunFiles:
    """The content of a run directory. Missing files are None, or empty."""

    path: Path
    recipe: Recipe | None
    recipe_text: str | None
    recipe_problem: str | None
    """The reason why the existing recipe cannot be used."""
    versions: Mapping[str, Any]
    status: Status | None
    evaluation: Evaluation | None
    proteins: Proteins | None
    steps: Mapping[str, Values]
    """The values of STEP_COLUMNS, float64 [S] each; NaN where a step has no value."""
    validations: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    goodput: Goodput
    headline: Headline | None

    @property
    def task(self) -> str:
        """Return the name of the task; empty if it is unknown."""
        if self.evaluation is not None:
            return str(self.evaluation.raw["task"])
        return self.recipe.task.name if self.recipe is not None else ""


def read_run(run: Path) -> RunFiles:
    """Read a run directory.

    Raises:
        InputError: if there is no run, or a file is damaged.
    """
    if not run.is_dir():
        raise InputError(f"{run}: no such directory; give the directory of a run (its recipe's `out`)")
    known = ("recipe.yaml", "status.json", METRICS, "evaluation.json")
    if not any((run / name).is_file() for name in known):
        raise InputError(f"{run}: holds no run ({', '.join(known)} are missing); give the directory of one")
    recipe_text, recipe, problem = _text(run / "recipe.yaml"), None, None
    if recipe_text is not None:
        try:
            recipe = recipe_file.load(run / "recipe.yaml")
        except UsageError as error:  # a recipe of another version; the results are still readable
            problem = error.problems[0]
    lines = _lines(run)
    steps = [line for line in lines if is_step(line)]
    validations = [line for line in lines if line.get("split") == "valid" and "step" in line]
    with reading(str(run / METRICS), "remove it to see the rest"):
        spent = goodput(lines)
    evaluation = _evaluation(run / "evaluation.json")
    return RunFiles(
        path=run,
        recipe=recipe,
        recipe_text=recipe_text,
        recipe_problem=problem,
        versions=json_object(run / "versions.json") or {},
        status=read_status(run),
        evaluation=evaluation,
        proteins=_proteins(run / "per_protein.csv"),
        steps={name: np.array([number(line.get(name)) for line in steps]) for name in STEP_COLUMNS},
        validations=validations,
        events=[line for line in lines if "event" in line],
        goodput=spent,
        headline=_headline(recipe, evaluation, validations),
    )


def number(value: object) -> float:
    """Return a number of a JSON or CSV file; NaN for anything else.

    >>> number(2), number("0.5"), number(None), number("x")
    (2.0, 0.5, nan, nan)
    """
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return float("nan")


def _headline(
    recipe: Recipe | None, evaluation: Evaluation | None, validations: Sequence[Mapping[str, Any]]
) -> Headline | None:
    if evaluation is not None:
        return Headline(evaluation.raw["columns"][0], bool(evaluation.raw["lower_is_better"]))
    names = [name for name in (validations[0] if validations else ()) if name not in ("step", "split", "loss", "time")]
    lower = new_task(recipe.task, {}).lower_is_better if recipe is not None else None
    return Headline(names[0], lower) if names else None


def _lines(out: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl without the values of single ranks, which take gigabytes for a long run on many ranks."""
    lines = [{name: value for name, value in line.items() if not isinstance(value, dict)} for line in metrics_of(out)]
    path = out / METRICS
    if not lines and path.is_file() and path.stat().st_size:
        raise InputError(f"{path}: damaged, no line of it is JSON; the run cannot be shown")
    return lines


def _evaluation(path: Path) -> Evaluation | None:
    raw = json_object(path)
    if raw is None:
        return None
    with reading(str(path), "write it anew with `esmshard evaluate MODEL DATA -o DIR`"):
        metrics = {method: intervals(row) for method, row in raw["metrics"].items()}
        differences = {method: intervals(row) for method, row in raw["differences"].items()}
        absent = {"task", "step", "split", "records", "interval", "lower_is_better"} - raw.keys()
        absent |= set(raw["columns"]) - next(iter(metrics.values())).keys()
        if absent or not raw["columns"]:
            raise ValueError(f"{', '.join(sorted(absent)) or 'a metric'} is missing")
    return Evaluation(metrics, differences, raw)


def intervals(row: Mapping[str, Mapping[str, Any]]) -> dict[str, Interval]:
    """Read intervals from `value`, `low` and `high`, each a number or null."""
    return {
        name: Interval(number(found["value"]), number(found["low"]), number(found["high"]))
        for name, found in row.items()
    }


def _proteins(path: Path) -> Proteins | None:
    if not path.is_file():
        return None
    with open(path, encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        head, body = next(rows, []), list(rows)
    if head[:2] != ["id", "length"] or any(len(row) != len(head) for row in body):
        raise InputError(f"{path}: damaged (not a table that begins with id and length); evaluate the model again")
    values = {name: np.array([number(row[k]) for row in body]) for k, name in enumerate(head) if k}
    length_N = values.pop("length")
    return Proteins([row[0] for row in body], length_N, {n: v for n, v in values.items() if np.isfinite(v).any()})


def json_object(path: Path) -> dict[str, Any] | None:
    """Read the object of a JSON file; None if there is no such file.

    Raises:
        InputError: if the file holds no JSON object.
    """
    text = _text(path)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{path}: damaged (not a JSON object); remove it, or write it anew")
    return found


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


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
    return traits((json_object(run / SUMMARY) or {}).get("task")).reads_table


def read_variants(run: Path) -> CrossValidated:
    """Read the directory of a cross-validated run of variants.

    Raises:
        InputError: if a file is damaged.
    """
    with reading(str(run / SUMMARY), AGAIN):
        raw = json_object(run / SUMMARY) or {}
        names = [str(name) for name in raw["runs"]]
        given = TypeAdapter(GivenTable).validate_python(raw["table"]) if "table" in raw else None
        joint = (
            TypeAdapter(Joint).validate_python(raw["joint"] | {"verdict": raw["verdict"]}) if "joint" in raw else None
        )
        try:
            recipe = Recipe.model_validate(raw["recipe"])
        except ValidationError:  # a recipe of another version; the results are still readable
            recipe = None
    runs = {name: read_run(run / name) if (run / name).is_dir() else None for name in names}
    with reading(str(run / OUT_OF_FOLD), AGAIN):
        tested = _tested(run / OUT_OF_FOLD)
    with reading(str(run / RANKED), AGAIN):
        ranked = _ranked(run / RANKED)
    with reading(str(run / CURVE), AGAIN):
        curve = _curve(run / CURVE)
    return CrossValidated(run, raw, recipe, given, joint, runs, tested, ranked, curve)


def _table(path: Path) -> tuple[list[str], list[list[str]]] | None:
    """Read header and rows."""
    if not path.is_file():
        return None
    with open(path, encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        head, body = next(rows, []), list(rows)
    if uneven := [n for n, row in enumerate(body, 1) if len(row) != len(head)]:
        raise ValueError(f"row {uneven[0]:,} has not as many cells as the header")
    return head, body


def _tested(path: Path) -> Tested | None:
    found = _table(path)
    if found is None:
        return None
    head, body = found
    # The columns of the user's table come first. If one of them has a name of ours, all our columns have a prefix.
    prefix = "esmshard " if "esmshard variant" in head else ""
    first = len(head) - 1 - head[::-1].index(f"{prefix}variant")
    place = {name.removeprefix(prefix): first + n for n, name in enumerate(head[first:])}
    several = [name.removeprefix("predicted ") for name in place if name.startswith("predicted ")]
    keys = (
        [("measured", "predicted")] if "predicted" in place else [(f"measured {n}", f"predicted {n}") for n in several]
    )
    if not keys:
        raise ValueError("there is no column 'predicted'")
    has_one = [row for row in body if any(row[place[said]] for _, said in keys)]
    # a variant that was measured in several rows has the same values in each
    once = {row[first]: row for row in has_one}
    measured_NT, predicted_NT = (
        np.array([[number(row[place[pair[k]]]) for pair in keys] for row in once.values()]).reshape(-1, len(keys))
        for k in (0, 1)
    )
    mutations = [parse_variant(name) for name in once]
    fold_N = np.array([int(row[place["fold"]]) for row in once.values()], dtype=np.int64)
    return Tested(mutations, several, measured_NT, predicted_NT, fold_N, len(body), len(has_one))


def _ranked(path: Path) -> Ranked | None:
    found = _table(path)
    if found is None:
        return None
    head, body = found
    keys = [name for name in head if name == "prediction" or name.startswith("prediction ")]
    rows = [dict(zip(head, row, strict=True)) for row in body]
    ranks = [int(row["rank"]) for row in rows]
    rows = [rows[n] for n in np.argsort(ranks, kind="stable")]
    mutations = [mutation for row in rows for mutation in parse_variant(row["mutant"])]
    values_NT = np.array([[number(row[key]) for key in keys] for row in rows]).reshape(-1, len(keys))
    return Ranked(rows, mutations, values_NT)


def _curve(path: Path) -> Curve | None:
    raw = json_object(path)
    if raw is None:
        return None
    points = sorted(((point["variants"], point["metrics"]) for point in raw["points"]), key=lambda point: point[0])
    return TypeAdapter(Curve).validate_python(raw | {"points": points})


@dataclass(frozen=True)
class SweepFiles:
    """A sweep, which may be unfinished."""

    path: Path
    raw: Mapping[str, Any]
    """The content of sweep.json."""
    keys: list[str]
    """The settings that were searched."""
    trials: list[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    """The content of summary.json: the tests of the best settings; None until they are done."""

    @property
    def complete(self) -> list[Mapping[str, Any]]:
        """The trials that were trained to their end, in their order."""
        return [one for one in self.trials if one["state"] == "complete"]

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The best trial; None until one was trained to its end."""
        return next((one for one in self.trials if one["number"] == self.raw["best"]), None)


def is_sweep(run: Path) -> bool:
    """Whether a directory holds a sweep."""
    return (run / SWEEP).is_file()


def read_sweep(out: Path) -> SweepFiles:
    """Read the directory of a sweep.

    Raises:
        InputError: if a file is damaged.
    """
    raw = json_object(out / SWEEP)
    assert raw is not None
    if not isinstance(raw.get("trials"), list) or not isinstance(raw.get("sweep"), dict):
        raise InputError(f"{out / SWEEP}: damaged; remove it, and go on with --resume auto")
    summary = json_object(out / SUMMARY) if raw["state"] == "done" else None
    return SweepFiles(out, raw, list(raw["sweep"]["space"]), raw["trials"], summary)
