"""LoRA on an ESM-C: `peft` loads what is written here over `transformers`' model, and the numbers are the same."""

from pathlib import Path

import pytest
import torch
from model_files import tokenise
from peft import PeftModel
from safetensors.torch import load_file
from transformers import EsmcForMaskedLM

from esmshard.batch import TokenBatch
from esmshard.model import export, weights
from esmshard.model.adapters import adapter_config, write_adapter
from esmshard.model.families.family_registry import SIZES
from esmshard.model.lora import add_lora
from esmshard.model.trunk import Trunk

CONFIG = SIZES["esmc_nano"]
RANK, ALPHA = 3, 6.0
EVERY = ("q", "k", "v", "out", "fc1", "fc2")


def logits(model: Trunk, batch: TokenBatch) -> torch.Tensor:
    with torch.no_grad():
        found = model(batch, logits_at=torch.arange(batch.bounds[-1])).logits_PV
    assert found is not None
    return found


@pytest.mark.parametrize(("targets", "bias"), [(EVERY, "all"), (("q", "v"), "none"), (("fc1",), "none")], ids=str)
def test_peft_computes_what_we_compute(tmp_path: Path, targets: tuple[str, ...], bias: str) -> None:
    base = weights.fresh(CONFIG, 0)
    sizes = {n: s for n, s in weights.stored_shapes(CONFIG).items() if not n.startswith("contact_head.")}
    (tmp_path / "base").mkdir()
    export.write_transformers(tmp_path / "base", CONFIG, sizes, lambda names: {name: base[name] for name in names})
    model = weights.build(weights.read(str(tmp_path / "base")), torch.device("cpu")).eval()
    block, batch = tokenise(["MKTAYIAKQRQISFVKSHFSRQ", "GSHM<mask>"])
    before = logits(model, batch)
    added = add_lora(model.layers, CONFIG.matrices, RANK, ALPHA, targets)
    assert len(added) == 2 * CONFIG.n_layers * sum(matrix.target in targets for matrix in CONFIG.matrices)
    state, generator = model.state_dict(), torch.Generator().manual_seed(1)
    trained = {name for name in state if "lora_" in name}
    if bias == "all":
        trained |= {name for name in state if name.startswith("layers.") and name.endswith("bias")}
    with torch.no_grad():
        for name in sorted(trained):
            state[name].copy_(0.2 * torch.randn(state[name].shape, generator=generator))
    mine = logits(model, batch)
    assert (mine - before).abs().max() > 1e-2

    (tmp_path / "adapter").mkdir()
    settings = adapter_config(str(tmp_path / "base"), CONFIG, RANK, ALPHA, targets, bias)
    write_adapter(tmp_path / "adapter", settings, CONFIG, targets, {name: state[name] for name in trained})
    again = weights.load_model(str(tmp_path / "adapter"))
    assert (logits(again, batch) - mine).abs().max() < 1e-5, "the adapter is merged when it is read"

    theirs = PeftModel.from_pretrained(EsmcForMaskedLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    known = {key.replace(".default.", ".") for key in theirs.state_dict()}
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys() <= known
    kept = block != 1
    with torch.no_grad():
        found = theirs(input_ids=block, attention_mask=kept.long()).logits[kept]
    assert (found - mine).abs().max() < 1e-5
