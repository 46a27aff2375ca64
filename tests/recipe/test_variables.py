"""Which environment variables a recipe reads, and where their values never appear."""

import json
from pathlib import Path

import pytest

from esmshard.api.runs import finetune
from esmshard.errors import UsageError
from esmshard.recipe import recipe_file
from esmshard.report.page import report

SECRET = "hf_abcdefgh"


def test_a_recipe_reads_no_variable_that_may_hold_a_secret(tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("SLURM_JWT", SECRET)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    for name in ("HF_TOKEN", "SLURM_JWT"):
        with pytest.raises(UsageError, match=rf"--env {name}") as caught:
            recipe_file.load(tiny_recipe, [f"out=sec/${{{name}}}"])
        assert SECRET not in str(caught.value)
    assert recipe_file.load(tiny_recipe, ["out=/runs/${SLURM_JOB_ID}"]).out == "/runs/17"


def test_shared_files_hold_variables_as_they_were_written(tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_recipe.parent)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    folder = tiny_recipe.with_name(SECRET)
    folder.mkdir()
    for name in ("train.fasta", "train.npz"):
        tiny_recipe.with_name(name).rename(folder / name)
    how = {"env": ["HF_TOKEN"], "out": "${HF_TOKEN}/run", "data.train": "${HF_TOKEN}/train.fasta"}
    run = finetune(tiny_recipe, report=False, train={"steps": 1, "eval_every": 1}, **how)
    assert run.path.parent.name == SECRET
    finetune(tiny_recipe, report=False, resume="auto", train={"steps": 2, "eval_every": 1}, **how)
    page = report(run.path)
    for path in (run.path / "recipe.yaml", page, *run.path.glob("model/*.*")):
        assert SECRET.encode() not in path.read_bytes(), path.name
    assert SECRET not in json.dumps(run.evaluation["recipe"])
    assert recipe_file.load(run.path / "recipe.yaml", of_run=True).out.endswith("/${HF_TOKEN}/run")
