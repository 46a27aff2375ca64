"""A run that is a trial of a sweep: its validations go to the search, which may stop it. Its test set is not used."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from esmshard.train.experiments import search

if TYPE_CHECKING:
    from optuna.trial import Trial

TRIAL = "ESMSHARD_TRIAL"
"""The environment variable of the processes of a trial: the number of the trial, and the directory of the sweep."""


@dataclass
class TrialRun:
    """The trial that this process trains. Only the first rank opens the journal of the sweep."""

    number: int
    sweep: Path
    _trial: "Trial | None" = field(default=None, repr=False)

    def report(self, step: int, values: Mapping[str, float]) -> str:
        """Tell the search a validation, on the first rank.

        Args:
            step: the number of optimizer steps done.
            values: the loss, and the metrics of the task, of which the first is the headline.

        Returns:
            Why the trial should stop; empty if it should go on.
        """
        if self._trial is None:
            from optuna.trial import Trial

            study = search.study(self.sweep)
            self._trial = Trial(study, study.get_trials(deepcopy=False)[self.number]._trial_id)
        asked = self._trial.study.user_attrs["settings"]["metric"]
        name = next(name for name in values if (name == "loss") == (asked == "loss"))
        if step not in self._trial.study.get_trials(deepcopy=False)[self.number].intermediate_values:
            self._trial.report(values[name], step)  # it is known if the run goes on from an earlier checkpoint
        if not self._trial.should_prune():
            return ""
        return f"pruned after step {step}: valid {name} {values[name]:.4g} is worse than the median of other trials"


def current() -> TrialRun | None:
    """Return the trial that the worker of a sweep has started this process for; None in any other process."""
    number, _, sweep = os.environ.get(TRIAL, "").partition(":")
    return TrialRun(int(number), Path(sweep)) if sweep else None


def variables(number: int, sweep: Path) -> dict[str, str]:
    """Return the environment of the processes of a trial."""
    return {TRIAL: f"{number}:{sweep}"}
