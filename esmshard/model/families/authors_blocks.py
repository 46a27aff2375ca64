"""The names that the authors of ESM-C and ESM3 give to the tensors of a block, and what their files tell of sizes.

Queries, keys and values are one tensor in these files, and so are gate and up. No torch.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from esmshard.model.families.family import Piece
from esmshard.model.gated_config import ROWS, GatedConfig

HEAD = 64
"""Width of an attention head in every published model. Tensors alone do not tell it."""

LM_HEAD = {"0": "dense", "2": "layer_norm", "3": "decoder"}
"""Our names of the parts of an LM head, by their place in the authors' `nn.Sequential`."""

QKV, GATE_UP = "attn.layernorm_qkv.1.weight", "ffn.1.weight"
BLOCK = {
    "self_attn_layer_norm.weight": "attn.layernorm_qkv.0.weight",
    "self_attn_layer_norm.bias": "attn.layernorm_qkv.0.bias",
    "self_attn.q_norm.weight": "attn.q_ln.weight",
    "self_attn.k_norm.weight": "attn.k_ln.weight",
    "self_attn.out_proj.weight": "attn.out_proj.weight",
    "final_layer_norm.weight": "ffn.0.weight",
    "final_layer_norm.bias": "ffn.0.bias",
    "down.weight": "ffn.3.weight",
}
"""Our names of a block's tensors, other than the joined ones, to those of 2024."""
_BLOCK_BACK = {theirs: ours for ours, theirs in BLOCK.items()} | {
    "attn.layernorm_qkv.layer_norm_weight": "self_attn_layer_norm.weight",  # These are the names of 2026-05.
    "attn.layernorm_qkv.layer_norm_bias": "self_attn_layer_norm.bias",
    "ffn.layer_norm_weight": "final_layer_norm.weight",
    "ffn.layer_norm_bias": "final_layer_norm.bias",
    "ffn.fc2_weight": "down.weight",
}


def block_pieces(layer: str, key: str, config: GatedConfig) -> Sequence[Piece]:
    """Return our tensors in a key of a block, which we call `layer`; none for a key that is not known."""
    d, f = config.dim, config.ffn_width
    if key in (QKV, "attn.layernorm_qkv.weight"):
        return [
            Piece(f"{layer}.self_attn.{name}_proj.weight", slice(n * d, (n + 1) * d)) for n, name in enumerate("qkv")
        ]
    if key in (GATE_UP, "ffn.fc1_weight"):
        return [Piece(f"{layer}.gate.weight", slice(0, f)), Piece(f"{layer}.up.weight", slice(f, 2 * f))]
    return [Piece(f"{layer}.{_BLOCK_BACK[key]}")] if key in _BLOCK_BACK else []


def sizes_of(keys: Iterable[str], table: str, shape: Sequence[int]) -> dict[str, Any]:
    """Return layers, width and heads of a published model, for its configuration.

    Args:
        keys: all keys of its file.
        table: key of the token embedding.
        shape: shape of the token embedding.

    Raises:
        ValueError: the token embedding is not that of a published model.
    """
    if len(shape) != 2 or shape[0] != ROWS or shape[1] % HEAD:
        raise ValueError(f"its {table} is {list(shape)}, and {ROWS} rows of a multiple of {HEAD} are expected")
    layers = {int(match[1]) for key in keys if (match := re.match(r"transformer\.blocks\.(\d{1,6})\.", key))}
    return {"n_layers": max(layers, default=0) + 1, "dim": shape[1], "n_heads": shape[1] // HEAD}
