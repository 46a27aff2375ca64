"""The files that a sweep writes beside its trials: `sweep.json`, `sweep.csv` and `best.yaml`."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from esmshard import spreadsheet
from esmshard.errors import InputError
from esmshard.files import replace_json, replace_text, replacing
from esmshard.launch.preemption import Preempted
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe
from esmshard.recipe.sweep_file import override, shown, value_text
from esmshard.train.experiments.repeats import Repeat
from esmshard.train.experiments.search import Outcome, Search, SearchTrial
from esmshard.train.records import goodput, status
from esmshard.train.records.attempt import METRICS
from esmshard.train.records.standing import SWEEP
from esmshard.train.records.verdict import aligned

TABLE, BEST = "sweep.csv", "best.yaml"
SWEEP_FILES = (SWEEP, TABLE, BEST)


@dataclass(frozen=True)
class SweptRecipe:
    """The recipe of a sweep, and how its runs are compared."""

    path: Path
    overrides: tuple[str, ...]
    """The settings that all runs of the sweep change."""
    recipe: Recipe
    headline: str
    """The metric of the task that models are chosen by, such as `long P@L`."""
    headline_lower: bool
    """Whether lower values of the headline are better."""
    by_loss: bool
    """Whether trials are compared by the validation loss, and not by the headline."""

    @property
    def metric(self) -> str:
        """The validation value that trials are compared by."""
        return "loss" if self.by_loss else self.headline

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values of `metric` are better."""
        return self.by_loss or self.headline_lower

    def with_settings(self, own: Sequence[str]) -> Recipe:
        """Return the recipe of one run."""
        return recipe_file.load(self.path, [*self.overrides, *own])


def own_settings(trial: SearchTrial) -> list[str]:
    """Return the settings that the search chose for a trial, as they are typed."""
    return [override(key, value) for key, value in trial.values.items()]


def outcome(swept: SweptRecipe, run: Path, code: int, own: Sequence[str]) -> Outcome:
    """Return the end of a trial whose processes have ended.

    The value is that of the model that such a run gives: the last validation, or that of the best checkpoint where the
    recipe keeps the best.

    Args:
        swept: the recipe of the sweep.
        run: the directory of the trial.
        code: the exit code of its processes; not that of a request to stop.
        own: the settings of the trial, as they are typed.
    """
    assert code != Preempted.exit_code
    path = run / METRICS
    lines = goodput.parse(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else []
    validations = [line for line in lines if line.get("split") == "valid"]
    step = max((int(line.get("step", 0)) for line in lines if "event" not in line), default=0)
    if code:
        status.mark_failed(run, "the processes were ended from outside", code)
        known = status.read(run)
        what = f"its processes ended with exit code {code}; the reason is on stderr"
        if known is not None and known["exit_code"] == code:
            what = known["message"]
        return Outcome("failed", None, step, what, code)
    last = [line for line in lines if line.get("event") in ("pruned", "attempt")][-1]
    is_pruned, sign = last["event"] == "pruned", 1 if swept.headline_lower else -1
    chosen = validations[-1]
    if is_pruned or swept.with_settings(own).keeps_best:
        defined = [line for line in validations if line.get(swept.headline) is not None]
        chosen = min(defined, key=lambda line: sign * float(line[swept.headline]), default=chosen)
    value, metric = chosen.get(swept.metric), swept.metric
    if is_pruned:
        return Outcome("pruned", value, step, str(last["reason"]))
    if value is None or not math.isfinite(value):
        return Outcome("failed", None, step, f"valid {metric} is undefined after the last step")
    return Outcome("complete", float(value), step, f"valid {metric} {value:.4g} after step {chosen['step']}")


def write(search: Search, swept: SweptRecipe, **more: Any) -> dict[str, Any]:
    """Write the state of the search to its files, and return the content of `sweep.json`.

    Args:
        search: the search.
        swept: the recipe.
        **more: further entries of `sweep.json`.
    """
    trials, best = search.trials, search.best
    found: dict[str, Any] = {
        "task": swept.recipe.task.name,
        "recipe": swept.recipe.model_dump(mode="json"),
        "sweep": search.settings.model_dump(mode="json"),
        "metric": swept.metric,
        "lower_is_better": search.lower_is_better,
        "trials_wanted": search.count,
        "state": "searching",
        "best": None if best is None else best.number,
        "trials": [_entry(trial) for trial in trials],
        "importance": {},
        "selected": None if best is None else selected(search, swept, best),
        "runs": [],
        **more,
    }
    with search.alone():
        replace_json(search.out / SWEEP, found)
        with replacing(search.out / TABLE) as file:
            writer = spreadsheet.writer(file)
            writer.writerow(["trial", *search.settings.space, "state", f"valid {swept.metric}", "step", "message"])
            for one in found["trials"]:
                values = [_cell(one["values"].get(key)) for key in search.settings.space]
                ended = [one["state"], _cell(one["value"]), _cell(one["step"]), one["message"]]
                writer.writerow([str(one["number"]), *values, *ended])
        if best is not None:
            settings = [*own_settings(best), f"out={search.out / 'best'}"]
            head = f"# The best of {len(trials)} trials: {shown(best.values)}\n"
            replace_text(search.out / BEST, head + recipe_file.dump(swept.with_settings(settings)))
    return found


def _entry(trial: SearchTrial) -> dict[str, Any]:
    ended: Mapping[str, Any] = (
        asdict(trial.outcome)
        if trial.outcome
        else {
            "state": "running",
            "value": None,
            "step": max(trial.validations, default=0),
            "message": "",
            "exit_code": None,
        }
    )
    return {"number": trial.number, "values": trial.values, **ended, "validations": trial.validations}


def _cell(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def selected(search: Search, swept: SweptRecipe, best: SearchTrial) -> str:
    """Return a sentence on the validation value of the best trial, which is too good an estimate."""
    assert best.outcome is not None
    assert best.outcome.value is not None
    ended = sum(trial.outcome is not None and trial.outcome.state == "complete" for trial in search.trials)
    return (
        f"Trial {best.number} is the best of {ended} that were trained to their end: valid {swept.metric} "
        f"{best.outcome.value:.4g} with {shown(best.values)}. This value is optimistic: the trial was selected by it."
    )


def honest(swept: SweptRecipe, runs: Sequence[Repeat]) -> str:
    """Return a sentence on the runs of the best settings with new seeds, whose values nothing was selected by."""
    found = [outcome(swept, run.out, 0, run.overrides).value for run in runs]
    values = [value for value in found if value is not None]
    if not values:
        raise InputError(
            f"{runs[0].out}: no validation with a value in {METRICS}; remove it, and go on with --resume auto"
        )
    each = ", ".join(f"{value:.4g}" for value in values)
    seeds = f"{len(runs)} new seed{'s' if len(runs) > 1 else ''}"
    return (
        f"The same settings with {seeds}: valid {swept.metric} {each}. No trial has seen the test set; the test values "
        "of these runs are the result."
    )


def as_text(found: Mapping[str, Any], most: int = 10) -> str:
    """Format the best trials as a table for the terminal."""
    sign = 1 if found["lower_is_better"] else -1
    ended = [one for one in found["trials"] if one["state"] == "complete"]
    ended.sort(key=lambda one: sign * float(one["value"]))
    keys = list(found["sweep"]["space"])
    rows = [
        [str(one["number"]), f"{one['value']:.4g}", *(value_text(one["values"][key]) for key in keys)] for one in ended
    ]
    counts = {state: sum(one["state"] == state for one in found["trials"]) for state in ("pruned", "failed")}
    others = "".join(f", {count} {state}" for state, count in counts.items() if count)
    head = f"{len(found['trials'])} trials{others}; those that were trained to their end, best first:"
    return "\n".join([head, aligned([["trial", f"valid {found['metric']}", *keys], *rows[:most]])])
