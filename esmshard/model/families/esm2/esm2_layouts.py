"""Names and settings of the same model in fair-esm, whose names are ours, and in `transformers`.

The key maps follow `transformers`' own converter.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esmshard.files import replace_json
from esmshard.model.families.esm2.esm2_config import EsmConfig
from esmshard.model.families.family import Piece
from esmshard.vocab import CLS, EOS, MASK, PAD, TOKENS, UNK, VOCAB_SIZE

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


def from_transformers(key: str, config: EsmConfig) -> tuple[Piece, ...]:
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


def transformers_config(config: EsmConfig) -> dict[str, Any]:
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
        "mask_token_id": MASK,
        "max_position_embeddings": 1026 if config.rotary else config.position_rows,
        "model_type": "esm",
        "num_attention_heads": config.n_heads,
        "num_hidden_layers": config.n_layers,
        "pad_token_id": PAD,
        "position_embedding_type": "rotary" if config.rotary else "absolute",
        "token_dropout": config.token_dropout,
        "vocab_size": VOCAB_SIZE,
    }


def config_of_transformers(raw: Mapping[str, Any]) -> EsmConfig:
    """Return the architecture that a `config.json` describes.

    Raises:
        ValueError: it is not an architecture that is supported here; the message says why.
    """
    if raw.get("is_folding_model"):
        raise ValueError("it is an ESMFold; only ESM-2, ESM-1b and ESM-1v can be read")
    positions = raw.get("position_embedding_type", "absolute")
    wrong = [] if positions in ("rotary", "absolute") else [f"position_embedding_type is {positions!r}"]
    wrong += [
        f"{key} is {raw.get(key, default)!r}, not {value!r}"
        for key, value, default in (
            ("vocab_size", VOCAB_SIZE, None),
            ("layer_norm_eps", 1e-5, 1e-12),
            ("hidden_act", "gelu", "gelu"),
        )
        if raw.get(key, default) != value
    ]
    rows = raw.get("max_position_embeddings", 1026)
    if positions == "absolute" and not isinstance(rows, int):
        raise ValueError(f"max_position_embeddings is {rows!r} and not a whole number")
    try:
        config = EsmConfig(
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
    if wrong:
        raise ValueError("; ".join(wrong))
    return config


def config_of_fair_esm(data: Mapping[str, Any]) -> EsmConfig:
    """Return the architecture of the model in a fair-esm `.pt`.

    Raises:
        ValueError: it is not an architecture that is supported here; the message says why.
    """
    if "args" in data:
        # These are names of the fairseq trainer: encoder_layers, encoder_embed_dim, ... (ESM-1b and ESM-1v).
        args = {key.removeprefix("encoder_"): value for key, value in _vars(data["args"]).items()}
        arch = args.get("arch")
        if arch != "roberta_large":
            raise ValueError(f"its architecture is {arch!r}; only ESM-2, ESM-1b and ESM-1v can be read")
        before = any("emb_layer_norm_before" in str(key) for key in data.get("model", ()))
    else:
        cfg = data.get("cfg")
        sizes = cfg.get("model") if isinstance(cfg, dict) else None
        args = {key.removeprefix("encoder_"): value for key, value in _vars(sizes).items()}
        args["max_positions"], before = None, False
    try:
        config = EsmConfig(
            n_layers=args["layers"],
            dim=args["embed_dim"],
            n_heads=args["attention_heads"],
            token_dropout=bool(args.get("token_dropout", False)),
            max_positions=args["max_positions"],
            emb_layer_norm_before=before,
        )
    except KeyError as error:
        raise ValueError(f"it does not say its {error}") from None
    if args.get("ffn_embed_dim", 4 * config.dim) != 4 * config.dim:
        raise ValueError(f"its feed-forward width is {args['ffn_embed_dim']}, not {4 * config.dim}")
    return config


def _vars(settings: Any) -> dict[str, Any]:
    if isinstance(settings, argparse.Namespace):
        return vars(settings)
    if isinstance(settings, dict):
        return settings
    raise ValueError("it has neither cfg.model nor args with the sizes of a model")


def fair_esm_settings(config: EsmConfig) -> dict[str, Any]:
    """Return the entries beside the weights in a fair-esm `.pt`."""
    sizes = argparse.Namespace(
        encoder_layers=config.n_layers,
        encoder_embed_dim=config.dim,
        encoder_attention_heads=config.n_heads,
        token_dropout=config.token_dropout,
    )
    if config.rotary:
        return {"cfg": {"model": sizes}}
    sizes.arch = "roberta_large"
    sizes.encoder_ffn_embed_dim = 4 * config.dim
    sizes.max_positions = config.max_positions
    return {"args": sizes}


def from_fair_esm(key: str) -> str:
    """Return our name for a key of a fair-esm `.pt`: released files keep the prefixes of the fairseq trainer."""
    return re.sub(r"^(encoder\.sentence_encoder\.|encoder\.)", "", key)


def write_tokenizer(directory: Path) -> None:
    """Write the files from which `transformers.AutoTokenizer` makes its EsmTokenizer."""
    special: dict[str, Any] = {
        "cls_token": TOKENS[CLS],
        "eos_token": TOKENS[EOS],
        "mask_token": TOKENS[MASK],
        "pad_token": TOKENS[PAD],
        "unk_token": TOKENS[UNK],
    }
    (directory / "vocab.txt").write_text("\n".join(TOKENS), encoding="utf-8")
    replace_json(directory / "special_tokens_map.json", special)
    replace_json(directory / "tokenizer_config.json", special | {"tokenizer_class": "EsmTokenizer"})
