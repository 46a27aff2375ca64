"""Defines the encoders of ProtT5, ProstT5, Ankh and Ankh 3 for packed sequences, and their file format.

All outputs must equal the outputs of `T5EncoderModel` of `transformers` 5.24. `tests/parity/` compares the outputs.
T5 (Raffel et al. 2020, JMLR 21:140) has RMSNorm, no biases in linear layers, attention scores that are not divided by
sqrt(K), and a learned bias for the distance between two tokens in place of position embeddings. The decoders of these
models are not read, so there is no LM head. `esmshard.batch` explains the letters of tensor names.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.model.attention import OnAttention, SelfAttention, TrunkBlock, distance_bias
from esmshard.model.config import ModelConfig
from esmshard.model.families.esmc import RMSNorm, gated
from esmshard.model.families.family import Family, Names, Piece, Released, check_settings, renamed
from esmshard.model.families.saprot import STRUCTURE
from esmshard.model.trunk import Trunk, embedding
from esmshard.model.weight_reader import tokenizer_rows
from esmshard.vocab import CLS, RESIDUES, STANDARD, TOKENS, Track

TOKENS_OF_T5 = ("<pad>", "</s>", "<unk>", *"ALGVSREDTIPKFQNYMHWCXBOUZ")
"""The first tokens of ProtT5, ProstT5 and Ankh, in the order of the embedding's rows (`spiece.model`, and Ankh's
`tokenizer.json`). Sentinels such as `<extra_id_0>` follow; esmshard does not use them."""

LETTERS = replace(STRUCTURE, replaces_residues=True)
"""The track of ProstT5, which reads either the amino acids or the structure letters of a protein."""
BEFORE_LETTERS = "<fold2AA>"
"""The token that the authors of ProstT5 put before structure letters."""

FIRST = TOKENS.index("L")
"""The first token of `esmshard.vocab` that is a residue. All tokens of residues follow each other."""
FARTHEST = 128
"""The distance from which on all distances have the same bias."""


class Vocabulary(NamedTuple):
    """The differences between the vocabularies of these models."""

    title: str
    prefix: str | None
    """The token that the authors put before amino acids, in the place of `<cls>`; None if they put none there. Then no
    token may attend to `<cls>`."""
    rare_as_x: bool
    """Whether U, Z, O and B are read as X, as the authors ask."""


VOCABULARIES = {
    128: Vocabulary("ProtT5", None, rare_as_x=True),
    144: Vocabulary("Ankh", None, rare_as_x=False),
    150: Vocabulary("ProstT5", "<AA2fold>", rare_as_x=True),
    256: Vocabulary("Ankh 3", "[NLU]", rare_as_x=False),
}
"""The vocabularies by the number of the embedding's rows."""
ROWS = {token: row for row, token in enumerate(TOKENS_OF_T5)}
"""The rows of the tokens in ProtT5 and Ankh."""
MADE_UP = ROWS | {token: row for row, token in enumerate((*STRUCTURE.letters, BEFORE_LETTERS, "<AA2fold>"), 128)}
MADE_UP |= {"[NLU]": 255}
"""The rows of the tokens in new random models with the vocabulary of ProstT5 or Ankh 3."""


@dataclass(frozen=True, kw_only=True)
class T5Config(ModelConfig):
    """The architecture of a T5 encoder."""

    family: ClassVar[str] = "t5"
    only_represents: ClassVar[bool] = True
    distance_bias: ClassVar[bool] = True

    head_width: int
    """The width K of an attention head. `n_heads * head_width` may differ from `dim`."""
    ffn: int
    """The width F of the feed-forward part."""
    feed_forward: str = "relu"
    """The feed-forward part: `relu`, `gated-gelu` or `gated-silu`."""
    buckets: int = 32
    """The number of groups of distances. All distances in a group have the same bias."""
    rows: int = 128
    """The number of the embedding's rows, a key of `VOCABULARIES`."""
    token_rows: Mapping[str, int] | None = field(default=None, compare=False)
    """The rows of all tokens in ProstT5 and Ankh 3 (see `T5Family.read_tokens`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if None in (self.head_width, self.ffn):
            raise ValueError("d_kv and d_ff must be positive whole numbers, not None")
        if self.feed_forward not in ("relu", "gated-gelu", "gated-silu"):
            raise ValueError(f"feed_forward_proj is {self.feed_forward!r}, not relu, gated-gelu or gated-silu")
        if type(self.buckets) is not int or self.buckets < 4 or self.buckets % 4:
            raise ValueError(f"relative_attention_num_buckets is {self.buckets!r}, and must be a multiple of 4")
        if self.rows not in VOCABULARIES:
            known = ", ".join(f"{rows} ({vocabulary.title})" for rows, vocabulary in VOCABULARIES.items())
            raise ValueError(f"vocab_size is {self.rows!r}, and must be one of {known}")

    @property
    def gated(self) -> bool:  # type: ignore[override]
        return self.feed_forward.startswith("gated")

    @property
    def relu(self) -> bool:
        return not self.gated

    @property
    def has_cls(self) -> bool:
        return VOCABULARIES[self.rows].prefix is not None

    @property
    def head_dim(self) -> int:
        return self.head_width

    @property
    def n_logits(self) -> int:
        return 0

    @property
    def ffn_width(self) -> int:
        return self.ffn

    @property
    def rows_in_order(self) -> list[int]:
        """The row of the embedding for each token of `esmshard.vocab`, and then, for ProstT5, for each structure
        letter, for an unknown letter (X) and for `BEFORE_LETTERS`. Gaps and `<mask>` are read as `<unk>`.
        """
        row, (_, prefix, rare_as_x) = self.token_rows or MADE_UP, VOCABULARIES[self.rows]
        names = {"<cls>": prefix or "<pad>", "<eos>": "</s>"} | (dict.fromkeys("UZOB", "X") if rare_as_x else {})
        known = [row.get(names.get(token, token), row["<unk>"]) for token in TOKENS]
        letters = [*STRUCTURE.letters, "X", BEFORE_LETTERS] if LETTERS in FAMILY.tracks_of(self) else []
        return known + [row[letter] for letter in letters]


class T5Layer(TrunkBlock):
    """A block of attention and a feed-forward part, with an RMSNorm before each of them."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        d, f = config.dim, config.ffn
        linear = partial(nn.Linear, bias=False)
        self.self_attn_layer_norm = RMSNorm(d, eps=1e-6)
        self.self_attn = SelfAttention(d, config.n_heads, rotary=False, bias=False, head_dim=config.head_width)
        self.final_layer_norm = RMSNorm(d, eps=1e-6)
        if config.gated:
            self.gate, self.up = linear(d, f), linear(d, f)
        else:
            self.fc1 = linear(d, f)
        self.fc2 = linear(f, d)
        self.activation: Any = config.feed_forward.removeprefix("gated-")

    def forward(
        self, x_TD: torch.Tensor, batch: TokenBatch, layer: int = 0, on_attention: OnAttention | None = None
    ) -> torch.Tensor:
        """Map x [T, D] to [T, D]. The batch has a `distance_bias`. `on_attention` is not used."""
        x_TD = x_TD + self.self_attn(self.self_attn_layer_norm(x_TD), batch)
        y_TD = self.final_layer_norm(x_TD)
        if self.activation == "relu":
            return x_TD + self.fc2(F.relu(self.fc1(y_TD)))  # type: ignore[no-any-return]
        return x_TD + self.fc2(gated(self.gate(y_TD), self.up(y_TD), self.activation))  # type: ignore[no-any-return]


class T5Encoder(Trunk):
    """The encoder of a T5 model."""

    never_learns = ()
    config: T5Config

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embedding(config.rows, config.dim)
        self.distance_bias = embedding(config.buckets, config.n_heads)
        self.layers = nn.ModuleList(T5Layer(config) for _ in range(config.n_layers))
        self.norm_after = RMSNorm(config.dim, eps=1e-6)

    def embed(self, batch: TokenBatch) -> torch.Tensor:
        index_T, letter_T = batch.tokens_T, batch.tracks.get(LETTERS.name)
        if letter_T is not None:
            # A protein of which no structure letter is known is read as amino acids.
            bounds = zip(batch.bounds, batch.bounds[1:], strict=False)
            known_N = torch.stack([(letter_T[start:end] != LETTERS.unknown).any() for start, end in bounds])
            known_T = known_N.repeat_interleave(batch.cu_seqlens.diff().long(), output_size=len(letter_T))
            is_residue_T = (index_T >= FIRST) & (index_T < FIRST + len(RESIDUES))
            index_T = torch.where(known_T & is_residue_T, len(TOKENS) + letter_T.long(), index_T)
            index_T = torch.where(known_T & (index_T == CLS), len(TOKENS) + len(LETTERS.letters) + 1, index_T)
        # A table from tokens to rows would need a buffer, so the rows of the embedding are reordered instead.
        rows = self.embed_tokens.weight.split(1)  # type: ignore[no-untyped-call]
        return F.embedding(index_T, torch.cat([rows[row] for row in self.config.rows_in_order]))

    def for_blocks(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with the bias of each distance, which all blocks share."""
        bucket_E = buckets(torch.arange(-FARTHEST, FARTHEST + 1), self.config.buckets)
        bias_EH = self.distance_bias.weight[bucket_E.to(batch.tokens_T.device)]
        config = self.config
        return replace(
            batch, distance_bias=distance_bias(bias_EH, batch, config.head_dim, hides_first=not config.has_cls)
        )

    def finish(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.norm_after(x_TD)  # type: ignore[no-any-return]


def buckets(distance_E: torch.Tensor, n_buckets: int) -> torch.Tensor:
    """Return the bucket of each distance (the position of the key minus the position of the query), int64 [E].

    Keys before and after the query have one half of the buckets each. In each half, the first half is for single
    distances, and the other half for ranges up to `FARTHEST` whose lengths grow exponentially.
    """
    half, exact = n_buckets // 2, n_buckets // 4
    far_E = distance_E.abs().clamp(min=1).float() / exact
    range_E = exact + (torch.log(far_E) / math.log(FARTHEST / exact) * (half - exact)).long()
    near_E = distance_E.abs()
    return torch.where(near_E < exact, near_E, range_E.clamp(max=half - 1)) + half * (distance_E > 0)


_XL = T5Config(n_layers=24, dim=1024, n_heads=32, head_width=128, ffn=16384)
_ANKH = partial(T5Config, n_layers=48, head_width=64, feed_forward="gated-gelu", buckets=64, rows=144)
_KEYS = {
    "n_layers": "num_layers",
    "dim": "d_model",
    "n_heads": "num_heads",
    "head_width": "d_kv",
    "ffn": "d_ff",
    "rows": "vocab_size",
}
"""esmshard's names of a model's sizes, mapped to the names in `config.json`."""
_FIXED = {"layer_norm_epsilon": 1e-6, "relative_attention_max_distance": FARTHEST, "pad_token_id": 0, "eos_token_id": 1}
_ELNAGGAR = "Elnaggar et al. 2022, IEEE TPAMI 44:7112, doi:10.1109/TPAMI.2021.3095381"
_HEINZINGER = "Heinzinger et al. 2024, NAR Genomics and Bioinformatics 6:lqae150, doi:10.1093/nargab/lqae150"
_ANKH_1, _ANKH_3 = "Elnaggar et al. 2023, arXiv:2301.06568", "Alsamkary et al. 2025, arXiv:2505.20052"


class T5Family(Family):
    """Describes the encoders of ProtT5, ProstT5, Ankh and Ankh 3."""

    title = "ProtT5, ProstT5 and Ankh"
    config = T5Config
    trunk = T5Encoder
    sizes: ClassVar[Mapping[str, ModelConfig]] = {
        # For tests and for training from scratch on a laptop; no released model has these names.
        "t5_nano": T5Config(n_layers=2, dim=32, n_heads=4, head_width=16, ffn=64),
        "t5_mini": T5Config(n_layers=6, dim=128, n_heads=8, head_width=32, ffn=512),
        "ankh_mini": _ANKH(n_layers=6, dim=128, n_heads=8, head_width=16, ffn=320),
        "prot_t5_xl": _XL,
        "prost_t5": replace(_XL, rows=150),
        "ankh_base": _ANKH(dim=768, n_heads=12, ffn=3072),
        "ankh_large": _ANKH(dim=1536, n_heads=16, ffn=3840),
        "ankh3_large": _ANKH(dim=1536, n_heads=16, ffn=3840, feed_forward="gated-silu", rows=256),
    }
    released: ClassVar[Mapping[str, Released]] = {
        # The model card of ProtT5 names no licence; this is the licence in the README of ProtTrans.
        "prot_t5_xl": Released("Rostlab/prot_t5_xl_half_uniref50-enc", "afl-3.0", "Rostlab", _ELNAGGAR),
        "prost_t5": Released("Rostlab/ProstT5", "mit", "Michael Heinzinger", _HEINZINGER),
        **{
            name.replace("-", "_"): Released(f"ElnaggarLab/{name}", "cc-by-nc-sa-4.0", "the authors of Ankh", paper)
            for name, paper in {"ankh-base": _ANKH_1, "ankh-large": _ANKH_1, "ankh3-large": _ANKH_3}.items()
        },
    }
    paper = _ELNAGGAR
    window = 511  # and </s>
    model_types = ("t5",)
    model_class = "T5EncoderModel"
    names = Names(
        block="encoder.block.",
        in_block={
            **{f"self_attn.{name}_proj": f"layer.0.SelfAttention.{name}" for name in "qkv"},
            "self_attn.out_proj": "layer.0.SelfAttention.o",
            "self_attn_layer_norm": "layer.0.layer_norm",
            "fc1": "layer.1.DenseReluDense.wi",
            "gate": "layer.1.DenseReluDense.wi_0",
            "up": "layer.1.DenseReluDense.wi_1",
            "fc2": "layer.1.DenseReluDense.wo",
            "final_layer_norm": "layer.1.layer_norm",
        },
        others={
            "embed_tokens.": "shared.",
            "distance_bias.": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.",
            "norm_after.": "encoder.final_layer_norm.",
        },
    )

    def initial(self, config: T5Config, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Return initial values of the tensor `name`, as in `transformers` with `initializer_factor` 1."""
        if len(shape) == 1:
            return super().initial(config, name, shape, generator)
        inverse = 1 if name.startswith("embed_tokens") else config.dim if name.startswith("distance_bias") else shape[1]
        if "q_proj" in name:
            inverse *= config.head_width
        return torch.randn(shape, generator=generator) / math.sqrt(inverse)

    def pieces(self, key: str, config: T5Config) -> tuple[Piece, ...]:
        if re.match(r"(decoder|lm_head)\.", key):
            return ()
        if key == "encoder.embed_tokens.weight":  # the same tensor as `shared.weight`
            return (Piece("embed_tokens.weight"),)
        return (Piece(self.names.ours(key)),)

    def read_config(self, raw: Mapping[str, Any]) -> T5Config:
        check_settings(raw, _FIXED)
        more = {"buckets": "relative_attention_num_buckets", "feed_forward": "feed_forward_proj"}
        given = {ours: raw[key] for ours, key in more.items() if key in raw}
        return T5Config(**renamed(raw, _KEYS), **given, token_rows=raw.get("token_rows"))

    def read_tokens(self, config: T5Config, directory: Path) -> T5Config:
        """Return the architecture with the rows of its tokens: the rows in `config.json`, if esmshard wrote this file,
        and otherwise those in the authors' `tokenizer.json` and `added_tokens.json`. Raises `ValueError` if the row of
        a token is unknown without which the model cannot be used.
        """
        prefix = VOCABULARIES[config.rows].prefix
        if prefix is None or config.token_rows:
            return config
        added = {BEFORE_LETTERS, *STRUCTURE.letters} if LETTERS in self.tracks_of(config) else set()
        known = tokenizer_rows(directory)
        row = (ROWS if added else {}) | {token: known[token] for token in {*ROWS, prefix, *added} & known.keys()}
        if missing := sorted({"<pad>", "</s>", "<unk>", "X", *STANDARD, prefix, *added} - row.keys()):
            files = f"{directory / 'tokenizer.json'} and added_tokens.json"
            raise ValueError(f"{files} have no row of {', '.join(missing)}; download both, too")
        if wrong := [token for token, number in row.items() if not 0 <= number < config.rows]:
            raise ValueError(f"{wrong[0]} has row {row[wrong[0]]} of an embedding with {config.rows} rows")
        return replace(config, token_rows=row)

    def tracks_of(self, config: T5Config) -> tuple[Track, ...]:
        return (LETTERS,) if VOCABULARIES[config.rows].title == "ProstT5" else ()

    def write_config(self, config: T5Config) -> dict[str, Any]:
        sizes = {key: getattr(config, ours) for ours, key in _KEYS.items()}
        return (
            _FIXED
            | sizes
            | {
                "architectures": ["T5EncoderModel"],
                "feed_forward_proj": config.feed_forward,
                "is_encoder_decoder": False,
                "model_type": "t5",
                "relative_attention_num_buckets": config.buckets,
                "use_cache": False,
            }
            | ({"token_rows": config.token_rows or MADE_UP} if config.has_cls else {})
        )


FAMILY = T5Family()
