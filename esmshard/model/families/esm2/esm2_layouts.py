"""Names and settings of the family ESM-2 in the files of fair-esm, whose names are ours. No torch."""

import argparse
import re
from collections.abc import Mapping
from typing import Any

from esmshard.model.families.esm2.esm2_config import EsmConfig


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
