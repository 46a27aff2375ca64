"""The four layouts of ESM-C hold the same tensors, and a configuration of unknown names is refused."""

import json
from pathlib import Path

import esmc_files
import pytest
import torch
from esmc_files import FFN, HEADS, LAYERS, WIDTH
from safetensors.torch import load_file, save_file
from transformers import EsmcForMaskedLM

from esmshard.errors import InputError
from esmshard.model import weights
from esmshard.model.families.esmc import EsmcConfig


@pytest.fixture(scope="module")
def reference() -> EsmcForMaskedLM:
    return esmc_files.random_esmc()


def test_all_four_layouts_hold_the_same_tensors(reference: EsmcForMaskedLM, tmp_path: Path) -> None:
    found = {layout: weights.read(str(esmc_files.write(tmp_path / layout, layout, reference))) for layout in "ABCD"}
    state = reference.state_dict()
    # These names are written down here, whatever the map of the package says.
    same = {
        "layers.1.self_attn.q_proj.weight": "esmc.layers.1.self_attn.q_proj.weight",
        "layers.1.self_attn.k_proj.weight": "esmc.layers.1.self_attn.k_proj.weight",
        "layers.1.self_attn.v_proj.weight": "esmc.layers.1.self_attn.v_proj.weight",
        "layers.0.self_attn.k_norm.weight": "esmc.layers.0.self_attn.k_norm.weight",
        "layers.0.gate.weight": "esmc.layers.0.mlp.gate_proj.weight",
        "layers.0.up.weight": "esmc.layers.0.mlp.up_proj.weight",
        "layers.0.down.weight": "esmc.layers.0.mlp.down_proj.weight",
        "layers.1.self_attn_layer_norm.bias": "esmc.layers.1.input_layernorm.bias",
        "layers.1.final_layer_norm.weight": "esmc.layers.1.post_attention_layernorm.weight",
        "layer_norm_after.weight": "esmc.norm.weight",
        "embed_tokens.weight": "esmc.embed_tokens.weight",
        "lm_head.decoder.bias": "lm_head.decoder.bias",
    }
    for layout, read in found.items():
        assert read.config == EsmcConfig(n_layers=LAYERS, dim=WIDTH, n_heads=HEADS), layout
        assert read.config.ffn_width == FFN
        assert read.absent == ("contact_head",), "no ESM-C has a contact regression"
        for ours, theirs in same.items():
            assert torch.equal(read[ours], state[theirs]), (layout, ours)
        for name in weights.stored_shapes(read.config):
            assert torch.equal(read[name], found["A"][name]), (layout, name)


def test_a_file_that_lacks_a_joined_tensor_is_refused(reference: EsmcForMaskedLM, tmp_path: Path) -> None:
    directory = esmc_files.write(tmp_path / "model", "B", reference)
    file = directory / "model.safetensors"
    state = load_file(file)
    del state["esmc.transformer.blocks.1.attn.layernorm_qkv.weight"]
    save_file(state, file)
    with pytest.raises(InputError, match=r"layers\.1\.self_attn\..*are missing"):
        weights.read(str(directory))


def test_an_esm_plusplus_under_the_type_of_an_esm2_is_refused(reference: EsmcForMaskedLM, tmp_path: Path) -> None:
    directory = esmc_files.write(tmp_path / "model", "D", reference)
    raw = json.loads((directory / "config.json").read_text()) | {"model_type": "esm"}
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="vocab_size is 64, not 33"):
        weights.read(str(directory))
