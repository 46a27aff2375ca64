"""The page about a cross-validated run of variants: all folds and seeds, with each variant predicted unseen."""

import json
import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from esmshard.data.splits.variant_records import OUT_OF_FOLD
from esmshard.data.tables import counted
from esmshard.predict.variants import better_baseline
from esmshard.recipe import recipe_file
from esmshard.report import charts
from esmshard.report.files import AGAIN, RANKED, CrossValidated, RunFiles, Values, number
from esmshard.report.parts import (
    Figure,
    PageTable,
    Section,
    cell,
    if_intervals,
    range_text,
    unit_text,
    value_text,
)
from esmshard.report.run_page import MOST_TARGETS, measured_figures, methods_figure
from esmshard.tasks import metrics
from esmshard.tasks.base import MAIN
from esmshard.tasks.metrics import Interval
from esmshard.train.cross_validation import CURVE, SUMMARY
from esmshard.train.evaluate import comparison

LETTERS = "GAVLIMCFYWPSTNQHKRDE"
"""The rows of a map, with similar amino acids together: aliphatic, aromatic, proline, polar, positive, negative."""
MOST_POSITIONS = 1000
"""The most positions of a map, which are ten blocks."""


def substitutions(found: CrossValidated) -> Section:
    """Draw maps of the measured and predicted values of each single substitution."""
    section = ("map", "Map of substitutions")
    tested, ranked = found.tested, found.ranked
    if tested is None and ranked is None:
        return Section(*section, missing=f"{OUT_OF_FOLD} and {RANKED} are missing; {AGAIN}.")
    # Of a long protein only the measured region is drawn, since predictions far from it are unreliable.
    changed = {m.position for one in tested.mutations for m in one} if tested else set()
    changed = changed or ({m.position for m in ranked.mutations} if ranked else set())
    if not changed:
        return Section(*section, missing="No variant changes a residue.")
    first, last = min(changed), min(max(changed), min(changed) + MOST_POSITIONS - 1)
    wild_type = found.wild_type
    wild_P = [LETTERS.find(wild_type.get(p, "?")) for p in range(first, last + 1)]
    texts = [
        f"Residues {first + 1:,} to {last + 1:,}: a dot marks that of the wild type, grey is what has no value. "
        "Measured: single substitutions of the table. Predicted: mean over the models of all runs, most "
        "of which were trained on the measured variants, so that this is no test of them. Both have one "
        "colour scale; values beyond its ends, the 2nd and 98th percentile, have the colours of the ends."
    ]
    if last < max(changed):
        texts.append(f"Changed residues after {last + 1:,}, up to {max(changed) + 1:,}, are not shown.")
    figures = []
    for t, name in enumerate(found.targets[:MOST_TARGETS]):
        maps = {}
        if tested is not None:
            singles = [
                (one[0], value)
                for one, value in zip(tested.mutations, tested.measured_NT[:, t], strict=True)
                if len(one) == 1
            ]
            maps["Measured"] = _grid(singles, first, last)
        if ranked is not None and t < ranked.prediction_NT.shape[1]:
            pairs = list(zip(ranked.mutations, ranked.prediction_NT[:, t], strict=True))
            maps["Predicted"] = _grid(pairs, first, last)
        every = np.concatenate([grid_AP[np.isfinite(grid_AP)] for grid_AP in maps.values()])
        if not len(every):
            continue
        low, high = np.percentile(every, [2, 98]).tolist()
        for what, grid_AP in maps.items():

            def draw(
                axes: Any,
                grid_AP: Values = grid_AP,
                label: str = f"{what.lower()} {name}",
                ends: tuple[float, float] = (low, high),
            ) -> None:
                wild = [letter if letter >= 0 else None for letter in wild_P]
                charts.heat_map(axes, grid_AP, first + 1, wild, LETTERS, ends, label)

            lines = -(-grid_AP.shape[1] // 100)
            count = int(np.isfinite(grid_AP).sum())
            if not count:  # a library of multiple mutants, for example
                texts.append(f"No single substitution has a {what.lower()} {name}.")
                continue
            picture = charts.chart(f"{what}{t}", draw, height=0.3 + 2.3 * lines, width=10)
            figures.append(Figure(f"{what} {name} of {counted(count, 'substitution')}.", picture, wide=True))
    for name, there in ((OUT_OF_FOLD, tested), (RANKED, ranked)):
        if there is None:
            texts.append(f"{name} is missing; {AGAIN}.")
    return Section(*section, texts, figures, missing="" if figures else "No single substitution has a value.")


def _grid(pairs: Sequence[tuple[Any, float]], first: int, last: int) -> Values:
    """Return the values of single substitutions, [letters, positions]; NaN where there is none."""
    grid_AP = np.full((len(LETTERS), last - first + 1), np.nan)
    for mutation, value in pairs:
        if first <= mutation.position <= last and mutation.mutant in LETTERS:
            grid_AP[LETTERS.index(mutation.mutant), mutation.position - first] = value
    return grid_AP


BEST = 20
"""The number of rows of the table of ranked variants."""


def about(found: CrossValidated) -> str:
    """Describe model and data in a line."""
    recipe = found.recipe
    if recipe is None:
        return "Cross-validated runs of task variant."
    return (
        f"Cross-validated runs of task variant, model {recipe.model.name} ({recipe.init}), adaptation "
        f"{recipe.adapt.method}."
    )


def verdict(found: CrossValidated) -> str:
    """Return a sentence: whether fine-tuning was worth it."""
    if found.joint is None:
        return f"The runs have not been taken together: {SUMMARY} has no joint results; {AGAIN}."
    return found.joint.verdict


def facts(found: CrossValidated) -> list[tuple[str, str, str]]:
    """Return the numbers on top of the page: name, value and explanation."""
    joint = found.joint
    if joint is None:
        return []
    ours = joint.metrics[MAIN]
    figures = [("Spearman", value_text(ours.value), f"{range_text(ours)}, {joint.statistic}")]
    if (name := joint.strongest) is not None:
        gain = joint.differences[name]
        how = comparison(gain, lower_is_better=False)
        figures.append((f"against {name}", value_text(gain.value, "+"), f"{range_text(gain)}, {how} the best baseline"))
    recall = joint.best.recall[MAIN]
    chosen = f"{range_text(recall)}, of {counted(joint.best.count, 'chosen variant')}"
    figures.append(("recall of the best 1%", value_text(recall.value), chosen))
    figures.append(("variants", f"{joint.variants:,}", f"tested, at {counted(joint.positions, 'position')}"))
    folds, seeds = found.raw.get("folds"), len(joint.seeds)
    made = f"{folds} x {seeds}" if folds else f"{seeds}"
    figures.append(("folds x seeds" if folds else "seeds", made, f"split {joint.split}"))
    return figures


def compared(found: CrossValidated) -> Section:
    """Return every method's scores over all test variants, and in the single runs."""
    section = ("compared", "Fine-tuned model and baselines")
    joint, raw = found.joint, found.raw
    texts, figures, tables = [], [], []
    if joint is None:
        texts.append(f"Over all test variants together: missing, as {SUMMARY} has no joint results.")
    else:
        best = joint.best
        texts.append(f"{joint.statistic} ({joint.targets}). Intervals: {joint.interval}.")
        texts.append(
            f"The best 1%: of each fold, the 1% of its measured variants with the best predicted {best.target} were "
            f"chosen, and one at least, together {best.count:,}. Recall is the share of them that are among as many "
            f"best measured ones. The mean {best.target} of all variants is {unit_text(best.mean_of_all)}."
        )
        rows = []
        for name, one in joint.metrics.items():
            chosen = best.mean_of_chosen.get(name)
            top = [cell(best.recall.get(name)), "-" if chosen is None else _unit_cell(chosen)]
            seeds = map(value_text, joint.of_each_seed.get(name, ()))
            rows.append([name, cell(one), cell(joint.differences.get(name), "+"), *top, *seeds])
        head = ["", "Spearman", f"{MAIN} minus it", "recall of the best 1%", "mean of the chosen"]
        note = if_intervals(
            joint.differences.values(),
            " * marks intervals without 0: the two differ by more than the choice of these variants explains.",
        )
        caption = f"Of predictions averaged over seeds, then Spearman of each seed.{note}"
        tables.append(PageTable([*head, *(f"seed {seed}" for seed in joint.seeds)], rows, caption))
        figures.append(methods_figure("Spearman", joint.metrics, MAIN))
    columns = [str(name) for name in raw.get("columns", ())]
    rows = [
        [
            name,
            *(
                cell(Interval(*(number(row[c][key]) for key in ("mean", "low", "high"))) if c in row else None)
                for c in columns
            ),
        ]
        for name, row in raw.get("metrics", {}).items()
    ]
    if rows and columns:
        note = f"Of the {counted(len(found.runs), 'run')}, each with its own test set. {raw.get('interval', '')}."
        tables.append(PageTable(["mean over runs", *columns], rows, note))
    return Section(*section, texts, figures, tables)


def _unit_cell(found: Interval) -> str:
    """Format a value of any unit with its interval below."""
    limits = f"[{unit_text(found.low)}, {unit_text(found.high)}]" if math.isfinite(found.low) else "no interval"
    return f"{unit_text(found.value)}\n{limits}"


def table(found: CrossValidated) -> Section:
    """Return the changes made to the user's table before training."""
    section, given = ("table", "The table of variants"), found.given
    if given is None:
        return Section(*section, missing=f"{SUMMARY} does not say what was done to it; {AGAIN}.")
    read = (
        f"{given.path}: {counted(given.rows, 'row')}, of which {given.rows_left_out:,} could not be used; "
        f"{OUT_OF_FOLD} has them all, with the reason for each."
    )
    numbering = "Positions count the residues of the wild type from 1, on this page and in all files."
    if given.offset:
        numbering += (
            f" The table counts otherwise: its positions {given.offset:+d} are those of the wild type. {RANKED} has "
            "both, in the columns 'mutant' and 'mutant in table'."
        )
    return Section(*section, [read, numbering, *given.notices])


def predictions(found: CrossValidated) -> Section:
    """Draw predicted against measured values of each target."""
    section = ("predictions", "Predicted against measured")
    tested = found.tested
    if tested is None:
        return Section(*section, missing=f"{OUT_OF_FOLD} is missing; {AGAIN}.")

    columns = list(zip(found.targets, tested.measured_NT.T, tested.predicted_NT.T, strict=False))
    rho = {name: metrics.spearman_within(x_N, y_N, tested.fold_N) for name, y_N, x_N in columns}

    def caption(name: str, x_N: Values, _y_N: Values) -> str:
        return f"{name}: one dot a variant, {len(x_N):,} of them; Spearman{within} {value_text(rho[name])}."

    several = len(set(tested.fold_N.tolist())) > 1
    within = " within folds" if several else ""
    figures = measured_figures(columns, caption)
    if not figures:
        return Section(*section, missing=f"No variant in {OUT_OF_FOLD} has both a measured and a predicted value.")
    texts = ["Out of fold: each variant was predicted by models that had not been trained on it; mean over seeds."]
    if several:
        texts.append(
            "Each fold has models of its own, whose predictions may be higher or lower than those of other folds; the "
            "correlation within folds does not depend on that."
        )
    if tested.rows > tested.rows_tested:
        n = tested.rows - tested.rows_tested
        texts.append(f"{n:,} of {counted(tested.rows, 'row')} of the table could not be used, or were in no test set.")
    if len(found.targets) > MOST_TARGETS:
        texts.append(f"The first {MOST_TARGETS} of {len(found.targets)} targets are shown here and below.")
    return Section(*section, texts, figures)


def curve(found: CrossValidated) -> Section:
    """Draw Spearman against the number of training variants."""
    section = ("curve", "Learning curve")
    data = found.curve
    if data is None:
        return Section(*section, missing=f"None was made: {CURVE} is missing.")
    if not data.points:
        return Section(*section, missing=f"{CURVE} has no points.")
    methods = list(dict.fromkeys(name for _, rows in data.points for name in rows))

    def draw(axes: Any) -> None:
        charts.learning_curve(axes, data.points, methods)
        charts.name_axes(axes, "training variants", "Spearman")

    fold = f"fold {data.fold} (counted from 0)" if found.raw.get("folds") else "the test set"
    texts = [f"Every point is tested on the same {data.tested_on:,} variants: {fold}, seed {data.seed}."]
    rows = [[name, *(cell(rows.get(name)) for _, rows in data.points)] for name in methods]
    points = [one for _, row in data.points for one in row.values()]
    tables = [
        PageTable(
            ["training variants", *(f"{size:,}" for size, _ in data.points)],
            rows,
            f"Spearman{if_intervals(points, ', and its 95% interval below it')}.",
        )
    ]
    if never := [n for n in methods if not any(n in r and math.isfinite(r[n].value) for _, r in data.points)]:
        texts.append(f"Not drawn, as it is undefined for every number of them: {', '.join(never)}.")
    caption = f"Spearman against the number of training variants{if_intervals(points, ', with 95% intervals')}."
    return Section(
        *section, texts, [Figure(caption, charts.chart("learning", draw, height=3, width=10), wide=True)], tables
    )


def ranked(found: CrossValidated) -> Section:
    """Return the top of the ranked list."""
    section = ("ranked", "Best predicted substitutions")
    ranking = found.ranked
    if ranking is None:
        return Section(*section, missing=f"{RANKED} is missing; {AGAIN}.")
    columns = list(ranking.rows[0]) if ranking.rows else []
    keys = [k for k in columns if k.startswith(("prediction", "low 90%", "high 90%", "disagreement of models"))]
    named = [k for k in ("mutant", "mutant in table") if k in columns]
    rows = [
        [row["rank"], *(row[k] for k in named), *(unit_text(number(row.get(key))) for key in (*keys, "measured"))]
        for row in ranking.rows[:BEST]
    ]
    target = found.targets[0]
    lower = target in found.facts.get("lower_is_better", ())
    texts = [
        f"The first {len(rows)} of {len(ranking.rows):,} single substitutions, by {target}: "
        f"{'lower' if lower else 'higher'} is better. The prediction is the mean over the models of all runs, and "
        f"their disagreement is the standard deviation. All are in {RANKED}."
    ]
    if (better := better_baseline(found.raw)) is not None:
        run = shlex.quote(str(found.path))
        command = f"esmshard predict {run} --all-singles --with {better} -o better.csv"
        texts.append(f"A baseline was better. It ranks with `{command}`.")
    if found.joint is not None:
        texts.append(f"How far to trust them: {found.joint.verdict}")
    return Section(*section, texts, tables=[PageTable(["rank", *named, *keys, "measured"], rows)])


def runs(found: CrossValidated) -> Section:
    """Return the score of each run on its own test set."""
    columns = [str(name) for name in found.raw.get("columns", ())]
    rows = [[name, *_run(run, columns)] for name, run in found.runs.items()]
    text = "Each is a directory of its own, of which `esmshard report` makes a page as well."
    head = ["run", "state", "step of the model", "trained on", "tested on", *columns]
    note = f"Metrics of the {MAIN} model on the test set of the run, with 95% intervals where there are any."
    return Section("runs", "Runs", [text], tables=[PageTable(head, rows, note)])


def _run(run: RunFiles | None, columns: Sequence[str]) -> list[str]:
    if run is None:
        return ["missing", *["-"] * (3 + len(columns))]
    state, tested = run.status["state"] if run.status else "unknown", run.evaluation
    trained = run.versions.get("data", {}).get("train", {}).get("records")
    size = f"{trained:,}" if isinstance(trained, int) else "-"
    if tested is None:
        return [state, "-", size, *["-"] * (1 + len(columns))]
    values = [cell(tested.metrics[tested.main].get(column)) for column in columns]
    return [state, f"{tested.raw['step']:,}", size, f"{tested.raw['records']:,}", *values]


def recipe(found: CrossValidated) -> Section:
    """Return the recipe of all runs."""
    if found.recipe is None:
        text = "This version of esmshard cannot use it."
        return Section("recipe", "Recipe", [text], code=json.dumps(found.raw["recipe"], indent=1))
    text = "With every key resolved, as the first run has it; the others differ in train.seed, data.fold and out."
    return Section("recipe", "Recipe", [text], code=found.raw.get("recipe_yaml") or recipe_file.dump(found.recipe))


def reproduce(found: CrossValidated) -> Section:
    """Return the command to repeat all runs."""
    section = ("reproduce", "Command to reproduce")
    name, first = next(iter(found.runs.items()), ("", None))
    if first is None or first.recipe_text is None:
        return Section(*section, missing="The recipe.yaml of the first run is missing, so there is none.")
    run, folds, joint = found.path.resolve().name, found.raw.get("folds"), found.joint
    options = ["--folds", str(folds)] if folds else []
    options += ["--seeds", str(len(joint.seeds))] if joint and len(joint.seeds) > 1 else []
    # The recipe of a run names one fold; without this key the recipe covers all folds.
    changes = ["data.folds=null", "data.fold=0", f"out={run}-again"]
    text = (
        "All runs again, from the directory in which theirs lies. The same versions, data and number of processes give "
        "the same models on a CPU; on GPUs the same up to rounding."
    )
    code = shlex.join(["esmshard", "finetune", f"{run}/{name}/recipe.yaml", *changes, *options])
    return Section(*section, [text], code=code)


SECTIONS: Sequence[Callable[[CrossValidated], Section]] = (
    compared,
    table,
    predictions,
    substitutions,
    curve,
    ranked,
    runs,
    recipe,
    reproduce,
)
"""The sections of the page from top to bottom."""
