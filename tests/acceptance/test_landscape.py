"""The shipped landscape has a known truth: fine-tuning finds it at positions that training has not seen."""

import csv
import json
from pathlib import Path

import pytest
from command import esmshard
from scipy.stats import spearmanr

from esmshard.io.paths import shipped


def _recovered(table: Path, name: str, column: str, where: tuple[str, str] | None = None) -> tuple[float, int]:
    """Spearman of predictions with the effects that the landscape was made from, and over how many variants."""
    with open(shipped("data") / "variants" / "truth.csv", newline="") as file:
        effect = {row["mutant"]: float(row["effect"]) for row in csv.DictReader(file)}
    with open(table, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row[column] and (where is None or row[where[0]] == where[1])]
    told = [float(row[column]) for row in rows]
    return float(spearmanr(told, [effect[row[name]] for row in rows]).statistic), len(rows)


@pytest.mark.parametrize("kind", ["likelihood", "gp"])
def test_few_variants_rank_positions_that_were_never_seen(tmp_path: Path, kind: str) -> None:
    head, *rows = (shipped("data") / "variants" / "landscape.csv").read_text().splitlines()
    (tmp_path / "few.csv").write_text("\n".join([head, *rows[1::15]]) + "\n")
    wild_type = "data.wild_type=sample:variants/wild_type.fasta"
    options = ("data.table=few.csv", wild_type, "data.folds=5", "data.fold=0", "out=run", f"task.head={kind}")
    done = esmshard("finetune", "variants-few", *options, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    ranked = tmp_path / "ranked.csv"
    done = esmshard("predict", "run", "--all-singles", "-o", ranked, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    rho, count = _recovered(ranked, "mutant", "prediction", ("sites varied in training", "no"))
    assert count > 1000
    assert rho > 0.5
    scores = json.loads((tmp_path / "run" / "evaluation.json").read_text())["metrics"]
    assert scores["one-hot ridge"]["Spearman"]["value"] is None  # it says the same of all of them, which is not 0


@pytest.mark.slow
def test_effects_are_recovered_over_all_folds(tmp_path: Path) -> None:
    done = esmshard("finetune", "variants", f"out={tmp_path / 'run'}", cwd=tmp_path, timeout=3600)
    assert done.returncode == 0, done.stderr
    rho, count = _recovered(tmp_path / "run" / "variants.csv", "variant", "predicted")
    assert count > 1700
    assert rho > 0.9
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["verdict"].startswith("Fine-tuning beat the best baseline")
