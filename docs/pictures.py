"""The pictures of the README, from a finished run of the recipe `contact`.

    python docs/pictures.py runs/contact

Writes `docs/_static/contact-map.png`, the contacts of a test protein before and after fine-tuning, and, where Chromium
is installed, `docs/_static/report.png`, the top of the run's report. Together they have at most 300 KB.
"""

import csv
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from esmshard.data.splits.recipe_splits import open_split
from esmshard.predict.pictures import draw
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe
from esmshard.tasks.finetuned import load_base, load_finetuned

STATIC = Path(__file__).parent / "_static"
MOST_BYTES = 300_000
WIDTH, HEIGHT = 1100, 1080
"""Pixels of the part of the report that is shown."""


def chosen(run: Path) -> str:
    """Return the test protein at the upper quartile of long-range P@L."""
    with open(run / "per_protein.csv", newline="", encoding="utf-8") as file:
        rows = sorted((float(row["long P@L"]), row["id"]) for row in csv.DictReader(file) if row["long P@L"])
    return rows[len(rows) * 3 // 4][1]


def contact_maps(run: Path, recipe: Recipe) -> Image.Image:
    """Return the maps of one test protein side by side: before and after fine-tuning, as `evaluate` compares."""
    after = load_finetuned(str(run / "model"))
    data = open_split(recipe, "test", after.task.labels)
    example = next(data.get(n) for n in range(len(data)) if data.id(n) == chosen(run))
    inputs = after.task.inputs(example)
    before_LL, after_LL = (
        after.task.predict(model.outputs([inputs])[0]) for model in (load_base(recipe, after.task), after.model)
    )
    pictures = [
        Image.open(io.BytesIO(draw(map_LL, f"{example.id}, {when} fine-tuning", inputs.target)))
        for map_LL, when in ((before_LL, "before"), (after_LL, "after"))
    ]
    both = Image.new("RGB", (sum(p.width for p in pictures), max(p.height for p in pictures)), "white")
    both.paste(pictures[0], (0, 0))
    both.paste(pictures[1], (pictures[0].width, 0))
    return both


def report(run: Path) -> Image.Image | None:
    """Return the top of the run's page as a browser shows it; None without Chromium."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium here, so docs/_static/report.png stays as it is", file=sys.stderr)
        return None
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "report.png"
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        size, page = f"--window-size={WIDTH},{HEIGHT}", (run / "report.html").resolve().as_uri()
        subprocess.run([browser, *options, size, f"--screenshot={picture}", page], check=True, capture_output=True)
        return Image.open(picture).convert("RGB")


def main(run: Path) -> None:
    """Write both pictures, with 256 colours each."""
    pictures = {"contact-map.png": contact_maps(run, recipe_file.load(run / "recipe.yaml")), "report.png": report(run)}
    for name, picture in pictures.items():
        if picture is not None:
            picture.quantize(256).save(STATIC / name, optimize=True)
    size = sum((STATIC / name).stat().st_size for name in pictures)
    print(f"{size:,} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"the pictures have over {MOST_BYTES:,} bytes; make them smaller")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
