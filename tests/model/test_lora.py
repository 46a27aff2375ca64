"""LoRA: PEFT and `transformers` compute the same outputs from the files that esmshard writes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import everything
from peft import PeftModel
from safetensors.torch import load_file
from transformers import BertForMaskedLM, EsmcForMaskedLM, EsmForMaskedLM, T5EncoderModel

from esmshard.batch import pack
from esmshard.model import export, weights
from esmshard.model.adapters import adapter_config, peft_name, write_adapter
from esmshard.model.families.esm2 import ESM2, EsmConfig
from esmshard.model.families.family_registry import SIZES
from esmshard.model.lora import add_lora, lora_names, merged
from esmshard.vocab import encode

TARGETS = ("q", "k", "v", "out", "fc1", "fc2")
ALPHA, RANK = 6.0, 3


def test_names_and_shapes_and_first_values() -> None:
    config, name = EsmConfig(n_layers=2, dim=32, n_heads=4), "layers.0.fc2.lora_A.weight"
    with torch.device("meta"):
        model = ESM2(config)
    before = dict(model.named_parameters())
    added = add_lora(model.layers, model.config.matrices, 3, 1.0, ["fc2", "q"])
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() | added.keys()
    assert all(after[name] is before[name] for name in before)
    drawn = weights.drawn(config, added, seed=7)
    a = drawn[name]
    assert torch.equal(a(slice(1, 3)), a()[1:3])
    assert torch.equal(a(), weights.drawn(config, {name: added[name]}, seed=7)[name]())
    assert not torch.equal(a(), weights.drawn(config, added, seed=8)[name]())
    assert not torch.equal(a(), drawn["layers.1.fc2.lora_A.weight"]())
    assert all((reader() == 0).all() for name, reader in drawn.items() if "lora_B" in name)
    # Kaiming-uniform with a = sqrt 5: uniform within 1 / sqrt(inputs).
    wide = weights.drawn(config, {name: torch.Size((64, 128))}, 0)[name]()
    assert 0.99 / math.sqrt(128) < wide.abs().max() < 1 / math.sqrt(128)
    assert abs(float(wide.mean())) < 0.02 / math.sqrt(128)


CASES = [
    ("nano", EsmForMaskedLM, ("k", "v", "fc2"), "all"),
    ("esmc_nano", EsmcForMaskedLM, TARGETS, "all"),
    ("esmc_nano", EsmcForMaskedLM, ("fc1",), "none"),
    ("saprot_nano", EsmForMaskedLM, ("q", "v", "fc1"), "none"),
    ("bert_nano", BertForMaskedLM, ("k", "out", "fc2"), "all"),
    ("t5_nano", T5EncoderModel, TARGETS, "none"),
]


@pytest.mark.parametrize(("size", "of_transformers", "targets", "bias"), CASES, ids=str)
def test_peft_computes_what_we_compute(
    tmp_path: Path, size: str, of_transformers: Any, targets: tuple[str, ...], bias: str
) -> None:
    config = SIZES[size]
    base = weights.fresh(config, 0)
    sizes = weights.stored_shapes(config)
    if size == "esmc_nano":  # whose class of transformers has no contact regression
        sizes = {name: shape for name, shape in sizes.items() if not name.startswith("contact_head.")}
    (tmp_path / "base").mkdir()
    export.write_transformers(tmp_path / "base", config, sizes, base.__getitem__)
    model = weights.build(weights.read(str(tmp_path / "base")), torch.device("cpu")).eval()
    batch = pack([encode("MKTAYIAKQRQISFVKSHFSRQ")])
    before = everything(model, batch)
    added = add_lora(model.layers, config.matrices, RANK, ALPHA, targets)
    assert len(added) == 2 * config.n_layers * sum(matrix.target in targets for matrix in config.matrices)
    state, generator = model.state_dict(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, reader in weights.drawn(config, added, seed=5).items():
            state[name].copy_(reader())
    assert all(torch.equal(a, b) for a, b in zip(everything(model, batch), before, strict=True)), "B is 0"
    trained = {name for name in state if "lora_" in name}
    if bias == "all":
        trained |= {name for name in state if name.startswith("layers.") and name.endswith("bias")}
    with torch.no_grad():
        for name in sorted(trained):
            state[name].copy_(0.2 * torch.randn(state[name].shape, generator=generator))
    mine = everything(model, batch)
    assert (mine[-1] - before[-1]).abs().max() > 1e-2

    (tmp_path / "adapter").mkdir()
    settings = adapter_config(str(tmp_path / "base"), config, RANK, ALPHA, targets, bias)
    head = {"head.out.bias": torch.tensor([3.0])}
    write_adapter(tmp_path / "adapter", settings, config, targets, {name: state[name] for name in trained} | head)
    assert load_file(tmp_path / "adapter" / "head.safetensors") == head
    again = everything(weights.load_model(str(tmp_path / "adapter")), batch)
    assert (again[-1] - mine[-1]).abs().max() < 1e-5, "the adapter is merged when it is read"

    theirs = PeftModel.from_pretrained(of_transformers.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    known = {key.replace(".default.", ".") for key in theirs.state_dict()}
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys() <= known
    rows_1T = model.rows(batch)[None] if size in ("saprot_nano", "bert_nano") else batch.tokens_T[None]  # type: ignore[operator]
    if size == "t5_nano":  # which has no <cls>
        rows_1T, mine = torch.tensor(model.config.rows_in_order)[rows_1T[:, 1:]], [x_TD[1:] for x_TD in mine]  # type: ignore[attr-defined]
    with torch.no_grad():
        found = theirs(input_ids=rows_1T, attention_mask=torch.ones_like(rows_1T), output_hidden_states=True)
    assert (found.hidden_states[-1][0] - mine[-2]).abs().max() < 1e-5
    if size in ("nano", "esmc_nano"):  # the others have another vocabulary, or no logits
        assert (found.logits[0] - mine[-1]).abs().max() < 1e-5

    back = theirs.merge_and_unload().state_dict()
    half = {name: tensor.bfloat16() for name, tensor in state.items()}
    for name in (name for name, shape in sizes.items() if name.startswith("layers.") and len(shape) == 2):
        key = peft_name(name, config, []).removeprefix("base_model.model.")
        assert (back[key] - merged(name, state, ALPHA / RANK)).abs().max() < 1e-6, name
        assert torch.equal(back[key], base[name]) != (lora_names(name)[0] in trained)
        if lora_names(name)[0] in trained:  # B A must not be rounded away in the precision of storage
            assert merged(name, half, ALPHA / RANK).dtype == torch.float32
