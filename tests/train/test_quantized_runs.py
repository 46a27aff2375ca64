"""Runs on quantised matrices. On the CPU, the check of the device is switched off."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RECIPE, write_subset
from packed_weights import unpacked
from safetensors.torch import load_file

from esmshard.checkpoint import sharded
from esmshard.checkpoint.consolidate import consolidate
from esmshard.errors import UsageError
from esmshard.model import lora, weights
from esmshard.model.families.family_registry import SIZES
from esmshard.model.finetuner import FineTuner
from esmshard.model.lora import merged
from esmshard.recipe import recipe_file
from esmshard.train import finetune

LORA = "adapt.method=lora"


@pytest.fixture(autouse=True)
def _on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "check_quantization", lambda device: None)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    write_subset(tmp_path, "train", "train", range(8))
    write_subset(tmp_path, "valid", "valid", range(3))
    path = tmp_path / "few.yaml"
    path.write_text(RECIPE.format(tokens_per_rank=130, out=tmp_path / "run"))
    return path


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "lr" in line]


def test_a_run_goes_on_bit_for_bit_and_ends_as_the_base_with_its_lora(few: Path) -> None:
    recipe = recipe_file.load(few, [LORA, "model.quantize=nf4", "optim.lr=0.01"])
    out = finetune.run(recipe)
    assert out is not None
    before, evaluation = losses(out), (out / "evaluation.json").read_text()
    model = load_file(out / "model" / "model.safetensors")
    shutil.rmtree(out / "checkpoints" / "step_000006")
    assert finetune.run(recipe, resume="auto") == out
    assert losses(out) == before
    assert (out / "evaluation.json").read_text() == evaluation

    # The model is the base model, not quantised, with the trained part.
    checkpoint = out / "checkpoints" / "step_000006"
    (trained, read), start = sharded.reader(checkpoint), "model.trunk."
    assert not any("packed" in name for name in trained)
    tensors = {n: read(n) for n in trained if n.startswith(start) and "lora_" in n}
    base = weights.fresh(SIZES["nano"], 3)
    name, lora = "layers.1.fc1.weight", {n.removeprefix(start): tensor for n, tensor in tensors.items()}
    expected = merged(name, lora | {name: base[name]}, 0.25)
    assert (expected - base[name]).abs().max() > 1e-4
    assert torch.equal(model["esm.encoder.layer.1.intermediate.dense.weight"], expected)
    assert not torch.allclose(unpacked(base, "nf4")[name], base[name], atol=1e-4)

    assert json.loads((out / "model" / "esmshard.json").read_text())["recipe"]["model"]["quantize"] == "nf4"
    adapter = consolidate(out, out.parent / "adapter", adapter=True)
    assert "packed" not in " ".join(load_file(adapter / "adapter_model.safetensors"))
    with pytest.raises(UsageError, match=r"model\.quantize"):
        finetune.run(recipe_file.load(few, [LORA, "model.quantize=int8", "optim.lr=0.01"]), resume="auto")


def test_a_probe_learns_from_what_the_quantised_model_says(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is as from the unpacked weights."""
    rows_of = FineTuner.rows_of

    def rows_of_unpacked(model: FineTuner, found: Any, head: Any) -> Any:
        return rows_of(model, unpacked(found, "int8"), head)

    changes = ["adapt.method=probe", "task={name: contact, head: attention}"]
    out = finetune.run(recipe_file.load(few, [*changes, "model.quantize=int8"]))
    assert out is not None
    monkeypatch.setattr(FineTuner, "rows_of", rows_of_unpacked)
    other = finetune.run(recipe_file.load(few, [*changes, f"out={out.parent / 'other'}"]))
    assert other is not None
    heads = [load_file(run / "model" / "model.safetensors")["head.regression.weight"] for run in (out, other)]
    assert torch.allclose(*heads, atol=1e-4)
