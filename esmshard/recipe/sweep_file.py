"""The file of a search over settings of a recipe: which keys have which values, and how they are chosen. No torch.

    space:
      optim.lr: {low: 1.0e-5, high: 1.0e-3, log: true}
      adapt.rank: {choices: [4, 8, 16]}

Its errors are reported as those of a recipe. Every end of a range and every choice is put into the recipe and checked
before anything is trained.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, model_validator

from esmshard.errors import UsageError
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Clash, Recipe, Settings
from esmshard.recipe.yaml_keys import Tree, read

REFUSED = ("out", "data", "task.name", "train.seed", "train.eval_every", "track", "checkpoint", "parallel")
"""The keys, and sections, that are not searched: trials have the same task, data and validations, and a directory of
their own; the best seed is luck, and not a setting.
"""

MOST_CELLS = 10_000
"""The most trials of a grid."""

Number = int | float


class SearchSpace(Settings):
    """The values of one key: `choices`, or all numbers from `low` to `high`."""

    low: Number | None = None
    """The lowest number."""
    high: Number | None = None
    """The highest number. It is one of the values."""
    step: Number | None = Field(None, gt=0)
    """The distance between two values, counted from `low`. A key of whole numbers has step 1 by default."""
    log: bool = False
    """Whether values are drawn evenly on a logarithmic scale, as suits learning rates."""
    choices: tuple[Any, ...] | None = Field(None, strict=False)
    """The values, of any type that the key has."""

    @model_validator(mode="after")
    def _is_complete(self) -> "SearchSpace":
        if self.choices is not None:
            if others := [name for name in ("low", "high", "step", "log") if getattr(self, name)]:
                raise Clash("choices", f"are the values themselves; remove {', '.join(others)}")
            if len({json.dumps(choice, default=str) for choice in self.choices}) < max(2, len(self.choices)):
                raise Clash("choices", "two different values or more are expected, each once")
        elif self.low is None or self.high is None:
            name = "high" if self.high is None else "low"
            raise Clash(name, "is missing; write {low: 1.0e-5, high: 1.0e-3}, or {choices: [4, 8]}")
        elif self.low >= self.high:
            raise Clash("high", f"must be above low ({self.low}), not {self.high}")
        elif self.log and self.low <= 0:
            raise Clash("low", f"must be above 0 on a logarithmic scale, not {self.low}")
        elif self.log and self.step is not None:
            raise Clash("step", "does not go with log; remove one of the two, or list the values as choices")
        return self

    @property
    def is_whole(self) -> bool:
        """Whether the values are whole numbers."""
        return isinstance(self.low, int)

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values that are checked beforehand: all choices, or both ends of the range."""
        return (self.low, self.high) if self.choices is None else self.choices

    @property
    def cells(self) -> tuple[Any, ...] | None:
        """All values in their order; None if there is no end of them."""
        if self.choices is not None:
            return self.choices
        step = self.step or (1 if self.is_whole and not self.log else None)
        if step is None or self.low is None or self.high is None:
            return None
        count = min(MOST_CELLS + 1, math.floor((self.high - self.low) / step + 1e-9) + 1)
        return tuple(self.low + n * step for n in range(count))


class SweepSettings(Settings):
    """A search over settings of a recipe (docs/sweep.md)."""

    space: dict[str, SearchSpace] = Field(min_length=1)
    """The keys that are searched, and the values of each."""
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    """How values are chosen. `tpe`: near values of good trials (Bergstra et al. 2011), after 10 random trials;
    `random`: without regard to earlier trials; `grid`: every combination once."""
    seed: int = Field(0, ge=0, lt=2**32)
    """The seed of the choices. That of the training is the recipe's."""
    pruner: Literal["median", "none"] = "median"
    """`median` stops a trial whose best validation so far is worse than the median of the other trials at the same
    step. `none` trains every trial to its end."""
    prune_after_trials: int = Field(5, ge=1, le=10**6)
    """The number of trials that must have been trained to their end before one is stopped."""
    prune_after_steps: int = Field(0, ge=0, le=10**8)
    """The optimizer steps of a trial during which it is not stopped."""
    metric: Literal["headline", "loss"] = "headline"
    """The validation value that trials are compared by: `headline` is the task's first metric, and `loss` its loss."""
    storage: str | None = None
    """The database that several machines share, such as `postgresql://HOST/NAME`; by default a file in the directory of
    the sweep, which the workers of one machine can share."""

    @property
    def cells(self) -> int:
        """The number of combinations of a grid."""
        return math.prod(len(space.cells or ()) for space in self.space.values())


def load(path: Path, recipe: Path, overrides: Sequence[str]) -> SweepSettings:
    """Read the file of a search, and check it against a recipe and its overrides.

    Ends of ranges become floats if the key of the recipe takes numbers with decimals.

    Raises:
        UsageError: with one sentence for each problem, as `sweep.yaml:2:3: optim.lrr: unknown key; did you mean 'lr'?`.
    """
    tree = read(path, "a sweep", SweepSettings)
    found = tree.checked(SweepSettings)
    base, resolved = recipe_file.opened(recipe, overrides), recipe_file.load(recipe, overrides)
    for key in found.space:
        at = f"{tree.where(('space', key))}: {key}:"
        if any(f"{key}.".startswith(f"{name}.") for name in (*REFUSED, "batch.tokens_per_rank")):
            tree.problems.append(f"{at} cannot be searched; set it in the recipe")
        if found.metric == "loss" and key.startswith("task."):
            tree.problems.append(f"{at} may change what the loss is; search it with metric: headline")
        if tuple(key.split(".")) in base.overrides:
            tree.problems.append(f"{at} is searched, and {base.overrides[tuple(key.split('.'))]} sets it; remove one")
    tree.problems += [] if tree.problems else dict.fromkeys(_unfit(tree, found, base))
    if tree.problems:
        raise UsageError(*tree.problems)
    found = found.model_copy(update={"space": {key: _typed(resolved, key, one) for key, one in found.space.items()}})
    if found.sampler == "grid" and not 0 < found.cells <= MOST_CELLS:
        raise UsageError(
            f"{tree.where(('sampler',))}: sampler: a grid takes choices, or ranges with a step, and has at most "
            f"{MOST_CELLS:,} combinations; use tpe"
        )
    return found


def override(key: str, value: Any) -> str:
    """Return a setting of a trial as it is typed, such as `optim.lr=0.0001`."""
    return f"{key}={json.dumps(value)}"


def _unfit(tree: Tree, sweep: SweepSettings, base: Tree) -> Iterator[str]:
    """Yield a sentence for each value that the recipe refuses, beside the first value of each other key."""
    for key, space in sweep.space.items():
        for value in space.ends:
            for name, other in sweep.space.items():
                chosen = value if name == key else other.ends[0]
                base.put(tuple(name.split(".")), chosen, tree.where(("space", name), on_value=True))
            try:
                recipe_file.checked(base)
            except UsageError as error:
                yield from error.problems
            base.problems = []


def _typed(recipe: Recipe, key: str, space: SearchSpace) -> SearchSpace:
    """Return a range with ends and step of the type of its key."""
    *sections, last = key.split(".")
    section: BaseModel = recipe
    for name in sections:
        section = getattr(section, name)
    field = type(section).model_fields[last]
    if space.choices is not None or float not in _kinds(field.annotation):
        return space
    number = {name: float(value) for name in ("low", "high", "step") if (value := getattr(space, name)) is not None}
    return space.model_copy(update=number)


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that an annotation is made of."""
    return {annotation}.union(*(_kinds(part) for part in get_args(annotation)))


def shown(values: Mapping[str, Any]) -> str:
    """Format the settings of a trial in a line.

    >>> shown({"optim.lr": 0.00012345, "adapt.method": "lora"})
    'optim.lr=0.0001234 adapt.method=lora'
    """
    return " ".join(f"{key}={value_text(value)}" for key, value in values.items())


def value_text(value: Any) -> str:
    """Format a value of a setting: four digits of a number with decimals.

    >>> value_text(0.00012345), value_text(16), value_text([0.9, 0.98])
    ('0.0001234', '16', '[0.9, 0.98]')
    """
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
