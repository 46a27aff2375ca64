"""Names and settings of ESM-C in `transformers`, in the code of its authors, and in ESM++. No torch.

Four layouts of files exist, and all hold the same tensors. `transformers` from 5.16 on writes one key for each of our
tensors. The files of 2026-05 and those of 2024-12 join the projections of queries, keys and values in one tensor, and
gate and up in another, under two sets of names. ESM++ has the names of 2024-12. Keys are unambiguous, so that one
function reads all of them; only the first layout is written, which the authors' code reads from 3.4 on.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esmshard.files import replace_json
from esmshard.model.families.authors_blocks import LM_HEAD, block_pieces
from esmshard.model.families.esmc.esmc_config import EsmcConfig
from esmshard.model.families.family import Piece
from esmshard.model.gated_config import CHAIN_BREAK, ROWS
from esmshard.vocab import CLS, EOS, MASK, PAD, TOKENS, UNK

# Our names of a block's tensors to those of transformers.
_LAYER = {
    "self_attn.q_proj.weight": "self_attn.q_proj.weight",
    "self_attn.k_proj.weight": "self_attn.k_proj.weight",
    "self_attn.v_proj.weight": "self_attn.v_proj.weight",
    "self_attn.out_proj.weight": "self_attn.o_proj.weight",
    "self_attn.q_norm.weight": "self_attn.q_norm.weight",
    "self_attn.k_norm.weight": "self_attn.k_norm.weight",
    "self_attn_layer_norm.weight": "input_layernorm.weight",
    "self_attn_layer_norm.bias": "input_layernorm.bias",
    "final_layer_norm.weight": "post_attention_layernorm.weight",
    "final_layer_norm.bias": "post_attention_layernorm.bias",
    "gate.weight": "mlp.gate_proj.weight",
    "up.weight": "mlp.up_proj.weight",
    "down.weight": "mlp.down_proj.weight",
}
_TOP = {"embed_tokens.weight": "esmc.embed_tokens.weight", "layer_norm_after.weight": "esmc.norm.weight"}
_LAYER_BACK = {theirs: ours for ours, theirs in _LAYER.items()}
_TOP_BACK = {theirs: ours for ours, theirs in _TOP.items()}


def to_transformers(name: str) -> str | None:
    """Return the name in `EsmcForMaskedLM` of one of our tensors; None for rotary frequencies, which it computes."""
    if name.endswith("inv_freq"):
        return None
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if match:
        return f"esmc.layers.{match[1]}.{_LAYER[match[2]]}"
    return _TOP.get(name, name)


def pieces(key: str, config: EsmcConfig) -> tuple[Piece, ...]:
    """Return our tensors in a key of any of the layouts. An unknown key is returned as it is."""
    if key.endswith("._extra_state"):  # An empty record of TransformerEngine.
        return ()
    bare = re.sub(r"^esmc\.", "", key)
    if match := re.fullmatch(r"transformer\.blocks\.(\d+)\.(.+)", bare):
        return tuple(block_pieces(f"layers.{match[1]}", match[2], config)) or (Piece(key),)
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", bare):
        return (Piece(f"layers.{match[1]}.{_LAYER_BACK.get(match[2], match[2])}"),)
    if match := re.fullmatch(r"(?:lm_head|sequence_head)\.([023])\.(weight|bias)", bare):
        return (Piece(f"lm_head.{LM_HEAD[match[1]]}.{match[2]}"),)
    if bare in ("embed.weight", "embed_tokens.weight"):
        return (Piece("embed_tokens.weight"),)
    if bare == "rotary_emb.inv_freq":  # Buffers of `transformers`, which no file holds: all layers share one table.
        return tuple(Piece(f"layers.{n}.self_attn.rot_emb.inv_freq") for n in range(config.n_layers))
    if bare == "rotary_emb.original_inv_freq":
        return ()
    if bare in ("norm.weight", "transformer.norm.weight"):
        return (Piece("layer_norm_after.weight"),)
    return (Piece(key),)


def config_of_transformers(raw: Mapping[str, Any]) -> EsmcConfig:
    """Return the architecture of a `config.json`: that of `transformers`, of the authors of 2026-05, or of ESM++.

    Raises:
        ValueError: it is not an architecture that is supported here; the message says why.
    """
    wrong = [
        f"{key} is {raw[key]!r}, not {value!r}"
        for key, value in (
            ("vocab_size", ROWS),
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
            ("tie_word_embeddings", False),
        )
        if key in raw and raw[key] != value
    ]
    rope = raw.get("rope_parameters") or {}
    if isinstance(rope, dict):
        wrong += [
            f"rope_parameters.{key} is {rope[key]!r}, not {value!r}"
            for key, value in (("rope_type", "default"), ("rope_theta", 10000.0))
            if key in rope and rope[key] != value
        ]
    if wrong:
        raise ValueError("; ".join(wrong))
    # ESM++ has the names of transformers, and the authors' files of 2026-05 their own.
    theirs = {"n_layers": "num_hidden_layers", "dim": "hidden_size", "n_heads": "num_attention_heads"}
    if "d_model" in raw:
        theirs = {"n_layers": "n_layers", "dim": "d_model", "n_heads": "n_heads"}
    try:
        sizes = {ours: raw[key] for ours, key in theirs.items()}
    except KeyError as error:
        raise ValueError(f"{error} is missing") from None
    return EsmcConfig(**sizes, ffn=_ffn(raw.get("intermediate_size"), sizes["dim"]))


def _ffn(width: Any, dim: int) -> int | None:
    """Return None for the width that follows from the model's."""
    if width is None or width == EsmcConfig(n_layers=1, dim=dim, n_heads=1).ffn_width:
        return None
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ValueError(f"intermediate_size is {width!r} and not a positive whole number")
    return width


def transformers_config(config: EsmcConfig) -> dict[str, Any]:
    """Return the content of `config.json` for `EsmcForMaskedLM`."""
    return {
        "architectures": ["EsmcForMaskedLM"],
        "attention_bias": False,
        "bos_token_id": CLS,
        "eos_token_id": EOS,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_width,
        "mask_token_id": MASK,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "model_type": "esmc",
        "num_attention_heads": config.n_heads,
        "num_hidden_layers": config.n_layers,
        "num_key_value_heads": config.n_heads,
        "pad_token_id": PAD,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": ROWS,
    }


def write_tokenizer(directory: Path) -> None:
    """Write the files from which `transformers.AutoTokenizer` makes its EsmcTokenizer."""
    names = [*TOKENS]
    names[CHAIN_BREAK] = "|"
    vocabulary = {name: n for n, name in enumerate(names)}
    special = [names[n] for n in (CLS, PAD, EOS, UNK, CHAIN_BREAK, MASK)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ends = [{"SpecialToken": {"id": "<cls>", "type_id": 0}}, {"SpecialToken": {"id": "<eos>", "type_id": 0}}]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[name], "content": name, **flags, "special": True} for name in special],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [ends[0], {"Sequence": {"id": "A", "type_id": 0}}, ends[1]],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                name: {"id": name, "ids": [vocabulary[name]], "tokens": [name]} for name in ("<cls>", "<eos>")
            },
        },
        "decoder": None,
        "model": {"type": "BPE", "unk_token": "<unk>", "vocab": vocabulary, "merges": []},
    }
    replace_json(directory / "tokenizer.json", tokenizer)
    roles = {"bos": CLS, "cls": CLS, "eos": EOS, "mask": MASK, "pad": PAD, "unk": UNK, "chain_break": CHAIN_BREAK}
    settings = {f"{role}_token": names[n] for role, n in roles.items()}
    replace_json(directory / "tokenizer_config.json", settings | {"tokenizer_class": "EsmcTokenizer"})
