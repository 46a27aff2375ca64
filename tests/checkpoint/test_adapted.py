"""Checkpoints without their base: put on it, accounted for, or written as an adapter. No training here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from esmshard.checkpoint import consolidate as adapted
from esmshard.errors import InputError, UsageError
from esmshard.io.paths import sha256
from esmshard.model import weights
from esmshard.model.families.family_registry import SIZES

NANO = SIZES["nano"]
HERE = Path("run/checkpoints/step_000007")
A, B = "layers.0.fc1.lora_A.weight", "layers.0.fc1.lora_B.weight"
LORA = {"method": "lora", "rank": 2, "alpha": 6.0, "targets": ["fc1"], "bias": "all"}


def state(adapt: dict[str, Any], seed: int = 3) -> dict[str, Any]:
    base = weights.identity(weights.fresh(NANO, seed), "nano")
    return {"config": NANO.recorded(), "recipe": {"adapt": adapt}, "base": base}


def trained() -> dict[str, torch.Tensor]:
    """A LoRA on both layers' fc1, one bias, a head."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"layers.{n}.fc1.{p}.weight": s for n in (0, 1) for p, s in (("lora_A", (2, 32)), ("lora_B", (128, 2)))}
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return found | {"layers.1.fc1.bias": torch.full((128,), 5.0), "head.out": torch.full((3,), 7.0)}


def checkpoint(tensors: dict[str, torch.Tensor], **changes: Any) -> adapted.Checkpoint:
    sizes = {name: tensor.shape for name, tensor in tensors.items()}
    return adapted.Checkpoint(HERE, state(LORA) | changes, sizes, tensors.__getitem__)


def test_the_base_with_what_was_trained_put_in() -> None:
    tensors, base = trained(), weights.fresh(NANO, 3)
    sizes, read = adapted.on_base(checkpoint(tensors))
    assert sizes.keys() == (weights.shapes(NANO).keys() - {"lm_head.weight"}) | {"head.out"}
    for name in sizes:
        if name in ("layers.0.fc1.weight", "layers.1.fc1.weight"):
            b, a = (tensors[name.replace("weight", f"lora_{part}.weight")] for part in "BA")
            assert (read(name) - base[name] - 3.0 * b @ a).abs().max() < 1e-5
        else:
            assert torch.equal(read(name), tensors[name] if name in tensors else base[name]), name


def test_what_has_no_place_in_the_base_and_an_adapter_without_a_lora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no LoRA"):
        adapted.write_adapter(tmp_path, checkpoint({}, recipe={"adapt": {"method": "head"}}))
    with pytest.raises(InputError, match=r"layers\.9\.fc2\.weight: have no place in its base"):
        adapted.on_base(checkpoint(trained() | {"layers.9.fc2.weight": torch.zeros(32, 128)}))


def test_an_adapter_is_written_without_reading_the_base(tmp_path: Path) -> None:
    tensors = trained()
    of_run = checkpoint(tensors, base={"name": "gone", "config": {}, "seed": None, "files": {}})
    digests = adapted.write_adapter(tmp_path, of_run)
    assert digests == {path.name: sha256(path) for path in tmp_path.glob("*.safetensors")}
    written = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.esm.encoder.layer.1.intermediate.dense"
    assert torch.equal(written[f"{prefix}.base_layer.bias"], tensors["layers.1.fc1.bias"])
    assert torch.equal(written[f"{prefix}.lora_A.weight"], tensors["layers.1.fc1.lora_A.weight"])
    assert len(written) == 5
    assert load_file(tmp_path / "head.safetensors").keys() == {"head.out"}
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (2, 6.0, "all")
    assert config["base_model_name_or_path"] == "gone"
    assert config["target_modules"] == [f"encoder.layer.{n}.intermediate.dense" for n in (0, 1)]
    adapted.write_adapter(tmp_path, of_run, base="facebook/x")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "facebook/x"
