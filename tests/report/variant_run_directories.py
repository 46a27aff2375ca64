"""Directories of cross-validated runs of variants, as they leave them."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from run_directories import interval

from esmshard.recipe import recipe_file

RECIPE = """\
task: {name: variant}
model: {name: esm2_t6_8M_UR50D}
adapt: {method: lora}
data: {table: t.csv, wild_type: w.fasta, folds: 3, fold: 0}
batch: {global_tokens: 96}
train: {steps: 50, eval_every: epoch, early_stop: 5}
out: runs/v
"""
COLUMNS = ["Spearman", "RMSE"]
METRICS = {
    "fine-tuned": interval(0.8, 0.7, 0.9),
    "zero-shot": interval(0.3, 0.1, 0.5),
    "one-hot ridge": interval(None, None, None),
    "frozen embedding ridge": interval(0.65, 0.5, 0.8),
}
GAINS = {
    "zero-shot": interval(0.5, 0.3, 0.7),
    "one-hot ridge": interval(None, None, None),
    "frozen embedding ridge": interval(0.15, -0.05, 0.4),
}
VARIANTS = [
    # cell, name, fold, measured, predicted
    ["m1a", "M1A", "0", "1", "1.5"],
    ["M1C", "M1C", "1", "2", "1.5"],
    ["K2A", "K2A", "2", "3", "5"],
    ["K2A", "K2A", "2", "3", "5"],
    ["M1A:K2C", "M1A:K2C", "", "", ""],
    ["junk", "", "", "", ""],
    ["T3A:A4C", "T3A:A4C", "0", "4", "4.25"],
    ["WT", "WT", "0", "0.5", "0.5"],
]


def write(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def variants(rows: Sequence[Sequence[str]] = VARIANTS, prefix: str = "", user: str = "score") -> list[list[str]]:
    ours = [f"{prefix}{name}" for name in ("variant", "fold", "measured", "predicted", "sd", "zero-shot")]
    return [["mutant", user, *ours], *([cell, "77", *rest, "", "9"] for cell, *rest in rows)]


RANKED = [
    ["mutant", "measured", "prediction", "disagreement of models", "rank"],
    ["K2A", "3", "5", "0.25", "1"],
    *([f"T3{letter}", "", str(4 - n / 10), "0.5", str(n + 2)] for n, letter in enumerate("ACDEFGHIKLMNPQRSVWY")),
    ["M1A", "1", "1.25", "0.125", "21"],
]
CURVE = {
    "tested_on": 40,
    "fold": 2,
    "seed": 7,
    "points": [
        {"variants": size, "metrics": METRICS | {"fine-tuned": interval(value, value - 0.1, value + 0.1)}}
        for size, value in ((100, 0.8), (25, 0.45))
    ],
}


def cross_validated(run: Path, **changes: Any) -> Path:
    """The joint results of three runs of a table of variants."""
    run.mkdir(parents=True)
    (run / "whole.yaml").write_text(RECIPE)
    recipe = recipe_file.load(run / "whole.yaml")
    spread = {"mean": 0.55, "deviation": 0.1, "low": 0.2, "high": 0.9}
    nothing: Mapping[str, None] = dict.fromkeys(spread)
    summary: dict[str, Any] = {
        "task": "variant",
        "recipe": recipe.model_dump(mode="json"),
        "recipe_yaml": recipe_file.dump(recipe),
    }
    summary |= {"runs": [f"seed-3-fold-{fold}" for fold in range(3)], "folds": 3, "columns": COLUMNS}
    summary |= {"lower_is_better": False, "interval": "95% interval of the mean over runs"}
    summary |= {"verdict": "Fine-tuning was not clearly apart from the best baseline."}
    summary["metrics"] = {
        "fine-tuned": dict.fromkeys(COLUMNS, spread),
        "one-hot ridge": dict.fromkeys(COLUMNS, nothing),
    }
    counts = {"rows": 8, "rows_left_out": 1, "variants": 6, "variants_averaged": 1, "variants_in_no_set": 1}
    notices = ["t.csv: left out 1 row whose 'mutant' names no substitutions: line 7 'junk'"]
    summary["table"] = {"path": "t.csv", "offset": -23, "notices": notices, **counts}
    joint: dict[str, Any] = {"statistic": "Spearman within folds", "targets": "score", "variants": 5, "positions": 4}
    joint |= {"interval": "95% percentile bootstrap of 12 positions", "split": "position", "seeds": [3]}
    joint |= {"metrics": METRICS, "differences": GAINS}
    joint["of_each_seed"] = {name: [one["value"]] for name, one in METRICS.items()}
    best: dict[str, Any] = {"target": "score", "lower_is_better": False, "count": 2, "mean_of_all": 10.5}
    best["recall"] = dict.fromkeys(METRICS, interval(0.5, 0.25, 1))
    best["mean_of_chosen"] = dict.fromkeys(METRICS, interval(12.5, 8, 16))
    summary |= {"joint": joint | {"best": best}, **changes}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "learning_curve.json").write_text(json.dumps(CURVE))
    write(run / "variants.csv", variants())
    write(run / "ranked.csv", RANKED)
    return run
