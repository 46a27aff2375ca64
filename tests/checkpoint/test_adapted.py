"""Trained parts without their base: an adapter, or a contact head that becomes the regression of the model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RECIPE, write_subset
from safetensors.torch import load_file

import esmshard
from esmshard.checkpoint import consolidate as adapted
from esmshard.errors import InputError, UsageError
from esmshard.io.paths import sha256
from esmshard.model import weights
from esmshard.model.families.family_registry import SIZES
from esmshard.recipe import recipe_file
from esmshard.train import finetune

NANO = SIZES["nano"]
LORA = {"method": "lora", "rank": 2, "alpha": 6.0, "targets": ["fc1"], "bias": "all"}


def trained() -> dict[str, torch.Tensor]:
    """Return a LoRA on fc1 of both layers, a bias and a head."""
    shapes = {f"layers.{n}.fc1.{p}.weight": s for n in (0, 1) for p, s in (("lora_A", (2, 32)), ("lora_B", (128, 2)))}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    return tensors | {"layers.1.fc1.bias": torch.full((128,), 5.0), "head.out": torch.full((3,), 7.0)}


def checkpoint(tensors: dict[str, torch.Tensor], adapt: dict[str, Any]) -> adapted.Checkpoint:
    base = {"name": "gone", "config": {}, "seed": None, "files": {}}
    state = {"config": NANO.recorded(), "recipe": {"adapt": adapt}, "base": base}
    sizes = {name: tensor.shape for name, tensor in tensors.items()}
    return adapted.Checkpoint(Path("run/checkpoints/step_000007"), state, sizes, tensors.__getitem__)


def test_unknown_tensors_and_an_adapter_without_a_lora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no LoRA"):
        adapted.write_adapter(tmp_path, checkpoint({}, {"method": "head"}))
    with pytest.raises(InputError, match=r"layers\.9\.fc2\.weight: not in its base model"):
        adapted.on_base(checkpoint(trained() | {"layers.9.fc2.weight": torch.zeros(32, 128)}, LORA))


@pytest.mark.parametrize("base", [None, "facebook/x"])
def test_an_adapter_is_written_without_reading_the_base(tmp_path: Path, base: str | None) -> None:
    tensors = trained()
    digests = adapted.write_adapter(tmp_path, checkpoint(tensors, LORA), base)
    assert digests == {path.name: sha256(path) for path in tmp_path.glob("*.safetensors")}
    written = load_file(tmp_path / "adapter_model.safetensors")
    bias = written["base_model.model.esm.encoder.layer.1.intermediate.dense.base_layer.bias"]
    assert torch.equal(bias, tensors["layers.1.fc1.bias"])
    assert len(written) == 5
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (2, 6.0, "all")
    assert config["base_model_name_or_path"] == (base or "gone")


SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "ACDEFGHIKLMNPQRSTVWY" * 2]


def test_a_head_over_attention_maps_is_the_regression_of_the_model(tmp_path: Path) -> None:
    write_subset(tmp_path, "train", "train", range(4))
    write_subset(tmp_path, "valid", "valid", range(2))
    text = RECIPE.format(tokens_per_rank=200, out=tmp_path / "run").replace("{name: nano}", "{name: esmc_nano}")
    (tmp_path / "recipe.yaml").write_text(text.replace("channels: 8, blocks: 1", "head: attention"))
    out = finetune.run(recipe_file.load(tmp_path / "recipe.yaml", ["adapt.method=lora", "train.steps=2"]))
    assert out is not None
    directory = out / "model"
    found = weights.read(str(directory))
    for part in ("weight", "bias"):
        assert torch.equal(found[f"contact_head.regression.{part}"], found.head[f"regression.{part}"]())
    about = json.loads((directory / "esmshard.json").read_text())
    assert about["unlearned"] == ["lm_head"]
    assert "Its contact regression is the fine-tuned head." in (directory / "README.md").read_text()
    model = esmshard.load(directory)
    for mine, theirs in zip(model.embed(SEQUENCES, "contacts"), model.predict(SEQUENCES), strict=True):
        assert mine.shape == theirs.shape
        assert np.abs(mine - theirs).max() < 1e-6

    # A pairwise head is no regression, and a regression that was trained stays.
    untrained, size = about | {"unlearned": ["contact_head"]}, torch.Size([1, 8])
    sizes = {"head.regression.weight": size, "contact_head.regression.weight": size}
    for state, more, replaces in ((untrained, {}, True), (untrained, {"head.out": size}, False), (about, {}, False)):
        read = adapted._with_regression(state, sizes | more, found.__getitem__)
        assert (read is not None) is replaces
