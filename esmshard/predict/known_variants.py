"""Facts of a run of task `variant` about variants: measured values, predictions by models that had not seen them, the
variants of the training, and predictions by its baselines.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.batching.loader import SEEN, Examples
from esmshard.data.splits.variant_records import OUT_OF_FOLD, VariantRecords
from esmshard.data.variants.substitutions import Mutation, parse_variant
from esmshard.devices import DeviceName
from esmshard.errors import InputError, UsageError
from esmshard.io.paths import read_json
from esmshard.io.tables import counted
from esmshard.progress import Progress
from esmshard.recipe.sections import Recipe
from esmshard.tasks import metrics
from esmshard.tasks.finetuned import FineTuned, load_base
from esmshard.tasks.metrics import LEAST, Interval, variant_spearman
from esmshard.tasks.variants import FROZEN, ONE_HOT, SHORT, VariantTask, fit_scale

SUMMARY, VARIANT = "summary.json", "variant"

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Known:
    """The facts of a run, by the names of variants in the numbering of the wild type."""

    measured: Mapping[str, str]
    """The measured value of the first target, as text."""
    out_of_fold: Mapping[str, Sequence[float]]
    """The predictions of the T targets by the models that were not trained on the variant."""
    fold: Mapping[str, int]
    """The fold of each variant with such a prediction."""
    baselines: Mapping[str, Mapping[str, float]]
    """The predictions of the first target by each baseline, by the baseline's name."""
    seen: frozenset[str] | None
    """The variants that at least one model was trained on or selected by; None if this is not recorded."""
    verdict: str | None
    """Whether fine-tuning was better than the best baseline, in the sentence of the run."""


def read(run: Path, models: Sequence[Path], targets: Sequence[str]) -> Known:
    """Read what a run and its models have recorded.

    Args:
        run: the directory of a cross-validation, of a single run, or of a model.
        models: the models of the run.
        targets: names of the targets.

    Raises:
        InputError: a file is damaged.
    """
    summary = json_of(run / SUMMARY) or {}
    methods = list(summary.get("joint", {}).get("differences", ()))
    files = [model / SEEN for model in models]
    seen = None
    if all(file.is_file() for file in files):
        seen = frozenset(name for file in files for name in file.read_text(encoding="utf-8").split())
    rows = _rows(run / OUT_OF_FOLD)
    of = [f" {name}" for name in targets] if len(targets) > 1 else [""]
    out_of_fold, fold, baselines = {}, {}, {method: dict[str, float]() for method in methods}
    for row in rows:
        if any(row.get(f"predicted{one}") for one in of):
            out_of_fold[row[VARIANT]] = [float(row[f"predicted{one}"] or "nan") for one in of]
            fold[row[VARIANT]] = int(row["fold"])
        for method in methods:
            if cell := row.get(f"{method}{of[0]}"):
                baselines[method][row[VARIANT]] = float(cell)
    measured = {row[VARIANT]: row["measured"] for row in rows if row["measured"]}
    return Known(measured, out_of_fold, fold, baselines, seen, summary.get("verdict"))


def _rows(path: Path) -> list[dict[str, str]]:
    """Read the columns of `variants.csv` that a run added, by their names without a prefix. Rows without a variant are
    left out.
    """
    if not path.is_file():
        return []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            head, *body = csv.reader(file)
        # The columns of the user's table come first. If one of them has the name of an added column, all added columns
        # have a prefix.
        prefix = ""
        while f"esmshard {prefix}{VARIANT}" in head:
            prefix += "esmshard "
        first = len(head) - 1 - head[::-1].index(f"{prefix}{VARIANT}")
        names = [name.removeprefix(prefix) for name in head[first:]]
        found = [dict(zip(names, row[first:], strict=True)) for row in body]
        return [row for row in found if row[VARIANT]]
    except (ValueError, KeyError, csv.Error) as error:
        raise InputError(
            f"{path}: damaged ({error}); repeat its `esmshard finetune` command with --resume auto, which writes the "
            "file again"
        ) from None


def json_of(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if there is no such file.

    Raises:
        InputError: the file is damaged.
    """
    try:
        found = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: damaged ({error}); repeat the command that wrote this file") from None
    return found if isinstance(found, dict) else None


def compared(
    known: Known, names: Sequence[str], said_N: Array, measured_N: Array, target: str
) -> tuple[dict[str, Any], list[str]]:
    """Compare predictions with the measured values of a table, separately for variants that training has seen and
    others.

    Args:
        known: the facts of the run.
        names: names of the variants in the N rows of the table.
        said_N: predictions by the mean of all models, which are no test for variants that these models were trained on.
        measured_N: measured values; NaN where the table has none.
        target: name of the values.

    Returns:
        Facts for a JSON file, and messages for the user.
    """
    has_N = ~np.isnan(measured_N)
    rows = int(has_N.sum())
    if known.seen is None:
        why = (
            f"Spearman with {target}: not given, because it is not recorded beside these models which of the "
            f"{counted(rows, 'row')} with a value they were trained on"
        )
        return {"target": target, "rows_with_values": rows, "seen_in_training": None, "unseen": None, "why": why}, [why]
    seen_N = np.array([name in known.seen for name in names], dtype=bool)
    facts: dict[str, Any] = {"target": target, "rows_with_values": rows, "seen_in_training": None, "unseen": None}
    messages = []
    if (mine_N := seen_N & has_N).any():
        facts["seen_in_training"], sentence = _seen(known, names, mine_N, measured_N, target)
        messages.append(sentence)
    if (others_N := ~seen_N & has_N).any():
        others = [parse_variant(name) for name, is_other in zip(names, others_N, strict=True) if is_other]
        trained = {mutation.position for name in known.seen for mutation in parse_variant(name)}
        sites = [{mutation.position for mutation in one} for one in others]
        varied, new = sum(one <= trained for one in sites), sum(not one & trained and bool(one) for one in sites)
        of_sites = {"all": varied, "some": len(others) - varied - new, "none": new}
        found, unit = variant_spearman(said_N[others_N], measured_N[others_N], others)
        facts["unseen"] = {"rows": len(others), "sites_varied_in_training": of_sites, "spearman": _finite(found)}
        messages.append(
            f"{spearman_sentence(found, target, unit)} over {counted(len(others), 'row')} that no model was trained "
            f"on; {varied:,} of them change only sites that training has varied, {of_sites['some']:,} also other "
            f"sites, and {new:,} only other sites"
        )
    return facts, messages


def _seen(
    known: Known,
    names: Sequence[str],
    mine_N: npt.NDArray[np.bool_],
    measured_N: Array,
    target: str,
) -> tuple[dict[str, Any], str]:
    """Compare rows of variants that training has seen: their out-of-fold predictions, beside those of the best
    baseline. Each fold is predicted by models of its own, so that variants are compared within their fold.
    """
    count = int(mine_N.sum())
    apart_N = np.array([known.out_of_fold.get(name, [np.nan])[0] for name in names])
    tested_N = mine_N & ~np.isnan(apart_N)
    tested = int(tested_N.sum())
    facts: dict[str, Any] = {"rows": count, "rows_out_of_fold": tested, "spearman_out_of_fold": None}
    facts["best_baseline"] = None
    trained = f"{counted(count, 'row')} that the models were trained on"
    if not tested:
        return facts, (
            f"Spearman with {target}: not given for {trained}, as there are no predictions of them by models that had "
            "not seen them"
        )
    tested_names = [name for name, is_tested in zip(names, tested_N, strict=True) if is_tested]
    variants = [parse_variant(name) for name in tested_names]
    fold_M, measured_M = np.array([known.fold[name] for name in tested_names]), measured_N[tested_N]
    found, unit = variant_spearman(apart_N[tested_N], measured_M, variants, fold_M)
    facts["spearman_out_of_fold"] = _finite(found)
    each = "each predicted by the models that had not seen it"
    of = trained if tested == count else f"{tested:,} of {trained}"
    within = "within folds, " if len(set(fold_M.tolist())) > 1 else ""
    said = f"{spearman_sentence(found, target, unit)} out of fold over {of}, {within}{each}"
    baselines = {
        method: np.array([values[name] for name in tested_names])
        for method, values in known.baselines.items()
        if values.keys() >= set(tested_names)
    }
    rho = {method: metrics.spearman_within(x_M, measured_M, fold_M) for method, x_M in baselines.items()}
    if best := max((method for method in rho if not np.isnan(rho[method])), key=rho.__getitem__, default=""):
        theirs, _ = variant_spearman(baselines[best], measured_M, variants, fold_M)
        facts["best_baseline"] = {"name": best, "spearman_out_of_fold": _finite(theirs)}
        said += f"; the best baseline there, {best}, has {theirs}"
    return facts, said


def spearman_sentence(found: Interval, target: str, unit: str) -> str:
    """Say a correlation with measured values, and over what its interval is; or why there is none.

    Args:
        found: the correlation.
        target: the column of the measured values.
        unit: the noun for what was resampled (`variant_spearman`).
    """
    if np.isnan(found.value):
        return f"Spearman with {target} undefined: it takes two different values and two different predictions"
    of = f"no interval, for an interval takes {LEAST} {unit}s" if np.isnan(found.low) else f"95% over {unit}s"
    return f"Spearman with {target} {found} ({of})"


def _finite(found: Interval) -> dict[str, float | None]:
    return {name: None if np.isnan(value) else value for name, value in asdict(found).items()}


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
    own = {"targets": [target], "scales": [asdict(scale)]}
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
    with Progress("predict", len(examples)) as progress:
        for first in range(0, len(examples), 1000):
            part = [examples.get(n) for n in range(first, min(first + 1000, len(examples)))]
            outputs = task.baseline_outputs(part, known, base)[name]
            predicted += [task.predict(np.asarray(output))[0] for output in outputs]
            progress.update(first + len(part), "variants")
    return np.array(predicted, np.float32)


def _examples(task: VariantTask, variants: Sequence[tuple[Mutation, ...]]) -> Examples:
    records = VariantRecords(Path("variants"), task.wild_type, list(variants), int(task.facts["first"]))
    return Examples("input", records.path, records, None)
