"""The charts of a report, as SVG that uses the colours of the page, and pictures of contact maps."""

import base64
import csv
import io
import re
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
from esmshard.report.files import Values
from esmshard.tasks.base import of_residues
from esmshard.tasks.finetuned import FineTuned, load_finetuned
from esmshard.tasks.metrics import LEAST, Interval, draws, interval
from esmshard.vocab import chain_spans, is_residue

BLUE, ORANGE, GREY = "#3b82c4", "#d9772b", "#8a8f98"
"""Colours that are readable on white and on black, and distinguishable without red or green vision."""
POINTS = 400
"""The most points of a curve, which is what the width of a chart can show."""
RASTER = 1500
"""The number of points from which a cloud becomes a picture, since each point as SVG takes a hundred bytes."""
METHODS = ((BLUE, "o"), (ORANGE, "s"), (GREY, "^"), ("#009e73", "D"), ("#b8579a", "v"), ("#b59410", "P"))
"""Colour and marker of each line where several methods are compared. The first is for the fine-tuned model."""
MISSING = "#c4c8ce"
"""The colour of the cells of a map without a value."""
_INK = "#010203"
"""The placeholder for the colour of the page's text while matplotlib draws."""


def chart(name: str, draw: Callable[[Any], None], height: float = 2.7, width: float = 4.4) -> str:
    """Return one pair of axes as an `<svg>` element.

    Args:
        name: a part of an HTML id that no other chart of the page has.
        draw: called with the axes.
        height: height in inches of 72 points.
        width: width in inches.
    """
    figure_of, settings = matplotlib_figure()
    with settings:
        figure = figure_of(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=_INK, alpha=0.12, linewidth=0.6)
        axes.set_axisbelow(True)
        draw(axes)
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            text.set_color(_INK)
        axes.tick_params(colors=_INK)
        for spine in axes.spines.values():
            spine.set_color(_INK)
        if legend := axes.get_legend():
            legend.set_frame_on(False)
            for text in legend.get_texts():
                text.set_color(_INK)
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, dpi=120, metadata=nothing)
    return _inline(out.getvalue(), name)


def _inline(svg: str, name: str) -> str:
    """Adapt an SVG to HTML: no XML declaration, no style for the whole page, unique ids, the page's colour and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="([^"]+)"', rf' id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg)
    return svg.replace(_INK, "currentColor").strip()


def neighbours(count: int, most: int = POINTS) -> list[npt.NDArray[np.int64]]:
    """Return the numbers below `count`, in at most `most` groups of neighbours of about equal size.

    >>> [group.tolist() for group in neighbours(5, 2)]
    [[0, 1, 2], [3, 4]]
    """
    return [group for group in np.array_split(np.arange(count), min(count, most) or 1) if len(group)]


def curve(axes: Any, x: Values, y: Values, colour: str = BLUE, label: str | None = None) -> None:
    """Draw a line through finite values. For many values draw means of neighbours, and a band of their range."""
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    groups = neighbours(len(x))
    mean_x = np.array([x[group].mean() for group in groups])
    mean_y = np.array([y[group].mean() for group in groups])
    if len(groups) < len(x):
        low, high = ([reach(y[group]) for group in groups] for reach in (np.min, np.max))
        axes.fill_between(mean_x, low, high, color=colour, alpha=0.2, linewidth=0)
    marker = "o" if len(x) <= 30 else ""
    axes.plot(mean_x, mean_y, color=colour, linewidth=1.3, label=label, marker=marker, markersize=3)


def cloud(axes: Any, x: Values, y: Values) -> None:
    """Draw one dot for each protein."""
    shade = float(np.clip(300 / max(len(x), 1), 0.12, 0.6))
    axes.scatter(x, y, s=10, color=BLUE, alpha=shade, linewidths=0, rasterized=len(x) > RASTER)


def intervals(axes: Any, rows: Mapping[str, Interval], main: str) -> None:
    """Draw one line for each method: its value, with the 95% interval."""
    names = [name for name, found in rows.items() if np.isfinite(found.value)]
    for place, name in enumerate(reversed(names)):
        found, colour = rows[name], BLUE if name == main else GREY
        if np.isfinite([found.low, found.high]).all():
            axes.plot([found.low, found.high], [place, place], color=colour, linewidth=2)
        axes.plot([found.value], [place], color=colour, marker="o", markersize=6, linestyle="")
    axes.set_yticks(range(len(names)), [_short(name) for name in reversed(names)])
    axes.set_ylim(-0.6, len(names) - 0.4)


def by_length(axes: Any, length_N: Values, score_N: Values) -> None:
    """Draw a dot for each protein, and means with 95% intervals over bins of similar length and equal size."""
    cloud(axes, length_N, score_N)
    for members in length_bins(length_N):
        found = mean_interval(score_N[members])
        left, right, middle = length_N[members].min(), length_N[members].max(), float(np.median(length_N[members]))
        axes.plot([left, right], [found.value] * 2, color=ORANGE, linewidth=2)
        axes.plot([middle, middle], [found.low, found.high], color=ORANGE, linewidth=1.3)
        axes.plot([middle], [found.value], color=ORANGE, marker="o", markersize=4)


def length_bins(length_N: Values, most: int = 6, fewest: int = LEAST) -> list[npt.NDArray[np.int64]]:
    """Return the indices of proteins in up to `most` bins of at least `fewest`. Equal lengths stay together."""
    order = np.argsort(length_N, kind="stable")
    bins = max(1, min(most, len(order) // fewest))
    edges = np.unique(np.quantile(length_N, np.linspace(0, 1, bins + 1)[1:-1])) if len(order) else np.empty(0)
    place_N = np.searchsorted(edges, length_N, side="left")
    return [order[place_N[order] == k] for k in range(len(edges) + 1) if (place_N == k).any()]


def mean_interval(values: Values) -> Interval:
    """Return the mean with its 95% percentile bootstrap interval. Fewer than LEAST values have no interval."""
    return interval([float(values.mean()), *(float(values[n].mean()) for n in draws(len(values)))])


def against(axes: Any, target_N: Values, prediction_N: Values) -> None:
    """Draw predicted against measured values, with the line of equality."""
    cloud(axes, target_N, prediction_N)
    ends = [min(target_N.min(), prediction_N.min()), max(target_N.max(), prediction_N.max())]
    axes.plot(ends, ends, color=GREY, linewidth=1, linestyle="--")


def profile(axes: Any, observed_L: Values, predicted_L: Values, classes: Sequence[str] = ()) -> None:
    """Draw observed and predicted values along a sequence; NaN leaves a gap. Classes are drawn by their numbers."""
    position_L = np.arange(1, len(observed_L) + 1)
    how = {"drawstyle": "steps-mid"} if classes else {}
    axes.plot(position_L, observed_L, color=GREY, linewidth=2.2, label="observed", **how)
    axes.plot(position_L, predicted_L, color=BLUE, linewidth=1, label="predicted", **how)
    if classes:
        axes.set_yticks(range(len(classes)), [_short(name) for name in classes])
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def reliability(axes: Any, count: Values, confidence: Values, accuracy: Values) -> None:
    """Draw the share of correct predictions by confidence. The area of a dot is the number of predictions."""
    known = (count > 0) & np.isfinite(confidence) & np.isfinite(accuracy)
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
    axes.plot(confidence[known], accuracy[known], color=BLUE, linewidth=1.2)
    area = 14 + 70 * count[known] / count[known].max(initial=1)
    axes.scatter(confidence[known], accuracy[known], s=area, color=BLUE, alpha=0.8, linewidths=0)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)


def confusion(axes: Any, classes: Sequence[str], counts_CC: Values) -> None:
    """Draw true classes as rows and predicted classes as columns, shaded by the share of the row."""
    total_C = counts_CC.sum(axis=1, keepdims=True)
    share_CC = np.divide(counts_CC, total_C, out=np.zeros_like(counts_CC), where=total_C > 0)
    axes.grid(visible=False)
    axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    if len(classes) <= 12:
        for true, row in enumerate(counts_CC):
            for said, n in enumerate(row):
                dark = share_CC[true, said] > 0.5
                axes.text(said, true, f"{n:,.0f}", ha="center", va="center", fontsize=7, color="w" if dark else "k")
    names = [_short(name, 14) for name in classes]
    step = -(-len(names) // 30)
    places = range(0, len(names), step)
    slant = max(map(len, names)) > 2
    axes.set_xticks(places, names[::step], rotation=45 if slant else 0, ha="right" if slant else "center")
    axes.set_yticks(places, names[::step])


def bars(axes: Any, rows: Mapping[str, float]) -> None:
    """Draw one horizontal bar for each value, the first on top."""
    names = list(reversed(list(rows)))
    axes.barh(names, [rows[name] for name in names], color=[GREY] * (len(rows) - 1) + [BLUE], height=0.65)
    axes.grid(visible=False, axis="y")


def learning_curve(axes: Any, points: Sequence[tuple[int, Mapping[str, Interval]]], methods: Sequence[str]) -> None:
    """Draw a line for each method through its defined points, with their 95% intervals."""
    sizes = np.array([size for size, _ in points], dtype=np.float64)
    apart = 0.012 * float(np.ptp(sizes))  # neighbouring intervals stay distinguishable
    for n, name in enumerate(methods):
        nothing = Interval(np.nan, np.nan, np.nan)
        found = np.array([(one.value, one.low, one.high) for one in (rows.get(name, nothing) for _, rows in points)])
        known = np.isfinite(found[:, 0])
        if not known.any():
            continue
        x, (y, low, high) = (sizes + apart * (n - (len(methods) - 1) / 2))[known], found[known].T
        colour, marker = METHODS[n % len(METHODS)]
        axes.vlines(x, low, high, color=colour, linewidth=1)
        axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.3, label=_short(name))
    axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    if axes.lines:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def heat_map(
    axes: Any,
    value_AP: Values,
    first: int,
    wild_P: Sequence[int | None],
    letters: str,
    limits: tuple[float, float],
    label: str,
    most: int = 100,
) -> None:
    """Draw a cell for each substitution: a row for each letter, in blocks of up to `most` positions.

    Args:
        axes: empty axes.
        value_AP: the values; NaN where there is none.
        first: the number of the first position.
        wild_P: the index of the wild type's letter, which gets a dot.
        letters: the A letters.
        limits: the values at the ends of the colour scale.
        label: the label of the scale.
        most: the most positions of a block.
    """
    import matplotlib

    count, positions = value_AP.shape
    lines = max(1, -(-positions // most))
    width, height = -(-positions // lines), count + 2.5  # room for the numbers of the positions
    colours = matplotlib.colormaps["viridis"].with_extremes(bad=MISSING)
    image = None
    for line in range(lines):
        start, top = line * width, line * height
        part = value_AP[:, start : start + width]
        edges = (-0.5, part.shape[1] - 0.5, top + count - 0.5, top - 0.5)
        scale = {"vmin": limits[0], "vmax": limits[1], "cmap": colours}
        image = axes.imshow(np.ma.masked_invalid(part), extent=edges, aspect="auto", interpolation="nearest", **scale)
        dots = [(p, top + letter) for p, letter in enumerate(wild_P[start : start + width]) if letter is not None]
        axes.plot(*zip(*dots, strict=True) if dots else ([], []), color="k", marker="o", markersize=2, linestyle="")
        for p in range(part.shape[1]):
            if (first + start + p) % 10 == 0 or p == start == 0:
                at = {"ha": "center", "va": "top", "fontsize": 7, "color": _INK}
                axes.text(p, top + count - 0.3, str(first + start + p), **at)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=6.5)
    axes.set_xlim(-0.5, max(width, most // 3) - 0.5)  # a few positions must not get giant cells
    axes.set_ylim(lines * height - 0.5, -0.5)
    axes.set_xticks([])
    axes.set_yticks([line * height + n for line in range(lines) for n in range(count)], list(letters) * lines)
    bar = axes.figure.colorbar(image, ax=axes, extend="both", pad=0.01, fraction=0.02, aspect=12 * lines)
    bar.solids.set_rasterized(True)
    bar.set_label(label, color=_INK)
    bar.ax.tick_params(colors=_INK, labelsize=7)
    bar.outline.set_visible(False)


def from_zero(axes: Any) -> None:
    """Let the axis begin at 0, for amounts whose heights are compared."""
    axes.set_ylim(0, 1.05 * max(axes.get_ylim()[1], 0))


def name_axes(axes: Any, x: str, y: str) -> None:
    """Label the axes, with units."""
    axes.set_xlabel(_short(x, 50))
    axes.set_ylabel(_short(y, 35))


def _short(text: str, most: int = 26) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def contact_figure(run: Path, data: Examples, device: str | None = None) -> Path:
    """Draw predicted against true contacts of one test protein: `figures/contacts_ID.png`.

    The protein is the one with the median long-range P@L, so the picture is neither the best nor the worst.
    """
    record_id, value = _median(run / "per_protein.csv", "long P@L")
    example = data.get(next(n for n in range(len(data)) if data.id(n) == record_id))
    length = int(is_residue(example.tokens).sum())
    about = f"{length} residues, long-range P@L {value:.2f}, the median of {data.name}"
    out = run / "figures" / f"contacts_{pictures.file_name(record_id, set())}"
    out.parent.mkdir(exist_ok=True)
    out.write_bytes(contact_map(load_finetuned(str(run / "model"), device), example, about))
    return out


def draw_maps(found: FineTuned, data: Examples, folder: Path) -> None:
    """Write `ID.png` for each record: its predicted map beside its true contacts; see `contact_map`."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = set[str]()
    with Progress("draw", len(data)) as progress:
        for n in range(len(data)):
            example = data.get(n)
            picture = contact_map(found, example, f"{is_residue(example.tokens).sum()} residues")
            (folder / pictures.file_name(example.id, taken)).write_bytes(picture)
            progress.update(n + 1, "")


def contact_map(found: FineTuned, example: Example, note: str = "") -> bytes:
    """Return a PNG of a model's predicted contacts of one protein, beside its true contacts."""
    inputs, residues = found.task.inputs(example), example.tokens[1:-1]
    probability_LL = found.task.predict(found.model.outputs([inputs])[0])
    maps = [of_residues(found.task, one_LL, residues) for one_LL in (probability_LL, inputs.target)]
    return pictures.draw(maps[0], example.id, maps[1], note, [end - start for start, end in chain_spans(residues)])


def data_uri(png: bytes) -> str:
    """Return a picture as text for a page."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _median(table: Path, metric: str) -> tuple[str, float]:
    with open(table, encoding="utf-8", newline="") as file:
        rows = [(float(row[metric]), row["id"]) for row in csv.DictReader(file) if row[metric]]
    if not rows:
        raise InputError(f"{table}: no protein has a value for {metric}, so there is none to draw")
    value, record_id = sorted(rows)[len(rows) // 2]
    return record_id, value
