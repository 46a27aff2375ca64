"""The shipped landscape has a known truth: fine-tuning finds it at positions that training has not seen."""

import csv
import json
from pathlib import Path

import pytest
from command import esmshard
from scipy.stats import spearmanr

from esmshard.io.paths import shipped


def _recovered(table: Path, name: str, column: str) -> tuple[float, int]:
    """Spearman of predictions with the effects that the landscape was made from, and over how many variants."""
    with open(shipped("data") / "variants" / "truth.csv", newline="") as file:
        effect = {row["mutant"]: float(row["effect"]) for row in csv.DictReader(file)}
    with open(table, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row[column]]
    told = [float(row[column]) for row in rows]
    return float(spearmanr(told, [effect[row[name]] for row in rows]).statistic), len(rows)


@pytest.mark.slow
def test_effects_are_recovered_over_all_folds(tmp_path: Path) -> None:
    done = esmshard("finetune", "variants", f"out={tmp_path / 'run'}", cwd=tmp_path, timeout=3600)
    assert done.returncode == 0, done.stderr
    rho, count = _recovered(tmp_path / "run" / "variants.csv", "variant", "predicted")
    assert count > 1700
    assert rho > 0.9
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["verdict"].startswith("Fine-tuning beat the best baseline")
