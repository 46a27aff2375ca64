"""A finished run that goes on to a higher `train.steps`."""

import json
from pathlib import Path

import pytest

from esmshard.api.runs import finetune
from esmshard.errors import UsageError
from esmshard.recipe.recipe_file import load
from esmshard.train.cross_validation import is_done
from esmshard.train.optim import schedule


def test_a_finished_run_is_extended(tiny_recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finetune(tiny_recipe, report=False, train={"steps": 2, "eval_every": 2})
    first = json.loads((run.path / "model" / "esmshard.json").read_text())
    start = {"after": 0, "steps": 2, "device": "cpu"}
    assert first["history"] == [start]
    capsys.readouterr()
    finetune(tiny_recipe, report=False, resume="auto", train={"steps": 5, "eval_every": 2})
    said = capsys.readouterr()
    optim = load(tiny_recipe).optim
    assert "train.steps was 2 and is 5" in said.out + said.err
    lines = [line for line in run.metrics if "loss" in line and "split" not in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    expected = [schedule(s, 2 if s < 2 else 5, optim.warmup, optim.schedule) * optim.lr for s in range(5)]
    assert [line["lr"] for line in lines] == pytest.approx(expected)
    about = json.loads((run.path / "model" / "esmshard.json").read_text())
    change = [start, {"after": 2, "steps": 5, "device": "cpu"}]
    assert (about["step"], about["history"]) == (5, change)
    assert about["weights_sha256"] != first["weights_sha256"]
    assert json.loads((run.path / "versions.json").read_text())["history"] == change
    assert "5 of 5; planned as 2 until step 2" in (run.path / "model" / "README.md").read_text()
    assert (run.status, is_done(run.path, 5), is_done(run.path, 6)) == ("done", True, False)
    # Once more, from a checkpoint that has a change already.
    finetune(tiny_recipe, report=False, resume="auto", train={"steps": 6, "eval_every": 2})
    about = json.loads((run.path / "model" / "esmshard.json").read_text())
    assert about["history"] == [*change, {"after": 5, "steps": 6, "device": "cpu"}]
    with pytest.raises(UsageError, match=r"train.steps \(4, was 6\); go on with the old values"):
        finetune(tiny_recipe, report=False, resume="auto", train={"steps": 4, "eval_every": 2})
