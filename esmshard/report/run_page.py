"""The page about one run: its scores, the course of its training, its data and its recipe."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from esmshard.data.splits.recipe_splits import open_split, open_tested
from esmshard.data.tracks import track_files
from esmshard.errors import InputError
from esmshard.io.paths import found_place, memory_text
from esmshard.io.tables import counted
from esmshard.model.families.family_registry import family_of
from esmshard.progress import duration, rate
from esmshard.recipe.sections import Recipe
from esmshard.report import charts
from esmshard.report.files import Evaluation, Headline, RunFiles, Values, intervals, number
from esmshard.report.parts import Figure, PageTable, Section, cell, if_intervals, range_text, value_text
from esmshard.tasks.base import BEFORE, MAIN
from esmshard.tasks.finetuned import load_finetuned, tracks_of
from esmshard.tasks.metrics import LEAST, Interval
from esmshard.tasks.registry import traits
from esmshard.train import evaluate
from esmshard.train.evaluate import comparison
from esmshard.train.run_dir import METRICS

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
        f"On {counted(raw['records'], 'record')} of the {raw['split']} set. The headline is {head.name}: "
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
        of = counted(found.raw["records"], f"{found.raw['split']} record")
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
            png=charts.data_uri(charts.contact_map(found, examples[n])),
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

    note = ", with 95% bootstrap intervals" if len(score_N) >= LEAST else ""
    figures = [
        Figure(
            f"{name} by length: one dot a protein. Orange: means of about as many proteins each, over the lengths that "
            f"the bar spans{note}.",
            charts.chart("length", draw),
        ),
    ]
    left_out = int((~known).sum())
    texts = [f"{counted(left_out, 'protein')} without {name} left out."] if left_out else []
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


MOST_ATTEMPTS = 50
"""The number of latest attempts in the table."""


def curves(run: RunFiles) -> Section:
    """Draw loss, main metric, learning rate and gradient norm over steps."""
    steps, valid = run.steps, run.validations
    section = ("curves", "Learning curves")
    if not len(steps["step"]) and not valid:
        return Section(*section, missing=_no_step(run))
    valid_step = np.array([number(line["step"]) for line in valid])
    valid_loss = np.array([number(line.get("loss")) for line in valid])
    averaged = ""
    if len(steps["step"]) > charts.POINTS:
        each = math.ceil(len(steps["step"]) / charts.POINTS)
        averaged = f" Each point is the mean of up to {each:,} steps, the band their range."

    def loss(axes: Any) -> None:
        charts.curve(axes, steps["step"], steps["loss"], label="training")
        if len(valid):
            charts.curve(axes, valid_step, valid_loss, charts.ORANGE, "validation")
            axes.legend(fontsize="small")
        charts.name_axes(axes, "optimizer step", "loss")

    figures = [
        Figure(
            "Loss: of each training step, and of the whole validation set. A validation loss that rises while the "
            f"training loss falls is overfitting.{averaged}",
            charts.chart("loss", loss),
        )
    ]
    if run.headline is not None and valid:
        figures.append(_validation(run, valid_step))
    clip = f"; a longer one is scaled to {run.recipe.optim.clip:g}" if run.recipe is not None else ""
    for name, title, caption in (
        ("lr", "learning rate", "Learning rate of the language model at each step."),
        ("grad_norm", "gradient norm", f"Norm of the gradient before clipping{clip}."),
    ):
        if np.isfinite(steps[name]).any():

            def draw(axes: Any, name: str = name, title: str = title) -> None:
                charts.curve(axes, steps["step"], steps[name])
                axes.yaxis.set_major_formatter("{x:g}")  # the format of recipes, such as 2e-05
                charts.name_axes(axes, "optimizer step", title)

            figures.append(Figure(f"{caption}{averaged}", charts.chart(name, draw)))
    texts = []
    if lost := int((~np.isfinite(steps["loss"])).sum()):
        texts.append(f"{counted(lost, 'step')} had no finite loss, and no point in the chart.")
    if not valid:
        texts.append("There is no validation yet.")
    return Section(*section, texts, figures)


def _validation(run: RunFiles, valid_step: Values) -> Figure:
    assert run.headline is not None
    name, lower = run.headline.name, run.headline.lower_is_better
    values, top = np.array([number(line.get(name)) for line in run.validations]), best(run)

    def draw(axes: Any) -> None:
        charts.curve(axes, valid_step, values, charts.ORANGE)
        if top is not None:
            axes.plot([top[0]], [top[1]], marker="*", markersize=13, linestyle="", color=charts.BLUE, clip_on=False)
        charts.name_axes(axes, "optimizer step", name)

    caption = f"{name} on the validation set"
    if lower is not None:
        caption += f"; {'lower' if lower else 'higher'} is better"
    caption += f". Best (star): {value_text(top[1])} at step {top[0]:,}." if top is not None else "."
    if run.evaluation is not None:
        caption += f" The model that was tested is that of step {run.evaluation.raw['step']:,}."
    return Figure(caption, charts.chart("valid", draw))


def _no_step(run: RunFiles) -> str:
    return f"{METRICS} has no step{'' if run.evaluation is not None else ' yet'}."


def best(run: RunFiles) -> tuple[int, float] | None:
    """Return step and value of the best validation, the first among equals. None if the better direction is unknown."""
    if run.headline is None or run.headline.lower_is_better is None:
        return None
    found = [(int(line["step"]), number(line.get(run.headline.name))) for line in run.validations]
    known = [pair for pair in found if math.isfinite(pair[1])]
    sign = -1 if run.headline.lower_is_better else 1
    return max(known, key=lambda pair: sign * pair[1], default=None)


def throughput(run: RunFiles) -> Section:
    """Draw residues per second, and memory."""
    section = ("speed", "Throughput and memory")
    steps = run.steps
    if not np.isfinite(steps["residues_per_s"]).any():
        return Section(*section, missing=_no_step(run))

    def fast(axes: Any) -> None:
        charts.curve(axes, steps["step"], steps["residues_per_s"])
        charts.from_zero(axes)
        charts.name_axes(axes, "optimizer step", "residues/s")

    figures = [
        Figure(
            f"Residues a second that were trained on, all processes together, padding not counted; "
            f"{rate(speed(run))} over all steps.",
            charts.chart("speed", fast),
        )
    ]
    memory = steps["peak_memory_bytes"]
    texts = []
    if np.isfinite(memory).any():

        def held(axes: Any) -> None:
            charts.curve(axes, steps["step"], memory / 2**30)
            charts.from_zero(axes)
            charts.name_axes(axes, "optimizer step", "peak memory (GiB)")

        figures.append(
            Figure(
                f"Most memory that one process held in a step, of the process with the most: at most "
                f"{memory_text(float(np.nanmax(memory)))}. On a GPU its memory, else that of the process.",
                charts.chart("memory", held),
            )
        )
    else:
        texts.append("Memory was not recorded.")
    return Section(*section, texts, figures)


def speed(run: RunFiles) -> float:
    """Return residues per second over all steps."""
    known = np.isfinite(run.steps["residues"]) & np.isfinite(run.steps["step_s"])
    seconds = float(run.steps["step_s"][known].sum())
    return float(run.steps["residues"][known].sum()) / seconds if seconds else math.nan


def time(run: RunFiles) -> Section:
    """Return goodput, the use of the remaining time, and the attempts."""
    section, spent = ("time", "Time"), run.goodput
    if not spent["attempts"]:
        return Section(*section, missing=f"{METRICS} does not tell when the run was started.")
    begun = [event for event in run.events if event["event"] == "attempt"]
    parts = {
        "steps that count": spent["useful_s"],
        "steps lost": spent["lost_s"],
        "start, before a step": sum(event["time"] - event["started"] for event in begun),
        "waiting for checkpoints": float(
            np.nansum([number(event.get("stall_s")) for event in run.events if event["event"] == "checkpoint"])
        ),
    }
    parts["validation, test, other"] = max(0.0, spent["allocated_s"] - sum(parts.values()))
    share = "" if spent["goodput"] is None else f", {spent['goodput']:.0%} of it in steps that count (goodput)"
    texts = [
        f"{duration(spent['allocated_s'])} in {counted(spent['attempts'], 'attempt')}{share}. Time between "
        "attempts, such as in a queue, is not counted."
    ]
    if spent["steps_lost"]:
        texts.append(
            f"{counted(spent['steps_lost'], 'step')} had to be taken again after a restart: "
            f"{duration(spent['lost_s'])} of work."
        )

    def draw(axes: Any) -> None:
        charts.bars(axes, parts)
        axes.set_xlabel("seconds")

    figure = Figure("What the time went into, all attempts together.", charts.chart("time", draw, height=2.2))
    note = "Each start of the run." if spent["attempts"] <= MOST_ATTEMPTS else f"The last {MOST_ATTEMPTS} starts."
    head = ["attempt", "went on from step", "steps lost before", "time to first step", "ended as"]
    return Section(*section, texts, [figure], [PageTable(head, _attempts(run)[-MOST_ATTEMPTS:], note)])


def _attempts(run: RunFiles) -> list[list[str]]:
    """Return a row of the table for each attempt."""
    rows: list[list[str]] = []
    for event in run.events:
        if event["event"] == "attempt":
            known = (event["attempt"], event.get("from_step", 0), event["steps_lost"])
            rows.append([*(f"{n:,}" for n in known), "-", "-"])
        elif rows and event["event"] == "first_step":
            rows[-1][3] = duration(event["seconds"])
        elif rows and event["event"] == "end":
            rows[-1][4] = str(event.get("state"))
    return rows


def about(run: RunFiles) -> str:
    """Describe task and model in a line."""
    if run.recipe is None:
        return f"Task {run.task or 'unknown'}."
    recipe = run.recipe
    return f"Task {recipe.task.name}, model {recipe.model.name} ({recipe.init}), adaptation {recipe.adapt.method}."


def state(run: RunFiles) -> str:
    """Return a sentence: how the run ended, or how far it is."""
    if run.status is None:
        return "There is no status.json: how the run ended is not known."
    found = run.status
    words = {"done": "Done", "running": "Still running when this page was made", "preempted": "Preempted"}
    state = words.get(found["state"], "Failed")
    return f"{state}; step {found['step']:,} of {found['steps']:,}: {found['message'].rstrip('.')}."


def facts(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return the numbers on top of the page: name, value and explanation."""
    shown, steps, head, tested = [], run.steps, run.headline, run.evaluation
    if tested is not None and head is not None:
        ours = tested.metrics[tested.main][head.name]
        of = counted(tested.raw["records"], f"{tested.raw['split']} record")
        shown.append((head.name, value_text(ours.value), f"{range_text(ours)}, {of}"))
        if (name := strongest(run)) is not None:
            gain = tested.differences[name][head.name]
            how = comparison(gain, lower_is_better=bool(head.lower_is_better))
            note = f"{range_text(gain)}, {how} the best baseline"
            shown.append((f"against {name}", value_text(gain.value, "+"), note))
    elif head is not None and (top := best(run)) is not None:
        shown.append((f"best validation {head.name}", value_text(top[1]), f"at step {top[0]:,}; not tested yet"))
    if len(steps["step"]):
        seen = rate(float(np.nansum(steps["residues"])))
        shown.append(("steps", f"{int(np.nanmax(steps['step'])):,}", f"{seen} residues seen"))
    if math.isfinite(mean_speed := speed(run)):
        shown.append(("speed", rate(mean_speed), "residues/s over all steps"))
    if np.isfinite(steps["peak_memory_bytes"]).any():
        shown.append(("memory", memory_text(float(np.nanmax(steps["peak_memory_bytes"]))), "peak of a process"))
    if run.goodput["goodput"] is not None:
        note = f"{run.goodput['goodput']:.0%} of it in steps that count"
        shown.append(("time", duration(run.goodput["allocated_s"]), note))
    return shown


def _data(run: RunFiles) -> Section:
    splits: Mapping[str, Mapping[str, Any]] = run.versions.get("data", {})
    leakage = (
        [str(s).removeprefix("leakage: ") for s in run.evaluation.raw.get("leakage", ())] if run.evaluation else []
    )
    texts = leakage or ["What the splits share has not been recorded: evaluation.json has no leakage check."]
    changed = dict.fromkeys(str(notice) for s in splits.values() for notice in s.get("notices", ()))
    texts += [f"Changed or left out: {notice}" for notice in changed]
    head = ["split", "file", "records", "residues", "sha256 of the tokens"]
    rows = [
        [
            name,
            str(s.get("path", "-")),
            *(_count(s.get(k)) for k in ("records", "residues")),
            s.get("tokens_sha256", "-"),
        ]
        for name, s in splits.items()
    ]
    tables = [PageTable(head, rows, "What went in. The digest is of all sequences in their order.")] if rows else []
    if not rows:
        texts = ["Which data went in is not recorded: versions.json is missing.", *texts]
    return Section("data", "Data and leakage", texts, tables=tables)


def _versions(run: RunFiles) -> Section:
    facts = [[name, str(value)] for name, value in run.versions.items() if not isinstance(value, dict | list)]
    if not facts:
        return Section("versions", "Versions", missing="versions.json is missing.")
    return Section("versions", "Versions", tables=[PageTable(["", ""], facts)])


def _recipe(run: RunFiles) -> Section:
    if run.recipe_text is None:
        return Section("recipe", "Recipe", missing="recipe.yaml is missing.")
    texts = ["With every key resolved, as recipe.yaml holds it."]
    if run.recipe_problem is not None:
        texts.append(f"This version of esmshard cannot use it: {run.recipe_problem}")
    return Section("recipe", "Recipe", texts, code=run.recipe_text)


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"


def _reproduce(run: RunFiles) -> Section:
    section, name = ("reproduce", "Command to reproduce"), run.path.resolve().name
    if run.recipe_text is None:
        return Section(*section, missing="recipe.yaml is missing, so there is none.")
    processes = run.versions.get("processes", 1)
    nproc = ["--nproc", str(processes)] if isinstance(processes, int) and processes > 1 else []
    text = (
        "From the directory in which that of the run lies. The same versions, data and number of processes give the "
        "same model on a CPU; on GPUs the same up to rounding."
    )
    command = ["esmshard", "finetune", f"{name}/recipe.yaml", *nproc, f"out={name}-again"]
    return Section(*section, [text], code=shlex.join(command))


SECTIONS: Sequence[Callable[[RunFiles], Section]] = (
    predictions,
    metrics,
    curves,
    lengths,
    calibration,
    throughput,
    time,
    _data,
    _versions,
    _recipe,
    _reproduce,
)
"""The sections of the page from top to bottom."""
