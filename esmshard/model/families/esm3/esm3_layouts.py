"""Names of the tensors of an ESM3 in its authors' file, and the directories that only esmshard reads.

`transformers` has no ESM3. A fine-tuned one is therefore written under our own names, with a `config.json` whose
`model_type` is `esm3`: esmshard reads such a directory, and nothing else does. For the authors' code,
`esmshard.model.families.esm3.esm3_pickle` writes their file.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from esmshard.model.families.authors_blocks import BLOCK, GATE_UP, LM_HEAD, QKV, block_pieces
from esmshard.model.families.esm3.esm3_config import Esm3Config
from esmshard.model.families.family import Piece

_GEOMETRIC = "transformer.blocks.0.geom_attn."
_TOP = {"embed_tokens.weight": "encoder.sequence_embed.weight", "layer_norm_after.weight": "transformer.norm.weight"}
_TOP_BACK = {theirs: ours for ours, theirs in _TOP.items()}
_HEAD_BACK = {ours: n for n, ours in LM_HEAD.items()}


def pieces(key: str, config: Esm3Config) -> tuple[Piece, ...]:
    """Return our tensors in a key of the authors' file, or in one of our own. An unknown key is returned as it is."""
    if key in _TOP_BACK:
        return (Piece(_TOP_BACK[key]),)
    if key.startswith(_GEOMETRIC):
        return (Piece("geom_attn." + key.removeprefix(_GEOMETRIC)),)
    if match := re.fullmatch(r"transformer\.blocks\.(\d+)\.(.+)", key):
        return tuple(block_pieces(f"layers.{match[1]}", match[2], config)) or (Piece(key),)
    if match := re.fullmatch(r"output_heads\.(\w+)\.([023])\.(weight|bias)", key):
        head = "lm_head" if match[1] == "sequence_head" else f"other_heads.{match[1]}"
        return (Piece(f"{head}.{LM_HEAD[match[2]]}.{match[3]}"),)
    if key.startswith("encoder."):
        return (Piece("other_tracks." + key.removeprefix("encoder.")),)
    return (Piece(key),)


def authors_key(name: str) -> str:
    """Return the key in the authors' file of one of our tensors that is not part of a joined one."""
    if name in _TOP:
        return _TOP[name]
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        return f"transformer.blocks.{match[1]}.{BLOCK[match[2]]}"
    if match := re.fullmatch(r"(?:lm_head|other_heads\.(\w+))\.(\w+)\.(weight|bias)", name):
        return f"output_heads.{match[1] or 'sequence_head'}.{_HEAD_BACK[match[2]]}.{match[3]}"
    if name.startswith("geom_attn."):
        return _GEOMETRIC + name.removeprefix("geom_attn.")
    return "encoder." + name.removeprefix("other_tracks.")


def joined(config: Esm3Config) -> dict[str, tuple[str, ...]]:
    """Return the names of our tensors that the authors' file joins along the rows, by its key."""

    def of_layer(n: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield f"transformer.blocks.{n}.{QKV}", tuple(f"layers.{n}.self_attn.{name}_proj.weight" for name in "qkv")
        yield f"transformer.blocks.{n}.{GATE_UP}", (f"layers.{n}.gate.weight", f"layers.{n}.up.weight")

    return dict(pair for n in range(config.n_layers) for pair in of_layer(n))


def own_key(name: str) -> str | None:
    """Return the key in our own directory: the name; None for rotary frequencies, which are computed."""
    return None if name.endswith("inv_freq") else name


def own_config(config: Esm3Config) -> dict[str, Any]:
    """Return the content of the `config.json` in our own directory."""
    return {"model_type": "esm3", **config.sizes}


def config_of_own(raw: Mapping[str, Any]) -> Esm3Config:
    """Return the architecture that `own_config` wrote.

    Raises:
        ValueError: a size is missing or cannot be right.
    """
    if missing := [name for name in ("n_layers", "dim", "n_heads", "v_heads") if name not in raw]:
        raise ValueError(f"{missing[0]} is missing, which the config.json that esmshard writes for an ESM3 has")
    ffn = raw.get("ffn")
    if ffn is not None and (isinstance(ffn, bool) or not isinstance(ffn, int) or ffn < 1):
        raise ValueError(f"ffn is {ffn!r} and not a positive whole number")
    return Esm3Config(**{name: raw[name] for name in ("n_layers", "dim", "n_heads", "v_heads")}, ffn=ffn)


def write_no_tokenizer(directory: Path) -> None:
    """Write nothing, since `transformers` has no tokenizer of ESM3."""
