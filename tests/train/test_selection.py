"""Settings of a recipe: how long to train, which parameters, and which model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import TINY, edit_tensors, fair_esm, write_transformers

from esmshard.errors import InputError
from esmshard.recipe import recipe_file
from esmshard.tasks.mlm import MlmSettings
from esmshard.tasks.registry import new_task
from esmshard.train import finetune
from esmshard.train.inputs import notices, prepare

CPU = torch.device("cpu")


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_missing_layer_is_refused_before_training(tiny_recipe: Path) -> None:
    with pytest.raises(InputError, match=r"adapt.freeze: .*: the model has layers.0 to layers.1"):
        prepare(recipe_file.load(tiny_recipe, ["adapt.freeze=[layers.0-2]"]), 1, 1, CPU)


def test_early_stopping_ends_the_run_with_the_best_model(tiny_recipe: Path) -> None:
    options = ["train.steps=30", "train.eval_every=1", "train.early_stop=2", "checkpoint.keep=1"]
    options += ["optim.lr=1e-12", "optim.head_lr=1e-12"]  # nothing gets better than after the first step
    out = finetune.run(recipe_file.load(tiny_recipe, options))
    assert out is not None
    assert [line["step"] for line in lines(out) if line.get("split") == "valid"] == [1, 2, 3]
    assert json.loads((out / "status.json").read_text())["state"] == "done"
    assert json.loads((out / "model" / "esmshard.json").read_text())["step"] == 1
    finetune.run(recipe_file.load(tiny_recipe, options), "auto")
    assert max(line["step"] for line in lines(out) if "loss" in line) == 3, "a stopped run does not go on"


def test_a_probe_is_fitted_without_a_step(tiny_recipe: Path) -> None:
    out = finetune.run(recipe_file.load(tiny_recipe, ["task.head=attention", "adapt.method=probe"]))
    assert out is not None
    found = lines(out)
    assert [line["step"] for line in found if line.get("split") == "valid"] == [0]
    assert not [line for line in found if "lr" in line]
    metrics = json.loads((out / "evaluation.json").read_text())["metrics"]
    # The baseline is the same fit on the same chains.
    assert metrics["fine-tuned"]["AUPRC"] == pytest.approx(metrics["unsupervised head"]["AUPRC"], abs=1e-4)


def test_a_missing_lm_head_is_named_where_the_task_uses_it(tiny_recipe: Path, tmp_path: Path) -> None:
    """A contact head does not read the LM head, nor the contact regression, which the model lacks too."""
    model = write_transformers(tmp_path / "bare", fair_esm(TINY), TINY)
    edit_tensors(model, lambda state: [state.pop(key) for key in list(state) if "_head" in key])
    job = prepare(recipe_file.load(tiny_recipe, [f"model.name={model}", "init=pretrained"]), 1, 1, CPU)
    assert not any("random" in notice for notice in notices(job, leakage=False))
    of_language_model = replace(job, task=new_task(MlmSettings(name="mlm"), {}))
    assert f"{model}: has no lm_head; its output is random" in notices(of_language_model, leakage=False)
