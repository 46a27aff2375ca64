"""ESM3 as a user trains it, from random weights. tests/parity/test_esm3.py looks at the files that are made of it."""

import json
from pathlib import Path

import torch
from command import in_process
from family_runs import losses, run

from esmshard.model import weights
from esmshard.model.families.family_registry import SIZES


def test_masked_language_modelling_leaves_other_tracks_as_they_were(tmp_path: Path) -> None:
    directory = run(tmp_path, "esm3_nano", "{name: mlm}")
    assert len(losses(directory)) == 4
    model = directory / "model"
    assert json.loads((model / "config.json").read_text())["model_type"] == "esm3"
    made, start = weights.read(str(model)), weights.fresh(SIZES["esm3_nano"], 3)
    for name in weights.stored_shapes(made.config):
        same = torch.equal(made[name], start[name])
        frozen = name.startswith(("geom_attn.", "other_tracks.", "other_heads.")) or name.endswith("inv_freq")
        assert same == frozen or name.startswith("contact_head."), name
    refused = in_process("consolidate", tmp_path / "run", "-o", tmp_path / "hf", "--to", "hf")
    assert refused.returncode == 2
    assert "--to hf: ESM3 models can be written as esm3-pth, or without --to" in refused.stderr
