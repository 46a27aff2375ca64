"""Draw charts for the HTML page of a report, and PNG pictures of contact maps."""

import base64
import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.batching.loader import Example, Examples
from esmshard.errors import InputError
from esmshard.predict import pictures
from esmshard.predict.pictures import matplotlib_figure
from esmshard.progress import Progress
from esmshard.tasks.base import of_residues
from esmshard.tasks.finetuned import FineTuned, load_finetuned
from esmshard.tasks.metrics import Interval
from esmshard.vocab import chain_spans, is_residue

Values = npt.NDArray[np.float64]

BLUE, ORANGE, GREY = "#3b82c4", "#d9772b", "#8a8f98"
"""Colours that people with red-green colour blindness can distinguish."""
METHODS = ((BLUE, "o"), (ORANGE, "s"), (GREY, "^"), ("#009e73", "D"), ("#b8579a", "v"), ("#b59410", "P"))
"""The colour and marker of each line in a learning curve: first the fine-tuned model, then the baselines."""
STYLE: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}
POINTS = 400
"""The maximum number of points of a curve. A chart is too narrow for more points."""
RASTER = 1500
"""The maximum number of dots that are drawn as SVG, with 100 bytes for each dot. More dots are drawn as one image."""
LONGEST_MAP = 512
"""The maximum length, in residues, of proteins whose contact maps are drawn. Larger maps are unreadable."""


def data_uri(picture: bytes, kind: str) -> str:
    """Return a picture as a data URI for an `<img>` element. Pictures in `<img>` load nothing and run no scripts."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def chart(draw: Callable[..., None], *values: Any, height: float = 2.7, width: float = 4.4, **options: Any) -> str:
    """Call `draw(axes, *values, **options)`, and return the chart as a data URI. Height and width are in inches."""
    return _svg(lambda figure: draw(figure.add_subplot(), *values, **options), height, width)


def _svg(draw: Callable[[Any], None], height: float, width: float) -> str:
    figure_of, settings = matplotlib_figure()
    with settings:
        import matplotlib

        matplotlib.rcParams.update(STYLE)
        figure = figure_of(figsize=(width, height), layout="constrained")
        draw(figure)
        out = io.BytesIO()
        figure.savefig(out, format="svg", dpi=120, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return data_uri(out.getvalue(), "svg+xml")


def curves(
    axes: Any,
    name: str,
    lines: Mapping[str, tuple[Values, Values]],
    star: tuple[float, float] | None = None,
    *,
    from_zero: bool = False,
    x_name: str = "optimizer step",
) -> None:
    """Draw one or two lines of values over steps or trials. For more than `POINTS` values, draw means of neighbouring
    values, and a band from their minimum to their maximum, so that a spike stays visible.

    `lines` has the steps and values of each line by label. `star` is the step and value of a point that gets a star.
    With `from_zero`, the y axis begins at 0. `name` and `x_name` are the labels of the axes.
    """
    for colour, (label, (step, value)) in zip((BLUE, ORANGE), lines.items(), strict=False):
        x, y = step[np.isfinite(value)], value[np.isfinite(value)]
        groups = [group for group in np.array_split(np.arange(len(x)), min(len(x), POINTS) or 1) if len(group)]
        mean_x, mean_y = (np.array([values[group].mean() for group in groups]) for values in (x, y))
        if len(groups) < len(x):
            low, high = ([reach(y[group]) for group in groups] for reach in (np.min, np.max))
            axes.fill_between(mean_x, low, high, color=colour, alpha=0.2, linewidth=0)
        marker = "o" if len(x) <= 30 else ""
        axes.plot(mean_x, mean_y, color=colour, linewidth=1.3, label=label, marker=marker, markersize=3)
    if len(lines) > 1:
        axes.legend(fontsize="small", frameon=False)
    if star is not None:
        axes.plot(*([value] for value in star), marker="*", markersize=13, linestyle="", color=BLUE, clip_on=False)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x_name)
    axes.set_ylabel(_short(name))


def dots(axes: Any, x_N: Values, y_N: Values, x_name: str, y_name: str, *, same_unit: bool = False) -> None:
    """Draw a dot for each of N pairs of values. With `same_unit`, also draw the line on which both values are equal."""
    shade = float(np.clip(300 / max(len(x_N), 1), 0.12, 0.6))
    axes.scatter(x_N, y_N, s=10, color=BLUE, alpha=shade, linewidths=0, rasterized=len(x_N) > RASTER)
    if same_unit:
        ends = [min(x_N.min(), y_N.min()), max(x_N.max(), y_N.max())]
        axes.plot(ends, ends, color=GREY, linewidth=1, linestyle="--")
    axes.set_xlabel(_short(x_name))
    axes.set_ylabel(_short(y_name))


def intervals(axes: Any, rows: Mapping[str, Interval], main: str, name: str) -> None:
    """Draw the value and 95% interval of each of `rows` with a finite value, in blue for the row `main`. `name` labels
    the x axis.
    """
    names = [method for method, of_method in rows.items() if np.isfinite(of_method.value)]
    for place, method in enumerate(reversed(names)):
        of_method, colour = rows[method], BLUE if method == main else GREY
        axes.plot([of_method.low, of_method.high], [place, place], color=colour, linewidth=2)
        axes.plot([of_method.value], [place], color=colour, marker="o", markersize=6)
    axes.set_yticks(range(len(names)), [_short(method, 26) for method in reversed(names)])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlabel(_short(name))


def profile(axes: Any, observed_L: Values, predicted_L: Values, classes: Sequence[str] = ()) -> None:
    """Draw observed and predicted values of L residues as lines. With `classes`, values are class indices, drawn as
    steps. NaN is a gap.
    """
    position_L = np.arange(1, len(observed_L) + 1)
    how = "steps-mid" if classes else "default"
    axes.plot(position_L, observed_L, color=GREY, linewidth=2.2, label="observed", drawstyle=how)
    axes.plot(position_L, predicted_L, color=BLUE, linewidth=1, label="predicted", drawstyle=how)
    if classes:
        axes.set_yticks(range(len(classes)), [_short(name, 26) for name in classes])
    axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_xlabel("residue")
    axes.set_ylabel("class" if classes else "value")


def residue_weights(axes: Any, chains: Sequence[str], weights: Sequence[Sequence[float]]) -> None:
    """Draw a bar for the weight of each residue, and name the three highest of each chain. The `chains` of a record
    follow each other, in two colours.
    """
    start = 0
    for n, (chain, of_chain) in enumerate(zip(chains, weights, strict=True)):
        axes.bar(np.arange(start + 1, start + 1 + len(chain)), of_chain, 1, color=(BLUE, ORANGE)[n % 2])
        for place in np.argsort(of_chain)[-3:].tolist():
            name, at = f"{chain[place]}{place + 1}", (start + place + 1, of_chain[place])
            axes.annotate(name, at, ha="center", va="bottom", fontsize=7)
        start += len(chain)
    axes.set_xlim(0.5, start + 0.5)
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("residue" if len(chains) == 1 else f"residue of {len(chains)} chains, one after another")
    axes.set_ylabel("weight")


def reliability(axes: Any, count: Values, confidence: Values, accuracy: Values) -> None:
    """Draw `accuracy` (share of predictions that came true) over `confidence`. A larger `count` enlarges the dot."""
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
    axes.scatter(confidence, accuracy, s=14 + 70 * count / count.max(initial=1), color=BLUE, alpha=0.8, linewidths=0)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted probability", ylabel="share that came true")


def confusion(axes: Any, classes: Sequence[str], counts_CC: Values) -> None:
    """Draw a confusion matrix. Rows are true classes, columns predicted classes. Colours show shares of a row's sum."""
    total_C = counts_CC.sum(axis=1, keepdims=True)
    share_CC = np.divide(counts_CC, total_C, out=np.zeros_like(counts_CC), where=total_C > 0)
    axes.grid(visible=False)
    axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    if len(classes) <= 12:
        for (true, predicted), count in np.ndenumerate(counts_CC):
            colour = "w" if share_CC[true, predicted] > 0.5 else "k"
            axes.text(predicted, true, f"{count:,.0f}", ha="center", va="center", fontsize=7, color=colour)
    names = [_short(name, 14) for name in classes]
    step = -(-len(names) // 30)  # More than 30 names would be written over each other.
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=45, ha="right")
    axes.set_yticks(range(0, len(names), step), names[::step])
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")


def learning_curve(axes: Any, sizes: Sequence[int], methods: Mapping[str, Mapping[int, Interval]]) -> None:
    """Draw Spearman's correlation, with 95% intervals, over the number of training variants. `methods` has the points
    of each line, by the name of the model or baseline.
    """
    apart = 0.012 * (max(sizes) - min(sizes))  # moves methods sideways, so that their intervals do not overlap
    for n, (method, points) in enumerate(methods.items()):
        defined = {size: point for size, point in sorted(points.items()) if np.isfinite(point.value)}
        if not defined:
            continue
        x = np.array(list(defined)) + apart * (n - (len(methods) - 1) / 2)
        y, low, high = np.array([(point.value, point.low, point.high) for point in defined.values()]).T
        colour, marker = METHODS[n % len(METHODS)]
        axes.vlines(x, low, high, color=colour, linewidth=1)
        axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.3, label=_short(method, 26))
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_xlabel("training variants")
    axes.set_ylabel("Spearman")


def heat_map(
    value_AP: Values, first: int, wild_P: npt.NDArray[np.int64], letters: str, limits: tuple[float, float], label: str
) -> str:
    """Return a substitution map as a data URI. For the arguments see `pictures.draw_substitution_map`."""
    lines = -(-value_AP.shape[1] // pictures.BLOCK)
    values = (value_AP, first, wild_P, letters, limits, _short(label))
    return _svg(lambda figure: pictures.draw_substitution_map(figure, *values), height=0.3 + 2.3 * lines, width=10)


def _short(text: str, most: int = 50) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def contact_figures(run: Path, data: Examples, device: str | None = None) -> list[Path]:
    """Draw predicted and true contacts for three test proteins: those with the best, median and worst long-range P@L,
    among proteins with up to `LONGEST_MAP` residues. Return the files, such as `figures/contacts_best_ID.png`.
    """
    with open(run / "per_protein.csv", encoding="utf-8", newline="") as file:
        scored = [row for row in csv.DictReader(file) if row["long P@L"] and int(row["length"]) <= LONGEST_MAP]
    ranked = sorted((float(row["long P@L"]), row["id"], int(row["length"])) for row in scored)
    if not ranked:
        raise InputError(f"{run}: no test protein with up to {LONGEST_MAP} residues has a long-range P@L")
    (run / "figures").mkdir(exist_ok=True)
    model, places = load_finetuned(str(run / "model"), device), {data.id(n): n for n in range(len(data))}
    chosen = {"best": ranked[-1], "median": ranked[len(ranked) // 2], "worst": ranked[0]}
    drawn: dict[str, Path] = {}
    for word, (value, record_id, length) in chosen.items():
        if record_id not in drawn:
            note = f"{length} residues, long-range P@L {value:.2f}, the {word} of {data.name}"
            drawn[record_id] = run / "figures" / f"contacts_{word}_{pictures.file_name(record_id, set())}"
            drawn[record_id].write_bytes(contact_map(model, data.get(places[record_id]), note))
    return list(drawn.values())


def draw_maps(model: FineTuned, data: Examples, folder: Path) -> None:
    """Write a picture `ID.png` of each record into a folder; see `contact_map`."""
    with pictures.collected(folder) as add, Progress("draw", len(data)) as progress:
        for n in range(len(data)):
            example = data.get(n)
            add(example.id, contact_map(model, example, f"{is_residue(example.tokens).sum()} residues"))
            progress.update(n + 1, "")


def contact_map(model: FineTuned, example: Example, note: str = "") -> bytes:
    """Return a PNG picture of one protein's predicted and true contacts. `note` is the second line of its title."""
    inputs, residues = model.task.inputs(example), example.tokens[1:-1]
    probability_LL = model.task.predict(model.model.outputs([inputs])[0])
    maps = [of_residues(model.task, map_LL, residues) for map_LL in (probability_LL, inputs.target)]
    chains = [end - start for start, end in chain_spans(residues)]
    return pictures.draw(maps[0], example.id, maps[1], note, chains)
