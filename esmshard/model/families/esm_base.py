"""What all models that `transformers` calls `esm` have in common: ESM-2, ESM-1b, ESM-1v and SaProt.

Their blocks are those of ESM-2 (Lin et al. 2023, doi:10.1126/science.ade2574) over packed sequences, under fair-esm's
names; ESM-1b and ESM-1v have learned positions. Families differ in their vocabulary. No linear layer and no LayerNorm
sees padding. The reference for every number is fair-esm 2.0.0 (`esm/model/esm2.py`, `esm1.py`); `tests/parity/`
compares the two. The names of tensors in files follow `transformers`' own converter. `esmshard.batch` explains the
letters of tensor names.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.errors import InputError
from esmshard.files import replace_json
from esmshard.model.attention import OnAttention, SelfAttention, TrunkBlock
from esmshard.model.config import Matrix, ModelConfig
from esmshard.model.families.family import SIZES_OF_TRANSFORMERS, Family, Names, Piece, check_settings, renamed
from esmshard.model.trunk import ContactRegression, Trunk, embedding
from esmshard.vocab import EOS, PAD, VOCAB_SIZE

MASK_RATIO_TRAINED = 0.15 * 0.8
"""Share of tokens that were `<mask>` in pre-training. The embeddings are scaled as if the share were always this."""

TIED = "lm_head.weight"
"""The LM head's matrix: the same tensor as `embed_tokens.weight`, stored once."""


@dataclass(frozen=True, kw_only=True)
class EsmShape(ModelConfig):
    """The architecture of a model that `transformers` calls `esm`.

    Everything else (4 x feed-forward, exact gelu, LayerNorm before each part, eps 1e-5) is fixed.
    """

    vocabulary: ClassVar[tuple[str, ...]]
    """The tokens of the family, in the order of the rows of its embedding. `<pad>` is where it is in
    `esmshard.vocab`."""

    token_dropout: bool = True
    """Whether `<mask>` embeddings are set to zero and the others rescaled, as in training. All
    released models do this.
    """
    max_positions: int | None = None
    """Number of tokens that the table of learned positions covers (ESM-1b, ESM-1v: 1024); None for rotary positions
    (ESM-2, SaProt).
    """
    emb_layer_norm_before: bool = False
    """Whether a LayerNorm follows the embeddings, before the first layer."""

    @property
    def mask_row(self) -> int:
        """The row of `<mask>`."""
        return self.vocabulary.index("<mask>")

    @property
    def rotary(self) -> bool:
        """Whether positions are rotary (ESM-2, SaProt) instead of learned (ESM-1b, ESM-1v)."""
        return self.max_positions is None

    @property
    def position_rows(self) -> int:
        """Number of rows of the table of learned positions. fairseq counts positions from `<pad>`'s number + 1."""
        return (self.max_positions or 0) + PAD + 1

    @property
    def most_tokens(self) -> int | None:
        """Tokens that the learned positions cover; None for rotary positions."""
        return self.max_positions

    @property
    def n_logits(self) -> int:
        """The 33 tokens of `esmshard.vocab`."""
        return VOCAB_SIZE

    @property
    def ffn_width(self) -> int:
        """Four times the width of the model."""
        return 4 * self.dim

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Attention's four projections, and the two matrices of the feed-forward part."""
        d = self.dim
        return (*self.projections, Matrix("fc1", "fc1", d, 4 * d, "fc1"), Matrix("fc2", "fc2", 4 * d, d, "fc2"))


class TransformerLayer(TrunkBlock):
    """A pre-LayerNorm block. `final_layer_norm`, fair-esm's name, comes before the feed-forward part."""

    def __init__(self, dim: int, n_heads: int, *, rotary: bool = True) -> None:
        super().__init__()
        self.self_attn = SelfAttention(dim, n_heads, rotary=rotary)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(
        self, x_TD: torch.Tensor, batch: TokenBatch, layer: int = 0, on_attention: OnAttention | None = None
    ) -> torch.Tensor:
        """Map x [T, D] to [T, D]."""
        on_qk = partial(on_attention, layer) if on_attention is not None else None
        x_TD = x_TD + self.self_attn(self.self_attn_layer_norm(x_TD), batch, on_qk)
        h_TF = F.gelu(self.fc1(self.final_layer_norm(x_TD)))  # the exact erf form; the tanh form differs by 5e-4
        return x_TD + self.fc2(h_TF)  # type: ignore[no-any-return]


class LMHead(nn.Module):
    """The masked-language-model head. `weight` is the token embedding's matrix: one tensor under two names."""

    def __init__(self, dim: int, weight: torch.Tensor) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.layer_norm = nn.LayerNorm(dim)
        self.weight: torch.Tensor = weight
        self.bias = nn.Parameter(torch.zeros(len(weight)))

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        """Map x [P, D] to logits, one for each row of the embedding."""
        return F.linear(self.layer_norm(F.gelu(self.dense(x_PD))), self.weight, self.bias)


class EsmTrunk(Trunk):
    """A trunk of these blocks with its LM head and its contact regression."""

    tied: ClassVar[Mapping[str, str]] = {TIED: "embed_tokens.weight"}
    make_lm_head: ClassVar[type[LMHead]] = LMHead
    """The class of the LM head."""
    config: EsmShape
    lm_head: LMHead

    def __init__(self, config: EsmShape) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embedding(len(config.vocabulary), config.dim, padding_idx=PAD)
        if not config.rotary:
            self.embed_positions = embedding(config.position_rows, config.dim)
        if config.emb_layer_norm_before:
            self.emb_layer_norm_before = nn.LayerNorm(config.dim)
        self.layers = nn.ModuleList(
            TransformerLayer(config.dim, config.n_heads, rotary=config.rotary) for _ in range(config.n_layers)
        )
        self.contact_head = ContactRegression(config.n_maps)
        self.emb_layer_norm_after = nn.LayerNorm(config.dim)
        self.lm_head = self.make_lm_head(config.dim, self.embed_tokens.weight)

    def tie_weights(self) -> None:
        """Share the embedding's matrix with the LM head again."""
        self.lm_head.weight = self.embed_tokens.weight

    def rows(self, batch: TokenBatch) -> torch.Tensor:
        """Return the row of the embedding of each token, int64 [T]."""
        return batch.tokens_T

    def embed(self, batch: TokenBatch) -> torch.Tensor:
        """Compute the token embeddings [T, D]: token dropout, learned positions and LayerNorm, if the model has them.

        Raises:
            InputError: a sequence is longer than a model with learned positions allows.
        """
        rows_T = self.rows(batch)
        x_TD: torch.Tensor = self.embed_tokens(rows_T)
        if self.config.token_dropout:
            x_TD = _token_dropout(x_TD, rows_T == self.config.mask_row, batch)
        if self.config.max_positions is not None:
            if batch.max_seqlen > self.config.max_positions:
                n = batch.token_counts.index(batch.max_seqlen)
                raise InputError(
                    f"record {batch.record_ids[n]}: {batch.lengths[n]} residues; this model has learned positions for "
                    f"{self.config.max_positions - 2}; cut the sequence, or use an ESM-2"
                )
            x_TD = x_TD + self.embed_positions(batch.position_T + PAD + 1)
        if self.config.emb_layer_norm_before:
            x_TD = self.emb_layer_norm_before(x_TD)
        return x_TD

    def finish(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Apply `emb_layer_norm_after`."""
        return self.emb_layer_norm_after(x_TD)  # type: ignore[no-any-return]


def _token_dropout(x_TD: torch.Tensor, masked_T: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Set `<mask>` embeddings to zero and rescale the others. In evaluation too: without any `<mask>` they are
    multiplied by 0.88.

    The share of `<mask>` is counted per sequence, `<cls>` and `<eos>` included, never over the pack.
    """
    lengths_N = batch.cu_seqlens.diff().long()
    # Masked tokens of a sequence are a difference of running sums, which is exact in integers and needs no loop.
    running = F.pad(masked_T.long().cumsum(0), (1, 0))
    ratio_N = running[batch.cu_seqlens.long()].diff().float() / lengths_N
    scale_N = (1 - MASK_RATIO_TRAINED) / (1 - ratio_N)
    scale_T = torch.repeat_interleave(scale_N, lengths_N, output_size=batch.bounds[-1]).masked_fill(masked_T, 0.0)
    return x_TD * scale_T[:, None].to(x_TD.dtype)


class EsmFamily(Family):
    """A family whose directories `EsmForMaskedLM` of `transformers` reads."""

    config: ClassVar[type[EsmShape]]
    model_types = ("esm",)
    model_class = "EsmForMaskedLM"
    model_module = "transformers.models.esm.modeling_esm"
    prefix = "esm."
    names = Names(
        block="esm.encoder.layer.",
        in_block={
            "self_attn.q_proj": "attention.self.query",
            "self_attn.k_proj": "attention.self.key",
            "self_attn.v_proj": "attention.self.value",
            "self_attn.out_proj": "attention.output.dense",
            "self_attn.rot_emb": "attention.self.rotary_embeddings",
            "self_attn_layer_norm": "attention.LayerNorm",
            "fc1": "intermediate.dense",
            "fc2": "output.dense",
            "final_layer_norm": "LayerNorm",
        },
        others={
            "embed_tokens.weight": "esm.embeddings.word_embeddings.weight",
            "embed_positions.weight": "esm.embeddings.position_embeddings.weight",
            "emb_layer_norm_before.weight": "esm.embeddings.layer_norm.weight",
            "emb_layer_norm_before.bias": "esm.embeddings.layer_norm.bias",
            "emb_layer_norm_after.weight": "esm.encoder.emb_layer_norm_after.weight",
            "emb_layer_norm_after.bias": "esm.encoder.emb_layer_norm_after.bias",
            "contact_head.regression.weight": "esm.contact_head.regression.weight",
            "contact_head.regression.bias": "esm.contact_head.regression.bias",
            TIED: "lm_head.decoder.weight",
        },
    )

    def initial(self, config: EsmShape, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Draw a tensor of a new model.

        Linear layers are Xavier-uniform (q, k and v with gain 1/sqrt 2, as in fair-esm's attention). The embedding,
        whose matrix is the LM head's too, is normal with deviation 0.02, so that first logits are small, and so are
        learned positions.
        """
        if len(shape) == 1:
            return super().initial(config, name, shape, generator)
        if name.startswith("embed_"):
            table = 0.02 * torch.randn(shape, generator=generator)
            table[PAD] = 0.0
            return table
        gain = 1 / math.sqrt(2) if re.search(r"\.[qkv]_proj\.", name) else 1.0
        bound = gain * math.sqrt(6 / (shape[0] + shape[1]))
        return torch.rand(shape, generator=generator) * 2 * bound - bound

    def key(self, name: str) -> str:
        """Return the name in `EsmForMaskedLM` (in the layout that transformers 4 and 5 read). Its files hold rotary
        frequencies, too.
        """
        return self.names.theirs(name)

    def pieces(self, key: str, config: EsmShape) -> tuple[Piece, ...]:
        """Return our tensors in a `transformers` key; none for keys that this model does not use."""
        if not re.match(r"(esm|lm_head|head)\.", key):
            key = "esm." + key  # The key is from a bare EsmModel.
        # Released files hold these keys, and nothing uses them: `pooler` was never trained.
        if re.match(r"esm\.embeddings\.position_ids$|esm\.pooler\.", key):
            return ()
        if config.rotary and key == self.names.others["embed_positions.weight"]:
            return ()
        # transformers 5 writes LayerNorms under the names of old TensorFlow files.
        key = re.sub(r"(LayerNorm|layer_norm)\.gamma$", r"\1.weight", key)
        key = re.sub(r"(LayerNorm|layer_norm)\.beta$", r"\1.bias", key)
        # All layers share one table: at model level, or (transformers 5.23) under a literal `layer.*`.
        if re.search(r"(^esm\.|layer\.\*.*)rotary_embeddings\.inv_freq$", key):
            return tuple(Piece(f"layers.{n}.self_attn.rot_emb.inv_freq") for n in range(config.n_layers))
        return (Piece(self.names.ours(key)),)

    def write_config(self, config: EsmShape) -> dict[str, Any]:
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

    def read_config(self, raw: Mapping[str, Any]) -> EsmShape:
        """Return the architecture that a `config.json` describes."""
        if raw.get("is_folding_model"):
            raise ValueError("it is an ESMFold; only language models can be read")
        positions, rows = raw.get("position_embedding_type", "absolute"), raw.get("max_position_embeddings", 1026)
        if positions not in ("rotary", "absolute"):
            raise ValueError(f"position_embedding_type is {positions!r}")
        config = self.config(
            **renamed(raw, SIZES_OF_TRANSFORMERS),
            token_dropout=bool(raw.get("token_dropout", False)),
            max_positions=rows - PAD - 1 if positions == "absolute" else None,
            emb_layer_norm_before=bool(raw.get("emb_layer_norm_before")),
        )
        fixed = {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "intermediate_size": config.ffn_width}
        if config.token_dropout and raw.get("mask_token_id") is not None:
            fixed["mask_token_id"] = config.mask_row
        check_settings({"layer_norm_eps": 1e-12, "intermediate_size": None, **raw}, fixed)
        return config

    def write_tokenizer(self, directory: Path) -> None:
        """Write the files from which `transformers.AutoTokenizer` makes its EsmTokenizer."""
        special: dict[str, Any] = {f"{role}_token": f"<{role}>" for role in ("cls", "eos", "mask", "pad", "unk")}
        (directory / "vocab.txt").write_text("\n".join(self.config.vocabulary), encoding="utf-8")
        replace_json(directory / "special_tokens_map.json", special)
        replace_json(directory / "tokenizer_config.json", special | {"tokenizer_class": "EsmTokenizer"})
