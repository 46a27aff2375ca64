"""Functions that read and check the file of a sweep, a search for the best settings of a recipe.

An example of the file:

    space:
      optim.lr: {low: 1.0e-5, high: 1.0e-3, log: true}
      adapt.rank: {choices: [4, 8, 16]}

Before training, the recipe is checked with both ends of each range and with every choice. This module does not import
torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from esmshard.errors import UsageError
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Clash, Settings
from esmshard.recipe.yaml_keys import Tree, read

REFUSED = (
    *("out", "data", "task.name", "train.seed", "train.eval_every", "track", "checkpoint", "parallel"),
    "batch.tokens_per_rank",
)
"""The keys and sections of a recipe that a sweep cannot search. Trials with different values of these could not be
compared, or would share a directory. For `train.seed`, the best value is only luck."""

MOST_CELLS = 10_000
"""The maximum number of trials in a grid."""

Number = int | float


class SearchSpace(Settings):
    """The values that the search may try for one recipe key: `choices`, or all numbers from `low` to `high`."""

    low: Number | None = None
    """The lowest number that the search may try."""
    high: Number | None = None
    """The highest number that the search may try."""
    step: Number | None = Field(None, gt=0)
    """The distance between neighbouring values, from `low` on. For whole numbers, the default is 1."""
    log: bool = False
    """Whether to choose values evenly on a logarithmic scale, as for learning rates."""
    choices: tuple[Any, ...] | None = Field(None, strict=False)
    """A list of values that the search may try."""

    @model_validator(mode="after")
    def _is_complete(self) -> "SearchSpace":
        if self.choices is not None:
            if others := [name for name in ("low", "high", "step", "log") if getattr(self, name)]:
                raise Clash("choices", f"cannot have a range, too; remove {', '.join(others)}")
            if len({json.dumps(choice, default=str) for choice in self.choices}) < max(2, len(self.choices)):
                raise Clash("choices", "two or more different values are expected")
        elif self.low is None or self.high is None or self.low >= self.high:
            raise Clash("low", "must be below high; write {low: 1.0e-5, high: 1.0e-3}, or {choices: [4, 8]}")
        elif self.log and (self.low <= 0 or self.step is not None):
            raise Clash("log", "is for a low above 0, without step; remove log, or list the values as choices")
        return self

    @property
    def is_whole(self) -> bool:
        """Whether the range has only whole numbers."""
        return isinstance(self.low, int)

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values with which the recipe is checked before training: all choices, or both ends of the range."""
        return (self.low, self.high) if self.choices is None else self.choices

    @property
    def cells(self) -> tuple[Any, ...] | None:
        """All values that a grid tries, in order. None for a logarithmic range, or for fractions without `step`."""
        if self.choices is not None:
            return self.choices
        step = self.step or (1 if self.is_whole and not self.log else None)
        if step is None or self.low is None or self.high is None:
            return None
        count = min(MOST_CELLS + 1, math.floor((self.high - self.low) / step + 1e-9) + 1)
        return tuple(self.low + n * step for n in range(count))


class SweepSettings(Settings):
    """The settings of a sweep (docs/sweep.md)."""

    space: dict[str, SearchSpace] = Field(min_length=1)
    """The recipe keys to search, such as `optim.lr`, with the values to try for each key."""
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    """How to choose values. `tpe` chooses random values in the first 10 trials, and then values near those of good
    trials (Bergstra et al. 2011). `random` ignores earlier trials. `grid` tries every combination of values once."""
    seed: int = Field(0, ge=0, lt=2**32)
    """The random seed for the choice of values. The seed for training is in the recipe."""
    pruner: Literal["median", "none"] = "median"
    """Which trials to stop early. `median` stops a trial whose best validation is worse than the median result of the
    other trials at the same step. `none` stops no trial."""
    prune_after_trials: int = Field(5, ge=1, le=10**6)
    """How many trials must finish before the pruner may stop a trial."""
    prune_after_steps: int = Field(0, ge=0, le=10**8)
    """Before this optimizer step, the pruner stops no trial."""
    metric: Literal["headline", "loss"] = "headline"
    """The validation result by which trials are compared: `headline` (the first metric of the task) or `loss`."""
    storage: str | None = None
    """A database for workers on several machines, such as `postgresql://HOST/NAME`. The default is a file in the
    directory of the sweep, for workers on one machine."""

    @property
    def cells(self) -> int:
        """The number of combinations in a grid; 0 if `SearchSpace.cells` is None for a key."""
        return math.prod(len(space.cells or ()) for space in self.space.values())


def load(path: Path, recipe: Path, overrides: Sequence[str]) -> SweepSettings:
    """Read the file of a sweep, and check it together with a recipe and overrides. If a recipe key is a float, the
    numbers of its range become floats.

    Raises:
        UsageError: with a sentence for each problem: `sweep.yaml:2:3: optim.lrr: unknown key; did you mean 'lr'?`.
    """
    tree = read(path, "a sweep", SweepSettings)
    sweep, base = tree.checked(SweepSettings), recipe_file.opened(recipe, overrides)
    recipe_file.checked(base)
    for key in sweep.space:
        at = f"{tree.where(('space', key))}: {key}:"
        if any(f"{key}.".startswith(f"{name}.") for name in REFUSED):
            tree.problems.append(f"{at} cannot be searched; set it in the recipe")
        if sweep.metric == "loss" and key.startswith("task."):
            tree.problems.append(f"{at} may change the formula of the loss; search it with metric: headline")
        if (typed := base.override_of(tuple(key.split(".")))) is not None:
            tree.problems.append(f"{at} is searched, and {typed} sets it; remove one of the two")
    if tree.problems:
        raise UsageError(*tree.problems)
    space = {key: _fitting(key, tree, sweep, base) for key in sweep.space}
    if tree.problems:
        raise UsageError(*dict.fromkeys(tree.problems))
    sweep = sweep.model_copy(update={"space": space})
    if sweep.sampler == "grid" and not 0 < sweep.cells <= MOST_CELLS:
        raise UsageError(
            f"{tree.where(('sampler',))}: sampler: a grid needs choices, or ranges with a step, and at most "
            f"{MOST_CELLS:,} combinations; change the space, or choose tpe"
        )
    return sweep


def override(key: str, value: Any) -> str:
    """Return an override that sets a key to a value, such as `optim.lr=0.0001`."""
    return f"{key}={json.dumps(value)}"


def _fitting(key: str, tree: Tree, sweep: SweepSettings, base: Tree) -> SearchSpace:
    """Return the search space of a key, with numbers in the type of the key. Check the recipe with each of the key's
    `ends` and the first value of every other key. Add problems to `tree`.
    """
    space = sweep.space[key]
    for value in space.ends:
        for name, other in sweep.space.items():
            chosen = value if name == key else other.ends[0]
            base.put(tuple(name.split(".")), chosen, tree.where(("space", name), on_value=True))
        try:
            section: Any = recipe_file.checked(base)
        except UsageError as error:
            tree.problems += error.problems
            base.problems = []
            continue
        for part in key.split("."):
            section = getattr(section, part)
    if space.choices is not None or tree.problems or not isinstance(section, float):
        return space
    numbers = {name: getattr(space, name) for name in ("low", "high", "step")}
    return space.model_copy(update={name: float(value) for name, value in numbers.items() if value is not None})


def shown(values: Mapping[str, Any]) -> str:
    """Format the recipe keys and values of a trial as one line.

    >>> shown({"optim.lr": 0.00012345, "adapt.method": "lora"})
    'optim.lr=0.0001234 adapt.method=lora'
    """
    return " ".join(f"{key}={value_text(value)}" for key, value in values.items())


def value_text(value: Any) -> str:
    """Format the value of one recipe key as text. A float gets four significant digits.

    >>> value_text(0.00012345), value_text(16), value_text([0.9, 0.98])
    ('0.0001234', '16', '[0.9, 0.98]')
    """
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
