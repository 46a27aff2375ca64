"""`esmshard finetune --seeds N --folds K`, as a user types it."""

import json
from pathlib import Path

import pytest
from command import esmshard


@pytest.mark.slow
def test_folds_are_run_one_after_another_and_summed_up(tiny_recipe: Path, tmp_path: Path) -> None:
    options = ("train.steps=1", "train.eval_every=1", "--folds", "3")
    done = esmshard("finetune", tiny_recipe, *options)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("leakage: ") >= 3, "each fold has a test set of its own"
    names = ["seed-3-fold-0", "seed-3-fold-1", "seed-3-fold-2"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["runs"] == names
    assert "\n3 runs: mean and 95% interval over runs" in done.stdout
    tested: list[str] = []
    for name in names:
        scores = (tmp_path / "run" / name / "per_protein.csv").read_text().splitlines()[1:]
        tested += [line.split(",")[0] for line in scores]
    assert len(tested) == len(set(tested)) == 24, "each training record is tested on once"
    # What is done is not done again; one that is not, is.
    (tmp_path / "run" / names[1] / "evaluation.json").unlink()
    (tmp_path / "run" / "summary.json").unlink()
    again = esmshard("finetune", tiny_recipe, *options, "--resume", "auto")
    assert again.returncode == 0, again.stderr
    assert names[0] not in again.stderr
    assert names[1] in again.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"] == summary["metrics"]
