"""Conversions between layouts keep every bit, and the libraries of each layout read the results."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from esm.model.esm2 import ESM2 as FairEsm
from esm.pretrained import load_model_and_alphabet_local
from model_files import SMALL, TINY, edit_tensors, fair_esm, write_fair_esm, write_transformers
from safetensors.torch import load_file
from transformers import EsmConfig as HfConfig
from transformers import EsmForMaskedLM

from esmshard.checkpoint.consolidate import consolidate
from esmshard.errors import InputError, UsageError
from esmshard.model import weights
from esmshard.model.families.esm2 import FAMILY, SIZES, TIED, EsmConfig, config_of_fair_esm, fair_esm_settings

NAMES = {"ESM-2": "esm2_it", "ESM-1b": "esm1b_it", "ESM-1v": "esm1v_it"}
HEAD = {"out.weight": torch.arange(6.0).view(2, 3), "out.bias": torch.ones(2)}


def same(reference: FairEsm, model: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Compare all tensors of a model with fair-esm's model."""
    found, expected = weights.read(str(model)), reference.state_dict()
    assert found.absent == found.notices == ()
    assert {name for name in found.read if not name.startswith("head.")} | {TIED} == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), (tensor if "inv_freq" in name else tensor.to(dtype)).float()), name


def by_fair_esm(file: Path) -> FairEsm:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return load_model_and_alphabet_local(file)[0]


def by_transformers(directory: Path) -> EsmForMaskedLM:
    model, info = EsmForMaskedLM.from_pretrained(directory, output_loading_info=True)
    assert not {kind: keys for kind, keys in info.items() if keys}
    return model


@pytest.mark.parametrize("family", SMALL)
def test_there_and_back_every_bit_is_the_same(family: str, tmp_path: Path) -> None:
    config, reference = SMALL[family], fair_esm(SMALL[family])
    expected = reference.state_dict()
    file = write_fair_esm(tmp_path / f"{NAMES[family]}.pt", reference)
    directory = consolidate(file, tmp_path / "first", to="hf")
    same(reference, directory)
    same(reference, directory / "model.safetensors")

    model = by_transformers(directory)
    model.save_pretrained(tmp_path / "saved")
    same(reference, tmp_path / "saved")
    theirs = model.state_dict()
    compared = {name: theirs.pop(FAMILY.key(name)) for name in expected if "inv_freq" not in name}
    for name, tensor in compared.items():
        assert torch.equal(tensor, expected[name]), name
    assert {key.rsplit(".", 1)[1] for key in theirs} <= {"inv_freq", "position_ids"}, "nothing else is in it"
    tables = [tensor for key, tensor in theirs.items() if key.endswith("inv_freq")]
    assert bool(tables) is config.rotary
    assert all(torch.equal(t, expected["layers.0.self_attn.rot_emb.inv_freq"]) for t in tables)

    back = consolidate(tmp_path / "saved", tmp_path / "mine", to="fair-esm")
    stem = f"{family.lower().replace('-', '')}_mine"  # fair-esm takes the architecture from the name
    assert sorted(p.name for p in back.iterdir()) == [f"{stem}-contact-regression.pt", f"{stem}.pt", "esmshard.json"]
    same(reference, back / f"{stem}.pt")
    read = by_fair_esm(back / f"{stem}.pt").state_dict()
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        # fair-esm knows no regression of an ESM-1v, and draws one.
        assert torch.equal(read[name], tensor) or (family == "ESM-1v" and name.startswith("contact_head.")), name

    again = consolidate(back / f"{stem}.pt", tmp_path / "again", to="hf")
    assert (again / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    assert (again / "config.json").read_bytes() == (directory / "config.json").read_bytes()


def test_settings_of_transformers_and_fair_esm_and_back() -> None:
    for base in [*SIZES.values(), *SMALL.values()]:
        for token_dropout in (True, False):
            config = EsmConfig(**vars(base) | {"token_dropout": token_dropout})
            assert FAMILY.read_config(HfConfig(**FAMILY.write_config(config)).to_dict()) == config
            keys = ["encoder.sentence_encoder.emb_layer_norm_before.weight"] * config.emb_layer_norm_before
            assert config_of_fair_esm(fair_esm_settings(config) | {"model": dict.fromkeys(keys)}) == config


def test_a_model_in_half_precision_and_in_several_files(tmp_path: Path) -> None:
    reference, dtype = fair_esm(TINY), torch.bfloat16
    file = write_fair_esm(tmp_path / "esm2_it.pt", reference)
    out = consolidate(file, tmp_path / "out", dtype="bf16", max_file_bytes=20_000)
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    same(reference, out, dtype)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    held = {key: file.name for file in out.glob("*.safetensors") for key in load_file(file)}
    assert index["weight_map"] == held
    state = {name: tensor for name, tensor in reference.state_dict().items() if name != TIED}
    assert held.keys() == {FAMILY.key(name) for name in state}
    assert index["metadata"]["total_size"] == sum((4 if "inv_freq" in n else 2) * t.numel() for n, t in state.items())
    stored = {reader().dtype for name, reader in weights.read(str(out)).read.items() if "inv_freq" not in name}
    assert stored == {dtype}
    assert by_transformers(out).dtype == dtype
    with pytest.raises(InputError, match="are missing"):
        weights.read(str(next(iter(out.glob("*00001-of*")))))
    whole = consolidate(file, tmp_path / "whole", to="fair-esm", dtype="bf16")
    same(reference, whole / "esm2_whole.pt", dtype)


@pytest.fixture
def fine_tuned(tmp_path: Path) -> Path:
    """The model of a run: a trunk, a head and `esmshard.json`."""
    directory = write_transformers(tmp_path / "tuned", fair_esm(TINY), TINY, HEAD)
    (directory / "esmshard.json").write_text(json.dumps({"format": "esmshard-model", "step": 7, "weights_sha256": "x"}))
    return directory


def test_a_fine_tuned_model_keeps_its_head_and_what_is_known_of_it(fine_tuned: Path, tmp_path: Path) -> None:
    out = consolidate(fine_tuned / "model.safetensors", tmp_path / "out")
    same(fair_esm(TINY), out)
    found = weights.read(str(out))
    assert found.head.keys() == HEAD.keys()
    for name, tensor in HEAD.items():
        assert torch.equal(found.head[name](), tensor)
    about = json.loads((out / "esmshard.json").read_text())
    assert (about["format"], about["step"], len(about["weights_sha256"])) == ("esmshard-model", 7, 64)


def test_a_model_is_not_converted_onto_itself(fine_tuned: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(fine_tuned)
    before = {path.name: path.read_bytes() for path in fine_tuned.iterdir()}
    cases = [(fine_tuned, fine_tuned), (fine_tuned / "model.safetensors", fine_tuned), (fine_tuned, tmp_path)]
    for source, out in [*cases, (tmp_path / "link", fine_tuned), (fine_tuned, tmp_path / "link")]:
        with pytest.raises(UsageError, match="contains the model that is to be converted"):
            consolidate(source, out, overwrite=True)
    assert {path.name: path.read_bytes() for path in fine_tuned.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "tuned"]


@pytest.mark.parametrize("part", ["lm_head", "contact_head"])
def test_what_a_model_lacks_is_said_and_not_made_up(part: str, tmp_path: Path) -> None:
    """The next reader would take a random part for a trained part."""
    directory = write_transformers(tmp_path / "given", fair_esm(TINY), TINY)
    edit_tensors(directory, lambda state: [state.pop(key) for key in list(state) if part in key])
    said: list[str] = []
    out = consolidate(directory, tmp_path / "out", warn=said.append)
    assert said == []
    assert weights.read(str(out)).absent == (part,)
    consolidate(directory, tmp_path / "esm2_it", to="fair-esm", warn=said.append)
    assert len(said) == 1
    assert said[0].startswith(f"{directory}: its {part} never learned")
    by_fair_esm(tmp_path / "esm2_it" / "esm2_it.pt")
