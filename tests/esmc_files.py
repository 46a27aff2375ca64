"""A small random ESM-C of `transformers`, and its files in the four published layouts.

Layout A is written by `transformers` from 5.16 on, B was on the hub in May 2026, C is of 2024-12, and D is ESM++.
"""

import json
from pathlib import Path

import torch
from model_files import perturb
from safetensors.torch import save_file
from transformers import EsmcConfig as TheirConfig
from transformers import EsmcForMaskedLM

LAYERS, WIDTH, HEADS, FFN = 2, 128, 2, 512
"""Heads are 64 wide, as in every published model: layout C does not say it."""


def random_esmc(seed: int = 0) -> EsmcForMaskedLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
        model = EsmcForMaskedLM(TheirConfig(**sizes, intermediate_size=FFN))
    perturb(model, seed)
    return model.eval()


BLOCK = {
    "attn.layernorm_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "attn.layernorm_qkv.layer_norm_bias": ("input_layernorm.bias",),
    "attn.layernorm_qkv.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "attn.q_ln.weight": ("self_attn.q_norm.weight",),
    "attn.k_ln.weight": ("self_attn.k_norm.weight",),
    "attn.out_proj.weight": ("self_attn.o_proj.weight",),
    "ffn.layer_norm_weight": ("post_attention_layernorm.weight",),
    "ffn.layer_norm_bias": ("post_attention_layernorm.bias",),
    "ffn.fc1_weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn.fc2_weight": ("mlp.down_proj.weight",),
}
"""Names in layout B, and the names in layout A of the tensors that are joined along the rows."""


def layout_b(model: EsmcForMaskedLM) -> dict[str, torch.Tensor]:
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    found = {"esmc.embed.weight": state["esmc.embed_tokens.weight"]}
    found["esmc.transformer.norm.weight"] = state["esmc.norm.weight"]
    for n in range(LAYERS):
        theirs = f"esmc.transformer.blocks.{n}."
        found[f"{theirs}attn.layernorm_qkv._extra_state"] = torch.zeros(0, dtype=torch.uint8)
        for name, parts in BLOCK.items():
            found[theirs + name] = torch.cat([state[f"esmc.layers.{n}.{part}"] for part in parts])
    for number, part in (("0", "dense"), ("2", "layer_norm"), ("3", "decoder")):
        for kind in ("weight", "bias"):
            found[f"lm_head.{number}.{kind}"] = state[f"lm_head.{part}.{kind}"]
    return found


def layout_c(model: EsmcForMaskedLM) -> dict[str, torch.Tensor]:
    renamed = (
        ("esmc.", ""),
        ("attn.layernorm_qkv.layer_norm_", "attn.layernorm_qkv.0."),
        ("attn.layernorm_qkv.weight", "attn.layernorm_qkv.1.weight"),
        ("ffn.layer_norm_", "ffn.0."),
        ("ffn.fc1_weight", "ffn.1.weight"),
        ("ffn.fc2_weight", "ffn.3.weight"),
        ("lm_head.", "sequence_head."),
    )
    found = {}
    for key, tensor in layout_b(model).items():
        name = key
        for old, new in renamed:
            name = name.replace(old, new)
        if not name.endswith("_extra_state"):
            found[name] = tensor
    return found


CONFIGS = {
    "B": {"model_type": "esmc", "d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "vocab_size": 64},
    "D": {"model_type": "ESMplusplus", "dropout": 0.0, "num_labels": 2, "vocab_size": 64}
    | {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS},
}


def write(directory: Path, layout: str, model: EsmcForMaskedLM) -> Path:
    """Write the model in a layout to a new directory. Return what is given as MODEL."""
    directory.mkdir(parents=True)
    if layout == "A":
        model.save_pretrained(directory)
    elif layout == "C":
        file = directory / "data" / "weights" / "esmc_tiny_2024_12_v0.pth"
        file.parent.mkdir(parents=True)
        torch.save(layout_c(model), file)
    else:
        state = layout_b(model) if layout == "B" else layout_c(model)
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(CONFIGS[layout]))
    return directory
