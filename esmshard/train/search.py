"""Searches settings of a recipe with Optuna (`esmshard finetune --sweep`): each trial is a run in processes of its own.
The result is `best.yaml`, the recipe with the best settings.

Workers share Optuna's study, which is a database: a file in the directory of the sweep, or a server for several
machines. Optuna's heartbeat finds trials whose worker is gone and queues them again. Such a trial goes on in the
directory of its run, from the newest checkpoint.
"""

import json
import math
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from esmshard.errors import InputError, RunFailed, UsageError
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
"""The states of trials that have ended, by Optuna's names."""
TRIALS_BY_DEFAULT = 20
HEARTBEAT, GRACE = 10, 60
"""The seconds between two signs of life of a trial, and those after which a silent trial is queued again."""


class _TrialLost(Exception):
    """A process of a trial was lost, which says nothing about its settings."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """One worker of a sweep, which may be alone.

    Args:
        name: the recipe as the user named it.
        overrides: the settings of the recipe that all trials change.
        recipe: the recipe with these settings. Its `out` is the directory of the sweep.
        settings: the file of the search.
        task: the task of the recipe.
        processes: the number of processes of each trial.
        count: the number of trials of all workers together.
        flags: the options of each run for the command line.
        max_restarts: see `launch.run_local`.
    """

    name: str
    overrides: Sequence[str]
    recipe: Recipe
    settings: SweepSettings
    task: Task
    processes: int
    count: int
    flags: Sequence[str]
    max_restarts: int

    @property
    def out(self) -> Path:
        """The directory of the sweep."""
        return Path(self.recipe.out)

    @property
    def metric(self) -> str:
        """The validation value that trials are compared by."""
        return "loss" if self.settings.metric == "loss" else self.task.columns[0]

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values of the metric are better."""
        return self.metric == "loss" or self.task.lower_is_better

    def check_directory(self, *, goes_on: bool) -> None:
        """Refuse to write over other files, or over an earlier sweep unless it `goes_on`."""
        is_sweep = (self.out / DATABASE_LOCK).is_file()  # another program may have a file of the name sweep.json, too
        is_empty = not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir()))
        if not is_empty and not (is_sweep and goes_on):
            fix = "pass --resume auto to go on or to join its workers, or " if is_sweep else ""
            raise UsageError(f"{self.out}: exists already; {fix}choose another directory with out=DIR")

    def work(self) -> bool:
        """Train trials until none is left to begin. Return whether all have ended, also those of other workers.

        Raises:
            InputError: all have ended, and none has a validation value.
        """
        import optuna
        from filelock import FileLock

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.out.mkdir(parents=True, exist_ok=True)
        with FileLock(self.out / DATABASE_LOCK):  # two workers cannot make the tables of a database at once
            study = self._opened()
        while True:
            self.write(study)
            optuna.storages.fail_stale_trials(study)
            trials = study.get_trials(deepcopy=False)
            if len(_by_run(trials)) >= self.count and not any(trial.state.name == "WAITING" for trial in trials):
                break
            study.optimize(self._train, n_trials=1, catch=(_TrialLost,))
        if running := sum(trial.state.name == "RUNNING" for trial in trials):
            say(f"no trial is left to begin; others train {running}, and the last one trains the best settings")
            return False
        sweep = self.write(study)
        if sweep["best"] is None:
            self.write(study, state="failed")
            raise InputError(f"{self.out}: no trial has a validation value; {sweep['trials'][-1]['message']}")
        print(sweep["selected"])
        return True

    def finish(self) -> None:
        """Record that the best settings are trained and tested."""
        replace_json(self.out / SWEEP, read_json(self.out / SWEEP) | {"state": "done"})

    def _opened(self) -> "Study":
        """Open the study, and make it if this is the first worker."""
        import optuna
        from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback

        settings, url = self.settings, self.settings.storage or f"sqlite:///{self.out.absolute() / DATABASE}"
        storage = RDBStorage(
            url,
            engine_kwargs={"connect_args": {"timeout": 60}} if url.startswith("sqlite:") else None,
            heartbeat_interval=HEARTBEAT,
            grace_period=GRACE,
            heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
        )
        median = optuna.pruners.MedianPruner(settings.prune_after_trials, settings.prune_after_steps)
        study = optuna.create_study(
            study_name=self.recipe.out,
            storage=storage,
            sampler=self._sampler(settings.seed),
            direction="minimize" if self.lower_is_better else "maximize",
            pruner=median if settings.pruner == "median" else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        facts = {"settings": self._settings, "recipe": self.recipe.model_dump(mode="json", exclude={"out"})}
        for key, value in facts.items():
            if study.user_attrs.get(key, value) != json.loads(json.dumps(value)):
                raise UsageError(
                    f"{self.out}: holds a sweep with another {key}; go on with the old one, or choose "
                    "another directory with out=DIR"
                )
            study.set_user_attr(key, value)
        return study

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings without the address of a database server, which may hold a password."""
        return self.settings.model_dump(mode="json", exclude={"storage"})

    def _sampler(self, seed: int) -> Any:
        from optuna.samplers import GridSampler, RandomSampler, TPESampler

        if self.settings.sampler == "grid":
            cells = {key: _stored(space, space.cells or ()) for key, space in self.settings.space.items()}
            return GridSampler(cells, seed=self.settings.seed)
        if self.settings.sampler == "random":
            return RandomSampler(seed=seed)
        return TPESampler(seed=seed, constant_liar=True)  # trials that are running count as bad: workers try others

    def _train(self, trial: "Trial") -> float:
        """Train one trial in processes of its own, and return its validation value.

        Raises:
            optuna.TrialPruned: the pruner has stopped it, or its settings diverge or do not fit into memory, which
                the sampler is to learn.
            _TrialLost: a process was lost.
            RunFailed: this worker was asked to stop. The trial is queued again.
        """
        import optuna

        # Every trial draws from a seed of its own: otherwise all workers would draw alike.
        seed = int(np.random.SeedSequence([self.settings.seed, trial.number]).generate_state(1)[0])
        trial.study.sampler = self._sampler(seed)
        values = {key: _suggested(trial, key, space) for key, space in self.settings.space.items()}
        name = trial.user_attrs.get("run", f"{trial.number:03}")
        trial.set_user_attr("run", name)
        run, which = self.out / TRIALS / name, f"trial {int(name)} of {self.count}"
        overrides = [*(override(key, value) for key, value in values.items()), f"out={run}"]
        say(f"{which}: {shown(values)}")
        told, looked, is_pruned = 0, 0.0, False

        def is_over(every: float = 1.0) -> bool:
            """Tell Optuna the new validations, at most once in some seconds, and return whether the trial is pruned.
            That depends on values and steps only, also where the run has gone on before its worker looked.
            """
            nonlocal told, looked, is_pruned
            if time.monotonic() < looked + every or (status := read_status(run)) is None:
                return is_pruned
            looked = time.monotonic()
            for line in _validations(run)[told:] if not is_pruned else ():
                told += 1
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
            trial.study.enqueue_trial(trial.params, user_attrs={"run": name})
            self.write(trial.study)
            raise RunFailed(last_word(run, code), code)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        value = math.nan if code or is_pruned else self._value(run, overrides)
        if math.isfinite(value):
            say(f"{which}: valid {self.metric} {value:.4g}")
            return value
        if is_pruned:
            reason = f"pruned, as valid {self.metric} is worse than the median of other trials"
        else:
            reason = last_word(run, code) if code else f"valid {self.metric} is undefined after the last step"
            trial.set_user_attr("failed", reason)
        say(f"{which}: {reason}")
        raise optuna.TrialPruned if code in (0, 1) else _TrialLost

    def _with_settings(self, overrides: Sequence[str]) -> Recipe:
        return recipe_file.load(recipe_file.resolve(self.name), [*self.overrides, *overrides])

    def _value(self, run: Path, overrides: Sequence[str]) -> float:
        """Return the validation value of the model that a run gives: the last one, or the best one where the best is
        kept; NaN if it is undefined.
        """
        lines, sign, headline = _validations(run), 1 if self.task.lower_is_better else -1, self.task.columns[0]
        chosen = lines[-1]
        if self._with_settings(overrides).keeps_best:
            defined = [line for line in lines if line[headline] is not None]
            chosen = min(defined, key=lambda line: sign * line[headline], default=chosen)
        return math.nan if chosen[self.metric] is None else float(chosen[self.metric])

    def write(self, study: "Study", state: str = "searching") -> dict[str, Any]:
        """Write `sweep.json` and `best.yaml`, and return the content of the first."""
        space, trials = self.settings.space, []
        for name, trial in sorted(_by_run(study.get_trials(deepcopy=False)).items()):
            values = {key: json.loads(v) if space[key].choices is not None else v for key, v in trial.params.items()}
            message = trial.user_attrs.get("failed", "its worker was lost" if trial.state.name == "FAIL" else "")
            trials.append(
                {
                    "number": int(name),
                    "values": values,
                    "state": "failed" if message else STATES.get(trial.state.name, "running"),
                    "value": trial.value,
                    "step": max(trial.intermediate_values, default=0),
                    "message": message,
                    "validations": trial.intermediate_values,
                }
            )
        complete = [trial for trial in trials if trial["state"] == "complete"]
        sign = 1 if self.lower_is_better else -1
        best = min(complete, key=lambda trial: sign * float(trial["value"]), default=None)
        message = f"{sum(trial['state'] != 'running' for trial in trials)} of {self.count} trials have ended"
        run = selected = None
        if best is not None:
            said, run = f"valid {self.metric} {best['value']:.4g}", f"best-{best['number']:03}"
            message += f"; the best is trial {best['number']}, {said}"
            selected = (
                f"Trial {best['number']} is the best of {len(complete)} that were trained to their end: {said} with "
                f"{shown(best['values'])}. This value is optimistic: the trial was selected by it."
            )
            settings = [override(key, value) for key, value in best["values"].items()]
            seed = self.recipe.train.seed + 1  # the seed of the trials was a part of what was selected
            # An extended sweep may have better settings than before, and keeps the results of the old ones.
            recipe = self._with_settings([*settings, f"train.seed={seed}", f"out={self.out / run}"])
            head = f"# The best of {len(trials)} trials: {shown(best['values'])}\n"
            replace_text(self.out / BEST, head + recipe_file.dump(recipe))
        sweep: dict[str, Any] = {
            "task": self.recipe.task.name,
            "recipe": self.recipe.model_dump(mode="json"),
            "sweep": self._settings,
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
    """Return the trials by the name of their run. One that was queued again stands in the place of the lost one."""
    return {trial.user_attrs.get("run", f"{trial.number:03}"): trial for trial in trials}


def _stored(space: SearchSpace, values: Sequence[Any]) -> list[Any]:
    """Return values of a key as Optuna stores them: choices as JSON, since they may be lists."""
    return list(values) if space.choices is None else [json.dumps(value) for value in values]


def _suggested(trial: "Trial", key: str, space: SearchSpace) -> Any:
    """Return the value of a key that the sampler chooses."""
    if space.choices is not None:
        return json.loads(trial.suggest_categorical(key, _stored(space, space.choices)))
    suggest: Any = trial.suggest_int if space.is_whole else trial.suggest_float
    return suggest(key, space.low, space.high, log=space.log, step=space.step or (1 if space.is_whole else None))
