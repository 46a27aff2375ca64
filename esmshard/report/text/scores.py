"""The scores of the model: metrics beside baselines, predictions, scores by length, calibration."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from esmshard.data.splits.recipe_splits import open_split, open_tested
from esmshard.data.tracks.track_files import track_files
from esmshard.errors import InputError
from esmshard.files import found_place, memory_text
from esmshard.model.families.family_registry import family_of
from esmshard.recipe.sections import Recipe
from esmshard.report.draw import charts, plots
from esmshard.report.read.run_directory import Evaluation, Headline, RunFiles, Values, intervals, number
from esmshard.report.text.page_parts import Figure, PageTable, Section, cell, if_intervals, range_text, value_text
from esmshard.tasks.base import BEFORE, MAIN
from esmshard.tasks.finetuned import load_finetuned, tracks_of
from esmshard.tasks.metrics import LEAST, Interval
from esmshard.tasks.registry import traits
from esmshard.train import evaluate

LONGEST_MAP = 512
"""The longest protein whose contact map is drawn, in residues: larger maps are unreadable and take long on a CPU."""
LARGEST_MODEL = 4 * 2**30
"""The largest weights, in bytes, that a report reads to draw contact maps."""
MOST_TARGETS = 6
"""The most numbers of a protein that get a chart each."""


def metrics(run: RunFiles) -> Section:
    """Return every metric of the model and its baselines, and the model's gains."""
    section = ("metrics", "Metrics and baselines")
    found, head = run.evaluation, run.headline
    if found is None or head is None:
        return Section(*section, missing="The model has not been tested yet: there is no evaluation.json.")
    raw, columns, main = found.raw, found.raw["columns"], found.main
    texts = [
        f"On {raw['records']:,} records of the {raw['split']} set. The headline is {head.name}: "
        f"{'lower' if head.lower_is_better else 'higher'} is better. Intervals: {raw['interval']}."
    ]
    if missing := [f"{count:,} without {name}" for name, count in raw.get("without_value", {}).items() if count]:
        texts.append(f"Records that a metric has no value for are left out of it: {', '.join(missing)}.")
    texts += [f"{str(sentence)[:1].upper()}{str(sentence)[1:]}." for sentence in raw.get("left_out", ())]
    if few := evaluate.without_interval(raw.get("without_interval", {})):
        texts.append(f"{' '.join(few)} Without one there is no star either.")
    rows = [[name, *(cell(row.get(c)) for c in columns)] for name, row in found.metrics.items()]
    note = if_intervals(found.metrics[main].values(), ", and its 95% interval below it")
    tables = [PageTable(["", *columns], rows, f"Each metric{note}.")]
    if groups := raw.get("groups"):
        rows = [
            [f"{name} ({one['records']:,}): {method}", *(cell(found.get(c)) for c in columns)]
            for name, one in groups.items()
            for method, found in ((method, intervals(row)) for method, row in one["metrics"].items())
        ]
        if rows:
            tables.append(PageTable(["", *columns], rows, "The same on each group of records, with their number."))
    if found.differences:
        rows = [[f"minus {n}", *(cell(row.get(c), "+") for c in columns)] for n, row in found.differences.items()]
        note = if_intervals(
            (one for row in found.differences.values() for one in row.values()),
            ", paired: of both on the same resampled records. * marks intervals without 0: the two differ by more than "
            "the choice of these records explains",
        )
        tables.append(PageTable(["", *columns], rows, f"{main} minus each baseline{note}."))
    else:
        texts.append("There are no baselines to compare with.")
    return Section(*section, texts, [methods_figure(head.name, _headlines(found, head)[0], main)], tables)


def methods_figure(metric: str, of: Mapping[str, Interval], main: str) -> Figure:
    """Draw a metric of every method, by name, with its interval."""

    def draw(axes: Any) -> None:
        charts.intervals(axes, of, main)
        axes.set_xlabel(metric)

    note = if_intervals(of.values(), ", with 95% intervals")
    caption = f"{metric} of {main} (blue) and of the baselines (grey){note}."
    return Figure(caption, charts.chart("methods", draw, 0.9 + 0.3 * len(of)))


def strongest(run: RunFiles) -> str | None:
    """Return the baseline with the best headline metric."""
    if run.evaluation is None or run.headline is None:
        return None
    head = run.headline
    return evaluate.strongest(*_headlines(run.evaluation, head), lower_is_better=bool(head.lower_is_better))


def achieved(run: RunFiles) -> list[str]:
    """Return the result in two sentences: the headline metric, before and after fine-tuning, and the verdict. Nothing
    before the model is tested.
    """
    found, head = run.evaluation, run.headline
    if found is None or head is None:
        return []
    now, before = found.metrics[found.main].get(head.name), found.metrics.get(BEFORE, {}).get(head.name)
    sentences = []
    if now is not None and math.isfinite(now.value):
        earlier = f", and was {value_text(before.value)} before" if before is not None else ""
        of = f"{found.raw['records']:,} {found.raw['split']} records"
        of = f"After fine-tuning, {head.name} of {of}" if found.main == MAIN else f"{head.name} of {found.main} on {of}"
        sentences.append(f"{of} is {value_text(now.value)} {range_text(now)}{earlier}.")
    return [*sentences, *filter(None, [found.raw.get("verdict")])]


def _headlines(found: Evaluation, head: Headline) -> tuple[dict[str, Interval], dict[str, Interval]]:
    """Return the headline metric of every method, and the model's gains over each baseline."""
    every, gains = (
        {name: row[head.name] for name, row in table.items() if head.name in row}
        for table in (found.metrics, found.differences)
    )
    return every, gains


def predictions(run: RunFiles) -> Section:
    """Return the predictions in the task's form: contact maps, measured against predicted, confusion of classes."""
    section = ("predictions", "Predictions")
    if run.evaluation is None:
        return Section(*section, missing="There are none before the model is tested.")
    maps, said = _maps(run) if traits(run.task).predicts_contacts else ([], "")
    figures = [*maps, *_numbers(run), *_profiles(run.evaluation.raw)]
    if found := run.evaluation.raw.get("confusion"):
        classes, counts_CC = [str(c) for c in found["classes"]], np.array(found["counts"], dtype=np.float64)

        def draw(axes: Any) -> None:
            charts.confusion(axes, classes, counts_CC)
            charts.name_axes(axes, "predicted class", "true class")

        side = float(np.clip(1.6 + 0.28 * len(classes), 2.8, 6))
        figures.append(
            Figure(
                "True classes (rows) and what was predicted (columns): the number of cases, shaded by its share of "
                "the row. A perfect model has all on the diagonal.",
                charts.chart("confusion", draw, height=side, width=side + 0.6),
            )
        )
    if not figures:
        return Section(*section, missing=said or "This task leaves nothing to draw but its scores.")
    return Section(*section, [said] if said else [], figures)


def _maps(run: RunFiles) -> tuple[list[Figure], str]:
    """Return contact maps of the best, median and worst test protein with a caption, or why there are none."""
    table, name = run.proteins, "long P@L"
    if table is None or name not in table.columns:
        return [], f"No contact maps: per_protein.csv with {name} is missing."
    raw: Mapping[str, Any] = run.evaluation.raw if run.evaluation else {}
    model = run.path / "model"
    if not model.is_dir() and raw.get("model"):  # `evaluate` leaves the model where it is
        model = Path(found_place(str(raw["model"]), run.path))
    weights = list(model.glob("*.safetensors"))
    recipe = run.recipe or (_recipe_of(raw["recipe"]) if run.recipe_text is None and raw else None)
    if recipe is None or not weights:
        why = "recipe.yaml cannot be used" if weights else f"the model is not in {model}"
        return [], f"No contact maps: {why}."
    if sum(file.stat().st_size for file in weights) > LARGEST_MODEL:
        return [], f"No contact maps: a model of over {memory_text(LARGEST_MODEL)} takes too long to read for a page."
    score_N = table.columns[name]
    order = [n for n in np.argsort(-score_N, kind="stable") if np.isfinite(score_N[n])]
    order = [n for n in order if table.length_N[n] <= LONGEST_MAP]
    if not order:
        return [], f"No contact maps: no protein of up to {LONGEST_MAP} residues has a {name}."
    chosen: dict[int, str] = {}
    for n, word in ((order[0], "Best"), (order[len(order) // 2], "Median"), (order[-1], "Worst")):
        chosen.setdefault(n, word)
    try:
        found = load_finetuned(str(model), torch.device("cpu"))
        if raw and found.about.get("weights_sha256") != raw.get("weights_sha256"):
            return [], "No contact maps: the model directory holds other weights than those that were tested."
        if run.recipe is not None:
            data = open_split(recipe, "test", found.task.labels, tracks_of(recipe))
        else:
            takes = family_of(found.model.trunk.config).tracks
            tracks = {name: found_place(path, run.path) for name, path in raw.get("tracks", {}).items()}
            files = track_files(tracks, takes, str(model), "--track ")
            data_path, labels, complexes = (
                None if raw.get(key) is None else found_place(str(raw[key]), run.path)
                for key in ("data", "labels", "complexes")
            )
            data = open_tested(str(data_path), labels, recipe, found.task.labels, files, complexes)
        recorded = run.versions.get("data", {}).get("test", {}).get("tokens_sha256")
        recorded = recorded or raw.get("tokens_sha256", data.digest)
        places = {data.id(n): n for n in range(len(data))}
        if recorded != data.digest or any(table.ids[n] not in places for n in chosen):
            return [], f"No contact maps: {data.path} is no longer what the model was tested on."
        examples = {n: data.get(places[table.ids[n]]) for n in chosen}
    except (InputError, OSError) as error:
        return [], f"No contact maps: {error}"
    figures = [
        Figure(
            f"{word}: {table.ids[n]}, {table.length_N[n]:.0f} residues, {name} {score_N[n]:.3f}.",
            png=plots.data_uri(plots.contact_map(found, examples[n])),
        )
        for n, word in chosen.items()
    ]
    return figures, (
        f"The test proteins with the best, the median and the worst {name}, of the {len(order):,} of up to "
        f"{LONGEST_MAP} residues. Above the diagonal: the predicted probability of each pair of residues. Below it: "
        "true contacts (Cb-Cb under 8 A, six or more residues apart), blue if they are among the L best predictions, L "
        "being the length, grey if not; and in orange those of the L best that are no contacts."
    )


def _recipe_of(raw: object) -> Recipe | None:
    """Return the recipe of a file; None if this version cannot use it."""
    try:
        return Recipe.model_validate(raw)
    except ValidationError:
        return None


def _numbers(run: RunFiles) -> list[Figure]:
    """Draw predicted against measured values of whole proteins."""

    def caption(name: str, x_N: Values, y_N: Values) -> str:
        return f"Predicted against measured {name}, in the unit of the labels: one dot a protein, {len(x_N):,} of them."

    return measured_figures(_pairs(run), caption)


def _profiles(raw: Mapping[str, Any]) -> list[Figure]:
    """Draw values along the sequence of single test proteins, and observed against predicted values of residues."""
    figures = []
    for n, protein in enumerate(raw.get("profiles", ())):
        observed_L, predicted_L = (np.array([number(v) for v in protein[key]]) for key in ("observed", "predicted"))

        def draw(axes: Any, observed_L: Values = observed_L, predicted_L: Values = predicted_L) -> None:
            charts.profile(axes, observed_L, predicted_L, raw["facts"].get("classes", ()))
            charts.name_axes(axes, "residue", "class" if "classes" in raw["facts"] else "value")

        caption = (
            f"{protein['id']}: observed and predicted along the sequence, {protein['score']} {protein['value']:.3f}. "
            "Of the test proteins, those with the best, the median and the worst score are drawn."
        )
        figures.append(Figure(caption, charts.chart(f"profile{n}", draw)))
    if residues := raw.get("residues"):
        observed_M, predicted_M = (np.array([number(v) for v in residues[key]]) for key in ("observed", "predicted"))

        def caption_of(_name: str, x_M: Values, _y_M: Values) -> str:
            return f"Predicted against observed values, in the unit of the labels: {len(x_M):,} residues, one dot each."

        figures += measured_figures([("value", observed_M, predicted_M)], caption_of)
    return figures


def measured_figures(
    pairs: Sequence[tuple[str, Values, Values]], caption: Callable[[str, Values, Values], str]
) -> list[Figure]:
    """Draw predicted against measured values.

    Args:
        pairs: name, measured and predicted values of each target. Only pairs of finite values are drawn.
        caption: returns the first sentences of a caption for a name and its drawn values.
    """
    figures = []
    for t, (name, target_N, prediction_N) in enumerate(pairs[:MOST_TARGETS]):
        known = np.isfinite(target_N) & np.isfinite(prediction_N)
        if not known.any():
            continue

        def draw(axes: Any, x: Values = target_N[known], y: Values = prediction_N[known], name: str = name) -> None:
            charts.against(axes, x, y)
            charts.name_axes(axes, f"measured {name}", f"predicted {name}")

        text = f"{caption(name, target_N[known], prediction_N[known])} On the dashed line both are equal."
        figures.append(Figure(text, charts.chart(f"against{t}", draw, height=3.3)))
    return figures


def _pairs(run: RunFiles) -> list[tuple[str, Values, Values]]:
    """Return name, target and prediction of each number of a whole protein; empty for other tasks."""
    columns = run.proteins.columns if run.proteins else {}
    names = run.evaluation.raw.get("facts", {}).get("targets", []) if run.evaluation else []
    keys = [(str(name), f" {name}" if len(names) > 1 else "") for name in names]
    return [
        (name, columns[f"target{of}"], columns[f"prediction{of}"])
        for name, of in keys
        if {f"target{of}", f"prediction{of}"} <= columns.keys()
    ]


def lengths(run: RunFiles) -> Section:
    """Return the scores of single proteins, by length and as a distribution."""
    section = ("length", "Score by protein")
    score = _score(run)
    if run.proteins is None or score is None:
        why = "per_protein.csv is missing" if run.proteins is None else "no protein has a score of its own"
        return Section(*section, missing=f"Nothing to draw: {why}.")
    name, score_N = score
    known = np.isfinite(score_N) & np.isfinite(run.proteins.length_N)
    score_N, length_N = score_N[known], run.proteins.length_N[known]

    def draw(axes: Any) -> None:
        charts.by_length(axes, length_N, score_N)
        charts.name_axes(axes, "length (residues)", name)

    def spread(axes: Any) -> None:
        charts.histogram(axes, score_N)
        charts.name_axes(axes, name, "proteins")

    note = ", with 95% bootstrap intervals" if len(score_N) >= LEAST else ""
    figures = [
        Figure(
            f"{name} by length: one dot a protein. Orange: means of about as many proteins each, over the lengths that "
            f"the bar spans{note}.",
            charts.chart("length", draw),
        ),
    ]
    if len(np.unique(score_N)) > 2:
        figures.append(Figure(f"How many proteins have which {name}.", charts.chart("spread", spread)))
    left_out = int((~known).sum())
    texts = [f"{left_out:,} proteins without {name} are left out."] if left_out else []
    return Section(*section, texts, figures)


def _score(run: RunFiles) -> tuple[str, Values] | None:
    """Return the name and the values of a score of single proteins.

    It is the first metric that single proteins have, whether the class is right, or the error of the first number.
    """
    if run.proteins is None:
        return None
    columns = run.proteins.columns
    for name in run.evaluation.raw["columns"] if run.evaluation else ():
        if name in columns:
            return name, columns[name]
    if {"correct", "confidence"} <= columns.keys():
        return "right (1) or wrong (0)", columns["correct"]
    for name, target_N, prediction_N in _pairs(run):
        if np.isfinite(error_N := np.abs(prediction_N - target_N)).any():
            return f"absolute error of {name}", error_N
    return None


def calibration(run: RunFiles) -> Section:
    """Return how well probabilities match the observed shares."""
    section = ("calibration", "Calibration")
    found = run.evaluation.raw.get("calibration") if run.evaluation else None
    if not found:
        why = "This task says no probabilities that could be checked." if run.evaluation else "Not tested yet."
        return Section(*section, missing=why)
    count, confidence, accuracy = (
        np.array([number(v) for v in found[name]]) for name in ("count", "confidence", "accuracy")
    )
    used = (count > 0) & np.isfinite(confidence) & np.isfinite(accuracy)
    total = float(count[used].sum())
    error = float((count * np.abs(confidence - accuracy))[used].sum() / total) if total else math.nan

    def draw(axes: Any) -> None:
        charts.reliability(axes, count, confidence, accuracy)
        charts.name_axes(axes, "predicted probability", "share that came true")

    return Section(
        *section,
        [
            f"Expected calibration error: {value_text(error)}, over {total:,.0f} predictions in {used.sum()} bins.",
            *filter(None, [found.get("scaling")]),
        ],
        [
            Figure(
                "Reliability: of predictions with about one probability, the share that came true; the larger the dot, "
                "the more predictions. On the dashed line probabilities mean what they say; below it the model is too "
                "sure, above it not sure enough.",
                charts.chart("calibration", draw, height=3.3),
            )
        ],
    )
