"""The trials of a sweep, which workers on any number of machines share through a directory.

    OUT/journal.log     settings and state of every trial (Optuna's journal, a file that workers only append to)
    OUT/trials/003/     the run of a trial; claim/lease-N.json in it names the worker that trains the trial

Optuna chooses the settings and decides which trials are stopped early. Its journal works on network file systems,
on which SQLite does not. Its heartbeat is for databases only, so a worker holds a lease
(`esmshard.train.records.lease`) of each trial. A trial whose worker is gone goes on in another worker, from its newest
checkpoint.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from esmshard.errors import InputError, UsageError, reading
from esmshard.files import parse_json
from esmshard.launch.preemption import Preemption
from esmshard.progress import say
from esmshard.recipe.sweep_file import SearchSpace, SweepSettings
from esmshard.train.records import lease

if TYPE_CHECKING:
    from types import ModuleType

    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial

JOURNAL = "journal.log"
TRIALS = "trials"
_STUDY = "sweep"

Ended = Literal["complete", "pruned", "failed"]


@dataclass(frozen=True)
class Outcome:
    """The end of a trial."""

    state: Ended
    value: float | None
    """The validation value; of a pruned trial the best one until then."""
    step: int
    """The optimizer steps done."""
    message: str
    exit_code: int = 0


@dataclass(frozen=True)
class SearchTrial:
    """One trial: settings of the recipe, and a run that is trained with them."""

    number: int
    values: dict[str, Any]
    """The settings, by their keys."""
    validations: dict[int, float]
    """The validation value after each step that was validated."""
    outcome: Outcome | None
    """The end; None while the trial has none."""


def optuna() -> "ModuleType":
    """Return the package Optuna, which prints no messages of its own.

    Raises:
        UsageError: if it is not installed.
    """
    try:
        import optuna as package
    except ImportError:
        raise UsageError("--sweep needs optuna; pip install 'esmshard[sweep]'") from None
    package.logging.set_verbosity(package.logging.ERROR)
    warnings.filterwarnings("ignore", category=package.exceptions.ExperimentalWarning)
    return package


def storage(out: Path) -> "JournalStorage":
    """Open the journal of a sweep."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    path = str(out / JOURNAL)
    # The lock is a file that is created exclusively, as leases are: NFS and Lustre guarantee that.
    return JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path)))


def is_sweep(out: Path) -> bool:
    """Whether a directory has the journal of a sweep, whose first line names the study."""
    try:
        with open(out / JOURNAL, encoding="utf-8") as file:
            return bool(parse_json(file.readline())["study_name"] == _STUDY)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def study(out: Path) -> "Study":
    """Open the study of a sweep that has begun.

    Raises:
        InputError: if its journal is damaged.
    """
    package = optuna()
    with reading(str(out / JOURNAL), "restore it, or start again with --overwrite"):
        found: Study = package.load_study(study_name=_STUDY, storage=storage(out))
        settings = SweepSettings.model_validate(found.user_attrs["settings"])
    found.sampler = package.samplers.RandomSampler()  # `Search` sets another one for each trial
    found.pruner = package.pruners.NopPruner()
    if settings.pruner == "median":
        found.pruner = package.pruners.MedianPruner(settings.prune_after_trials, settings.prune_after_steps)
    return found


class Search:
    """The search of one worker.

    Args:
        out: the directory of the sweep.
        settings: the settings of the search.
        facts: facts that all workers of a sweep must agree on, and that are written into its journal.
        trials: the number of trials of all workers.
        lower_is_better: the direction of the validation value.
    """

    def __init__(
        self, out: Path, settings: SweepSettings, facts: Mapping[str, Any], trials: int, *, lower_is_better: bool
    ) -> None:
        self.out, self.settings, self.count, self.lower_is_better = out, settings, trials, lower_is_better
        self._package = optuna()
        facts = {"settings": settings.model_dump(mode="json"), **facts}
        with self.alone():
            known = (out / JOURNAL).is_file() and storage(out).get_all_studies()
            if not known:
                direction = "minimize" if lower_is_better else "maximize"
                made = self._package.create_study(study_name=_STUDY, storage=storage(out), direction=direction)
                for name, value in facts.items():
                    made.set_user_attr(name, value)
            self._study = study(out)
            before = {name: self._study.user_attrs.get(name) for name in facts}
        if changed := [name for name in facts if before[name] != json.loads(json.dumps(facts[name]))]:
            raise UsageError(
                f"{out}: holds a sweep with other {' and '.join(changed)}; go on with the old ones, or start again "
                "with --overwrite or out=DIR"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude all other workers for a moment. Requests to stop are heard after it.

        Raises:
            Preempted: at the end of the block, if this process was asked to stop.
        """
        from optuna.storages.journal import JournalFileOpenLock

        self.out.mkdir(parents=True, exist_ok=True)
        lock = JournalFileOpenLock(str(self.out / "sweep"))  # one that a killed worker left counts for 30 s
        with Preemption() as preemption, preemption.noted():
            lock.acquire()
            try:
                yield
            finally:
                lock.release()

    @property
    def trials(self) -> list[SearchTrial]:
        """All trials that have begun, by number."""
        return [self._shown(trial) for trial in self._frozen()]

    @property
    def best(self) -> SearchTrial | None:
        """The trial with the best validation value among those that were trained to their end; None without one."""
        ended = [trial for trial in self.trials if trial.outcome and trial.outcome.state == "complete"]
        sign = 1 if self.lower_is_better else -1
        return min(ended, key=lambda trial: sign * _value(trial), default=None)

    @contextmanager
    def claimed(self) -> Iterator[SearchTrial | None]:
        """Yield a trial for this worker alone: one whose worker is gone, or a new one; None if all have begun."""
        with self._lease_of_next() as number:
            yield None if number is None else self._shown(self._frozen()[number])

    def tell(self, trial: SearchTrial, outcome: Outcome) -> None:
        """Record the end of a trial of this worker."""
        states = self._package.trial.TrialState
        with self.alone():
            frozen = self._frozen()[trial.number]
            attributes: dict[str, Any] = {"state": outcome.state, "step": outcome.step, "message": outcome.message}
            attributes |= {"value": outcome.value, "exit_code": outcome.exit_code}
            for name, value in attributes.items():
                self._study._storage.set_trial_user_attr(frozen._trial_id, name, value)
            if outcome.state == "complete":
                self._study.tell(trial.number, outcome.value)
            elif outcome.state == "pruned" or outcome.exit_code in (0, 1):
                # Settings that diverge or do not fit into memory (1) are bad ones, of which the sampler is to learn.
                self._study.tell(trial.number, state=states.PRUNED)
            else:  # a crash of the machine says nothing about the settings
                self._study.tell(trial.number, state=states.FAIL)

    def importance(self) -> dict[str, float]:
        """Return the share of the variance of the validation value that each key explains, by functional ANOVA (Hutter
        et al. 2014); empty if fewer than four trials were trained to their end, or if all have the same value.
        """
        values = [_value(one) for one in self.trials if one.outcome and one.outcome.state == "complete"]
        if len(values) < 4 or len(set(values)) == 1:
            return {}
        evaluator = self._package.importance.FanovaImportanceEvaluator(seed=self.settings.seed)
        found: dict[str, float] = self._package.importance.get_param_importances(self._study, evaluator=evaluator)
        return found

    @contextmanager
    def _lease_of_next(self) -> Iterator[int | None]:
        states = self._package.trial.TrialState
        with self.alone():  # a trial that is running has a lease, or lost its worker
            running = [trial.number for trial in self._frozen() if trial.state == states.RUNNING]
        for number in self._abandoned(running):
            try:
                claim = lease.Lease(self._claim(number), lambda text: None).__enter__()
            except InputError:  # another worker was faster
                continue
            try:
                if self._frozen()[number].state == states.RUNNING:
                    say(f"trial {number}: its worker is gone; going on with it")
                    yield number
                    return
            finally:
                self._release(number, claim)
        asked: int | None = None
        new: lease.Lease | None = None
        try:
            with self.alone():
                if (begun := len(self._frozen())) < self.count:
                    self._study.sampler = self._sampler(begun)
                    trial = self._study.ask({key: self._distribution(one) for key, one in self.settings.space.items()})
                    self._study.sampler = (
                        self._package.samplers.RandomSampler()
                    )  # that of a grid must not end the study
                    asked = trial.number
                    new = lease.Lease(self._claim(asked), say).__enter__()
            yield asked
        finally:
            if asked is not None and new is not None:
                self._release(asked, new)

    def _release(self, number: int, claim: lease.Lease) -> None:
        claim.__exit__(None, None, None)
        with suppress(OSError):  # another worker has claimed the trial already
            self._claim(number).rmdir()

    def _abandoned(self, running: list[int]) -> list[int]:
        """Return the trials whose worker is gone, and whose run, too. Leases of other machines are watched for 25 s."""

        def lives(number: int) -> bool:
            signs = [lease.watched(place) for place in (self._claim(number), self._claim(number).parent)]
            return any(sign is not None and sign.lives for sign in signs)

        if not running:
            return []
        with ThreadPoolExecutor(min(32, len(running))) as pool:
            return [number for number, alive in zip(running, pool.map(lives, running), strict=True) if not alive]

    def _claim(self, number: int) -> Path:
        return trial_directory(self.out, number) / "claim"

    def _frozen(self) -> "list[FrozenTrial]":
        with reading(str(self.out / JOURNAL), "restore it, or start again with --overwrite"):
            return self._study.get_trials(deepcopy=False)

    def _sampler(self, number: int) -> "BaseSampler":
        """Return the sampler of one trial. Its seed follows from the number: otherwise all workers would draw alike."""
        seed = int(np.random.SeedSequence([self.settings.seed, number]).generate_state(1)[0])
        samplers = self._package.samplers
        if self.settings.sampler == "grid":
            cells = {
                key: [_stored(one, value) for value in one.cells or ()] for key, one in self.settings.space.items()
            }
            # The sampler shuffles the cells by its seed, and gives trial N the Nth of them.
            return samplers.GridSampler(cells, seed=self.settings.seed)  # type: ignore[no-any-return]
        if self.settings.sampler == "random":
            return samplers.RandomSampler(seed=seed)  # type: ignore[no-any-return]
        # Trials that are running count as bad ones, so that workers do not all try the same.
        return samplers.TPESampler(seed=seed, constant_liar=True)  # type: ignore[no-any-return]

    def _distribution(self, space: SearchSpace) -> Any:
        distributions = self._package.distributions
        if space.choices is not None:
            return distributions.CategoricalDistribution([_stored(space, choice) for choice in space.choices])
        if space.is_whole:
            return distributions.IntDistribution(space.low, space.high, log=space.log, step=space.step or 1)
        return distributions.FloatDistribution(space.low, space.high, log=space.log, step=space.step)

    def _shown(self, trial: "FrozenTrial") -> SearchTrial:
        space, attributes = self.settings.space, trial.user_attrs
        values = {
            key: json.loads(value) if space[key].choices is not None else value for key, value in trial.params.items()
        }
        outcome = Outcome(**attributes) if trial.state.is_finished() and attributes else None
        return SearchTrial(trial.number, values, dict(trial.intermediate_values), outcome)


def trial_directory(out: Path, number: int) -> Path:
    """Return the directory of the run of a trial."""
    return out / TRIALS / f"{number:03}"


def _stored(space: SearchSpace, value: Any) -> Any:
    """Return a value as Optuna stores it: choices as JSON, since they may be lists."""
    return json.dumps(value) if space.choices is not None else value


def _value(trial: SearchTrial) -> float:
    assert trial.outcome is not None
    assert trial.outcome.value is not None
    return trial.outcome.value
