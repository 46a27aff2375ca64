"""Several runs of one recipe with different random seeds and folds, and the joint results of these runs.

`summarise` averages each metric over the runs. For a table of variants, `conclude` also compares the model with its
baselines on all test variants. Each variant is predicted by a model that was not trained on it.
"""

import csv
import itertools
import math
import os
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.mutations import parse_name
from esmshard.data.splits.assignment import LEFT_OUT
from esmshard.data.splits.variant_records import (
    LEFT_OUT_WHY,
    OUT_OF_FOLD,
    count_folds,
    divide,
    lacking,
    shares_positions,
    table_facts,
    table_of,
)
from esmshard.errors import UsageError
from esmshard.io.paths import read_json, replace_json, replacing
from esmshard.io.tables import counted, write_rows
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import DataSettings, Recipe
from esmshard.tasks import metrics
from esmshard.tasks.base import MAIN
from esmshard.tasks.metrics import (
    LEAST,
    PREDICTIVE,
    Interval,
    count_units,
    coverage,
    difference,
    interval,
    variant_units,
)
from esmshard.tasks.variant_baselines import AUGMENTED, FROZEN, ONE_HOT, SCORE
from esmshard.train.evaluate import Comparison, aligned, in_sample
from esmshard.train.run_dir import read_status

SUMMARY, CURVE = "summary.json", "learning_curve.json"
OF_PROTEINS = "proteins.csv"
JOINT_FILES = (SUMMARY, OUT_OF_FOLD, CURVE, OF_PROTEINS, "ranked.csv", "ranked.csv.json", "report.html")
"""The names of the files with joint results. They are in the directory that contains the directories of the runs."""
SHARES = (0.25, 0.5)
"""The shares of the training variants that the models of a learning curve are trained on. The curve also has the model
that is trained on all of them."""
LEVELS = (0.5, 0.8, 0.95)  # the levels of the intervals of a Gaussian process whose coverage is reported
SPEARMAN, RECALL, CHOSEN = "Spearman", "recall", "mean of chosen"

Array = npt.NDArray[np.float64]

HEADS = {"gp": "Gaussian process", "likelihood": "fine-tuned likelihood", "network": "fine-tuned network"}
"""The heads that `task.head: auto` trains, with their names in reports."""
AVERAGE = "average of the heads"
PREFERRED = (HEADS["gp"], SCORE, ONE_HOT, AUGMENTED, FROZEN, HEADS["likelihood"], HEADS["network"], AVERAGE)
"""The methods among which `task.head: auto` chooses. Earlier ones are preferred: the Gaussian process, which contains
the zero-shot score and has intervals, then the baselines, then the trained models."""
FEW = 12  # with fewer tested variants, a sentence says that methods cannot be compared
CHOICES = 200  # the number of resamples for a standard error of a choice


@dataclass(frozen=True)
class Repeat:
    """One of several runs of a recipe."""

    out: Path
    overrides: tuple[str, ...] = ()
    """The recipe settings that this run changes, as texts `KEY=VALUE`."""
    head: str = ""
    """For `task.head: auto`: the head of this run, a key of HEADS."""


def repeats(recipe: Recipe, seeds: int = 1, folds: int | None = None) -> list[Repeat]:
    """Return one run for each random seed and fold, or an empty list if the recipe is a single run.

    `seeds` is the number of random seeds, which count up from `train.seed`. `folds` is the number of folds, which are
    the same for all seeds. A table of variants has FOLDS folds by default, but none if `data.split` is `mutations` or
    `given`; `data.folds` may name its column of folds. Raises `UsageError` if folds are requested, and the recipe has
    the key `data.folds`.
    """
    if folds and recipe.data.folds is not None:
        raise UsageError("--folds makes a run for each fold, but data.folds divides the data too; remove one of them")
    if recipe.divides_table and recipe.data.split not in ("mutations", "given"):
        folds = folds or count_folds(recipe.data)
    if seeds == 1 and not folds and not recipe.divides_table:
        return []
    runs: list[Repeat] = []
    for seed in range(recipe.train.seed, recipe.train.seed + seeds):
        for fold in range(folds) if folds else [None]:
            out = Path(recipe.out) / (f"seed-{seed}" + ("" if fold is None else f"-fold-{fold}"))
            number = () if recipe.data.folds else (f"data.folds={folds}",)  # the recipe has a column of folds, or none
            fold_overrides = () if fold is None else (*number, f"data.fold={fold}")
            fold_overrides += (f"train.seed={seed}",)
            if recipe.divides_table and getattr(recipe.task, "head", "") == "auto":
                has_scores = recipe.task.model_dump()["zero_shot"]
                heads = [head for head in HEADS if has_scores or head != "likelihood"]
                runs += [_with_head(recipe, out, fold_overrides, head) for head in heads]
            else:
                runs.append(Repeat(out, (f"out={out}", *fold_overrides)))
    return runs


def _with_head(recipe: Recipe, out: Path, overrides: tuple[str, ...], head: str) -> Repeat:
    out = out.with_name(f"{out.name}-{head}")
    overrides = (*overrides, f"out={out}", f"task.head={head}")
    if head == "gp":  # the section may have keys of trained weights
        overrides += ("adapt={method: probe}",)
    if head == "likelihood":  # it reads neither of the two, and with sites the other changes of a variant
        task = recipe.task.model_dump()
        overrides += ("task.pool=wild_type", "task.zero_shot=true")
        overrides += ("task.context=variant",) if task["pool"] == "sites" else ()
    return Repeat(out, overrides, head)


def curve_runs(recipe: Recipe, runs: Sequence[Repeat]) -> list[Repeat]:
    """Return the runs for the learning curve of a table of variants, with the seed and fold of the first of `runs`.
    Return an empty list for other data, for a probe, and for several heads.
    """
    if not recipe.divides_table or recipe.adapt.method == "probe" or runs[0].head:
        return []
    others = [option for option in runs[0].overrides if not option.startswith("out=")]
    outs = {share: Path(recipe.out) / f"curve-{share:g}" for share in SHARES}
    return [Repeat(out, (*others, f"out={out}", f"data.train_share={share:g}")) for share, out in outs.items()]


def is_done(run: Path, steps: int | None = None) -> bool:
    """Whether a run is finished and evaluated. With `steps`, the run must also have at least this number of steps."""
    status = read_status(run)
    if status is None or status["state"] != "done" or not (run / "evaluation.json").is_file():
        return False
    return steps is None or status["steps"] >= steps


def check_out(out: Path) -> None:
    """Raise `UsageError` if `out` contains files of JOINT_FILES that esmshard did not write."""
    names = [name for name in JOINT_FILES if os.path.lexists(out / name)]
    try:
        are_joint_results = "verdict" in read_json(out / SUMMARY)
    except (OSError, ValueError, TypeError):
        are_joint_results = False
    if names and not are_joint_results:
        raise UsageError(
            f"{out}: contains {', '.join(names)}, which esmshard did not write and would replace; "
            "choose another directory with out=DIR"
        )


def summarise(out: Path, runs: Sequence[Repeat]) -> str:
    """Write `summary.json` to `out`. Return a table as text: mean and interval of each metric over the runs.

    The 95% interval (Student's t distribution) shows how much the mean would change with other seeds and folds. Runs of
    different folds share training records, so the interval is too narrow (Bengio and Grandvalet 2004, JMLR 5:1089).
    """
    evaluations = {run.out.name: read_json(run.out / "evaluation.json") for run in runs}
    first = next(iter(evaluations.values()))

    def values(table: str, method: str, metric: str) -> dict[str, float]:
        cells = {name: scores[table].get(method, {}).get(metric) or {} for name, scores in evaluations.items()}
        return {name: cell["value"] for name, cell in cells.items() if cell.get("value") is not None}

    table: dict[str, dict[str, Any]] = {method: {} for method in first["metrics"]}
    lines = [["", *first["columns"]]]
    for method, row in table.items():
        lines.append([method])
        for metric in first["columns"]:
            value_of_run = values("metrics", method, metric)
            mean = _mean(value_of_run)
            deviation = float(np.std([*value_of_run.values()], ddof=1)) if len(value_of_run) > 1 else None
            row[metric] = {"mean": mean.value, "deviation": deviation, "low": mean.low, "high": mean.high}
            row[metric]["runs"] = value_of_run
            lines[-1].append(str(mean))
    # Each difference compares two methods in the same run.
    headline = first["columns"][0]
    means, gains = (
        {method: _mean(values(key, method, headline)) for method in first[key]} for key in ("metrics", "differences")
    )
    trained_on, records = (max(each.get(key, 0) for each in evaluations.values()) for key in ("in_sample", "records"))
    comparison = Comparison(headline, means, gains, first["lower_is_better"])
    text = in_sample(trained_on, records) + comparison.verdict(f"Student's t, paired over {len(runs)} runs")
    summary = {
        "task": first["task"],
        "recipe": first["recipe"] | {"out": str(out)},
        "runs": [*evaluations],
        "folds": first["recipe"].get("data", {}).get("folds"),
        "columns": first["columns"],
        "lower_is_better": first["lower_is_better"],
        "interval": "95% interval of the mean over runs (Student's t)" if len(runs) > 1 else "no interval of one run",
        "metrics": table,
        "verdict": text,
    }
    replace_json(out / SUMMARY, summary)
    head = f"{len(runs)} runs: mean and 95% interval over runs; {MAIN} and its baselines"
    return "\n".join([head, aligned(lines), text])


def _mean(value_of_run: Mapping[str, float]) -> Interval:
    from scipy.special import stdtrit  # not from scipy.stats, whose import takes ten times as long

    x = np.array([*value_of_run.values()], dtype=np.float64)
    if len(x) < 2:
        return Interval(float(x[0]) if len(x) else math.nan, math.nan, math.nan)
    mean, half = float(x.mean()), float(stdtrit(len(x) - 1, 0.975) * x.std(ddof=1) / math.sqrt(len(x)))
    return Interval(mean, mean - half, mean + half)


def conclude(recipe: Recipe, runs: Sequence[Repeat], curve: Sequence[Repeat] = ()) -> str:
    """Write the joint result of all runs on a table of variants to the recipe's `out`, and return the result as text.

    - `variants.csv` has the rows of the user's table. The row of a test variant also has its name, measured value, fold
      and the predictions of baselines and model. A prediction is a mean over the seeds. The model's predictions
      also have standard deviations. The row of a variant that is not used has the reason.
    - `summary.json` gets the entries `table` (changes to the user's table), `joint` (the scores of all methods on all
      test variants, with intervals) and `verdict`.
    - `learning_curve.json` has, for each number of training variants, Spearman's correlation on the same test set.
    - `proteins.csv` has, for a table of several proteins, each protein's number of variants and Spearman's correlation
      of each method.

    Each fold has its own model, so variants are compared only within their fold. Variants of several proteins are
    compared only within their protein, and metrics are means over the proteins. `runs` are the finished runs of
    `repeats`, and `curve` those of `curve_runs`.
    """
    out, is_auto = Path(recipe.out), bool(runs[0].head)
    tested = [_Predictions(run.out) for run in runs]
    if is_auto:
        of_fold: dict[tuple[int, int], dict[str, _Predictions]] = defaultdict(dict)
        for run, part in zip(runs, tested, strict=True):
            of_fold[part.seed, part.fold][run.head] = part
        tested = [_of_heads(part_of) for part_of in of_fold.values()]
    names = tested[0].targets
    by_seed = {seed: [part for part in tested if part.seed == seed] for seed in sorted({part.seed for part in tested})}
    # The variants have the order of the folds. Every seed has the same test set in a fold.
    first, *_ = by_seed.values()
    ids = [name for part in first for name in part.ids]
    fold_N = np.concatenate([np.full(len(part.ids), part.fold) for part in first])
    measured_NT = np.concatenate([part.measured_NT for part in first])
    predicted = {  # [seeds, N, T]
        method: np.stack([np.concatenate([part.predicted[method] for part in parts]) for parts in by_seed.values()])
        for method in first[0].predicted
    }
    mean = {method: predicted_SNT.mean(0) for method, predicted_SNT in predicted.items()}
    block_N, unit, protein_N = _units(ids, recipe.data.protein is not None)
    lower = names[0] in (recipe.data.lower_is_better or ())
    chosen_for: dict[int, str] = {}
    if is_auto:
        chosen_for = choices(mean, measured_NT, fold_N, block_N)
        final = choose(mean, measured_NT, fold_N, block_N, np.ones(len(ids), dtype=bool))
        ours_SNT = np.empty_like(predicted[final])
        for k, method in chosen_for.items():
            ours_SNT[:, fold_N == k] = predicted[method][:, fold_N == k]
        predicted = {MAIN: ours_SNT, **predicted}
        mean = {MAIN: predicted[MAIN].mean(0), **mean}
        heads = [head for head, name in HEADS.items() if final in (name, AVERAGE)]
        summarise(out, [run for run in runs if run.head in (heads or ["gp"])])
    samples = {
        method: _samples(mean_NT, measured_NT, fold_N, block_N, lower, protein_N) for method, mean_NT in mean.items()
    }
    intervals, recall, chosen = (
        {method: interval(values[key]) for method, values in samples.items()} for key in (SPEARMAN, RECALL, CHOSEN)
    )
    ours = samples[MAIN][SPEARMAN]
    gains = {method: difference(ours, values[SPEARMAN]) for method, values in samples.items() if method != MAIN}
    each = {
        method: [_spearman(predicted_NT, measured_NT, fold_N, protein_N) for predicted_NT in predicted_SNT]
        for method, predicted_SNT in predicted.items()
    }
    units, resamples = counted(count_units(len(ids), block_N), unit), len(ours) - 1
    summary, split = read_json(out / SUMMARY), recipe.data.split or recipe.data.folds
    data = recipe.data.model_copy(update={"folds": recipe.data.folds or summary["folds"]})
    mixed = split not in ("mutations", "given") and shares_positions(data)
    caution = "; test positions also occur in training" if mixed else ""
    metric = "Spearman within folds" if len(set(fold_N.tolist())) > 1 else "Spearman"
    statistic = metric + (", weighted by their variants" if metric != "Spearman" else " over the test variants")
    if protein_N is not None:
        metric, statistic = "Spearman within proteins", "Spearman within proteins, mean over the proteins"
    to_beat = {method: gain for method, gain in gains.items() if method not in (*HEADS.values(), AVERAGE)}
    text = Comparison(metric, intervals, to_beat).verdict(f"paired over {units}; split {split}{caution}")
    subject = {"gp": "The Gaussian process", "auto": "The chosen method"}.get(getattr(recipe.task, "head", ""))
    text = text.replace("Fine-tuning", subject or "Fine-tuning", 1)
    if len(ids) < FEW:
        text += f" With fewer than {FEW} measured variants it cannot be known which method ranks new variants best."
    within_N = fold_N if protein_N is None else protein_N
    best = sum(metrics.best_count(measured_NT[within_N == group, 0]) for group in set(within_N.tolist()))
    joint: dict[str, Any] = {
        "statistic": statistic,
        "targets": "mean over the targets" if len(names) > 1 else names[0],
        "interval": f"95% percentile bootstrap of {units}, {resamples:,} resamples; of differences, paired"
        if resamples
        else f"none: {units}, and an interval needs {LEAST}",
        "unit": unit,
        "variants": len(ids),
        "positions": len({(name, m.position) for name, variant in map(parse_name, ids) for m in variant}),
        "proteins": None if protein_N is None else len(np.unique(protein_N)),
        "split": split,
        "seeds": list(by_seed),
        "metrics": {method: asdict(value) for method, value in intervals.items()},
        "differences": {method: asdict(gain) for method, gain in gains.items()},
        "of_each_seed": each,
        # ProteinGym's tables compare the predictions of all folds, although each fold has another model.
        "over_all_folds": {m: _spearman(x_NT, measured_NT, np.zeros_like(fold_N)) for m, x_NT in mean.items()},
        "best": {
            "target": names[0],
            "lower_is_better": lower,
            "count": best,
            "recall": {method: asdict(value) for method, value in recall.items()},
            "mean_of_chosen": {method: asdict(value) for method, value in chosen.items()},
            "mean_of_all": metrics.mean(measured_NT[:, 0]),
        },
    }
    summary |= {
        "folds": count_folds(data) if data.folds else None,
        "recipe": recipe.model_dump(mode="json"),
        "recipe_yaml": recipe_file.dump(recipe),
        "table": table_facts(data),
        "joint": joint,
        "verdict": text,
    }
    if is_auto:
        counts = Counter(chosen_for.values())
        of_folds = ", ".join(f"{method} ({counted(count, 'fold')})" for method, count in counts.most_common())
        joint["chosen"] = {"final": final, "of_folds": {str(fold): method for fold, method in chosen_for.items()}}
        summary["ranked_by"] = None if heads else final
        text += (
            f"\nThe row {MAIN} has for each fold the method that the other folds chose: {of_folds}. Predictions of new "
            f"variants are by the choice of all folds: {final}. The {HEADS['gp']} is chosen unless another method is "
            "better by more than one standard error."
        )
        summary["verdict"] = text
    sd_N = np.stack([np.concatenate([part.sd_N for part in parts]) for parts in by_seed.values()]).mean(0)
    if not np.isnan(sd_N).all():
        error_N = mean[HEADS["gp"] if is_auto else MAIN][:, 0] - measured_NT[:, 0]
        joint["coverage"] = {f"{level:.0%}": coverage(error_N, sd_N, level) for level in LEVELS}
        shares = ", ".join(
            f"{share:.0%} of values in intervals of {level}" for level, share in joint["coverage"].items()
        )
        text += f"\nThe Gaussian process expects errors out of fold of the right size if these numbers agree: {shares}."
    replace_json(out / SUMMARY, summary)
    sd_NT = predicted[MAIN].std(0, ddof=1) if len(by_seed) > 1 else np.full_like(measured_NT, np.nan)
    columns: dict[str, Array] = {}
    for t, name in enumerate(names):
        suffix = f" {name}" if len(names) > 1 else ""
        columns |= {f"measured{suffix}": measured_NT[:, t], f"predicted{suffix}": mean[MAIN][:, t]}
        columns[f"sd{suffix}"] = sd_NT[:, t]
        columns |= {f"{method}{suffix}": mean_NT[:, t] for method, mean_NT in mean.items() if method != MAIN}
    if "coverage" in joint and (not is_auto or final == HEADS["gp"]):
        columns[PREDICTIVE] = sd_N
    if len(names) > 1:  # variants are ranked by the first target
        columns["measured"] = measured_NT[:, 0]
    _write_variants(out / OUT_OF_FOLD, data, ids, fold_N, columns)
    if protein_N is not None:
        _write_proteins(out / OF_PROTEINS, ids, mean, measured_NT, fold_N, protein_N)
    if curve:
        _write_curve(out / CURVE, [_Predictions(run.out) for run in [*curve, runs[0]]], protein_N is not None)
    return f"{_as_text(metric, joint['best'], [intervals, gains, recall, chosen], each)}\n{text}"


class _Predictions:
    """The predictions in the file `per_protein.csv` of a run, with the fold and the random seed of the run."""

    def __init__(self, run: Path) -> None:
        evaluation, versions = read_json(run / "evaluation.json"), read_json(run / "versions.json")
        with open(run / "per_protein.csv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        self.seed = int(evaluation["recipe"]["train"]["seed"])
        self.fold = int(evaluation["recipe"]["data"]["fold"] or 0)
        self.targets: list[str] = evaluation["facts"]["targets"]
        self.trained: int = versions["data"]["train"]["records"]
        self.ids = [row["id"] for row in rows]
        self.measured_NT = self._columns(rows, "target", "")
        self.predicted = {MAIN: self._columns(rows, "prediction", "")}
        self.sd_N = np.array([float(row.get(PREDICTIVE) or "nan") for row in rows])
        for name in evaluation["metrics"]:
            if name != MAIN:
                self.predicted[name] = self._columns(rows, "prediction", f" of {name}")

    def _columns(self, rows: Sequence[Mapping[str, str]], column: str, suffix: str) -> Array:
        keys = [f"{column} {name}{suffix}" if len(self.targets) > 1 else f"{column}{suffix}" for name in self.targets]
        return np.array([[float(row[key] or "nan") for key in keys] for row in rows])


def _of_heads(part_of: Mapping[str, _Predictions]) -> _Predictions:
    """Join the predictions of all heads for one fold, and their average. The baselines of all heads are the same."""
    joined = part_of["gp"]
    of_heads = {HEADS[head]: part.predicted[MAIN] for head, part in part_of.items()}
    baselines = {method: values for method, values in joined.predicted.items() if method != MAIN}
    average = np.mean([*of_heads.values()], axis=0)
    joined.predicted = {**of_heads, AVERAGE: average, **baselines}
    return joined


def choices(
    predicted: Mapping[str, Array], measured_NT: Array, fold_N: npt.NDArray[np.int64], block_N: npt.NDArray[np.int64]
) -> dict[int, str]:
    """Return the method that the other folds choose for each fold; see `choose` for the arguments.

    So no measured value of a fold is compared with predictions to choose the method that is tested on the fold. Unlike
    in a nested cross-validation, the models that are tested on the other folds were trained on this fold, too. Nested
    models would take five times as long. Methods without any skill do not get a positive result by this.
    """
    return {k: choose(predicted, measured_NT, fold_N, block_N, fold_N != k) for k in np.unique(fold_N).tolist()}


def choose(
    predicted: Mapping[str, Array],
    measured_NT: Array,
    fold_N: npt.NDArray[np.int64],
    block_N: npt.NDArray[np.int64],
    known_N: npt.NDArray[np.bool_],
) -> str:
    """Return the first method of PREFERRED whose Spearman within folds is at most one standard error below the best
    (Breiman et al. 1984), on the variants with a true `known_N`. The standard error is that of the difference, by a
    paired bootstrap.

    Args:
        predicted: the predictions of each method, out of fold [N, T]. Without any value, the first method is returned.
        measured_NT: measured values.
        fold_N: the fold of each variant.
        block_N: the unit of each variant in the bootstrap.
        known_N: the variants on which methods are compared.
    """
    x = {method: predicted[method][known_N] for method in PREFERRED if method in predicted}
    y_NT, folds, blocks = measured_NT[known_N], fold_N[known_N], block_N[known_N]
    rows = [np.arange(len(folds)), *itertools.islice(metrics.draws(len(folds), blocks), CHOICES)]
    values = {m: np.array([_spearman(x_NT[r], y_NT[r], folds[r]) for r in rows]) for m, x_NT in x.items()}
    values = {method: samples for method, samples in values.items() if not math.isnan(samples[0])}
    if not values:
        return next(iter(x))
    best = max(values.values(), key=lambda samples: samples[0])
    for method, samples in values.items():
        error = float(np.nanstd((best - samples)[1:])) if len(rows) > 1 else 0.0
        if best[0] - samples[0] <= error:
            return method
    raise AssertionError("the best method is within its own standard error")


def _units(ids: Sequence[str], several: bool) -> tuple[npt.NDArray[np.int64], str, npt.NDArray[np.int64] | None]:
    """Return the number of each variant's unit in the bootstrap, the noun for a unit, and the number of each variant's
    protein, or None if there is only one protein.
    """
    names, variants = zip(*map(parse_name, ids), strict=True)
    if not several:
        return *variant_units(variants), None
    protein_N = np.unique(names, return_inverse=True)[1].astype(np.int64)
    return protein_N, "protein", protein_N


def _members(protein_N: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Return the indices of the variants of each protein."""
    order = np.argsort(protein_N, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(protein_N[order])) + 1)


def _spearman(
    predicted_NT: Array,
    measured_NT: Array,
    fold_N: npt.NDArray[np.int64],
    protein_N: npt.NDArray[np.int64] | None = None,
) -> float:
    if protein_N is not None:
        each = [_spearman(predicted_NT[m], measured_NT[m], fold_N[m]) for m in _members(protein_N)]
        return metrics.mean(np.array(each))
    targets = zip(predicted_NT.T, measured_NT.T, strict=True)
    return metrics.mean(np.array([metrics.spearman_within(x_N, y_N, fold_N) for x_N, y_N in targets]))


def _samples(
    predicted_NT: Array,
    measured_NT: Array,
    fold_N: npt.NDArray[np.int64],
    block_N: npt.NDArray[np.int64],
    lower_is_better: bool,
    protein_N: npt.NDArray[np.int64] | None = None,
) -> dict[str, list[float]]:
    """Return a list for each metric: Spearman, and recall and mean of the variants that `metrics.top_of_list` chooses.
    A list has the metric's value on all variants, and then its values on resamples of the blocks. For several proteins,
    a value is the mean over the proteins, which are resampled.
    """
    sign = -1 if lower_is_better else 1

    def scores(draw: npt.NDArray[np.int64]) -> dict[str, float]:
        x_NT, y_NT, drawn_fold_N = predicted_NT[draw], measured_NT[draw], fold_N[draw]
        recall, chosen = metrics.top_of_list(sign * x_NT[:, 0], sign * y_NT[:, 0], drawn_fold_N)
        return {SPEARMAN: _spearman(x_NT, y_NT, drawn_fold_N), RECALL: recall, CHOSEN: sign * chosen}

    if protein_N is not None:
        each = [scores(members) for members in _members(protein_N)]
        names = (SPEARMAN, RECALL, CHOSEN)
        samples = [metrics.means(each, names), *(
            metrics.means([each[k] for k in draw.tolist()], names) for draw in metrics.draws(len(each))
        )]  # fmt: skip
    else:
        samples = [scores(draw) for draw in (np.arange(len(block_N)), *metrics.draws(len(block_N), block_N))]
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def _as_text(
    metric: str,
    best: Mapping[str, Any],
    columns: Sequence[Mapping[str, Interval]],
    each: Mapping[str, Sequence[float]],
) -> str:
    top = [f"recall of the best 1% ({best['count']:,})", f"mean {best['target']} of the chosen"]
    head = [metric, "fine-tuned is better by", *top, "of each seed"]
    lines = [["", *head]]
    for method, seeds in each.items():
        cells = ["" if method not in column else str(column[method]) for column in columns]
        value, *limits = astuple(columns[-1][method])  # measured values may need more than three decimals
        cells[-1] = f"{value:.4g}" + ("" if math.isnan(limits[0]) else " [{:.4g}, {:.4g}]".format(*limits))
        seed_values = " ".join(f"{value:.3f}" for value in seeds)
        if math.isnan(columns[0][method].value):
            cells[:2], seed_values = ["undefined (the same for all)", ""], ""
        lines.append([method, *cells, seed_values])
    return aligned([*lines, ["mean of all variants", "", "", "", f"{best['mean_of_all']:.4g}", ""]])


def _write_variants(
    path: Path, data: DataSettings, ids: Sequence[str], fold_N: npt.NDArray[np.int64], columns: Mapping[str, Array]
) -> None:
    variants = table_of(data)
    in_no_set_N, lacks = divide(data)[0] == LEFT_OUT, lacking(data)
    in_no_set = f"without a {lacks}" if lacks else "changes positions of several sets"
    places: dict[str, deque[int]] = defaultdict(deque)  # replicates that are not averaged share a name
    for n, name in enumerate(ids):
        places[name].append(n)
    result_of_row: dict[int, tuple[str, int | None, int]] = {}
    for k, (rows, name) in enumerate(zip(variants.rows, variants.names(), strict=True)):
        result_of_row |= dict.fromkeys(rows, (name, places[name].popleft() if places[name] else None, k))
    names = variants.target_names
    measured = {f"measured {name}" if len(names) > 1 else "measured": t for t, name in enumerate(names)}
    measured.setdefault("measured", 0)
    table, prefix = variants.table, ""
    added = ("variant", "fold", *columns, LEFT_OUT_WHY)
    while any(f"{prefix}{name}" in table.columns for name in added):
        prefix += "esmshard "  # the user's columns keep their names
    lines = [[*table.columns, *(f"{prefix}{name}" for name in added)]]
    for row in range(len(table)):
        name, place, k = result_of_row.get(row, ("", None, -1))
        values = dict.fromkeys(columns, math.nan)
        if k >= 0:  # the measured value is also written for variants in no test set
            values |= {key: float(variants.target_NT[k, t]) for key, t in measured.items()}
        if place is not None:
            values |= {key: float(column[place]) for key, column in columns.items()}
        texts = ["" if math.isnan(value) else f"{value:.6g}" for value in values.values()]
        fold = "" if place is None else str(fold_N[place])
        why = in_no_set if k >= 0 and in_no_set_N[k] else variants.left_out.get(row, "")
        lines.append([*(cells[row] for cells in table.columns.values()), name, fold, *texts, why])
    with replacing(path) as file:
        write_rows(file, lines)


def _write_proteins(
    path: Path,
    ids: Sequence[str],
    mean: Mapping[str, Array],
    measured_NT: Array,
    fold_N: npt.NDArray[np.int64],
    protein_N: npt.NDArray[np.int64],
) -> None:
    lines = [["protein", "fold", "variants", *(f"Spearman of {method}" for method in mean)]]
    for m in _members(protein_N):
        values = [_spearman(mean_NT[m], measured_NT[m], fold_N[m]) for mean_NT in mean.values()]
        folds = " ".join(map(str, np.unique(fold_N[m])))
        texts = ["" if math.isnan(value) else f"{value:.6g}" for value in values]
        lines.append([parse_name(ids[int(m[0])])[0], folds, str(len(m)), *texts])
    with replacing(path) as file:
        write_rows(file, lines)


def _write_curve(path: Path, runs: Sequence[_Predictions], several: bool) -> None:
    points = []
    for run in runs:
        block_N, _, protein_N = _units(run.ids, several)
        fold_N = np.zeros(len(block_N), dtype=np.int64)
        samples = {
            method: interval(_samples(predicted_NT, run.measured_NT, fold_N, block_N, False, protein_N)[SPEARMAN])
            for method, predicted_NT in run.predicted.items()
        }
        points.append({"variants": run.trained, "metrics": {m: asdict(value) for m, value in samples.items()}})
    first = {"tested_on": len(runs[0].ids), "fold": runs[0].fold, "seed": runs[0].seed}
    replace_json(path, first | {"points": points})
