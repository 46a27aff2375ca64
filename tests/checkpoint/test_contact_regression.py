"""A contact head over attention maps becomes the contact regression of a model that had none, such as an ESM-C."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import RECIPE, write_subset

import esmshard
from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.recipe import recipe_file
from esmshard.train import finetune

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "ACDEFGHIKLMNPQRSTVWY" * 2]


def run(directory: Path, head: str, *overrides: str) -> Path:
    write_subset(directory, "train", "train", range(4))
    write_subset(directory, "valid", "valid", range(2))
    text = RECIPE.format(tokens_per_rank=200, out=directory / "run").replace("{name: nano}", "{name: esmc_nano}")
    text = text.replace("channels: 8, blocks: 1", head).replace("steps: 6", "steps: 2").replace("every: 3", "every: 2")
    (directory / "recipe.yaml").write_text(text)
    out = finetune.run(recipe_file.load(directory / "recipe.yaml", list(overrides)))
    assert out is not None
    return out / "model"


@pytest.mark.parametrize("adapt", [["adapt.method=lora"], ["adapt.method=probe"]], ids=str)
def test_the_head_is_the_regression_of_the_model(tmp_path: Path, adapt: list[str]) -> None:
    directory = run(tmp_path, "head: attention", *adapt)
    found = weights.read(str(directory))
    for part in ("weight", "bias"):
        assert torch.equal(found[f"contact_head.regression.{part}"], found.head[f"regression.{part}"]())
    about = json.loads((directory / "esmshard.json").read_text())
    assert about["unlearned"] == ["lm_head"]
    assert "Its contact regression is the fine-tuned head." in (directory / "README.md").read_text()
    model = esmshard.load(directory)
    of_head = model.predict(SEQUENCES)
    for mine, theirs in zip(model.embed(SEQUENCES, "contacts"), of_head, strict=True):
        assert mine.shape == theirs.shape
        assert np.abs(mine - theirs).max() < 1e-6


def test_another_head_is_no_regression(tmp_path: Path) -> None:
    directory = run(tmp_path, "channels: 8, blocks: 1")
    assert "contact_head" in weights.read(str(directory)).absent
    with pytest.raises(InputError, match="contact regression"):
        esmshard.load(directory).embed(SEQUENCES, "contacts")
