"""Directories of cross-validated runs of variants, as they leave them."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from run_directories import attempt, evaluation, interval, make, step

from esmshard.recipe import recipe_file

PROTEIN = "MKTAYIAK"
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


def resolved(run: Path, text: str = RECIPE) -> dict[str, Any]:
    (run / "whole.yaml").write_text(text)
    found = recipe_file.load(run / "whole.yaml").model_dump(mode="json")
    (run / "whole.yaml").unlink()
    return found


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


def cross_validated(run: Path, recipe: str = RECIPE, **changes: Any) -> Path:
    """Three runs of a table of variants; the last one is not there."""
    run.mkdir(parents=True)
    names = [f"seed-3-fold-{fold}" for fold in range(3)]
    for n, name in enumerate(names[:2]):
        rows = {"fine-tuned": {"Spearman": interval(0.5 + n / 10, 0.4, 0.9), "RMSE": interval(0.25, 0.2, 0.3)}}
        facts = {"targets": ["score"], "lower_is_better": [], "protein": PROTEIN, "first": 0, "length": len(PROTEIN)}
        tested = evaluation(
            task="variant", columns=COLUMNS, metrics=rows, differences={}, facts=facts, records=17 + n, step=40 + n
        )
        lines = [{**step(k, 1000.0 + k), "records": 32} for k in range(1, (40, 51)[n] + 1)]
        make(run / name, [attempt(1, 1000.0), *lines], tested=tested)
        (run / name / "recipe.yaml").write_text(recipe.replace("steps: 50", f"steps: {50 + n}"))
        versions = {"esmshard": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}
        versions |= {"data": {"train": {"records": 320}}}
        (run / name / "versions.json").write_text(json.dumps(versions))
    spread = {"mean": 0.55, "deviation": 0.1, "low": 0.2, "high": 0.9}
    nothing: Mapping[str, None] = dict.fromkeys(spread)
    summary = {
        "task": "variant",
        "recipe": resolved(run, recipe),
        "runs": names,
        "folds": 3,
        "columns": COLUMNS,
        "lower_is_better": False,
        "interval": "95% interval of the mean over runs",
        "metrics": {"fine-tuned": dict.fromkeys(COLUMNS, spread), "one-hot ridge": dict.fromkeys(COLUMNS, nothing)},
        "table": {
            "path": "t.csv",
            "rows": 8,
            "rows_left_out": 1,
            "variants": 6,
            "variants_averaged": 1,
            "variants_in_no_set": 1,
            "offset": -23,
            "notices": ["t.csv: left out 1 row whose 'mutant' names no substitutions: line 7 'junk'"],
        },
        "joint": {
            "statistic": "Spearman within folds",
            "targets": "score",
            "interval": "95% percentile bootstrap of 12 positions",
            "variants": 5,
            "positions": 4,
            "split": "position",
            "seeds": [3],
            "metrics": METRICS,
            "differences": GAINS,
            "of_each_seed": {name: [one["value"]] for name, one in METRICS.items()},
            "best": {
                "target": "score",
                "count": 2,
                "recall": dict.fromkeys(METRICS, interval(0.5, 0.25, 1)),
                "mean_of_chosen": dict.fromkeys(METRICS, interval(12.5, 8, 16)),
                "mean_of_all": 10.5,
            },
        },
        "verdict": "Fine-tuning was not clearly apart from the best baseline.",
        **changes,
    }
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "learning_curve.json").write_text(json.dumps(CURVE))
    write(run / "variants.csv", variants())
    write(run / "ranked.csv", RANKED)
    return run
