"""Predictions of variants by a baseline of a cross-validation, and which baseline its result advises."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.batching.loader import Examples
from esmshard.data.splits.variant_records import VariantRecords
from esmshard.data.variants.substitutions import Mutation
from esmshard.devices import DeviceName
from esmshard.errors import InputError, UsageError
from esmshard.progress import Progress
from esmshard.recipe.sections import Recipe
from esmshard.tasks.finetuned import FineTuned, load_base
from esmshard.tasks.variants import FROZEN, ONE_HOT, SHORT, VariantTask, fit_scale


def baseline_of(name: str) -> str:
    """Return the baseline of a short name, or of its name in `summary.json`. `UsageError` for another name."""
    if name not in (*SHORT, *SHORT.values()):
        raise UsageError(f"--with {name}: choose one of {', '.join(SHORT)}")
    return SHORT.get(name, name)


def better_baseline(summary: Mapping[str, Any]) -> str | None:
    """Return the short name of the best baseline that was better than the fine-tuned model; None if none was. Without
    intervals, the difference in the sample decides.

    Args:
        summary: the content of `summary.json` of a cross-validation.
    """
    scores = summary.get("joint", {})
    better = {
        short: scores["metrics"][name]["value"]
        for short, name in SHORT.items()
        if (gain := scores.get("differences", {}).get(name))
        and ((gain["value"] if gain["high"] is None else gain["high"]) or 0.0) < 0
    }
    return max(better, key=better.__getitem__, default=None)


def baseline_predictions(
    name: str,
    found: FineTuned,
    measured: Mapping[tuple[Mutation, ...], float],
    variants: Sequence[tuple[Mutation, ...]],
    device: DeviceName = None,
) -> npt.NDArray[np.float32]:
    """Fit a baseline to measured variants, as those of the folds are fitted, and predict variants, float32 [N].

    Args:
        name: the baseline.
        found: a model of the run, for its task and its recipe.
        measured: the values of the first target; at most `VariantTask.baseline_records` of them are used.
        variants: N variants, like the measured ones of the part of the protein that the model sees.
        device: see `chosen_device`.

    Raises:
        InputError: nothing was measured, or the run has no such baseline.
    """
    task, target = found.task, found.task.names[0]
    assert isinstance(task, VariantTask)
    if len(set(measured.values())) < 2:
        raise InputError(
            f"--with {name}: the run has no measured variants, which variants.csv of a cross-validation lists; name "
            "the directory of a cross-validation"
        )
    if name not in (ONE_HOT, FROZEN) and not task.settings.zero_shot:
        raise InputError(f"--with {name}: the run has no zero-shot scores (task.zero_shot is false); choose another")
    scale = fit_scale(np.array(list(measured.values())), task.facts["scales"][0]["kind"])
    own = {"targets": [target], "scales": [scale.as_json()]}
    own |= {"lower_is_better": [target] if target in task.facts["lower_is_better"] else []}
    task = VariantTask(task.settings, dict(task.facts) | own)
    base = None if name == ONE_HOT else load_base(Recipe.model_validate(found.about["recipe"]), task, device)
    train = _examples(task, list(measured))
    values = list(measured.values())
    some = range(0, len(train), -(-len(train) // task.baseline_records))
    known = task.baselines(
        [replace(train.get(n), labels={"target": np.array([values[n]], np.float32)}) for n in some], base, name
    )
    examples, predicted = _examples(task, variants), list[np.float32]()
    if name == FROZEN and base is not None:
        task.look_ahead([examples.get(n) for n in range(len(examples))], base)
    with Progress("predict", len(examples)) as progress:
        for n in range(len(examples)):
            output = task.baseline_outputs(examples.get(n), known, base)[name]
            assert isinstance(output, np.ndarray)
            predicted.append(task.predict(output)[0])
            if not n % 1000:
                progress.update(n, "variants")
    return np.array(predicted, np.float32)


def _examples(task: VariantTask, variants: Sequence[tuple[Mutation, ...]]) -> Examples:
    records = VariantRecords(Path("variants"), task.wild_type, list(variants), int(task.facts["first"]))
    return Examples("input", records.path, records, None)
