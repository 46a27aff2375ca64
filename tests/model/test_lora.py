"""LoRA: the base at first, then base plus B A in every path; merged, written for PEFT, and read by it."""

import math
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from model_files import SMALL, fair_esm, ours, tokenise, write_transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import EsmForMaskedLM, EsmModel

from esmshard.batch import TokenBatch
from esmshard.model import weights
from esmshard.model.adapters import adapter_config, peft_name, write_adapter
from esmshard.model.families.esm2 import ESM2, EsmConfig
from esmshard.model.lora import LoraLinear, add_lora, lora_names, merged

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "GSHM", "ACDEFGHIKLMNPQRSTVWYACDEFG"]
TARGETS = ("q", "k", "v", "out", "fc1", "fc2")
ALPHA, RANK = 6.0, 3


def adapted(family: str, targets: Collection[str]) -> tuple[ESM2, ESM2]:
    """A model with a LoRA that does something, and its base."""
    reference = fair_esm(SMALL[family])
    model, base = (ours(reference, SMALL[family]) for _ in range(2))
    added = add_lora(model.layers, model.config.matrices, RANK, ALPHA, targets)
    state = model.state_dict()
    with torch.no_grad():
        for name, reader in weights.drawn(SMALL[family], added, seed=5).items():
            state[name].copy_(reader())
    return model, base


def rough(model: nn.Module) -> None:
    """Give each B, which is zero, values; another place, other values."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.lora_B.weight.normal_(0, 0.2, generator=generator)


def logits(model: ESM2, batch: TokenBatch) -> torch.Tensor:
    found = model(batch, logits_at=torch.arange(batch.bounds[-1])).logits_PV
    assert found is not None
    return found


def by_hand(model: ESM2, base: ESM2) -> ESM2:
    """The base with W + 2 B A for each weight, written out as sums over the rank."""
    state, known = base.state_dict(), model.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            stem = name.removesuffix(".weight")
            if f"{stem}.lora_A.weight" in known:
                a, b = known[f"{stem}.lora_A.weight"], known[f"{stem}.lora_B.weight"]
                for r in range(RANK):
                    tensor.add_(ALPHA / RANK * b[:, r, None] * a[r])
    return base


@pytest.mark.parametrize(("family", "targets"), [("ESM-2", TARGETS), ("ESM-1b", ["fc2", "k"])])
def test_the_first_forward_pass_is_the_bases_and_a_later_one_that_of_the_merged_weights(
    family: str, targets: Collection[str]
) -> None:
    model, base = adapted(family, targets)
    batch = tokenise(SEQUENCES)[1]
    before = logits(base, batch)
    assert torch.equal(logits(model, batch), before)
    rough(model)
    after = logits(model, batch)
    assert (after - before).abs().max() > 1e-2
    assert (after - logits(by_hand(model, base), batch)).abs().max() < 1e-5
    with torch.no_grad():  # another path through the projections
        assert (logits(model, batch) - after).abs().max() < 1e-5


def test_names_and_shapes_and_first_values() -> None:
    config = EsmConfig(n_layers=2, dim=32, n_heads=4)
    with torch.device("meta"):
        model = ESM2(config)
    before = dict(model.named_parameters())
    added = add_lora(model.layers, model.config.matrices, 3, 1.0, ["fc2", "q"])
    assert added == {
        "layers.0.self_attn.q_proj.lora_A.weight": (3, 32),
        "layers.0.self_attn.q_proj.lora_B.weight": (32, 3),
        "layers.0.fc2.lora_A.weight": (3, 128),
        "layers.0.fc2.lora_B.weight": (32, 3),
        "layers.1.self_attn.q_proj.lora_A.weight": (3, 32),
        "layers.1.self_attn.q_proj.lora_B.weight": (32, 3),
        "layers.1.fc2.lora_A.weight": (3, 128),
        "layers.1.fc2.lora_B.weight": (32, 3),
    }
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() | added.keys()
    assert all(after[name] is before[name] for name in before), "no weight has another name or is another tensor"
    assert {p.device.type for p in after.values()} == {"meta"}
    drawn = weights.drawn(config, added, seed=7)
    a = drawn["layers.0.fc2.lora_A.weight"]
    assert torch.equal(a(slice(1, 3)), a()[1:3])
    assert torch.equal(a(), weights.drawn(config, {"layers.0.fc2.lora_A.weight": added[a_name()]}, seed=7)[a_name()]())
    assert not torch.equal(a(), weights.drawn(config, added, seed=8)[a_name()]())
    assert not torch.equal(a(), drawn["layers.1.fc2.lora_A.weight"]())
    assert all((reader() == 0).all() for name, reader in drawn.items() if "lora_B" in name)
    # Kaiming-uniform with a = sqrt 5: uniform within 1 / sqrt(inputs).
    wide = weights.drawn(config, {"layers.0.fc2.lora_A.weight": torch.Size((64, 128))}, 0)[a_name()]()
    assert wide.abs().max() < 1 / math.sqrt(128)
    assert wide.abs().max() > 0.99 / math.sqrt(128)
    assert abs(float(wide.mean())) < 0.02 / math.sqrt(128)


def a_name() -> str:
    return "layers.0.fc2.lora_A.weight"


@pytest.mark.parametrize(("targets", "bias"), [(["q", "out"], "none"), (["k", "v", "fc2"], "all")])
def test_peft_reads_what_we_write(targets: Collection[str], bias: str, tmp_path: Path) -> None:
    """Unmerged, merged, and `transformers` with PEFT: the same logits. Every key is used, none is missed."""
    config = SMALL["ESM-2"]
    model, base = adapted("ESM-2", targets)
    write_transformers(tmp_path / "base", base, config)
    rough(model)
    if bias == "all":
        perturb_biases(model)
    block, batch = tokenise(SEQUENCES)
    mine = logits(model, batch)

    trained = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if "lora_" in name or (bias == "all" and name.startswith(("layers.", "emb_l")) and name.endswith("bias"))
    }
    head = {"head.out.bias": torch.tensor([3.0])}
    settings = adapter_config(str(tmp_path / "base"), config, RANK, ALPHA, targets, bias)
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter", settings, config, targets, trained | head)
    assert load_file(tmp_path / "adapter" / "head.safetensors") == head
    again = weights.load_model(str(tmp_path / "adapter"))
    assert (logits(again, batch) - mine).abs().max() < 1e-5

    theirs = PeftModel.from_pretrained(EsmForMaskedLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    with torch.no_grad():
        found = theirs(input_ids=block, attention_mask=(block != 1).long()).logits
    for n in range(len(batch)):
        start, stop = batch.bounds[n], batch.bounds[n + 1]
        assert (found[n, : stop - start] - mine[start:stop]).abs().max() < 1e-5
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    known = theirs.state_dict()
    assert written.keys() <= {key.replace(".default.", ".") for key in known}, "PEFT leaves unknown keys out in silence"
    assert len(written) == len(trained)

    # What PEFT itself would write for this model; with biases it also has those that no task of ours trains.
    anew = get_peft_model(
        EsmForMaskedLM.from_pretrained(tmp_path / "base"),
        LoraConfig(r=RANK, lora_alpha=ALPHA, bias=bias, target_modules=settings["target_modules"]),  # type: ignore[arg-type]
    )
    rest = get_peft_model_state_dict(anew).keys() - written.keys()
    assert all(key.endswith("bias") and ("lm_head" in key or "contact_head" in key) for key in rest)
    assert bool(rest) == (bias == "all")
    assert written.keys() <= get_peft_model_state_dict(anew).keys()

    trunk = PeftModel.from_pretrained(
        EsmModel.from_pretrained(tmp_path / "base", add_pooling_layer=False),
        tmp_path / "adapter",
        key_mapping={"^esm.": ""},
    ).eval()
    with torch.no_grad():
        x = trunk(input_ids=block, attention_mask=(block != 1).long()).last_hidden_state
        expected = model(batch).representations[config.n_layers]
    assert (x[0, : batch.bounds[1]] - expected[: batch.bounds[1]]).abs().max() < 1e-5

    back, state = theirs.merge_and_unload().state_dict(), model.state_dict()
    half = {name: tensor.bfloat16() for name, tensor in state.items()}
    for name, tensor in base.state_dict().items():
        if name.startswith("layers.") and name.endswith("weight"):
            key = peft_name(name, config, []).removeprefix("base_model.model.")
            assert (back[key] - merged(name, state, ALPHA / RANK)).abs().max() < 1e-6, name
            assert torch.equal(back[key], tensor) != (lora_names(name)[0] in trained)
            if lora_names(name)[0] in trained:  # B A must not be rounded away in the precision of storage
                assert merged(name, half, ALPHA / RANK).dtype == torch.float32


def perturb_biases(model: ESM2) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("layers.", "emb_l")) and name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
