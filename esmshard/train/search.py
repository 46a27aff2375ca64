"""The search for the best settings of a recipe with Optuna (`esmshard finetune --sweep`).

Each trial is a run with its own processes. The result is `best.yaml`, the recipe with the best settings. The workers of
a sweep share an Optuna study. Its database is a file in the sweep's directory, or a server for workers on several
machines. If a worker sends no more heartbeats, Optuna queues its trial again, to continue from the newest checkpoint.
"""

import json
import math
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from esmshard.errors import InputError, LostProcess, RunFailed, UsageError
from esmshard.io.paths import read_json, replace_json, replace_text
from esmshard.parallel import launch, preemption
from esmshard.progress import say
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe
from esmshard.recipe.sweep_file import SearchSpace, SweepSettings, override, shown
from esmshard.tasks.base import Task
from esmshard.train.run_dir import SWEEP, last_word, metrics_of, read_status

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

DATABASE, DATABASE_LOCK, TRIALS = "optuna.db", "optuna.lock", "trials"
BEST, BEST_LOCK = "best.yaml", "best.lock"
STATES = {"COMPLETE": "complete", "PRUNED": "pruned"}
"""The state of an ended trial in `sweep.json`, by its state in Optuna."""
TRIALS_BY_DEFAULT = 20
HEARTBEAT, GRACE = 10, 60
"""A worker reports every HEARTBEAT seconds. After GRACE seconds without a report, its trial is queued again."""


@dataclass(kw_only=True)
class Search:
    """A worker of a sweep, which trains one trial at a time."""

    name: str
    """The name or path of the recipe, as the user gave it."""
    overrides: Sequence[str]
    """The recipe settings that the user changes for all trials, as texts `KEY=VALUE`."""
    recipe: Recipe
    """The recipe with `overrides`. Its key `out` names the directory of the sweep."""
    settings: SweepSettings
    task: Task
    processes: int
    count: int
    """The total number of trials of all workers."""
    flags: Sequence[str]
    """Command-line options for the run of each trial, besides the recipe and its settings."""
    max_restarts: int

    def __post_init__(self) -> None:
        self.out = Path(self.recipe.out)
        self.metric = "loss" if self.settings.metric == "loss" else self.task.columns[0]
        self.lower_is_better = self.metric == "loss" or self.task.lower_is_better
        # The address of a database server may hold a password.
        self._shared_settings = self.settings.model_dump(mode="json", exclude={"storage"})

    def check_directory(self, *, goes_on: bool) -> None:
        """Raise `UsageError` if the sweep's directory is not empty. With `goes_on`, it may contain a sweep."""
        is_sweep = (self.out / DATABASE_LOCK).is_file()  # another program may have written sweep.json
        is_empty = not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir()))
        if not is_empty and not (is_sweep and goes_on):
            fix = "pass --resume auto to go on or to join its workers, or " if is_sweep else ""
            raise UsageError(f"{self.out}: exists already; {fix}choose another directory with out=DIR")

    def work(self) -> bool:
        """Train trials until no trial is left to begin. Return whether the trials of all workers have ended.

        Raises `InputError` if all trials have ended without a validation value.
        """
        import optuna
        from filelock import FileLock

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.out.mkdir(parents=True, exist_ok=True)
        with FileLock(self.out / DATABASE_LOCK):  # two workers must not create the tables at the same time
            study = self._opened()
        while True:
            optuna.storages.fail_stale_trials(study)
            trials, sweep = study.get_trials(deepcopy=False), self.write(study)
            if len(_by_run(trials)) >= self.count and not any(trial.state.name == "WAITING" for trial in trials):
                break
            study.optimize(self._train, n_trials=1, catch=(LostProcess,))
        if running := sum(trial.state.name == "RUNNING" for trial in trials):
            say(f"no trial is left to begin; other workers train {running}, and the last one trains the best settings")
            return False
        if sweep["best"] is None:
            self.write(study, state="failed")
            raise InputError(f"{self.out}: no trial has a validation value; {sweep['trials'][-1]['message']}")
        print(sweep["selected"])
        return True

    def finish(self) -> None:
        """Write the state `done` to `sweep.json`. Call this after the model with the best settings was tested."""
        replace_json(self.out / SWEEP, read_json(self.out / SWEEP) | {"state": "done"})

    def _opened(self) -> "Study":
        """Open the study of the sweep, or create it. Raise `UsageError` if it is for another recipe or sweep file."""
        import optuna
        from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback

        settings, url = self.settings, self.settings.storage or f"sqlite:///{self.out.absolute() / DATABASE}"
        median = optuna.pruners.MedianPruner(settings.prune_after_trials, settings.prune_after_steps)
        study = optuna.create_study(
            study_name=self.recipe.out,
            storage=RDBStorage(
                url,
                engine_kwargs={"connect_args": {"timeout": 60}} if url.startswith("sqlite:") else None,
                heartbeat_interval=HEARTBEAT,
                grace_period=GRACE,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
            ),
            sampler=self._sampler(settings.seed),
            direction="minimize" if self.lower_is_better else "maximize",
            pruner=median if settings.pruner == "median" else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        facts = {"sweep file": self._shared_settings, "recipe": self.recipe.model_dump(mode="json", exclude={"out"})}
        for key, value in facts.items():
            if study.user_attrs.get(key, value) != json.loads(json.dumps(value)):
                raise UsageError(
                    f"{self.out}: holds a sweep with another {key}; use the old {key}, or another directory (out=DIR)"
                )
            study.set_user_attr(key, value)
        return study

    def _sampler(self, seed: int) -> Any:
        from optuna.samplers import GridSampler, RandomSampler, TPESampler

        if self.settings.sampler == "grid":
            cells = {key: _stored(space, space.cells or ()) for key, space in self.settings.space.items()}
            return GridSampler(cells, seed=self.settings.seed)
        if self.settings.sampler == "random":
            return RandomSampler(seed=seed)
        return TPESampler(seed=seed, constant_liar=True)  # running trials count as bad, so workers try other values

    def _train(self, trial: "Trial") -> float:
        """Train a trial in its own processes, and return its validation value (see `_value`).

        Raises:
            optuna.TrialPruned: the pruner stopped the trial, or training failed or gave no value. The sampler then
                avoids such settings.
            LostProcess: a process was lost, which says nothing about the settings.
            RunFailed: this worker was asked to stop. The trial is queued again.
        """
        import optuna

        # With one random seed for all trials, all workers would choose the same values.
        seed = int(np.random.SeedSequence([self.settings.seed, trial.number]).generate_state(1)[0])
        trial.study.sampler = self._sampler(seed)
        values = {key: _suggested(trial, key, space) for key, space in self.settings.space.items()}
        name = trial.user_attrs.get("run", f"{trial.number:03}")
        trial.set_user_attr("run", name)
        run, title = self.out / TRIALS / name, f"trial {int(name)} of {self.count}"
        overrides = [*(override(key, value) for key, value in values.items()), f"out={run}"]
        say(f"{title}: {shown(values)}")
        reported, last_read, is_pruned = 0, 0.0, False

        def is_over(interval: float = 1.0) -> bool:
            """Report new validations to Optuna at most every `interval` seconds. Return whether the trial is pruned."""
            nonlocal reported, last_read, is_pruned
            if is_pruned or time.monotonic() < last_read + interval or (status := read_status(run)) is None:
                return is_pruned
            last_read = time.monotonic()
            for line in _validations(run)[reported:]:
                reported += 1
                if line[self.metric] is not None:
                    trial.report(line[self.metric], line["step"])
                    if is_pruned := line["step"] < status["steps"] and trial.should_prune():
                        break
            return is_pruned

        arguments = ["-m", "esmshard", "finetune", self.name, *self.overrides, *overrides, *self.flags]
        with launch.environment({launch.TRIAL: "1"}):
            code = launch.run_local(arguments, self.processes, max_restarts=self.max_restarts, is_enough=is_over)
        if is_over(0):
            code = 0
        elif code in (preemption.Preempted.exit_code, *(128 + number for number in launch.TO_END)):
            held = trial.study.trials[trial.number]
            same: dict[str, Any] = {
                "params": held.params,
                "distributions": held.distributions,
                "system_attrs": held.system_attrs,
            }
            waiting = optuna.trial.TrialState.WAITING  # `enqueue_trial` drops an attribute that GridSampler needs
            trial.study.add_trial(optuna.trial.create_trial(state=waiting, user_attrs={"run": name}, **same))
            self.write(trial.study)
            raise RunFailed(last_word(run, code), code)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        value = math.nan if code or is_pruned else self._value(run)
        if math.isfinite(value):
            say(f"{title}: valid {self.metric} {value:.4g}")
            return value
        if is_pruned:
            reason = f"pruned, as valid {self.metric} is worse than the median of other trials"
        else:
            reason = last_word(run, code) if code else f"valid {self.metric} is undefined after the last step"
            trial.set_user_attr("failed", reason)
        say(f"{title}: {reason}")
        raise optuna.TrialPruned if code in (0, 1) else LostProcess(reason)

    def _value(self, run: Path) -> float:
        """Return the metric of a run's last validation; NaN if it is undefined.

        If the run keeps its best checkpoint, return the metric of its best validation instead.
        """
        lines, headline = _validations(run), self.task.columns[0]
        chosen = lines[-1]
        if recipe_file.load(run / "recipe.yaml").keeps_best:
            defined = [line for line in lines if line[headline] is not None]
            choose = min if self.task.lower_is_better else max
            chosen = choose(defined, key=itemgetter(headline), default=chosen)
        return math.nan if chosen[self.metric] is None else float(chosen[self.metric])

    def write(self, study: "Study", state: str = "searching") -> dict[str, Any]:
        """Write `sweep.json` and `best.yaml`, and return the content of `sweep.json`."""
        space, trials = self.settings.space, []
        for name, trial in sorted(_by_run(study.get_trials(deepcopy=False)).items()):
            message = trial.user_attrs.get("failed", "its worker was lost" if trial.state.name == "FAIL" else "")
            trials.append(
                {
                    "number": int(name),
                    "values": {
                        k: json.loads(v) if space[k].choices is not None else v for k, v in trial.params.items()
                    },
                    "state": "failed" if message else STATES.get(trial.state.name, "running"),
                    "value": trial.value,
                    "step": max(trial.intermediate_values, default=0),
                    "message": message,
                    "validations": trial.intermediate_values,
                }
            )
        complete = [trial for trial in trials if trial["state"] == "complete"]
        best = (min if self.lower_is_better else max)(complete, key=itemgetter("value"), default=None)
        message = f"{sum(trial['state'] != 'running' for trial in trials)} of {self.count} trials have ended"
        run = selected = None
        if best is not None:
            value_text, run = f"valid {self.metric} {best['value']:.4g}", f"best-{best['number']:03}"
            message += f"; the best is trial {best['number']}, {value_text}"
            selected = (
                f"Trial {best['number']} is the best of {len(complete)} that were trained to their end: {value_text} "
                f"with {shown(best['values'])}. This value is optimistic, because it selected the trial."
            )
            # The best settings get another random seed, because the trial was selected together with its seed. They
            # also get a directory by the trial's number, because an extended sweep may find better settings.
            settings = [override(key, value) for key, value in best["values"].items()]
            settings += [f"train.seed={self.recipe.train.seed + 1}", f"out={self.out / run}"]
            recipe = recipe_file.load(recipe_file.resolve(self.name), [*self.overrides, *settings])
            head = f"# The best of {len(trials)} trials: {shown(best['values'])}\n"
            replace_text(self.out / BEST, head + recipe_file.dump(recipe))
        sweep: dict[str, Any] = {
            "task": self.recipe.task.name,
            "recipe": self.recipe.model_dump(mode="json"),
            "sweep": self._shared_settings,
            "metric": self.metric,
            "lower_is_better": self.lower_is_better,
            "trials_wanted": self.count,
            "state": state,
            "message": message,
            "best": best and best["number"],
            "best_run": run,
            "selected": selected,
            "trials": trials,
        }
        replace_json(self.out / SWEEP, sweep)
        return sweep


def _validations(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_of(run) if line.get("split") == "valid"]


def _by_run(trials: "Sequence[Any]") -> dict[str, Any]:
    """Return the trials by the names of their runs. If a run has several trials, return the last of them."""
    return {trial.user_attrs.get("run", f"{trial.number:03}"): trial for trial in trials}


def _stored(space: SearchSpace, values: Sequence[Any]) -> list[Any]:
    """Return values of a recipe key as Optuna stores them. Choices become JSON, because a choice may be a list."""
    return list(values) if space.choices is None else [json.dumps(value) for value in values]


def _suggested(trial: "Trial", key: str, space: SearchSpace) -> Any:
    if space.choices is not None:
        return json.loads(trial.suggest_categorical(key, _stored(space, space.choices)))
    suggest: Any = trial.suggest_int if space.is_whole else trial.suggest_float
    return suggest(key, space.low, space.high, log=space.log, step=space.step or (1 if space.is_whole else None))
