"""The page about a sweep: its trials, and the test of the best settings. Optuna's dashboard shows the rest."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from esmshard.io.tables import counted
from esmshard.recipe.sweep_file import shown, value_text
from esmshard.report import charts
from esmshard.report.files import SweepFiles, number
from esmshard.report.parts import Figure, PageTable, Section, cell, unit_text
from esmshard.tasks.base import MAIN
from esmshard.tasks.metrics import Interval

MOST_TRIALS = 50
"""The most rows of the table of trials. sweep.json has all of them."""


def about(found: SweepFiles) -> str:
    """Describe model and search in a line."""
    recipe, sweep = found.raw["recipe"], found.raw["sweep"]
    return (
        f"A sweep of task {found.raw['task']}, model {recipe['model']['name']} ({recipe['init']}), adaptation "
        f"{recipe['adapt']['method']}: sampler {sweep['sampler']}, pruner {sweep['pruner']}."
    )


def states(found: SweepFiles) -> list[str]:
    """Return sentences: the best trial, why its value is too good, and the test of its settings."""
    texts = [found.raw["selected"], found.raw.get("honest"), (found.summary or {}).get("verdict")]
    if found.summary is None:
        texts.append("The best settings are not tested yet.")
    return [str(text) for text in texts if text]


def facts(found: SweepFiles) -> list[tuple[str, str, str]]:
    """Return the numbers on top of the page: name, value and explanation."""
    counts = {state: sum(one["state"] == state for one in found.trials) for state in ("pruned", "failed", "running")}
    note = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "all trained to their end"
    rows = [("trials", f"{len(found.trials):,} of {found.raw['trials_wanted']:,}", note)]
    if (best := found.best) is not None:
        rows.append((f"best validation {found.raw['metric']}", unit_text(best["value"]), "optimistic: selected by it"))
    if (tested := _tested(found)) is not None:
        column, row = tested
        count = counted(len(row["runs"]), "new seed")
        rows.append((f"test {column}", unit_text(number(row["mean"])), f"mean over {count}"))
    return rows


def _tested(found: SweepFiles) -> tuple[str, Mapping[str, Any]] | None:
    if found.summary is None:
        return None
    column = found.summary["columns"][0]
    return column, found.summary["metrics"][MAIN][column]


def history(found: SweepFiles) -> Section:
    """Draw the value of each trial, and the best one so far."""
    section = ("history", "Trials in their order")
    if not found.complete:
        return Section(*section, missing="No trial was trained to its end.")
    x_N, y_N = _points(found, "number")
    best_N = (np.minimum if found.raw["lower_is_better"] else np.maximum).accumulate(y_N)

    def draw(axes: Any) -> None:
        charts.cloud(axes, x_N, y_N)
        axes.step(x_N, best_N, where="post", color=charts.ORANGE, linewidth=1.3)
        charts.name_axes(axes, "trial", f"valid {found.raw['metric']}")

    caption = f"{counted(len(x_N), 'trial')} trained to the end, and the best so far (orange)."
    return Section(*section, figures=[Figure(caption, charts.chart("history", draw))])


def _points(found: SweepFiles, key: str) -> tuple[Any, Any]:
    rows = [(float(one[key]), float(one["value"])) for one in found.complete]
    return np.array([x for x, _ in rows]), np.array([y for _, y in rows])


def table(found: SweepFiles) -> Section:
    """Return the trials, the best first, then those that did not end or failed."""
    sign = 1 if found.raw["lower_is_better"] else -1
    order = {"complete": 0, "running": 1, "pruned": 2, "failed": 3}

    def place(one: Mapping[str, Any]) -> tuple[int, float]:
        value = number(one["value"])
        return order[one["state"]], sign * value if math.isfinite(value) else math.inf

    rows = [
        [
            str(one["number"]),
            one["state"],
            unit_text(number(one["value"])),
            str(one["step"]),
            *(value_text(one["values"][key]) if key in one["values"] else "-" for key in found.keys),
            one["message"] if one["state"] in ("failed", "pruned") else "",
        ]
        for one in sorted(found.trials, key=place)
    ]
    head = ["trial", "state", f"valid {found.raw['metric']}", "steps", *found.keys, ""]
    note = f"The first {MOST_TRIALS} of {len(rows)}; sweep.json has all." if len(rows) > MOST_TRIALS else ""
    return Section("trials", "Trials", tables=[PageTable(head, rows[:MOST_TRIALS], note)])


def tested(found: SweepFiles) -> Section:
    """Return the test of the best settings with new seeds."""
    section = ("tested", "Test of the best settings")
    if found.summary is None:
        return Section(*section, missing="It is made when all trials have ended.")
    columns = found.summary["columns"]
    rows = [
        [name, *(cell(Interval(*(number(row[column][key]) for key in ("mean", "low", "high")))) for column in columns)]
        for name, row in found.summary["metrics"].items()
    ]
    count = counted(len(found.summary["runs"]), "run")
    texts = [f"{count} with new seeds, each tested once. No trial has seen the test set."]
    note = f"Mean over runs and {found.summary['interval']}."
    return Section(*section, texts, tables=[PageTable(["", *columns], rows, note)])


def recipe(found: SweepFiles) -> Section:
    """Return the search, and how to train the best settings again."""
    texts = ["The settings of the search. best.yaml is the recipe with the best settings, for `esmshard finetune`."]
    if (best := found.best) is not None:
        texts.append(f"Best: {shown(best['values'])}.")
    return Section("recipe", "Search", texts, code=json.dumps(found.raw["sweep"], indent=1))


SECTIONS: Sequence[Callable[[SweepFiles], Section]] = (tested, history, table, recipe)
"""The sections of the page from top to bottom."""
