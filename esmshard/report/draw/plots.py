"""Figures of a run, drawn with matplotlib (extra `plots`)."""

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from esmshard import spreadsheet
from esmshard.data.batching.loader import Example, Examples
from esmshard.data.structures.contact_labels import MIN_SEPARATION
from esmshard.errors import InputError
from esmshard.predict.contact_pictures import MapFolder, colours
from esmshard.progress import Progress

if TYPE_CHECKING:
    from esmshard.tasks.finetuner import FineTuned

HIT, MISSED, WRONG = "#0072b2", "0.72", "#d55e00"
"""Colours of contacts, distinguishable without red or green vision (Okabe and Ito)."""


def contact_figure(run: Path, data: Examples) -> Path:
    """Draw predicted against true contacts of one test protein: `figures/contacts_ID.png`.

    The protein is the one with the median long-range P@L, so the picture is neither the best nor the worst.
    """
    from esmshard.tasks.finetuner import load_finetuned

    record_id, value = _median(run / "per_protein.csv", "long P@L")
    example = data.get(next(n for n in range(len(data)) if data.id(n) == record_id))
    length = len(example.tokens) - 2
    about = f"{length} residues, long-range P@L {value:.2f}, the median of {data.name}"
    out = run / "figures" / f"contacts_{_file_name(record_id)}.png"
    out.parent.mkdir(exist_ok=True)
    out.write_bytes(contact_map(load_finetuned(str(run / "model")), example, f"{record_id[:60]}\n{about}"))
    return out


def draw_maps(found: "FineTuned", data: Examples, folder: Path) -> None:
    """Write `ID.png` for each record: its predicted map beside its true contacts; see `contact_map`."""
    with MapFolder(folder) as pictures, Progress("draw", len(data)) as progress:
        for n in range(len(data)):
            example = data.get(n)
            title = f"{example.id[:60]}\n{len(example.tokens) - 2} residues"
            pictures.keep(example.id, contact_map(found, example, title))
            progress.update(n + 1, "")


def contact_map(found: "FineTuned", example: Example, title: str | None = None) -> bytes:
    """Return a PNG of a model's predicted contacts of one protein, beside its true contacts."""
    figure_of, settings = matplotlib_figure()
    inputs = found.task.inputs(example)
    probability_LL = found.task.predict(found.model.outputs([inputs])[0])
    with settings:
        figure = figure_of(figsize=(5.0, 5.0), layout="constrained")
        axes = figure.add_subplot()
        image = _draw(axes, probability_LL, inputs.target)
        if title:
            axes.set_title(title, fontsize="medium")
        figure.colorbar(image, ax=axes, label="predicted probability (upper triangle)", shrink=0.85)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=140, facecolor="white")
    return out.getvalue()


def data_uri(png: bytes) -> str:
    """Return a picture as text for a page."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def matplotlib_figure() -> tuple[Any, Any]:
    """Return matplotlib's class of figures, which needs no display, and its settings. `InputError` without matplotlib.

    Ids of records are plain text: matplotlib would otherwise read formulae between dollar signs.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("figures need matplotlib; pip install 'esmshard[plots]'") from None
    settings: Any = {"text.parse_math": False, "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "esmshard"}
    return Figure, matplotlib.rc_context(settings)


def _draw(axes: Any, probability_LL: npt.NDArray[np.float32], labels_LL: npt.NDArray[np.int8]) -> Any:
    """Draw probabilities above the diagonal, and true contacts below, filled if they are among the L best predictions.

    Residues are counted from 1. Pairs without coordinates have no rank, as in the scores.
    """
    length = len(labels_LL)
    i, j = np.triu_indices(length, MIN_SEPARATION)
    known = labels_LL[i, j] >= 0
    i_K, j_K = i[known], j[known]
    best = np.argsort(-probability_LL[i_K, j_K], kind="stable")[:length]
    upper_LL = np.full((length, length), np.nan)
    upper_LL[i, j] = probability_LL[i, j]
    edges = (0.5, length + 0.5, length + 0.5, 0.5)
    top = float(np.nanmax(upper_LL)) if len(i) else 0.0
    image = axes.imshow(upper_LL, cmap=colours(), vmin=0, vmax=max(0.1, top), extent=edges)
    true = labels_LL[i_K, j_K] == 1
    hit = np.zeros(len(i_K), dtype=bool)
    hit[best] = True
    # the size of a pixel of the map in points, within visible limits
    side = float(np.clip(340 / max(length, 1), 1.2, 5))
    for chosen, colour, label in (
        (true & ~hit, MISSED, "contact, not among the L best"),
        (~true & hit, WRONG, "L best, no contact"),
        (true & hit, HIT, "L best, contact"),
    ):
        axes.scatter(i_K[chosen] + 1, j_K[chosen] + 1, s=side**2, c=colour, marker="s", linewidths=0, label=label)
    legend = axes.figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    for handle in legend.legend_handles:
        handle.set_sizes([25])
    axes.set_xlabel("residue")
    axes.set_ylabel("residue")
    return image


def _median(table: Path, metric: str) -> tuple[str, float]:
    with open(table, encoding="utf-8", newline="") as file:
        rows = [(float(row[metric]), row["id"]) for row in spreadsheet.named_rows(file) if row[metric]]
    if not rows:
        raise InputError(f"{table}: no protein has a value for {metric}, so there is none to draw")
    value, record_id = sorted(rows)[len(rows) // 2]
    return record_id, value


def _file_name(record_id: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in record_id)[:80]
