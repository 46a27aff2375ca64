"""Files of weights: what is read of them, and fresh weights."""

import argparse
from pathlib import Path

import pytest
import torch
from esm.model.esm2 import ESM2 as FairEsm
from esm.pretrained import load_model_and_alphabet_local
from model_files import SMALL, TINY, edit_pt, edit_tensors, fair_esm, tokenise, write_fair_esm, write_transformers

from esmshard.model import weights
from esmshard.model.contacts import predict_contacts
from esmshard.model.families.esm2 import TIED, EsmConfig
from esmshard.model.weights import load_model


@pytest.fixture(scope="module")
def reference() -> FairEsm:
    return fair_esm(TINY)


@pytest.fixture
def directory(tmp_path: Path, reference: FairEsm) -> Path:
    return write_transformers(tmp_path / "model", reference, TINY)


@pytest.fixture
def file(tmp_path: Path, reference: FairEsm) -> Path:
    return write_fair_esm(tmp_path / "esm2_tiny.pt", reference)


# fair-esm


@pytest.mark.parametrize("prefixes", [("encoder.sentence_encoder.", "encoder."), ("", "")])
def test_a_fair_esm_file_is_read_under_each_prefix(
    prefixes: tuple[str, str], tmp_path: Path, reference: FairEsm
) -> None:
    path = write_fair_esm(tmp_path / "esm2_tiny.pt", reference, prefixes)
    assert weights.read(str(path)).absent == ()
    model = load_model(str(path))
    assert model.lm_head.weight is model.embed_tokens.weight
    assert not model.training
    state = model.state_dict()
    assert len(state) > 40
    for name, tensor in reference.state_dict().items():
        assert torch.equal(state[name], tensor), name
    # The file is what fair-esm reads, too.
    with torch.serialization.safe_globals([argparse.Namespace]):
        theirs, _ = load_model_and_alphabet_local(path)
    block, batch = tokenise(["MKTAYIAKQRQISFVKSHFSRQ"])
    with torch.no_grad():
        assert (predict_contacts(model, batch)[0] - theirs.predict_contacts(block)[0]).abs().max() <= 1e-6


def test_a_file_from_before_the_zip_format_is_read(file: Path, reference: FairEsm) -> None:
    with torch.serialization.safe_globals([argparse.Namespace]):
        data = torch.load(file)
    torch.save(data, file, _use_new_zipfile_serialization=False)
    assert torch.equal(load_model(str(file)).layers[1].fc2.weight, reference.layers[1].fc2.weight)


@pytest.mark.filterwarnings("ignore:.*random")
@pytest.mark.parametrize(
    ("parts", "form"),
    [(("contact_head",), "fair-esm"), (("lm_head",), "transformers"), (("lm_head", "contact_head"), "fair-esm")],
)
def test_a_missing_head_is_recorded_and_drawn_anew(
    parts: tuple[str, ...], form: str, directory: Path, file: Path, reference: FairEsm
) -> None:
    def lose(state: dict[str, torch.Tensor]) -> None:
        for key in [k for k in state if any(f"{part}." in k for part in parts)]:
            del state[key]

    if form == "fair-esm":
        edit_pt(file, lambda data: lose(data["model"]))
        if "contact_head" in parts:
            file.with_name(f"{file.stem}-contact-regression.pt").unlink()
    else:
        edit_tensors(directory, lose)
    path = str(file if form == "fair-esm" else directory)
    assert weights.read(path).absent == parts
    with pytest.warns(UserWarning, match=rf"no {parts[0]}; "):
        state, again = load_model(path).state_dict(), load_model(path).state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(state[name], again[name])
        drawn = name.startswith(tuple(f"{part}." for part in parts)) and name != TIED
        assert torch.equal(state[name], tensor) is not drawn, name


# Fresh weights


def test_fresh_weights_depend_on_seed_and_name_only() -> None:
    small, big = weights.fresh(TINY, 1), weights.fresh(EsmConfig(n_layers=3, dim=32, n_heads=4), 1)
    other = weights.fresh(TINY, 2)
    torch.manual_seed(7)
    names = [n for n in weights.shapes(TINY) if n.endswith(".weight") and "norm" not in n and n != TIED]
    assert len(names) == 2 * 6 + 3
    for name in names:
        assert torch.equal(small[name], small[name])
        if name != "contact_head.regression.weight":  # one weight per attention head: longer in the bigger model
            assert torch.equal(small[name], big[name])
        assert not torch.equal(small[name], other[name])
    assert not torch.equal(small["layers.0.fc1.weight"], small["layers.1.fc1.weight"])
    assert not torch.equal(small["layers.0.self_attn.q_proj.weight"], small["layers.0.self_attn.k_proj.weight"])


def test_fresh_weights_are_complete_and_of_the_right_size() -> None:
    config = EsmConfig(n_layers=2, dim=128, n_heads=4)
    found = weights.fresh(config, 0)
    assert found.read.keys() == weights.shapes(config).keys()
    model = weights.build(found, torch.device("cpu"))
    torch.manual_seed(0)
    like = FairEsm(2, 128, 4).state_dict()
    compared = 0
    for name, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), name
        if name.endswith("bias"):
            assert tensor.count_nonzero() == 0
        elif "norm" in name:
            assert (tensor == 1).all()
        elif "inv_freq" in name:
            torch.testing.assert_close(tensor, like[name])
        elif name == "embed_tokens.weight":
            compared += 1
            assert float(tensor.std()) == pytest.approx(0.02, rel=0.1)
        elif "self_attn" in name:
            compared += 1
            assert float(tensor.std()) == pytest.approx(float(like[name].std()), rel=0.1), name
        elif name != TIED:
            compared += 1
            assert float(tensor.std()) == pytest.approx((2 / sum(tensor.shape)) ** 0.5, rel=0.3), name
    assert compared == 2 * 6 + 3
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.embed_tokens.weight[1].count_nonzero() == 0


def test_fresh_weights_of_learned_positions() -> None:
    """Small, so that residues are not lost in them; the LayerNorm on their sum does nothing yet."""
    config = SMALL["ESM-1b"]
    found = weights.fresh(config, 0)
    assert found.read.keys() == weights.shapes(config).keys()
    assert found["embed_positions.weight"].shape == (1026, config.dim)
    assert float(found["embed_positions.weight"].std()) == pytest.approx(0.02, rel=0.05)
    norms = [name for name in found.read if name.startswith("emb_layer_norm_before.")]
    assert len(norms) == 2
    assert all((found[name] == float(name.endswith("weight"))).all() for name in norms)
