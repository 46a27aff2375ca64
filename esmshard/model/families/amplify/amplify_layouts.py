"""Names and settings of AMPLIFY in the files of its authors. No torch.

Their code is a class of `transformers` that lies beside the weights, and joins gate and up in one tensor.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esmshard.files import replace_json
from esmshard.model.families.amplify.amplify_config import VOCABULARY, AmplifyConfig
from esmshard.model.families.family import Piece

CODE = "chandar-lab/AMPLIFY_350M--amplify"
"""The repository and the module of the authors' code on the hub, as `auto_map` names them."""

_LAYER = {
    "self_attn.q_proj.weight": "q.weight",
    "self_attn.k_proj.weight": "k.weight",
    "self_attn.v_proj.weight": "v.weight",
    "self_attn.out_proj.weight": "wo.weight",
    "self_attn_layer_norm.weight": "attention_norm.weight",
    "final_layer_norm.weight": "ffn_norm.weight",
    "gate.weight": "ffn.w12.weight",
    "up.weight": "ffn.w12.weight",
    "down.weight": "ffn.w3.weight",
}
_TOP = {
    "embed_tokens.weight": "encoder.weight",
    "layer_norm_after.weight": "layer_norm_2.weight",
    "lm_head.decoder.weight": "decoder.weight",
    "lm_head.decoder.bias": "decoder.bias",
}
_LAYER_BACK = {theirs: ours for ours, theirs in _LAYER.items() if theirs != "ffn.w12.weight"}
_TOP_BACK = {theirs: ours for ours, theirs in _TOP.items()}

_FIXED = {
    "vocab_size": len(VOCABULARY),
    "rms_norm": True,
    "norm_eps": 1e-5,
    "layer_norm_after_embedding": False,
    "layer_norm_before_last_layer": True,
    "att_bias": False,
    "ffn_bias": False,
    "pad_token_id": VOCABULARY.index("<pad>"),
}
"""The settings that all released models have. They are the defaults of the authors' code, too."""


def to_transformers(name: str) -> str | None:
    """Return the authors' name of one of our tensors, the same for gate and up; None for rotary frequencies."""
    if name.endswith("inv_freq"):
        return None
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if match:
        return f"transformer_encoder.{match[1]}.{_LAYER[match[2]]}"
    return _TOP.get(name, name)


def pieces(key: str, config: AmplifyConfig) -> tuple[Piece, ...]:
    """Return our tensors in one of the authors' keys. An unknown key is returned as it is."""
    match = re.fullmatch(r"transformer_encoder\.(\d+)\.(.+)", key)
    if match and match[2] == "ffn.w12.weight":
        f = config.ffn_width
        return Piece(f"layers.{match[1]}.gate.weight", slice(0, f)), Piece(
            f"layers.{match[1]}.up.weight", slice(f, 2 * f)
        )
    if match:
        return (Piece(f"layers.{match[1]}.{_LAYER_BACK.get(match[2], match[2])}"),)
    return (Piece(_TOP_BACK.get(key, key)),)


def config_of_transformers(raw: Mapping[str, Any]) -> AmplifyConfig:
    """Return the architecture that a `config.json` describes.

    Raises:
        ValueError: it is not an architecture that is supported here; the message says why.
    """
    wrong = [f"{key} is {raw[key]!r}, not {value!r}" for key, value in _FIXED.items() if raw.get(key, value) != value]
    if str(raw.get("hidden_act", "SwiGLU")).lower() != "swiglu":
        wrong.append(f"hidden_act is {raw['hidden_act']!r}, not 'SwiGLU'")
    if wrong:
        raise ValueError("; ".join(wrong))
    theirs = {"n_layers": "num_hidden_layers", "dim": "hidden_size", "n_heads": "num_attention_heads"}
    try:
        sizes = {ours: raw[key] for ours, key in theirs.items()}
        width = raw["intermediate_size"]
    except KeyError as error:
        raise ValueError(f"{error} is missing") from None
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ValueError(f"intermediate_size is {width!r} and not a positive whole number")
    found, ffn = AmplifyConfig(**sizes), (2 * width // 3 + 7) // 8 * 8
    return found if ffn == found.ffn_width else AmplifyConfig(**sizes, ffn=ffn)


def transformers_config(config: AmplifyConfig) -> dict[str, Any]:
    """Return the content of `config.json` for the authors' class."""
    return _FIXED | {
        "architectures": ["AMPLIFY"],
        "auto_map": {"AutoConfig": f"{CODE}.AMPLIFYConfig", "AutoModel": f"{CODE}.AMPLIFY"},
        "bos_token_id": VOCABULARY.index("<bos>"),
        "decoder_init_range": 0.02,
        "dropout_prob": 0,
        "embedding_init_range": 0.02,
        "eos_token_id": VOCABULARY.index("<eos>"),
        "hidden_act": "SwiGLU",
        "hidden_size": config.dim,
        # The authors' code takes 2/3 of it, up to a multiple of 8.
        "intermediate_size": 4 * config.dim if config.ffn is None else 3 * config.ffn // 2,
        "mask_token_id": VOCABULARY.index("<mask>"),
        "max_length": 2048,
        "model_type": "AMPLIFY",
        "num_attention_heads": config.n_heads,
        "num_hidden_layers": config.n_layers,
        "unk_token_id": VOCABULARY.index("<unk>"),
    }


def write_tokenizer(directory: Path) -> None:
    """Write the files from which `transformers.AutoTokenizer` makes a tokenizer of AMPLIFY."""
    vocabulary = {name: n for n, name in enumerate(VOCABULARY)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ends = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ("<bos>", "<eos>")]
    sequence = [{"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB")]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": n, "content": name, **flags, "special": True} for name, n in vocabulary.items() if n < 5
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [ends[0], sequence[0], ends[1]],
            "pair": [ends[0], *sequence, ends[1]],
            "special_tokens": {
                name: {"id": name, "ids": [vocabulary[name]], "tokens": [name]} for name in ("<bos>", "<eos>")
            },
        },
        "decoder": None,
        "model": {"type": "BPE", "unk_token": "<unk>", "vocab": vocabulary, "merges": []},
    }
    replace_json(directory / "tokenizer.json", tokenizer)
    settings = {f"{role}_token": f"<{role}>" for role in ("pad", "unk", "mask", "bos", "eos")}
    replace_json(directory / "tokenizer_config.json", settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
