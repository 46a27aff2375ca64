"""The blocks of ESM-2 (Lin et al. 2023, doi:10.1126/science.ade2574) over packed sequences, under fair-esm's names.

SaProt has the same blocks, and ESM-1b and ESM-1v have them with learned positions. No linear layer and no LayerNorm
sees padding. The reference for every number is fair-esm 2.0.0 (`esm/model/esm2.py`, `esm1.py`); `tests/parity/`
compares the two. `esmshard.batch` explains the letters of tensor names.
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.errors import InputError
from esmshard.model.attention import OnAttention, SelfAttention, TrunkBlock
from esmshard.model.contacts import ContactRegression
from esmshard.model.families.esm_layouts import TIED
from esmshard.model.families.esm_shapes import EsmShape
from esmshard.model.trunk import Trunk
from esmshard.vocab import PAD

MASK_RATIO_TRAINED = 0.15 * 0.8
"""Share of tokens that were `<mask>` in pre-training. The embeddings are scaled as if the share were always this."""


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
        # nn.Embedding's own normal draw is avoided: on the meta device it imports the compiler, two seconds of every
        # start.
        rows = len(config.vocabulary)
        table = torch.empty(rows, config.dim).uniform_(-1, 1)
        self.embed_tokens = nn.Embedding(rows, config.dim, padding_idx=PAD, _weight=table)
        if not config.rotary:
            table = torch.empty(config.position_rows, config.dim).uniform_(-1, 1)
            self.embed_positions = nn.Embedding(config.position_rows, config.dim, _weight=table)
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
