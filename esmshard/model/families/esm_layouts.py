"""Names and settings of models that `transformers` calls `esm`, in its files. Ours are those of fair-esm. No torch.

The key maps follow `transformers`' own converter.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from esmshard.files import replace_json
from esmshard.model.families.esm_shapes import EsmShape
from esmshard.model.families.family import Piece
from esmshard.vocab import EOS, PAD

ShapeT = TypeVar("ShapeT", bound=EsmShape)

TIED = "lm_head.weight"
"""The LM head's matrix: the same tensor as `embed_tokens.weight`, stored once."""

# fair-esm names to transformers names, after the layer prefix `layers.N.` / `esm.encoder.layer.N.`
_LAYER = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn.rot_emb": "attention.self.rotary_embeddings",
    "self_attn_layer_norm": "attention.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "LayerNorm",
}
_TOP = {
    "embed_tokens.weight": "esm.embeddings.word_embeddings.weight",
    "embed_positions.weight": "esm.embeddings.position_embeddings.weight",
    "emb_layer_norm_before.weight": "esm.embeddings.layer_norm.weight",
    "emb_layer_norm_before.bias": "esm.embeddings.layer_norm.bias",
    "emb_layer_norm_after.weight": "esm.encoder.emb_layer_norm_after.weight",
    "emb_layer_norm_after.bias": "esm.encoder.emb_layer_norm_after.bias",
    "contact_head.regression.weight": "esm.contact_head.regression.weight",
    "contact_head.regression.bias": "esm.contact_head.regression.bias",
    TIED: "lm_head.decoder.weight",
}
_TOP_BACK = {hf: ours for ours, hf in _TOP.items()}
_LAYER_BACK = {hf: ours for ours, hf in _LAYER.items()}

# Released files hold these keys, and nothing uses them: `pooler` was never trained.
_UNUSED = re.compile(r"(esm\.embeddings\.position_ids|esm\.pooler\..*)$")


def to_transformers(name: str) -> str:
    """Return the name in `EsmForMaskedLM` of one of our tensors (in the layout that transformers 4 and 5 read)."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias|inv_freq)", name)
    if match:
        return f"esm.encoder.layer.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


def from_transformers(key: str, config: EsmShape) -> tuple[Piece, ...]:
    """Return our tensors in a `transformers` key; none for keys that this model does not use."""
    if not re.match(r"(esm|lm_head|head)\.", key):
        key = "esm." + key  # The key is from a bare EsmModel.
    if _UNUSED.match(key) or (config.rotary and key == _TOP["embed_positions.weight"]):
        return ()
    # transformers 5 writes LayerNorms under the names of old TensorFlow files.
    key = re.sub(r"(LayerNorm|layer_norm)\.gamma$", r"\1.weight", key)
    key = re.sub(r"(LayerNorm|layer_norm)\.beta$", r"\1.bias", key)
    match = re.fullmatch(r"esm\.encoder\.layer\.(\d+)\.(.+)\.(weight|bias|inv_freq)", key)
    if match:
        return (Piece(f"layers.{match[1]}.{_LAYER_BACK.get(match[2], match[2])}.{match[3]}"),)
    # All layers share one table: at model level, or (transformers 5.23) under a literal `layer.*`.
    if re.search(r"(^esm\.|layer\.\*.*)rotary_embeddings\.inv_freq$", key):
        return tuple(Piece(f"layers.{n}.self_attn.rot_emb.inv_freq") for n in range(config.n_layers))
    return (Piece(_TOP_BACK.get(key, key)),)


def transformers_config(config: EsmShape) -> dict[str, Any]:
    """Return the content of `config.json` for `EsmForMaskedLM`."""
    return {
        "architectures": ["EsmForMaskedLM"],
        "attention_probs_dropout_prob": 0.0,
        "emb_layer_norm_before": config.emb_layer_norm_before,
        "eos_token_id": EOS,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": config.dim,
        "intermediate_size": 4 * config.dim,
        "layer_norm_eps": 1e-5,
        "mask_token_id": config.mask_row,
        "max_position_embeddings": 1026 if config.rotary else config.position_rows,
        "model_type": "esm",
        "num_attention_heads": config.n_heads,
        "num_hidden_layers": config.n_layers,
        "pad_token_id": PAD,
        "position_embedding_type": "rotary" if config.rotary else "absolute",
        "token_dropout": config.token_dropout,
        "vocab_size": len(config.vocabulary),
    }


def config_of_transformers(kind: type[ShapeT], raw: Mapping[str, Any]) -> ShapeT:
    """Return the architecture of a family that a `config.json` describes.

    Raises:
        ValueError: it is not an architecture that is supported here; the message says why.
    """
    if raw.get("is_folding_model"):
        raise ValueError("it is an ESMFold; only language models can be read")
    positions = raw.get("position_embedding_type", "absolute")
    wrong = [] if positions in ("rotary", "absolute") else [f"position_embedding_type is {positions!r}"]
    wrong += [
        f"{key} is {raw.get(key, default)!r}, not {value!r}"
        for key, value, default in (
            ("vocab_size", len(kind.vocabulary), None),
            ("layer_norm_eps", 1e-5, 1e-12),
            ("hidden_act", "gelu", "gelu"),
        )
        if raw.get(key, default) != value
    ]
    rows = raw.get("max_position_embeddings", 1026)
    if positions == "absolute" and not isinstance(rows, int):
        raise ValueError(f"max_position_embeddings is {rows!r} and not a whole number")
    try:
        config = kind(
            n_layers=raw["num_hidden_layers"],
            dim=raw["hidden_size"],
            n_heads=raw["num_attention_heads"],
            token_dropout=bool(raw.get("token_dropout", False)),
            max_positions=rows - PAD - 1 if positions == "absolute" else None,
            emb_layer_norm_before=bool(raw.get("emb_layer_norm_before")),
        )
    except KeyError as error:
        raise ValueError(f"{error} is missing") from None
    if raw.get("intermediate_size") != 4 * config.dim:
        wrong.append(f"intermediate_size is {raw.get('intermediate_size')}, not {4 * config.dim}")
    masks = raw.get("mask_token_id")
    if config.token_dropout and masks not in (None, config.mask_row):
        wrong.append(f"mask_token_id is {masks!r}, not {config.mask_row}")
    if wrong:
        raise ValueError("; ".join(wrong))
    return config


def write_tokenizer(vocabulary: Sequence[str], directory: Path) -> None:
    """Write the files from which `transformers.AutoTokenizer` makes its EsmTokenizer."""
    special: dict[str, Any] = {f"{role}_token": f"<{role}>" for role in ("cls", "eos", "mask", "pad", "unk")}
    (directory / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    replace_json(directory / "special_tokens_map.json", special)
    replace_json(directory / "tokenizer_config.json", special | {"tokenizer_class": "EsmTokenizer"})
