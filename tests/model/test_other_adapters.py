"""LoRA on an ESM-C and a SaProt: `peft` loads what is written over `transformers`' model; its numbers are ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import everything
from peft import PeftModel
from safetensors.torch import load_file
from transformers import EsmcForMaskedLM, EsmForMaskedLM

from esmshard.batch import pack
from esmshard.model import export, weights
from esmshard.model.adapters import adapter_config, write_adapter
from esmshard.model.families.family_registry import SIZES
from esmshard.model.lora import add_lora
from esmshard.vocab import encode

RANK, ALPHA = 3, 6.0
EVERY = ("q", "k", "v", "out", "fc1", "fc2")
CASES = [
    ("esmc_nano", EsmcForMaskedLM, EVERY, "all"),
    ("esmc_nano", EsmcForMaskedLM, ("fc1",), "none"),
    ("saprot_nano", EsmForMaskedLM, ("q", "v", "fc1"), "none"),
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
    write_adapter(tmp_path / "adapter", settings, config, targets, {name: state[name] for name in trained})
    again = everything(weights.load_model(str(tmp_path / "adapter")), batch)
    assert (again[-1] - mine[-1]).abs().max() < 1e-5, "the adapter is merged when it is read"

    theirs = PeftModel.from_pretrained(of_transformers.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    known = {key.replace(".default.", ".") for key in theirs.state_dict()}
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys() <= known
    rows_1T = model.rows(batch)[None] if size == "saprot_nano" else batch.tokens_T[None]  # type: ignore[operator]
    with torch.no_grad():
        found = theirs(input_ids=rows_1T, attention_mask=torch.ones_like(rows_1T), output_hidden_states=True)
    assert (found.hidden_states[-1][0] - mine[-2]).abs().max() < 1e-5
    if size == "esmc_nano":  # SaProt's are of pairs
        assert (found.logits[0] - mine[-1]).abs().max() < 1e-5
