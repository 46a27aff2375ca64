"""What models whose blocks are `esmshard.model.gated_layer.GatedLayer` have in common: ESM-C, ESM3 and AMPLIFY.

`AUTHORS` and `block_pieces` are the layout in which the authors of ESM-C and ESM3 published their models: queries, keys
and values are one tensor in these files, and so are gate and up.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.files import replace_json
from esmshard.model.config import Matrix, ModelConfig
from esmshard.model.families.family import Names, Piece
from esmshard.model.gated_layer import GatedLayer
from esmshard.model.trunk import ContactRegression, Trunk, embedding

ROWS = 64
"""Rows of the embedding and columns of the logits of ESM-C and ESM3. The first 33 are tokens, the others have no
meaning."""

HEAD = 64
"""Width of an attention head in every published ESM-C and ESM3. Tensors alone do not tell it."""


@dataclass(frozen=True, kw_only=True)
class GatedConfig(ModelConfig):
    """The architecture of an ESM-C, or of the trunk of an ESM3; other families override what differs.

    Everything else (vocabulary, QK LayerNorm, rotary positions of base 10000, eps 1e-5, the divisor of the branches) is
    fixed.
    """

    gated: ClassVar[bool] = True
    qk_norm: ClassVar[bool] = True
    chain_break: ClassVar[bool] = True
    """`|` is a token. ESM-C was never trained on it, by its authors' own words (Biohub/esm#166)."""

    ffn: int | None = None
    """Width of the feed-forward part; None for the width of all released models, which follows from the model's."""

    @property
    def n_logits(self) -> int:
        """All rows of the embedding. The loss of the authors is over all of them."""
        return ROWS

    @property
    def ffn_width(self) -> int:
        """Width of gate and up: 8/3 of the model's width, up to a multiple of 256, in all released models."""
        return (8 * self.dim // 3 + 255) // 256 * 256 if self.ffn is None else self.ffn

    @property
    def branch_scale(self) -> float:
        """Factor of what attention and feed-forward part add: 1 / sqrt(layers / 36)."""
        return float((36 / self.n_layers) ** 0.5)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Attention's four projections; gate and up, which are both `fc1`; and down."""
        d, f = self.dim, self.ffn_width
        gate_up = (Matrix("fc1", "gate", d, f, "fc1"), Matrix("fc1", "up", d, f, "fc1"))
        return (*self.projections, *gate_up, Matrix("fc2", "down", f, d, "fc2"))


class GatedTrunk(Trunk):
    """A token embedding, gated blocks, a norm, an LM head, and a contact regression, which no released file has.

    Args:
        config: the architecture.
        rows: rows of the token embedding.
        last_norm: the norm after the blocks.
        lm_head: the LM head.
        block: further arguments of `GatedLayer`.
    """

    config: GatedConfig

    def __init__(self, config: GatedConfig, rows: int, last_norm: nn.Module, lm_head: nn.Module, **block: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embedding(rows, config.dim)
        block |= {"qk_norm": config.qk_norm, "branch_scale": config.branch_scale}
        self.layers = nn.ModuleList(
            GatedLayer(config.dim, config.n_heads, config.ffn_width, **block) for _ in range(config.n_layers)
        )
        self.contact_head = ContactRegression(config.n_maps)
        self.layer_norm_after = last_norm
        self.lm_head = lm_head

    def embed(self, batch: TokenBatch) -> torch.Tensor:
        """Look up the token embeddings [T, D]. `<mask>` has a learned row, and nothing is scaled."""
        return self.embed_tokens(batch.tokens_T)  # type: ignore[no-any-return]

    def finish(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Apply the last norm."""
        return self.layer_norm_after(x_TD)  # type: ignore[no-any-return]


AUTHORS = Names(
    block="transformer.blocks.",
    in_block={
        "self_attn_layer_norm": "attn.layernorm_qkv.0",
        "self_attn.q_norm": "attn.q_ln",
        "self_attn.k_norm": "attn.k_ln",
        "self_attn.out_proj": "attn.out_proj",
        "final_layer_norm": "ffn.0",
        "down": "ffn.3",
    },
    others={"layer_norm_after.weight": "transformer.norm.weight"},
)
"""The names of 2024-12, but for the joined tensors and those that differ between ESM-C and ESM3."""

LM_HEAD = {"0": "dense", "2": "layer_norm", "3": "decoder"}
"""Our names of the parts of an LM head, by their place in the authors' `nn.Sequential`."""

JOINED = {
    "attn.layernorm_qkv.1.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "ffn.1.weight": ("gate.weight", "up.weight"),
}
"""The tensors of a block that are several of ours, of the same size and one below the other."""

_OF_2026 = {
    "layernorm_qkv.layer_norm_": "layernorm_qkv.0.",
    "layernorm_qkv.weight": "layernorm_qkv.1.weight",
    "ffn.layer_norm_": "ffn.0.",
    "ffn.fc1_weight": "ffn.1.weight",
    "ffn.fc2_weight": "ffn.3.weight",
}
"""What the names of 2026-05 were in 2024-12."""


def authors_pieces(key: str, config: GatedConfig) -> tuple[Piece, ...]:
    """Return our tensors in a key of a file of the authors. An unknown key is returned as it is."""
    for new, old in _OF_2026.items():
        key = key.replace(new, old)
    match = re.fullmatch(r"transformer\.blocks\.(\d+)\.(.+)", key)
    if match and match[2] in JOINED:
        rows = config.dim if "qkv" in key else config.ffn_width
        return tuple(
            Piece(f"layers.{match[1]}.{name}", slice(n * rows, (n + 1) * rows))
            for n, name in enumerate(JOINED[match[2]])
        )
    return (Piece(AUTHORS.ours(key)),)


def authors_sizes(keys: Iterable[str], table: str, shape: Sequence[int]) -> dict[str, Any]:
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


def write_tokenizer(
    directory: Path,
    vocabulary: Sequence[str],
    special: Iterable[str],
    pair: Iterable[str],
    settings: Mapping[str, str],
) -> None:
    """Write the files from which `transformers.AutoTokenizer` makes a tokenizer of single letters.

    Args:
        directory: where to write them.
        vocabulary: the tokens in the order of their rows.
        special: those that stand for no residue.
        pair: what two sequences become: tokens, and the sequences A and B.
        settings: the content of `tokenizer_config.json`, with the tokens before and after a sequence.
    """
    rows = {name: n for n, name in enumerate(vocabulary)}
    ends = [settings[f"{role}_token"] for role in ("bos", "eos")]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)

    def template(parts: Iterable[str]) -> list[dict[str, Any]]:
        return [
            {"Sequence": {"id": part, "type_id": "AB".index(part)}}
            if part in "AB"
            else {"SpecialToken": {"id": part, "type_id": 0}}
            for part in parts
        ]

    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": rows[name], "content": name, **flags, "special": True} for name in special],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template([ends[0], "A", ends[1]]),
            "pair": template(pair),
            "special_tokens": {name: {"id": name, "ids": [rows[name]], "tokens": [name]} for name in ends},
        },
        "decoder": None,
        "model": {"type": "BPE", "unk_token": "<unk>", "vocab": rows, "merges": []},
    }
    replace_json(directory / "tokenizer.json", tokenizer)
    replace_json(directory / "tokenizer_config.json", dict(settings))
