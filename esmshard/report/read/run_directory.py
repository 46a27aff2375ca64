"""The files of a run's directory, read for a report. An unfinished run has fewer files than a finished run."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError, UsageError
from esmshard.files import parse_json
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe
from esmshard.tasks.metrics import Interval
from esmshard.tasks.registry import new_task
from esmshard.train.run_dir import METRICS, Goodput, Status, goodput, is_step, metrics_of, read_status

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


def read(run: Path) -> RunFiles:
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
            recipe = recipe_file.load(run / "recipe.yaml", of_run=True)
        except UsageError as error:  # a recipe of another version; the results are still readable
            problem = error.problems[0]
    lines = _lines(run)
    steps = [line for line in lines if is_step(line)]
    validations = [line for line in lines if line.get("split") == "valid" and "step" in line]
    try:
        spent = goodput(lines)
    except (KeyError, TypeError):
        raise InputError(f"{run / METRICS}: damaged (an event without its numbers); the run cannot be shown") from None
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
    try:
        metrics = {method: intervals(row) for method, row in raw["metrics"].items()}
        differences = {method: intervals(row) for method, row in raw["differences"].items()}
        columns = raw["columns"]
        main = next(iter(metrics.values()))
        asked = {"task", "step", "split", "records", "interval", "lower_is_better"}
        if not columns or not main.keys() >= set(columns) or not raw.keys() >= asked:
            raise KeyError
    except (KeyError, TypeError, AttributeError, StopIteration):
        raise InputError(
            f"{path}: damaged, or written by another version; write it anew with `esmshard evaluate MODEL DATA -o DIR`"
        ) from None
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
        found = parse_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{path}: damaged (not a JSON object); remove it, or write it anew")
    return found


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
