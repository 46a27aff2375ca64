"""`task.head: auto`: the choice for a fold does not see the fold, prefers the Gaussian process, and is written."""

import csv
import json
import random
from pathlib import Path

import numpy as np
import pytest
from command import esmshard

from esmshard.tasks.metrics import spearman_within
from esmshard.tasks.variant_baselines import SCORE
from esmshard.train import cross_validation
from esmshard.train.cross_validation import AVERAGE, HEADS, PREFERRED, choices, choose

FOLD_N, BLOCK_N = np.arange(60) % 5, np.arange(60)


def test_methods_without_skill_get_no_positive_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_validation, "CHOICES", 0)  # no standard error: the best method is chosen
    numbers, best, honest = np.random.default_rng(0), [], []
    for _ in range(150):
        y, x = numbers.normal(size=(60, 1)), {m: numbers.normal(size=(60, 1)) for m in PREFERRED}
        of_fold = choices(x, y, FOLD_N, BLOCK_N)
        main = np.array([x[of_fold[fold]][n, 0] for n, fold in enumerate(FOLD_N.tolist())])
        honest.append(spearman_within(main, y[:, 0], FOLD_N))
        best.append(max(spearman_within(values[:, 0], y[:, 0], FOLD_N) for values in x.values()))
    assert np.mean(best) > 0.15
    assert abs(np.mean(honest)) < 0.03


def test_a_fold_has_no_part_in_its_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_validation, "CHOICES", 20)
    numbers = np.random.default_rng(1)
    y = numbers.normal(size=(60, 1))
    x = {
        m: y + noise * numbers.normal(size=(60, 1))
        for m, noise in zip(PREFERRED, (2, 2, 1, 1, 1, 1, 1, 1), strict=True)
    }
    of_fold = choices(x, y, FOLD_N, BLOCK_N)
    others = [choices(x, np.where(FOLD_N[:, None] == k, -y, y), FOLD_N, BLOCK_N) for k in range(5)]
    assert all(other[k] == of_fold[k] for k, other in enumerate(others))
    assert any(other != of_fold for other in others)


def test_the_preferred_method_is_chosen_unless_another_is_clearly_better() -> None:
    numbers, everything = np.random.default_rng(2), np.ones(60, dtype=bool)
    y = numbers.normal(size=(60, 1))
    good, better = y + 0.5 * numbers.normal(size=(60, 1)), y + 0.5 * numbers.normal(size=(60, 1))
    poor, constant = numbers.normal(size=(60, 1)), np.zeros((60, 1))
    gp = HEADS["gp"]
    assert choose({SCORE: good, gp: better}, y, FOLD_N, BLOCK_N, everything) == gp
    assert choose({SCORE: good, gp: poor, AVERAGE: better}, y, FOLD_N, BLOCK_N, everything) == SCORE
    assert choose({SCORE: poor, gp: constant}, y, FOLD_N, BLOCK_N, everything) == SCORE, "gp has no correlation at all"


def test_a_run_of_all_heads(tmp_path: Path) -> None:
    """Predictions of new variants come from the models of the chosen head, or from the chosen baseline."""
    random.seed(0)
    (tmp_path / "wt.fasta").write_text(">wt\nMKTAYIAKQRQISFVKSHFSRQLEERLGLI\n")
    wild = "MKTAYIAKQRQISFVKSHFSRQLEERLGLI"
    rows = [f"{wild[n]}{n + 1}{to},{n % 7 + random.random():.3f}" for n in range(28) for to in "AWG" if to != wild[n]]
    (tmp_path / "v.csv").write_text("mutant,score\n" + "\n".join(rows) + "\n")
    options = ("data.table=v.csv", "data.wild_type=wt.fasta", "train.steps=2", "train.eval_every=2", "out=run")
    done = esmshard("finetune", "variants-auto", *options, "--folds", "3", "--no-report", cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    methods, chosen = summary["joint"]["metrics"], summary["joint"]["chosen"]
    assert {*HEADS.values(), AVERAGE} < methods.keys()
    assert chosen["of_folds"].keys() == {"0", "1", "2"}
    with open(tmp_path / "run" / "variants.csv", newline="") as file:
        tested = [row for row in csv.DictReader(file) if row["predicted"]]
    assert all(row["predicted"] == row[chosen["of_folds"][row["fold"]]] for row in tested)
    heads = [head for head, name in HEADS.items() if chosen["final"] in (name, AVERAGE)]
    assert {name.split("-")[-1] for name in summary["runs"]} == {*(heads or ["gp"])}
    assert (summary["ranked_by"] is None) == bool(heads)
    facts = json.loads((tmp_path / "run" / "ranked.csv.json").read_text())
    assert facts["ranked_by"] == (summary["ranked_by"] or "fine-tuned models")
    done = esmshard("finetune", "variants-auto", *options, "data.folds=3", "data.fold=0", "out=one", cwd=tmp_path)
    assert done.returncode == 2
    assert "data.fold" in done.stderr
