"""Defines the model family AMPLIFY for packed sequences, and its file format.

All outputs must equal the outputs of the authors' code (https://github.com/chandar-lab/AMPLIFY, commit 2fd2c08).
`tests/parity/` compares the outputs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.model.config import ModelConfig
from esmshard.model.families.esmc import ESMC, EsmcConfig, RMSNorm, write_tokenizer
from esmshard.model.families.family import SIZE_KEYS, Family, Names, Piece, Released, check_settings, renamed
from esmshard.model.trunk import ABSENT, embedding
from esmshard.vocab import TOKENS, VOCAB_SIZE

VOCABULARY = ("<pad>", "<unk>", "<mask>", "<bos>", "<eos>", "|", *"LAGVSERTIDPKQNFYMHWCB")
"""AMPLIFY's tokens, in the order of the embedding's rows (`conf/tokenizer/amplify_vocab.txt`)."""

_RENAMED = {"<cls>": "<bos>", "<null_1>": "|"}
"""The tokens of `esmshard.vocab` that have another name in AMPLIFY, mapped to AMPLIFY's name."""

ROWS: tuple[int | None, ...] = tuple(
    VOCABULARY.index(name) if (name := _RENAMED.get(token, token)) in VOCABULARY else None for token in TOKENS
)
"""The row of AMPLIFY's embedding for each token of `esmshard.vocab`; None for X, U, Z, O and gaps, which AMPLIFY reads
as `<unk>`."""

CODE = "chandar-lab/AMPLIFY_350M--amplify"
"""The hub repository and the module with the authors' code, for `auto_map` in `config.json`."""


@dataclass(frozen=True, kw_only=True)
class AmplifyConfig(EsmcConfig):
    """The architecture of an AMPLIFY model: RMSNorm with eps 1e-5, interleaved rotary positions, and no biases."""

    family: ClassVar[str] = "amplify"
    qk_norm: ClassVar[bool] = False
    chain_break: ClassVar[bool] = False

    @property
    def n_logits(self) -> int:
        return VOCAB_SIZE

    @property
    def ffn_width(self) -> int:
        """The width F of the feed-forward part; in released models 8/3 D, rounded up to a multiple of 8."""
        return (8 * self.dim // 3 + 7) // 8 * 8 if self.ffn is None else self.ffn

    @property
    def branch_scale(self) -> float:
        return 1.0


class AmplifyHead(nn.Module):
    """The LM head of AMPLIFY, a linear layer. The logits have the order of `esmshard.vocab`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.decoder = nn.Linear(dim, len(VOCABULARY))

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        """Map x [P, D] to logits [P, 33], with `ABSENT` for the tokens that AMPLIFY lacks."""
        logits = self.decoder(x_PD)
        columns, absent = logits.split(1, dim=1), torch.full_like(logits[:, :1], ABSENT)
        return torch.cat([absent if row is None else columns[row] for row in ROWS], dim=1)


class Amplify(ESMC):
    """The AMPLIFY language model with its LM head."""

    def __init__(self, config: AmplifyConfig) -> None:
        norm = partial(RMSNorm, eps=1e-5)
        super().__init__(config, norm, interleaved=True)
        self.embed_tokens = embedding(len(VOCABULARY), config.dim)
        self.layer_norm_after = norm(config.dim)
        self.lm_head = AmplifyHead(config.dim)

    def embed(self, batch: TokenBatch) -> torch.Tensor:
        # A table from tokens to rows would need a buffer, so the rows of the embedding are reordered instead.
        rows, unknown = self.embed_tokens.weight.split(1), VOCABULARY.index("<unk>")  # type: ignore[no-untyped-call]
        table = torch.cat([rows[unknown if row is None else row] for row in ROWS])
        return F.embedding(batch.tokens_T, table)


_M120 = AmplifyConfig(n_layers=24, dim=640, n_heads=10)
_M350 = AmplifyConfig(n_layers=32, dim=960, n_heads=15)
_FOURNIER = "Fournier et al. 2024, bioRxiv, doi:10.1101/2024.09.23.614603"
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
"""The settings that all released AMPLIFY models share. They are also the defaults in the authors' code."""


class AmplifyFamily(Family):
    """Describes all AMPLIFY models."""

    title = "AMPLIFY"
    config = AmplifyConfig
    trunk = Amplify
    sizes: ClassVar[Mapping[str, ModelConfig]] = {
        # For tests and for training from scratch on a laptop; no released model has these names.
        "amplify_nano": AmplifyConfig(n_layers=2, dim=32, n_heads=4),
        "amplify_mini": AmplifyConfig(n_layers=6, dim=128, n_heads=8),
        "amplify_120m": _M120,
        "amplify_350m": _M350,
        # These models had only the first training stage, with at most 512 tokens per protein.
        "amplify_120m_base": replace(_M120, window=510),
        "amplify_350m_base": replace(_M350, window=510),
    }
    released: ClassVar[Mapping[str, Released]] = {
        f"amplify_{size.lower()}": Released(f"chandar-lab/AMPLIFY_{size}", "mit", "chandar-lab", _FOURNIER)
        for size in ("120M", "350M", "120M_base", "350M_base")
    }
    paper = _FOURNIER
    window = 2046
    model_types = ("AMPLIFY",)
    model_class = "AutoModel"
    remote_code = True
    names = Names(
        block="transformer_encoder.",
        in_block={
            "self_attn.q_proj": "q",
            "self_attn.k_proj": "k",
            "self_attn.v_proj": "v",
            "self_attn.out_proj": "wo",
            "self_attn_layer_norm": "attention_norm",
            "final_layer_norm": "ffn_norm",
            "gate": "ffn.w12",
            "up": "ffn.w12",
            "fc2": "ffn.w3",
        },
        others={
            "embed_tokens.": "encoder.",
            "layer_norm_after.": "layer_norm_2.",
            "lm_head.decoder.": "decoder.",
        },
    )

    def initial(self, config: AmplifyConfig, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Return initial values of the tensor `name`: matrices uniform from -0.02 to 0.02, as in the authors' code."""
        if len(shape) == 1:
            return super().initial(config, name, shape, generator)
        return 0.04 * torch.rand(shape, generator=generator) - 0.02

    def pieces(self, key: str, config: AmplifyConfig) -> tuple[Piece, ...]:
        if match := re.fullmatch(r"transformer_encoder\.(\d+)\.ffn\.w12\.weight", key):
            f, layer = config.ffn_width, f"layers.{match[1]}"
            return Piece(f"{layer}.gate.weight", slice(0, f)), Piece(f"{layer}.up.weight", slice(f, 2 * f))
        return (Piece(self.names.ours(key)),)

    def read_config(self, raw: Mapping[str, Any]) -> AmplifyConfig:
        fixed = _FIXED | {"hidden_act": "swiglu"}
        check_settings({**raw, "hidden_act": str(raw.get("hidden_act", "swiglu")).lower()}, fixed)
        config = AmplifyConfig(**renamed(raw, SIZE_KEYS))
        width = raw.get("intermediate_size")
        if not isinstance(width, int):
            raise ValueError(f"intermediate_size is {width!r}, and must be a positive whole number")
        ffn = (2 * width // 3 + 7) // 8 * 8  # as in the authors' code
        return config if ffn == config.ffn_width else replace(config, ffn=ffn)

    def write_config(self, config: AmplifyConfig) -> dict[str, Any]:
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
            "intermediate_size": 4 * config.dim if config.ffn is None else 3 * config.ffn // 2,
            "mask_token_id": VOCABULARY.index("<mask>"),
            "max_length": 2048,
            "model_type": "AMPLIFY",
            "num_attention_heads": config.n_heads,
            "num_hidden_layers": config.n_layers,
            "unk_token_id": VOCABULARY.index("<unk>"),
        }

    def write_tokenizer(self, directory: Path) -> None:
        roles = {role: f"<{role}>" for role in ("pad", "unk", "mask", "bos", "eos")}
        write_tokenizer(directory, VOCABULARY, roles, "PreTrainedTokenizerFast")


FAMILY = AmplifyFamily()
