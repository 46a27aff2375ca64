"""Weight files in an old format or without a head, and fresh weights."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from esm.model.esm2 import ESM2 as FairEsm
from model_files import TINY, edit_pt, fair_esm, write_fair_esm

from esmshard.model import weights
from esmshard.model.families.esm2 import TIED, EsmConfig
from esmshard.model.weights import load_model


@pytest.fixture(scope="module")
def reference() -> FairEsm:
    return fair_esm(TINY)


@pytest.fixture
def file(tmp_path: Path, reference: FairEsm) -> Path:
    return write_fair_esm(tmp_path / "esm2_tiny.pt", reference)


def test_a_file_from_before_the_zip_format_is_read(file: Path, reference: FairEsm) -> None:
    with torch.serialization.safe_globals([argparse.Namespace]):
        data = torch.load(file)
    torch.save(data, file, _use_new_zipfile_serialization=False)
    assert torch.equal(load_model(str(file)).layers[1].fc2.weight, reference.layers[1].fc2.weight)


def test_a_missing_head_is_recorded_and_random(file: Path, reference: FairEsm) -> None:
    edit_pt(file, lambda data: [data["model"].pop(key) for key in [*data["model"]] if "lm_head." in key])
    file.with_name(f"{file.stem}-contact-regression.pt").unlink()
    assert weights.read(str(file)).absent == ("lm_head", "contact_head")
    with pytest.warns(UserWarning, match=r"no (lm_head|contact_head); "):
        state = load_model(str(file)).state_dict()
    for name, tensor in reference.state_dict().items():
        random = name.startswith(("lm_head.", "contact_head.")) and name != TIED
        assert torch.equal(state[name], tensor) is not random, name


def test_fresh_weights_depend_on_seed_and_name_only_and_have_the_right_size() -> None:
    config = EsmConfig(n_layers=2, dim=128, n_heads=4, max_positions=1024, emb_layer_norm_before=True)
    found, big = weights.fresh(config, 0), weights.fresh(replace(config, n_layers=3), 0)
    assert found.read.keys() == weights.shapes(config).keys()
    model = weights.build(found, torch.device("cpu"))
    torch.manual_seed(0)
    like = FairEsm(2, 128, 4).state_dict()
    compared = 0
    for name, tensor in model.state_dict().items():
        if name != "contact_head.regression.weight":  # one weight for each attention head
            assert torch.equal(big[name], tensor), name
        if name.endswith("bias"):
            assert tensor.count_nonzero() == 0
        elif "norm" in name:
            assert (tensor == 1).all()
        elif name != TIED:
            compared += 1
            expected = 0.02 if name.startswith("embed_") else (2 / sum(tensor.shape)) ** 0.5
            if "self_attn" in name:
                expected = float(like[name].std())
            assert float(tensor.std()) == pytest.approx(expected, rel=0.3 if name.startswith("contact") else 0.1), name
    assert compared == 2 * 6 + 4
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.embed_tokens.weight[1].count_nonzero() == 0
    assert not torch.equal(found["layers.0.self_attn.q_proj.weight"], found["layers.0.self_attn.k_proj.weight"])
