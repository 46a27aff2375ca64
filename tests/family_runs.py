"""Runs of a small model of any family from random weights."""

import json
from pathlib import Path

from command import esmshard
from conftest import RECIPE, write_subset


def run(directory: Path, size: str, task: str, adapt: str = "", ranks: int = 1) -> Path:
    """Run four steps, and return the run's directory."""
    write_subset(directory, "train", "train", range(8))
    write_subset(directory, "valid", "valid", range(2))
    text = RECIPE.format(tokens_per_rank=200, out=directory / "run").replace("{name: nano}", f"{{name: {size}}}")
    text = text.replace("steps: 6", "steps: 4").replace("{name: contact, channels: 8, blocks: 1}", task) + adapt
    (directory / "tiny.yaml").write_text(text)
    done = esmshard("finetune", directory / "tiny.yaml", *(["--nproc", str(ranks)] if ranks > 1 else []))
    assert done.returncode == 0, done.stderr
    return directory / "run"


def losses(directory: Path) -> list[float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line and "split" not in line]
