"""Figures of a run, drawn with matplotlib (extra `plots`)."""

import base64
import csv
from pathlib import Path
from typing import TYPE_CHECKING

from esmshard.data.batching.loader import Example, Examples
from esmshard.errors import InputError
from esmshard.predict.contact_pictures import FileNames, MapFolder, draw
from esmshard.progress import Progress
from esmshard.tasks.base import of_residues
from esmshard.vocab import chain_spans, is_residue

if TYPE_CHECKING:
    from esmshard.tasks.finetuned import FineTuned


def contact_figure(run: Path, data: Examples, device: str | None = None) -> Path:
    """Draw predicted against true contacts of one test protein: `figures/contacts_ID.png`.

    The protein is the one with the median long-range P@L, so the picture is neither the best nor the worst.
    """
    from esmshard.tasks.finetuned import load_finetuned

    record_id, value = _median(run / "per_protein.csv", "long P@L")
    example = data.get(next(n for n in range(len(data)) if data.id(n) == record_id))
    length = int(is_residue(example.tokens).sum())
    about = f"{length} residues, long-range P@L {value:.2f}, the median of {data.name}"
    out = run / "figures" / f"contacts_{FileNames().new(record_id)}"
    out.parent.mkdir(exist_ok=True)
    out.write_bytes(contact_map(load_finetuned(str(run / "model"), device), example, about))
    return out


def draw_maps(found: "FineTuned", data: Examples, folder: Path) -> None:
    """Write `ID.png` for each record: its predicted map beside its true contacts; see `contact_map`."""
    with MapFolder(folder) as pictures, Progress("draw", len(data)) as progress:
        for n in range(len(data)):
            example = data.get(n)
            pictures.keep(example.id, contact_map(found, example, f"{is_residue(example.tokens).sum()} residues"))
            progress.update(n + 1, "")


def contact_map(found: "FineTuned", example: Example, note: str = "") -> bytes:
    """Return a PNG of a model's predicted contacts of one protein, beside its true contacts."""
    inputs, residues = found.task.inputs(example), example.tokens[1:-1]
    probability_LL = found.task.predict(found.model.outputs([inputs])[0])
    maps = [of_residues(found.task, one_LL, residues) for one_LL in (probability_LL, inputs.target)]
    return draw(maps[0], example.id, maps[1], note, [end - start for start, end in chain_spans(residues)])


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
