"""With dropout too, a run is the same on any number of processes, and after it went on with another number."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

from esmshard.recipe import recipe_file
from esmshard.train import finetune

STEPS, SAVED = 4, 2


def train(path: str, options: list[str], resume: str | None) -> list[float]:
    """Losses that stand in metrics.jsonl after the main job; called on every rank."""
    recipe = recipe_file.load(Path(path), options)
    finetune.run(recipe, resume)
    lines = [json.loads(line) for line in (Path(recipe.out) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "lr" in line]


def test_losses_are_equal_on_1_and_2_processes_and_after_a_change(tiny_recipe: Path, tmp_path: Path) -> None:
    options = [
        *("task={name: sequence, dropout: 0.3}", "data.labels=sample:contact/labels.csv", "data.target=[helix]"),
        *("data.long=full", "batch.tokens_per_rank=400", "batch.global_tokens=1000"),
        f"train={{steps: {STEPS}, seed: 3, eval_every: 100}}",
        f"checkpoint={{every: {SAVED}, keep: 5}}",
        "parallel={precision: fp32, activation_checkpointing: full}",
    ]

    def losses(size: int, name: str, *more: str, resume: str | None = None) -> list[float]:
        given = [*options, f"out={tmp_path / name}", *more]
        found = run_ranks("test_dropout:train", size, tmp_path, str(tiny_recipe), given, resume)
        assert len(found[0]) == STEPS
        return found[0]

    alone, without = losses(1, "one"), losses(1, "dropless", "task.dropout=0")
    assert max(abs(a - b) for a, b in zip(alone, without, strict=True)) > 1e-3, "dropout does something"
    assert losses(2, "two") == pytest.approx(alone, abs=1e-4)
    saved = str(tmp_path / "two" / "checkpoints" / f"step_{SAVED:06}")
    assert losses(1, "two", resume=saved) == pytest.approx(alone, abs=1e-4)
