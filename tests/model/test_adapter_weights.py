"""An adapter on its base model gives PEFT's numbers, and another base is refused."""

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import SMALL, fair_esm, ours, tokenise, write_transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import EsmForMaskedLM, EsmModel

from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.adapters import adapter_config, write_adapter
from esmshard.model.families.esm2 import FAMILY, TIED
from esmshard.model.weights import Weights

CONFIG = SMALL["ESM-2"]
SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "GSHM", "ACDEFGHIKLMNPQRSTVWYACDEFG"]
KINDS: dict[str, dict[str, Any]] = {
    "regex, rslora": {"target_modules": r".*r\.[02]\.(attention\.self\.key|intermediate\.dense)", "use_rslora": True},
    "patterns": {
        "target_modules": ["dense", "query"],
        "rank_pattern": {"query": 2, r"layer\.1\.output\.dense": 5},
        "alpha_pattern": {r"layer\.2\.attention\.output\.dense": 1.5, "query": 9},
        "bias": "lora_only",
    },
    "one layer, whole norms": {
        "target_modules": ["key", "fc", "dense"],
        "layers_to_transform": [1],
        "modules_to_save": ["LayerNorm"],
        "exclude_modules": ["lm_head.dense"],
    },
    "all linear": {"target_modules": "all-linear", "bias": "all", "fan_in_fan_out": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_transformers(tmp_path_factory.mktemp("model") / "base", ours(fair_esm(CONFIG), CONFIG), CONFIG)


def peft_model(base: Path, kind: type[Any], **settings: Any) -> PeftModel:
    """PEFT's model, with noise in all trained parameters."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(2)
        model = get_peft_model(kind.from_pretrained(base), LoraConfig(**{"r": 3, "lora_alpha": 6} | settings))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def saved(model: PeftModel, out: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(out)
    return out


def edit(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_pefts(kind: str, base: Path, tmp_path: Path) -> None:
    theirs = peft_model(base, EsmForMaskedLM, **KINDS[kind])
    found = weights.read(str(saved(theirs, tmp_path / "adapter")))
    mine = weights.build(found, torch.device("cpu")).eval()
    block, batch = tokenise(SEQUENCES)
    with torch.no_grad():
        logits = mine(batch, logits_at=torch.arange(batch.bounds[-1])).logits_PV
        plain = weights.load_model(str(base))(batch, logits_at=torch.arange(batch.bounds[-1])).logits_PV
        expected = theirs(input_ids=block, attention_mask=(block != 1).long()).logits
    assert (logits - plain).abs().max() > 1e-2
    assert (logits - expected[block != 1]).abs().max() < 1e-5

    merged = theirs.merge_and_unload().state_dict()
    merged = {key.replace(".modules_to_save.default.", "."): tensor for key, tensor in merged.items()}
    for name in found.read:
        if not name.endswith("inv_freq"):
            assert (found[name] - merged[FAMILY.key(name)]).abs().max() < 1e-6, name
            rows = slice(len(found[name]) // 2, None)
            assert (found.rows(name, rows) - merged[FAMILY.key(name)][rows]).abs().max() < 1e-6, name
    assert found[TIED].shape == (33, 64)


def test_an_adapter_of_the_trunk_alone(base: Path, tmp_path: Path) -> None:
    """The LM head comes from the base. PEFT also adapts the pooler, which esmshard ignores."""
    theirs = peft_model(base, EsmModel, target_modules="all-linear")
    adapter = saved(theirs, tmp_path / "adapter")
    assert any("pooler" in key for key in load_file(adapter / "adapter_model.safetensors"))
    found, plain = weights.read(str(adapter)), weights.read(str(base))
    assert torch.equal(found["lm_head.dense.weight"], plain["lm_head.dense.weight"])
    assert (found.absent, found.notices, found.head, found.seed) == ((), (), {}, None)
    block, batch = tokenise(SEQUENCES)
    with torch.no_grad():
        x_TD = weights.build(found, torch.device("cpu"))(batch).representations[CONFIG.n_layers]
        expected = theirs(input_ids=block, attention_mask=(block != 1).long()).last_hidden_state
    assert (x_TD - expected[block != 1]).abs().max() < 1e-5


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return saved(peft_model(base, EsmForMaskedLM, target_modules=["query"]), tmp_path / "adapter")


def test_the_base_is_found_on_the_hub_or_beside_the_adapter_and_sums_are_fp32(
    adapter: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights.read(str(adapter))["layers.0.self_attn.q_proj.weight"]
    shutil.copytree(base, tmp_path / "beside")
    edit(adapter, base_model_name_or_path="../beside")
    found = weights.read(str(adapter))
    assert torch.equal(found["layers.0.self_attn.q_proj.weight"], expected)
    assert found.files[0].resolve() == tmp_path / "beside" / "model.safetensors"

    monkeypatch.setattr("esmshard.model.hub.fetch", lambda name: {"esm2_t6_8M_UR50D": base}[name])
    monkeypatch.setitem(weights.SIZES, "esm2_t6_8M_UR50D", CONFIG)
    edit(adapter, base_model_name_or_path="facebook/esm2_t6_8M_UR50D")
    assert weights.read(str(adapter)).files[0] == base / "model.safetensors"

    state = {key: t.bfloat16() for key, t in load_file(adapter / "adapter_model.safetensors").items()}
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(state, adapter / "adapter_model.bin")
    found = weights.read(str(adapter))
    a, b = (state[f"base_model.model.esm.encoder.layer.1.attention.self.query.lora_{x}.weight"].double() for x in "AB")
    plain = weights.read(str(base))["layers.1.self_attn.q_proj.weight"]
    assert (found["layers.1.self_attn.q_proj.weight"] - (plain + 2 * b @ a)).abs().max() < 1e-6
    assert found.files[1].name == "adapter_model.bin"


def own(base: str, out: Path, known: Weights, **about: Any) -> Path:
    """Write an adapter as `consolidate --adapter` does: a LoRA in layer 1, a bias, a head."""
    out.mkdir()
    tensors = {
        "layers.1.fc1.lora_A.weight": torch.full((2, 64), 0.5),
        "layers.1.fc1.lora_B.weight": torch.arange(512.0).view(256, 2),
        "layers.0.fc2.bias": torch.full((64,), 5.0),
        "head.out.bias": torch.tensor([3.0]),
    }
    settings = adapter_config(base, CONFIG, 2, 4.0, ["fc1"], "all")
    settings["target_modules"] = ["encoder.layer.1.intermediate.dense"]
    write_adapter(out, settings, CONFIG, ["fc1"], tensors)
    about |= {"format": "esmshard-adapter", "base": weights.identity(known, base)}
    (out / "esmshard.json").write_text(json.dumps(about))
    return out


def test_our_own_adapter_on_its_base_and_on_no_other(base: Path, tmp_path: Path) -> None:
    plain = weights.read(str(base))
    adapter = own(str(base), tmp_path / "adapter", plain, unlearned=["contact_head"])
    found = weights.read(str(adapter))
    assert found.absent == found.unlearned == ("contact_head",)
    assert len(found.lacking("lm_head", "contact_head")) == 1
    assert [file.name for file in found.files] == ["model.safetensors", "adapter_model.safetensors", "head.safetensors"]
    assert {name: reader().tolist() for name, reader in found.head.items()} == {"out.bias": [3.0]}
    # Row k of B A is 0.5 (2k + 2k + 1), and alpha / rank is 2.
    added = (4 * torch.arange(256.0) + 1)[:, None].expand(256, 64)
    for name in plain.read:
        expected = plain[name] + added if name == "layers.1.fc1.weight" else plain[name]
        expected = torch.full((64,), 5.0) if name == "layers.0.fc2.bias" else expected
        assert torch.equal(found[name], expected), name
    edit(adapter, lora_alpha=5.0)
    scaled = weights.read(str(adapter))
    assert weights.identity(scaled, "x")["files"] == weights.identity(found, "x")["files"]
    assert len({weights.model_hash(each) for each in (plain, found, scaled)}) == 3
    with pytest.raises(InputError, match=r"another model .other made"):
        weights.check(weights.identity(scaled, "x"), weights.identity(found, "x"), "step_1")
    edit(adapter, lora_alpha=4.0, inference_mode=False)
    weights.check(weights.identity(weights.read(str(adapter)), "y"), weights.identity(found, "x"), "step_1")

    other = write_transformers(tmp_path / "other", ours(fair_esm(CONFIG, seed=1), CONFIG), CONFIG)
    edit(adapter, base_model_name_or_path=str(other))
    with pytest.raises(InputError, match=r"another model \(other files\).*adapter_config.json"):
        weights.read(str(adapter))
    edit(adapter, base_model_name_or_path=str(tmp_path / "gone"))
    with pytest.raises(InputError, match=r"base model .*gone does not exist.*adapter_config.json"):
        weights.read(str(adapter))
    edit(adapter, base_model_name_or_path=str(shutil.copytree(base, tmp_path / "moved")))
    assert torch.equal(weights.read(str(adapter))["layers.1.fc1.weight"], found["layers.1.fc1.weight"])


def test_random_weights_as_the_base_follow_from_their_seed(tmp_path: Path) -> None:
    plain = weights.fresh(CONFIG, 7)
    found = weights.read(str(own("nano", tmp_path / "adapter", plain, unlearned=["lm_head", "contact_head"])))
    assert torch.equal(found["layers.2.fc1.weight"], plain["layers.2.fc1.weight"])
    assert found.unlearned == ("lm_head", "contact_head")
    assert found.seed is None, "the seed alone does not give these weights"
    other = weights.read(str(own("nano", tmp_path / "other", weights.fresh(CONFIG, 8))))
    with pytest.raises(InputError, match=r"step_1: .* another model .other made"):
        weights.check(weights.identity(other, "y"), weights.identity(found, "x"), "step_1")


def test_an_adapter_on_top_of_an_adapter(base: Path, tmp_path: Path) -> None:
    first = own(str(base), tmp_path / "first", weights.read(str(base)))
    second = own(str(first), tmp_path / "second", weights.read(str(first)))
    plain, found = weights.read(str(base)), weights.read(str(second))
    twice = plain["layers.1.fc1.weight"] + 2 * (4 * torch.arange(256.0) + 1)[:, None]
    assert (found["layers.1.fc1.weight"] - twice).abs().max() < 1e-3
    assert len(weights.identity(found, "x")["files"]) == len(found.files) == 5
    edit(first, base_model_name_or_path=str(first))
    with pytest.raises(InputError, match=r"first: .* its own base model"):
        weights.read(str(second))


Q = "base_model.model.esm.encoder.layer.1.attention.self.query"
REFUSED: list[tuple[dict[str, Any], dict[str, torch.Tensor | None], str]] = [
    ({"peft_type": "IA3"}, {}, "peft_type"),
    ({"of_the_future": {"x": 1}}, {}, "of_the_future"),
    ({"init_lora_weights": "pissa"}, {}, "pissa"),
    ({"base_model_name_or_path": None}, {}, "base_model_name_or_path"),
    *(({"lora_alpha": alpha}, {}, f"is {alpha!r}") for alpha in ("much", 0, -1, True, None)),
    ({"alpha_pattern": {"query": 0}}, {}, "alpha_pattern is 0"),
    ({"alpha_pattern": {"(a+)+$": 1}}, {}, "alpha_pattern"),
    ({"alpha_pattern": [1]}, {}, "damaged"),
    ({}, {f"{Q}.lora_B.weight": None}, "two matrices"),
    ({}, {f"{Q}.lora_B.weight": torch.ones(32, 3)}, "layers.1.self_attn.q_proj.weight"),
    ({}, {f"{Q}.lora_magnitude_vector": torch.ones(64)}, "lora_magnitude_vector"),
]


def test_what_cannot_be_read_is_refused(adapter: Path, base: Path, tmp_path: Path) -> None:
    file, settings = adapter / "adapter_model.safetensors", (adapter / "adapter_config.json").read_text()
    whole = load_file(file)
    for changes, tensors, token in REFUSED:
        (adapter / "adapter_config.json").write_text(settings)
        edit(adapter, **changes)
        save_file({k: tensor for k, tensor in (whole | tensors).items() if tensor is not None}, file)
        with pytest.raises(InputError, match=f"{re.escape(str(adapter))}/adapter_.*{re.escape(token)}"):
            weights.read(str(adapter))
    cases = ((["word_embeddings"], None, "lora_embedding"), (["query"], ["lm_head"], "LM head"))
    for targets, whole_modules, token in cases:
        theirs = peft_model(base, EsmForMaskedLM, target_modules=targets, modules_to_save=whole_modules)
        with pytest.raises(InputError, match=token):
            weights.read(str(saved(theirs, tmp_path / targets[0])))


def test_damage_is_named(adapter: Path, base: Path, tmp_path: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    state = load_file(file)
    state[f"{Q}.lora_A.weight"][1, 1] = torch.nan
    save_file(state, file)
    found = weights.read(str(adapter))
    with pytest.raises(InputError, match=r"adapter: layers.1.self_attn.q_proj.weight holds a value"):
        weights.build(found, torch.device("cpu"))
    damaged = shutil.copytree(base, tmp_path / "damaged")
    of_base = load_file(damaged / "model.safetensors")
    name = "layers.0.self_attn.q_proj.weight"
    of_base[str(FAMILY.key(name))][1, 1] = torch.inf
    save_file(of_base, damaged / "model.safetensors")
    edit(adapter, base_model_name_or_path=str(damaged))
    with pytest.raises(InputError, match=rf"damaged: {name} holds a value"):
        weights.read(str(adapter))[name]
    (adapter / "esmshard.json").write_text('{"base": {"name": "x"}}')
    with pytest.raises(InputError, match=r"esmshard.json: damaged"):
        weights.read(str(adapter))
    (adapter / "esmshard.json").unlink()
    file.unlink()
    with pytest.raises(InputError, match=r"adapter_model.safetensors is missing"):
        weights.read(str(adapter))
