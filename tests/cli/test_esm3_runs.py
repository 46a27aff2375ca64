"""ESM3 as a user trains it: runs from random weights, and what is made of their models."""

import json
from pathlib import Path

import numpy as np
import torch
from command import in_process
from family_runs import losses, run

from esmshard.model import weights
from esmshard.model.families.family_registry import SIZES


def embed(model: Path, directory: Path) -> np.ndarray:
    """The embeddings of the validation proteins."""
    out = directory / f"{model.name}.npy"
    done = in_process("embed", model, directory / "valid.fasta", "-o", out)
    assert done.returncode == 0, done.stderr
    found = np.load(out)
    assert found.shape == (2, 128)
    assert np.isfinite(found).all()
    return found


def test_masked_language_modelling_and_its_model_in_both_layouts(tmp_path: Path) -> None:
    directory = run(tmp_path, "esm3_nano", "{name: mlm}")
    assert len(losses(directory)) == 4
    model = directory / "model"
    assert json.loads((model / "config.json").read_text())["model_type"] == "esm3"
    text = (model / "README.md").read_text()
    assert "transformers" not in text
    assert "--to hf" not in text
    embeddings = embed(model, tmp_path)
    made, start = weights.read(str(model)), weights.fresh(SIZES["esm3_nano"], 3)
    for name in weights.stored_shapes(made.config):
        same = torch.equal(made[name], start[name])
        frozen = name.startswith(("geom_attn.", "other_tracks.", "other_heads.")) or name.endswith("inv_freq")
        assert same == frozen or name.startswith("contact_head."), name

    done = in_process("consolidate", model, "-o", tmp_path / "authors", "--to", "esm3-pth")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "authors" / "authors.pth"
    assert "model.load_state_dict(state)" in (tmp_path / "authors" / "README.md").read_text()
    state = torch.load(file, weights_only=True)
    assert state["transformer.blocks.1.attn.layernorm_qkv.1.weight"].shape == (3 * 128, 128)
    assert np.array_equal(embed(file, tmp_path), embeddings)

    refused = in_process("consolidate", tmp_path / "run", "-o", tmp_path / "hf", "--to", "hf")
    assert refused.returncode == 2
    assert "--to hf: ESM3 models can be written as esm3-pth, or without --to" in refused.stderr
