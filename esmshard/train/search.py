"""Searches settings of a recipe with Optuna (`esmshard finetune --sweep`): each trial is a run in processes of its own,
and the best settings are trained with new seeds and tested once.

Workers share Optuna's study, which is a database: a file in the directory of the sweep, or a server for several
machines. Optuna's heartbeat finds trials whose worker is gone and queues them again. Such a trial goes on in the
directory of its run, from the newest checkpoint.
"""

import json
import math
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from esmshard.errors import InputError, RunFailed, UsageError
from esmshard.io.paths import replace_json, replace_text, replacing
from esmshard.io.tables import write_rows
from esmshard.parallel import launch, preemption
from esmshard.parallel.launch import TO_END, run_local
from esmshard.progress import say
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe
from esmshard.recipe.sweep_file import SearchSpace, SweepSettings, override, shown
from esmshard.tasks.base import Task
from esmshard.train.cross_validation import Repeat, is_done, summarise
from esmshard.train.run_dir import SWEEP, abandoned, holder, last_word, metrics_of, read_status

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

DATABASE, DATABASE_LOCK, TRIALS, TABLE, BEST = "optuna.db", "optuna.lock", "trials", "sweep.csv", "best.yaml"
TRIALS_BY_DEFAULT, SEEDS_BY_DEFAULT = 20, 3
HEARTBEAT, GRACE = 10, 60
"""The seconds between two signs of life of a trial, and those after which a silent trial is queued again."""


class _TrialLost(Exception):
    """A process of a trial was lost, which says nothing about its settings."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """One worker of a sweep, which may be alone."""

    name: str
    """The recipe as the user named it."""
    overrides: Sequence[str]
    """The settings of the recipe that all trials change."""
    recipe: Recipe
    settings: SweepSettings
    task: Task
    processes: int
    """The number of processes of each trial."""
    count: int
    """The number of trials of all workers together."""
    seeds: int
    """The number of new seeds that the best settings are trained with."""
    flags: Sequence[str]
    """The options of each run for the command line."""
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
        if not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir())):
            return
        if not (self.out / DATABASE_LOCK).is_file():  # another program may have a file of the name sweep.json, too
            raise UsageError(f"{self.out}: exists already, and holds no sweep; choose another directory with out=DIR")
        if not goes_on:
            raise UsageError(
                f"{self.out}: holds a sweep; pass --resume auto to go on or to join its workers, or choose another "
                "directory with out=DIR"
            )

    def work(self) -> bool:
        """Train trials until none is left, and then the best settings, unless another worker still trains.

        Returns:
            Whether the sweep is done.
        """
        import optuna
        from filelock import FileLock

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.out.mkdir(parents=True, exist_ok=True)
        with FileLock(self.out / DATABASE_LOCK):  # two workers cannot make the tables of a database at once
            study = self._opened()
            self.write(study)
        while True:
            optuna.storages.fail_stale_trials(study)
            trials = study.get_trials(deepcopy=False)
            if len(_by_run(trials)) >= self.count and not any(trial.state.name == "WAITING" for trial in trials):
                break
            study.optimize(self._train, n_trials=1, catch=(_TrialLost,))
            self.write(study)
        if running := sum(trial.state.name == "RUNNING" for trial in study.get_trials(deepcopy=False)):
            say(f"no trial is left to begin; others train {running}, and the last one trains the best settings")
            return False
        return self._conclude(study)

    def _opened(self) -> "Study":
        """Open the study, and make it if this is the first worker."""
        import optuna
        from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback

        url, settings = self.settings.storage, self.settings
        storage = RDBStorage(
            url or f"sqlite:///{self.out.absolute() / DATABASE}",
            engine_kwargs={"connect_args": {"timeout": 60}} if url is None or url.startswith("sqlite:") else None,
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
        facts = {"settings": self._settings(), "recipe": self.recipe.model_dump(mode="json", exclude={"out"})}
        known = study.user_attrs
        for key, value in facts.items():
            if known.setdefault(key, value) != json.loads(json.dumps(value)):
                raise UsageError(
                    f"{self.out}: holds a sweep with another {key}; go on with the old one, or choose "
                    "another directory with out=DIR"
                )
            study.set_user_attr(key, value)
        return study

    def _sampler(self, seed: int) -> Any:
        from optuna.samplers import GridSampler, RandomSampler, TPESampler

        if self.settings.sampler == "grid":
            cells = {
                key: space.cells if space.choices is None else [json.dumps(choice) for choice in space.choices]
                for key, space in self.settings.space.items()
            }
            return GridSampler({key: values or () for key, values in cells.items()}, seed=self.settings.seed)
        if self.settings.sampler == "random":
            return RandomSampler(seed=seed)
        return TPESampler(seed=seed, constant_liar=True)  # trials that are running count as bad: workers try others

    def _settings(self) -> dict[str, Any]:
        """Return the settings without the address of a database server, which may hold a password."""
        return self.settings.model_dump(mode="json", exclude={"storage"})

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
        run = self.out / TRIALS / name
        course = _Course(self, trial, run)
        overrides = [*(override(key, value) for key, value in values.items()), f"out={run}"]
        say(f"trial {int(name)} of {self.count}: {shown(values)}")
        with launch.environment({launch.TRIAL: "1"}):
            code = self._run(overrides, course.is_over)
        course.look()
        if not course.reason and (code == preemption.Preempted.exit_code or code in {128 + n for n in TO_END}):
            trial.study.enqueue_trial(trial.params, user_attrs={"run": name})
            self.write(trial.study)
            raise RunFailed(last_word(run, code), code)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        state, message, value = "failed", "", None
        if course.reason:
            state, message, value = "pruned", course.reason, course.best
        elif code:
            message = last_word(run, code)
        else:
            chosen = self._chosen(run, overrides)
            result, message = chosen.get(self.metric), f"valid {self.metric} is undefined after the last step"
            if result is not None and math.isfinite(result):
                value = float(result)
                state, message = "complete", f"valid {self.metric} {value:.4g} after step {chosen['step']}"
        end = {"state": state, "value": value, "step": course.step, "message": message}
        trial.set_user_attr("end", end)
        say(f"trial {int(name)} of {self.count}: {state}: {message}")
        if state == "complete" and value is not None:
            return value
        raise _TrialLost(message) if code not in (0, 1) and state == "failed" else optuna.TrialPruned(message)

    def _run(self, overrides: Sequence[str], is_enough: Any = None) -> int:
        """Run `esmshard finetune` with these settings, and return its exit code."""
        arguments = ["-m", "esmshard", "finetune", self.name, *self.overrides, *overrides, *self.flags]
        return run_local(arguments, self.processes, max_restarts=self.max_restarts, is_enough=is_enough)

    def _with_settings(self, overrides: Sequence[str]) -> Recipe:
        return recipe_file.load(recipe_file.resolve(self.name), [*self.overrides, *overrides])

    def _chosen(self, run: Path, overrides: Sequence[str]) -> Mapping[str, Any]:
        """Return the validation of the model that a run gives: the last one, or the best one where the best is kept."""
        lines, sign, headline = _validations(run), 1 if self.task.lower_is_better else -1, self.task.columns[0]
        if not self._with_settings(overrides).keeps_best:
            return lines[-1]
        defined = [line for line in lines if line.get(headline) is not None]
        return min(defined, key=lambda line: sign * float(line[headline]), default=lines[-1])

    def _conclude(self, study: "Study") -> bool:
        """Train the best settings with several seeds, test each model once, and write and print the results."""
        sweep = self.write(study)
        if sweep["best"] is None:
            self.write(study, state="failed")
            last = next((trial["message"] for trial in reversed(sweep["trials"]) if trial["message"]), "there was none")
            raise InputError(f"{self.out}: none of {self.count} trials has a validation value; the last one: {last}")
        best = next(trial for trial in sweep["trials"] if trial["number"] == sweep["best"])
        settings = [override(key, value) for key, value in best["values"].items()]
        runs = []
        first = self.recipe.train.seed + 1  # the seed of the trials was a part of what was selected
        for seed in range(first, first + self.seeds):
            out = self.out / f"best-{best['number']:03}-seed-{seed}"
            runs.append(Repeat(out.name, out, (*settings, f"train.seed={seed}", f"out={out}")))
        self.write(study, state="training")
        for run in runs:
            if is_done(run.out):
                continue
            if not abandoned(run.out):
                say(f"{run.out}: {holder(run.out)} trains the best settings")
                return False
            say(" ".join(run.overrides))
            if code := self._run(run.overrides):
                raise RunFailed(last_word(run.out, code), code)
        values = [self._chosen(run.out, run.overrides).get(self.metric) for run in runs]
        each = ", ".join(f"{value:.4g}" for value in values if value is not None)
        honest = (
            f"The same settings with {len(runs)} new seed{'s' if len(runs) > 1 else ''}: valid {self.metric} {each}. "
            "No trial has seen the test set; the test values of these runs are the result."
        )
        summary = summarise(self.out, runs, None)
        sweep = self.write(study, state="done", runs=[run.name for run in runs], honest=honest)
        print("\n".join([sweep["selected"], honest, summary]))
        return True

    def write(self, study: "Study", **more: Any) -> dict[str, Any]:
        """Write `sweep.json`, `sweep.csv` and `best.yaml`, and return the content of the first. `more` are further
        entries.
        """
        space, trials = self.settings.space, []
        for name, trial in sorted(_by_run(study.get_trials(deepcopy=False)).items()):
            values = {key: json.loads(v) if space[key].choices is not None else v for key, v in trial.params.items()}
            end = {"state": "running", "value": None, "step": max(trial.intermediate_values, default=0), "message": ""}
            end |= {"state": "failed", "message": "its worker was lost"} if trial.state.name == "FAIL" else {}
            end = trial.user_attrs.get("end", end)
            trials.append({"number": int(name), "values": values, **end, "validations": trial.intermediate_values})
        complete = [trial for trial in trials if trial["state"] == "complete"]
        sign = 1 if self.lower_is_better else -1
        best = min(complete, key=lambda trial: sign * float(trial["value"]), default=None)
        sweep: dict[str, Any] = {
            "task": self.recipe.task.name,
            "recipe": self.recipe.model_dump(mode="json"),
            "sweep": self._settings(),
            "metric": self.metric,
            "lower_is_better": self.lower_is_better,
            "trials_wanted": self.count,
            "state": "searching",
            "best": best and best["number"],
            "trials": trials,
            "selected": best
            and f"Trial {best['number']} is the best of {len(complete)} that were trained to their end: valid "
            f"{self.metric} {best['value']:.4g} with {shown(best['values'])}. This value is optimistic: the trial was "
            "selected by it.",
            "runs": [],
            **more,
        }
        replace_json(self.out / SWEEP, sweep)
        with replacing(self.out / TABLE) as file:
            rows = [["trial", *space, "state", f"valid {self.metric}", "step", "message"]]
            for trial in trials:
                cells = [*(trial["values"].get(key) for key in space), trial["state"], trial["value"], trial["step"]]
                texts = ["" if cell is None else cell if isinstance(cell, str) else json.dumps(cell) for cell in cells]
                rows.append([str(trial["number"]), *texts, trial["message"]])
            write_rows(file, rows)
        if best is not None:
            settings = [override(key, value) for key, value in best["values"].items()]
            head = f"# The best of {len(trials)} trials: {shown(best['values'])}\n"
            recipe = self._with_settings([*settings, f"out={self.out / 'best'}"])
            replace_text(self.out / BEST, head + recipe_file.dump(recipe))
        return sweep


class _Course:
    """The validations of a trial that is running, told to Optuna in their order.

    The decision to prune depends on the values and steps only, also where the run has gone on for a while before its
    worker looked.
    """

    def __init__(self, search: Search, trial: "Trial", run: Path) -> None:
        self._search, self._trial, self._run, self._told, self._looked = search, trial, run, 0, 0.0
        self.reason, self.step = "", 0
        self.best: float | None = None

    def is_over(self) -> bool:
        """Return whether the pruner stops the trial, and look at most once a second."""
        if time.monotonic() >= self._looked + 1:
            self._looked = time.monotonic()
            self.look()
        return bool(self.reason)

    def look(self) -> None:
        """Tell Optuna the new validations. `reason` is set if the pruner stops the trial."""
        lines, metric = _validations(self._run), self._search.metric
        status = read_status(self._run) if lines else None
        better = min if self._search.lower_is_better else max
        for line in lines[self._told :]:
            if self.reason:
                return
            self._told, self.step = self._told + 1, int(line["step"])
            if line.get(metric) is None:
                continue
            value = float(line[metric])
            self.best = value if self.best is None else better(self.best, value)
            self._trial.report(value, self.step)
            if status is not None and self.step < status["steps"] and self._trial.should_prune():
                worse = f"valid {metric} {value:.4g} is worse than the median of other trials"
                self.reason = f"pruned after step {self.step}: {worse}"


def _validations(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_of(run) if line.get("split") == "valid"]


def _by_run(trials: "Sequence[Any]") -> dict[str, Any]:
    """Return the trials by the name of their run. One that was queued again stands in the place of the lost one."""
    return {trial.user_attrs.get("run", f"{trial.number:03}"): trial for trial in trials}


def _suggested(trial: "Trial", key: str, space: SearchSpace) -> Any:
    """Return the value of a key that the sampler chooses. Optuna stores choices as JSON, since they may be lists."""
    if space.choices is not None:
        return json.loads(trial.suggest_categorical(key, [json.dumps(choice) for choice in space.choices]))
    assert space.low is not None
    assert space.high is not None
    if space.is_whole:
        return trial.suggest_int(key, int(space.low), int(space.high), log=space.log, step=int(space.step or 1))
    return trial.suggest_float(key, space.low, space.high, log=space.log, step=space.step)
