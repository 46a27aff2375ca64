"""Several runs of one recipe, over seeds and cross-validation folds, and their summary."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from esmshard.data.splits.variant_records import OUT_OF_FOLD
from esmshard.errors import InputError, UsageError
from esmshard.files import read_json, replace_json
from esmshard.recipe.sections import Recipe
from esmshard.tasks.base import MAIN
from esmshard.tasks.metrics import Interval
from esmshard.train.evaluate import aligned, in_sample, verdict
from esmshard.train.run_dir import read_status

SUMMARY = "summary.json"
CURVE = "learning_curve.json"
JOINT_FILES = (SUMMARY, OUT_OF_FOLD, CURVE, "ranked.csv", "ranked.json", "report.html")
"""The files that are written beside the directories of several runs when all runs are done."""


@dataclass(frozen=True)
class Repeat:
    """One of the runs."""

    name: str
    """The name of the run's directory, such as `seed-0-fold-2`."""
    out: Path
    overrides: tuple[str, ...]
    """The settings of the recipe that this run changes, as `KEY=VALUE`."""


def repeats(recipe: Recipe, seeds: int, folds: int | None) -> list[Repeat]:
    """Return one run for each seed and fold. Seeds count up from the recipe's seed. The folds are the same for each
    seed.

    Raises:
        UsageError: if the recipe already names one fold.
    """
    if recipe.data.folds is not None:
        raise UsageError("--seeds and --folds make runs of the whole recipe, and it has data.folds; remove that key")
    found: list[Repeat] = []
    parts: list[int | None] = [None] if folds is None else list(range(folds))
    for seed in range(recipe.train.seed, recipe.train.seed + seeds):
        for fold in parts:
            name = f"seed-{seed}" + ("" if fold is None else f"-fold-{fold}")
            out = Path(recipe.out) / name
            overrides = [f"train.seed={seed}", f"out={out}"]
            if fold is not None:
                overrides += [f"data.folds={folds}", f"data.fold={fold}"]
            found.append(Repeat(name, out, tuple(overrides)))
    return found


def is_done(run: Path, steps: int | None = None) -> bool:
    """Whether a run of an earlier call has ended without an error, and had these steps, if they are given."""
    found = read_status(run)
    ended = found is not None and found["state"] == "done" and (run / "evaluation.json").is_file()
    return ended and (steps is None or (found is not None and found["steps"] >= steps))


def check_out(out: Path) -> None:
    """Refuse to write the joint results of several runs over files that no such runs left. Nothing is changed."""
    names = [name for name in JOINT_FILES if os.path.lexists(out / name)]
    try:
        is_left = "verdict" in read_json(out / SUMMARY)
    except (OSError, ValueError, TypeError):
        is_left = False
    if names and not is_left:
        raise UsageError(
            f"{out}: holds {', '.join(names)}, which no runs left there, and which their results would replace; "
            "choose another directory with out=DIR"
        )


def summarise(out: Path, runs: Sequence[Repeat], folds: int | None) -> str:
    """Write `summary.json` to `out`, and return its table as text: each metric of each run, mean, deviation and
    interval.

    The 95% interval is Student's, over runs. The interval shows how much the mean would change with other seeds (and
    folds). The interval does not show how it would change with other test proteins; `evaluation.json` of each run does.
    Runs of different folds share training records, so their interval is somewhat too narrow (Bengio and Grandvalet
    2004, JMLR 5:1089).
    """
    evaluations = {run.name: _read(out / run.name / "evaluation.json") for run in runs}
    first = next(iter(evaluations.values()))
    table: dict[str, dict[str, Any]] = {}
    for method in first["metrics"]:
        table[method] = {}
        for metric in first["columns"]:
            cells = {name: found["metrics"].get(method, {}).get(metric) for name, found in evaluations.items()}
            values = {name: cell["value"] for name, cell in cells.items() if cell and cell["value"] is not None}
            x = np.array(list(values.values()))
            mean = _mean(x.tolist())
            table[method][metric] = {
                "mean": mean.value if len(x) else None,
                "deviation": float(x.std(ddof=1)) if len(x) > 1 else None,
                "low": mean.low if len(x) > 1 else None,
                "high": mean.high if len(x) > 1 else None,
                "runs": values,
            }
    said = _verdict(evaluations, first["columns"][0], lower_is_better=first["lower_is_better"])
    summary = {
        "task": first["task"],
        "recipe": first["recipe"] | {"out": str(out)},
        "runs": [run.name for run in runs],
        "folds": folds,
        "columns": first["columns"],
        "lower_is_better": first["lower_is_better"],
        "interval": "95% interval of the mean over runs (Student's t)" if len(runs) > 1 else "no interval of one run",
        "metrics": table,
        "verdict": said,
    }
    replace_json(out / SUMMARY, summary)
    rows = [[method, *(_cell(row[metric]) for metric in first["columns"])] for method, row in table.items()]
    head = f"{len(runs)} runs: mean and 95% interval over runs; {MAIN} and its baselines"
    return "\n".join([head, aligned([["", *first["columns"]], *rows]), said])


def _mean(values: Sequence[float]) -> Interval:
    """Return the mean over runs, with Student's 95% interval. Fewer than two runs have no interval."""
    from scipy.special import stdtrit  # not from scipy.stats, whose import takes ten times as long

    x = np.array(values, dtype=np.float64)
    if len(x) < 2:
        return Interval(float(x[0]) if len(x) else math.nan, math.nan, math.nan)
    mean, half = float(x.mean()), float(stdtrit(len(x) - 1, 0.975) * x.std(ddof=1) / math.sqrt(len(x)))
    return Interval(mean, mean - half, mean + half)


def _verdict(evaluations: Mapping[str, Mapping[str, Any]], metric: str, *, lower_is_better: bool) -> str:
    """Return a sentence: whether fine-tuning was better than the best baseline. Differences are paired, run by run."""

    def values(table: str, method: str) -> Interval:
        cells = [found[table].get(method, {}).get(metric) or {} for found in evaluations.values()]
        return _mean([cell["value"] for cell in cells if cell.get("value") is not None])

    first = next(iter(evaluations.values()))
    means = {method: values("metrics", method) for method in first["metrics"]}
    gains = {method: values("differences", method) for method in first["differences"]}
    basis = f"Student's t, paired over {len(evaluations)} runs"
    seen, records = (max(found.get(key, 0) for found in evaluations.values()) for key in ("in_sample", "records"))
    return in_sample(seen, records) + verdict(metric, means, gains, basis, lower_is_better=lower_is_better)


def _cell(found: dict[str, Any]) -> str:
    if found["mean"] is None:
        return "-"
    return f"{found['mean']:.3f}" + ("" if found["low"] is None else f" [{found['low']:.3f}, {found['high']:.3f}]")


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read_json(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; go on with --resume auto") from None
    except ValueError as error:
        raise InputError(f"{path}: damaged ({error}); remove its directory, and go on with --resume auto") from None
    return found
