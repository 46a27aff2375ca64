"""The course of the training: learning curves, speed, memory, and the use of time."""

import math
from typing import Any

import numpy as np

from esmshard.files import memory_text
from esmshard.progress import duration, rate
from esmshard.report.draw import charts
from esmshard.report.read.run_directory import RunFiles, Values, number
from esmshard.report.text.page_parts import Figure, PageTable, Section, count_text, value_text
from esmshard.train.run_dir import METRICS

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
        texts.append(f"{count_text(lost, 'step')} had no finite loss, and no point in the chart.")
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
        f"{duration(spent['allocated_s'])} in {count_text(spent['attempts'], 'attempt')}{share}. Time between "
        "attempts, such as in a queue, is not counted."
    ]
    if spent["steps_lost"]:
        texts.append(
            f"{count_text(spent['steps_lost'], 'step')} had to be taken again after a restart: "
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
