"""Figures of a run, drawn with matplotlib (extra `plots`)."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esmshard.batch import pack
from esmshard.data.loader import Examples
from esmshard.data.structures import MIN_SEPARATION
from esmshard.errors import InputError
from esmshard.tasks.finetuner import load_finetuned


def contact_figure(run: Path, data: Examples) -> Path:
    """Predicted against true contacts of one test protein: `figures/contacts_ID.png`.

    The protein is the one with the median long-range P@L, so the picture is neither the best nor the worst.
    """
    try:
        import matplotlib
    except ImportError:
        raise InputError("the figure needs matplotlib; pip install 'esmshard[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    record_id, value = _median(run / "per_protein.csv", "long P@L")
    example = data.get(next(n for n in range(len(data)) if data.id(n) == record_id))
    found = load_finetuned(str(run / "model"))
    with torch.no_grad():
        batch = pack([example.tokens]).to(next(found.model.parameters()).device)
        probability_LL = found.task.predict(found.model(batch)[0].cpu().numpy())
    figure, axes = pyplot.subplots(figsize=(6.4, 6.0), layout="constrained")
    image = _draw(axes, probability_LL, found.task.targets(example))
    about = f"{len(probability_LL)} residues, long-range P@L {value:.2f}, the median of {data.name}"
    axes.set_title(f"{record_id[:60]}\n{about}", fontsize="medium")
    figure.colorbar(image, ax=axes, label="predicted probability (upper triangle)")
    out = run / "figures" / f"contacts_{_file_name(record_id)}.png"
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)
    return out


def _draw(axes: Any, probability_LL: npt.NDArray[np.float32], labels_LL: npt.NDArray[np.int8]) -> Any:
    """Probabilities above the diagonal; below it true contacts, filled where they are among the L best predictions."""
    length = len(labels_LL)
    i, j = np.triu_indices(length, MIN_SEPARATION)
    best = np.argsort(-probability_LL[i, j], kind="stable")[:length]
    upper_LL = np.full((length, length), np.nan)
    upper_LL[i, j] = probability_LL[i, j]
    image = axes.imshow(upper_LL, cmap="viridis_r", vmin=0, vmax=max(0.1, float(np.nanmax(upper_LL))))
    true = labels_LL[i, j] == 1
    hit = np.zeros(len(i), dtype=bool)
    hit[best] = True
    for chosen, colour, label in (
        (true & ~hit, "0.75", "contact, not among the L best"),
        (~true & hit, "tab:red", "L best, no contact"),
        (true & hit, "tab:green", "L best, contact"),
    ):
        axes.scatter(i[chosen], j[chosen], s=6, c=colour, marker="s", label=label)
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize="small", markerscale=2)
    axes.set_xlabel("residue")
    axes.set_ylabel("residue")
    return image


def _median(table: Path, metric: str) -> tuple[str, float]:
    with open(table, encoding="utf-8", newline="") as file:
        rows = [(float(row[metric]), row["id"]) for row in csv.DictReader(file) if row[metric]]
    if not rows:
        raise InputError(f"{table}: no protein has a value for {metric}, so there is none to draw")
    value, record_id = sorted(rows)[len(rows) // 2]
    return record_id, value


def _file_name(record_id: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in record_id)[:80]
