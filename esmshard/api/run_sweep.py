"""Carries out `esmshard finetune --sweep`: Optuna chooses settings, each trial is a run of its own, and the best
settings are trained with new seeds and tested once.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from esmshard import spreadsheet
from esmshard.api.run_options import RunOptions
from esmshard.api.start_run import RunFailed, last_word
from esmshard.errors import ExitCode, InputError, UsageError
from esmshard.files import read_json, replace_json, replace_text, replacing
from esmshard.parallel import launch, preemption
from esmshard.progress import say
from esmshard.recipe import recipe_file, sweep_file
from esmshard.recipe.sections import Recipe
from esmshard.recipe.sweep_file import SearchSpace, SweepSettings, override, shown, value_text
from esmshard.train.experiments.repeats import SUMMARY, Repeat, is_done, summarise
from esmshard.train.records import goodput, lock, status
from esmshard.train.records.attempt import METRICS
from esmshard.train.records.standing import SWEEP
from esmshard.train.records.verdict import aligned

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

DATABASE, LOCK, TRIALS, TABLE, BEST = "optuna.db", "optuna.lock", "trials", "sweep.csv", "best.yaml"
TRIALS_BY_DEFAULT, SEEDS_BY_DEFAULT = 20, 3
MOST_FAILED = 5
"""The number of trials that may fail before any has a value. Then the recipe or the machine is the cause."""
HEARTBEAT, GRACE = 10, 60
"""The seconds between two signs of life of a trial, and those after which a silent trial is queued again."""


class _TrialLost(Exception):
    """A process of a trial was lost, which says nothing about its settings."""


def sweep(recipe: str, overrides: Sequence[str], options: RunOptions) -> Path:
    """Search settings of a recipe, alone or as one of several workers, and test the best ones.

    Arguments and errors are those of `start_run.finetune`.

    Returns:
        The directory of the sweep.
    """
    try:
        import optuna
    except ImportError:
        raise UsageError("--sweep needs optuna; pip install 'esmshard[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    with preemption.Preemption():
        found = _Sweep(recipe, overrides, options)
        if options.dry_run:
            return found.out
        study = found.opened()
        while True:
            optuna.storages.fail_stale_trials(study)
            trials = study.get_trials(deepcopy=False)
            if len(_runs(trials)) >= found.count and not any(one.state.name == "WAITING" for one in trials):
                break
            study.sampler = found.grid or optuna.samplers.RandomSampler()
            study.optimize(found.train, n_trials=1, catch=(_TrialLost,))
            found.check(found.write(study))
        if running := [one.number for one in study.get_trials(deepcopy=False) if one.state.name == "RUNNING"]:
            say(f"no trial is left to begin; others train {len(running)}, and the last one trains the best settings")
        else:
            found.conclude(study)
    return found.out


class _Sweep:
    """One worker: the recipe, the search space, and the directory of the sweep."""

    def __init__(self, recipe: str, overrides: Sequence[str], options: RunOptions) -> None:
        """Check everything before the first trial. For a dry run, print what would be done."""
        import torch

        from esmshard.data.splits.variant_records import FOLDS
        from esmshard.parallel.process_group import is_launched, own_device
        from esmshard.train.resume import notices
        from esmshard.train.run_inputs import describe, prepare

        if is_launched():
            raise UsageError(
                "--sweep belongs to a single command, which starts the processes of each trial; start it without the "
                "launcher, once on each machine, with --nproc and --resume auto"
            )
        assert options.sweep is not None
        self.path, self.name = recipe_file.resolve(recipe), recipe
        self.settings: SweepSettings = sweep_file.load(Path(options.sweep), self.path, overrides)
        resolved = recipe_file.load(self.path, overrides)
        recipe_file.check_companions(self.path, resolved, overrides)
        if resolved.divides_table and resolved.data.split not in ("mutations", "given"):
            # The other folds are trained and validated on by trials, so that they are no test.
            overrides = [*overrides, f"data.folds={FOLDS}", "data.fold=0"]
            say(
                f"trials are validated, and the best settings tested, on fold 0 of {FOLDS}: data.folds={FOLDS} "
                "data.fold=0"
            )
            resolved = recipe_file.load(self.path, overrides)
        if options.dry_run and (far := recipe_file.far_inputs(resolved)):
            raise UsageError(
                f"--dry-run sends nothing over a network, and the sweep reads {', '.join(far)}; copy it first"
            )
        self.overrides, self.options, self.recipe, self.out = overrides, options, resolved, Path(resolved.out)
        self.processes = options.nproc or (1 if resolved.adapt.method == "probe" else max(1, torch.cuda.device_count()))
        job = prepare(resolved, self.processes, self.processes, own_device(0, self.processes))
        self.headline, self.headline_lower = job.task.columns[0], job.task.lower_is_better
        self.metric = "loss" if self.settings.metric == "loss" else self.headline
        self.lower_is_better = self.metric == "loss" or self.headline_lower
        self.count = options.trials or TRIALS_BY_DEFAULT
        self.grid: Any = None
        if self.settings.sampler == "grid":
            from optuna.samplers import GridSampler

            self.count = min(options.trials or self.settings.cells, self.settings.cells)
            cells = {
                key: (space.cells or ()) if space.choices is None else [json.dumps(choice) for choice in space.choices]
                for key, space in self.settings.space.items()
            }
            self.grid = GridSampler(cells, seed=self.settings.seed)
        self.flags = [flag for flag in options.flags(report=False) if flag != "--overwrite"]
        self.flags += [] if options.resume else ["--resume", "auto"]
        self._check_directory()
        for notice in notices(job):
            say(notice)
        if options.dry_run:
            print(describe(job, self.processes))
            print(f"trials    {self.count}, of {', '.join(self.settings.space)}; by valid {self.metric}")

    def _check_directory(self) -> None:
        """Refuse to write over an earlier run or sweep."""
        if not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir())):
            return
        if not (is_sweep(self.out) or (self.out / LOCK).is_file()):  # another worker may have just begun
            raise UsageError(f"{self.out}: exists already, and holds no sweep; choose another directory with out=DIR")
        if not self.options.resume and not self.options.overwrite:
            raise UsageError(
                f"{self.out}: holds a sweep; pass --resume auto to go on or to join its workers, --overwrite to start "
                "again, or out=DIR"
            )
        for run in (*self.out.glob(f"{TRIALS}/*"), *self.out.glob("best-*-seed-*")) if self.options.overwrite else ():
            if (held := lock.holder(run)) is not None and held.lives is not False:
                raise UsageError(f"{run}: held by {held}; stop it, or choose another directory with out=DIR")

    def opened(self) -> "Study":
        """Open the study, and make it if this is the first worker. `--overwrite` removes an earlier sweep first."""
        from filelock import FileLock

        self.out.mkdir(parents=True, exist_ok=True)
        with FileLock(self.out / LOCK):  # two workers cannot make the tables of a database at once
            study = self._opened()
            self.write(study)
        return study

    def _opened(self) -> "Study":
        import optuna
        from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback

        url, name = self.settings.storage or f"sqlite:///{self.out.absolute() / DATABASE}", self.recipe.out
        storage = RDBStorage(
            url,
            engine_kwargs={"connect_args": {"timeout": 60}} if url.startswith("sqlite:") else None,
            heartbeat_interval=HEARTBEAT,
            grace_period=GRACE,
            heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
        )
        if self.options.overwrite and is_sweep(self.out):
            if name in optuna.get_all_study_names(storage):
                optuna.delete_study(study_name=name, storage=storage)
            for file in (SWEEP, TABLE, BEST, SUMMARY, "report.html"):
                (self.out / file).unlink(missing_ok=True)
            for run in (self.out / TRIALS, *self.out.glob("best-*-seed-*")):
                shutil.rmtree(run, ignore_errors=True)
        pruner: Any = optuna.pruners.NopPruner()
        if self.settings.pruner == "median":
            pruner = optuna.pruners.MedianPruner(self.settings.prune_after_trials, self.settings.prune_after_steps)
        study = optuna.create_study(
            study_name=name,
            storage=storage,
            direction="minimize" if self.lower_is_better else "maximize",
            pruner=pruner,
            load_if_exists=True,
        )
        facts = {"settings": self._settings(), "recipe": self.recipe.model_dump(mode="json", exclude={"out"})}
        known = study.user_attrs
        for key, value in facts.items():
            if known.setdefault(key, value) != json.loads(json.dumps(value)):
                raise UsageError(
                    f"{self.out}: holds a sweep with another {key}; go on with the old one, or start again with "
                    "--overwrite or out=DIR"
                )
            study.set_user_attr(key, value)
        return study

    def _settings(self) -> dict[str, Any]:
        """Return the settings without the address of a database server, which may hold a password."""
        return self.settings.model_dump(mode="json", exclude={"storage"})

    def train(self, trial: "Trial") -> float:
        """Train one trial in processes of its own, and return its validation value.

        Raises:
            optuna.TrialPruned: the pruner has stopped it, or its settings diverge or do not fit into memory, which
                the sampler is to learn.
            _TrialLost: a process was lost.
            RunFailed: this worker was asked to stop. The trial is queued again.
        """
        import optuna

        from esmshard.parallel.launch import TO_END, run_local

        if self.grid is None:  # every trial draws from a seed of its own: otherwise all workers would draw alike
            seed = int(np.random.SeedSequence([self.settings.seed, trial.number]).generate_state(1)[0])
            # Trials that are running count as bad ones, so that workers do not all try the same.
            make = optuna.samplers.RandomSampler if self.settings.sampler == "random" else _tpe
            trial.study.sampler = make(seed=seed)
        values = {key: _suggested(trial, key, space) for key, space in self.settings.space.items()}
        name = trial.user_attrs.get("run", f"{trial.number:03}")
        trial.set_user_attr("run", name)
        run, watched = self.out / TRIALS / name, _Validations(self, trial, self.out / TRIALS / name)
        overrides = [*(override(key, value) for key, value in values.items()), f"out={run}"]
        say(f"trial {int(name)} of {self.count}: {shown(values)}")
        arguments = ["-m", "esmshard", "finetune", self.name, *self.overrides, *overrides, *self.flags]
        with launch.environment({launch.TRIAL: "1"}):
            restarts = self.options.max_restarts
            code = run_local(arguments, self.processes, max_restarts=restarts, is_enough=watched.is_due)
        pruned = watched.is_enough()
        if not pruned and (code == ExitCode.REQUEUE or code in {128 + number for number in TO_END}):
            trial.study.enqueue_trial(trial.params, user_attrs={"run": name})
            self.write(trial.study)
            raise RunFailed(last_word(run, code), code)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        if pruned:
            self._tell(trial, "pruned", watched.step, watched.reason, watched.value)
            raise optuna.TrialPruned(watched.reason)
        if code:
            message = last_word(run, code)
            self._tell(trial, "failed", watched.step, message)
            raise optuna.TrialPruned(message) if code == ExitCode.FAILED else _TrialLost(message)
        chosen = self.chosen(run, overrides)
        value = chosen.get(self.metric)
        if value is None or not math.isfinite(value):
            message = f"valid {self.metric} is undefined after the last step"
            self._tell(trial, "failed", watched.step, message)
            raise optuna.TrialPruned(message)
        message = f"valid {self.metric} {value:.4g} after step {chosen['step']}"
        self._tell(trial, "complete", watched.step, message, float(value))
        return float(value)

    def _tell(self, trial: "Trial", state: str, step: int, message: str, value: float | None = None) -> None:
        trial.set_user_attr("end", {"state": state, "value": value, "step": step, "message": message})
        say(f"trial {int(trial.user_attrs['run'])} of {self.count}: {state}: {message}")

    def chosen(self, run: Path, overrides: Sequence[str]) -> Mapping[str, Any]:
        """Return the validation of the model that a run gives: the last one, or the best one where the best is kept."""
        lines, sign = validations(run), 1 if self.headline_lower else -1
        if self.with_settings(overrides).keeps_best:
            defined = [line for line in lines if line.get(self.headline) is not None]
            return min(defined, key=lambda line: sign * float(line[self.headline]), default=lines[-1])
        return lines[-1]

    def with_settings(self, overrides: Sequence[str]) -> Recipe:
        """Return the recipe of one run."""
        return recipe_file.load(self.path, [*self.overrides, *overrides])

    def check(self, found: Mapping[str, Any]) -> None:
        """Refuse to go on where only failures came out so far."""
        failed = [one for one in found["trials"] if one["state"] == "failed"]
        if found["best"] is None and len(failed) >= MOST_FAILED:
            raise InputError(
                f"{self.out}: {len(failed)} trials failed, and none has a value; the last one: "
                f"{failed[-1]['message']}; mend that, then start again with --overwrite"
            )

    def conclude(self, study: "Study") -> None:
        """Train the best settings with several seeds, test each model once, and write the results."""
        from esmshard.parallel.launch import run_local

        found = self.write(study)
        if found["best"] is None:
            self.write(study, state="failed")
            last = next((one["message"] for one in reversed(found["trials"]) if one["message"]), "there was none")
            raise InputError(f"{self.out}: none of {self.count} trials has a validation value; the last one: {last}")
        best = next(one for one in found["trials"] if one["number"] == found["best"])
        settings = [override(key, value) for key, value in best["values"].items()]
        runs = []
        # The seed of the trials was a part of what was selected, so that these seeds are new.
        first = self.recipe.train.seed + 1
        for seed in range(first, first + (self.options.seeds or SEEDS_BY_DEFAULT)):
            out = self.out / f"best-{best['number']:03}-seed-{seed}"
            runs.append(Repeat(out.name, out, (*settings, f"train.seed={seed}", f"out={out}")))
        self.write(study, state="training")
        for run in runs:
            if is_done(run.out):
                continue
            if (held := lock.holder(run.out)) is not None and held.lives is not False:
                say(f"{run.out}: {held} trains the best settings")
                return
            say(" ".join(run.overrides))
            arguments = ["-m", "esmshard", "finetune", self.name, *self.overrides, *run.overrides, *self.flags]
            if code := run_local(arguments, self.processes, max_restarts=self.options.max_restarts):
                raise RunFailed(last_word(run.out, code), code)
        values = [self.chosen(run.out, run.overrides).get(self.metric) for run in runs]
        each = ", ".join(f"{value:.4g}" for value in values if value is not None)
        seeds = f"{len(runs)} new seed{'s' if len(runs) > 1 else ''}"
        again = (
            f"The same settings with {seeds}: valid {self.metric} {each}. No trial has seen the test set; the test "
            "values of these runs are the result."
        )
        summary = summarise(self.out, runs, None)
        more = {"importance": self.importance(study), "runs": [run.name for run in runs], "honest": again}
        found = self.write(study, state="done", **more)
        print("\n".join([as_text(found), found["selected"], again, summary]))
        if self.options.report:
            from esmshard.report.text.html_report import report

            try:
                say(f"report in {report(self.out)}")
            except InputError as error:
                say(f"no report: {error}")

    def importance(self, study: "Study") -> dict[str, float]:
        """Return the share of the variance of the validation value that each key explains, by functional ANOVA (Hutter
        et al. 2014); empty if fewer than four trials were trained to their end, or if all have the same value.
        """
        from optuna.importance import FanovaImportanceEvaluator, get_param_importances

        values = [one.value for one in study.get_trials(deepcopy=False) if one.state.name == "COMPLETE"]
        if len(values) < 4 or len(set(values)) == 1:
            return {}
        return dict(get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=self.settings.seed)))

    def write(self, study: "Study", **more: Any) -> dict[str, Any]:
        """Write `sweep.json`, `sweep.csv` and `best.yaml`, and return the content of the first. `more` are further
        entries.
        """
        space, trials = self.settings.space, []
        for name, trial in sorted(_runs(study.get_trials(deepcopy=False)).items()):
            values = {key: json.loads(v) if space[key].choices is not None else v for key, v in trial.params.items()}
            step = max(trial.intermediate_values, default=0)
            going = {"state": "running", "value": None, "step": step, "message": ""}
            lost = {"state": "failed", "message": "its worker was lost"} if trial.state.name == "FAIL" else {}
            end = trial.user_attrs.get("end") or going | lost
            trials.append({"number": int(name), "values": values, **end, "validations": trial.intermediate_values})
        complete = [one for one in trials if one["state"] == "complete"]
        sign = 1 if self.lower_is_better else -1
        best = min(complete, key=lambda one: sign * float(one["value"]), default=None)
        found: dict[str, Any] = {
            "task": self.recipe.task.name,
            "recipe": self.recipe.model_dump(mode="json"),
            "sweep": self._settings(),
            "metric": self.metric,
            "lower_is_better": self.lower_is_better,
            "trials_wanted": self.count,
            "state": "searching",
            "best": best and best["number"],
            "trials": trials,
            "importance": {},
            "selected": best
            and f"Trial {best['number']} is the best of {len(complete)} that were trained to their end: valid "
            f"{self.metric} {best['value']:.4g} with {shown(best['values'])}. This value is optimistic: the trial was "
            "selected by it.",
            "runs": [],
            **more,
        }
        replace_json(self.out / SWEEP, found)
        with replacing(self.out / TABLE) as file:
            writer = spreadsheet.writer(file)
            writer.writerow(["trial", *space, "state", f"valid {self.metric}", "step", "message"])
            for one in trials:
                cells = [*(one["values"].get(key) for key in space), one["state"], one["value"], one["step"]]
                texts = ["" if cell is None else cell if isinstance(cell, str) else json.dumps(cell) for cell in cells]
                writer.writerow([str(one["number"]), *texts, one["message"]])
        if best is not None:
            settings = [override(key, value) for key, value in best["values"].items()]
            head = f"# The best of {len(trials)} trials: {shown(best['values'])}\n"
            recipe = self.with_settings([*settings, f"out={self.out / 'best'}"])
            replace_text(self.out / BEST, head + recipe_file.dump(recipe))
        return found


class _Validations:
    """The validations of a trial that is running, told to Optuna in their order.

    The decision to prune depends on the values and steps only, also where the run has gone on for a while before its
    worker looked.
    """

    def __init__(self, found: _Sweep, trial: "Trial", run: Path) -> None:
        self._sweep, self._trial, self._run, self._told, self._looked = found, trial, run, 0, 0.0
        self.reason, self.step = "", 0
        self.value: float | None = None
        """The best value of a pruned trial."""

    def is_due(self) -> bool:
        """Return what `is_enough` does, and look at most once a second."""
        if time.monotonic() < self._looked + 1:
            return False
        self._looked = time.monotonic()
        return self.is_enough()

    def is_enough(self) -> bool:
        """Tell Optuna the new validations; return whether the pruner stops the trial."""
        lines, metric = validations(self._run), self._sweep.metric
        known = status.read(self._run) if lines else None
        for n, line in enumerate(lines[self._told :], self._told + 1):
            if self.reason:
                break
            self._told, self.step = n, int(line["step"])
            if line.get(metric) is None:
                continue
            self._trial.report(float(line[metric]), self.step)
            values = [float(one[metric]) for one in lines[:n] if one.get(metric) is not None]
            self.value = (min if self._sweep.lower_is_better else max)(values)
            if known is not None and self.step < known["steps"] and self._trial.should_prune():
                self.reason = (
                    f"pruned after step {self.step}: valid {metric} {values[-1]:.4g} is worse than the median of other "
                    "trials"
                )
        return bool(self.reason)


def is_sweep(out: Path) -> bool:
    """Whether a directory has the file of a sweep. Its content decides, since a user's file may have that name."""
    try:
        return "trials_wanted" in read_json(out / SWEEP)
    except (OSError, ValueError, TypeError):
        return False


def validations(run: Path) -> list[dict[str, Any]]:
    """Read the lines of the validations of a run."""
    path = run / METRICS
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return goodput.parse("".join(line for line in text.splitlines(keepends=True) if '"split": "valid"' in line))


def _runs(trials: "Sequence[Any]") -> dict[str, Any]:
    """Return the trials by the name of their run. One that was queued again stands in the place of the lost one."""
    return {one.user_attrs.get("run", f"{one.number:03}"): one for one in trials}


def _tpe(seed: int) -> Any:
    from optuna.samplers import TPESampler

    return TPESampler(seed=seed, constant_liar=True)


def _suggested(trial: "Trial", key: str, space: SearchSpace) -> Any:
    """Return the value of a key that the sampler chooses. Optuna stores choices as JSON, since they may be lists."""
    if space.choices is not None:
        return json.loads(trial.suggest_categorical(key, [json.dumps(choice) for choice in space.choices]))
    assert space.low is not None
    assert space.high is not None
    if space.is_whole:
        return trial.suggest_int(key, int(space.low), int(space.high), log=space.log, step=int(space.step or 1))
    return trial.suggest_float(key, space.low, space.high, log=space.log, step=space.step)


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
