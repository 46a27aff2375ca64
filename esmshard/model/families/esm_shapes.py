"""The shapes and initial values of models that `transformers` calls `esm`: ESM-2, ESM-1b, ESM-1v and SaProt. No torch.

Their blocks are `esmshard.model.families.esm_blocks`, and their files `esmshard.model.families.esm_layouts`. Families
among them differ in their vocabulary.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from esmshard.model.config import Matrix, ModelConfig
from esmshard.vocab import PAD, VOCAB_SIZE

if TYPE_CHECKING:
    import torch


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
        return (
            Matrix("q", "self_attn.q_proj", d, d, "qkv"),
            Matrix("k", "self_attn.k_proj", d, d, "qkv"),
            Matrix("v", "self_attn.v_proj", d, d, "qkv"),
            Matrix("out", "self_attn.out_proj", d, d, "out"),
            Matrix("fc1", "fc1", d, 4 * d, "fc1"),
            Matrix("fc2", "fc2", 4 * d, d, "fc2"),
        )

    @property
    def layer_parameters(self) -> int:
        """Matrices with their biases, and two LayerNorms."""
        return sum(matrix.rows * (matrix.columns + 1) for matrix in self.matrices) + 4 * self.dim

    @property
    def layer_biases(self) -> int:
        """Biases of the matrices and of two LayerNorms."""
        return sum(matrix.rows for matrix in self.matrices) + 2 * self.dim

    @property
    def embedding_parameters(self) -> int:
        """Tokens, and learned positions."""
        return self.dim * (len(self.vocabulary) + (0 if self.rotary else self.position_rows))

    @property
    def end_parameters(self) -> int:
        """The LayerNorm after the blocks, and the one before them."""
        return 2 * self.end_biases

    @property
    def end_biases(self) -> int:
        """Biases of these LayerNorms."""
        return self.dim * (1 + self.emb_layer_norm_before)

    @property
    def lm_head_parameters(self) -> int:
        """A dense layer, a LayerNorm and a bias for each token. The last matrix is the embedding's."""
        return self.dim * self.dim + 3 * self.dim + len(self.vocabulary)


def initial(config: EsmShape, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw a tensor of a new model.

    Linear layers are Xavier-uniform (q, k and v with gain 1/sqrt 2, as in fair-esm's attention). The embedding, whose
    matrix is the LM head's too, is normal with deviation 0.02, so that first logits are small, and so are learned
    positions. Biases are 0 and LayerNorm weights 1.
    """
    import torch

    from esmshard.model.attention import inverse_frequencies

    if name.endswith("inv_freq"):
        return inverse_frequencies(config.head_dim)
    if re.search(r"layer_norm(_before|_after)?\.weight$", name):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    if name.startswith("embed_"):
        table = 0.02 * torch.randn(shape, generator=generator)
        table[PAD] = 0.0
        return table
    gain = 1 / math.sqrt(2) if re.search(r"\.[qkv]_proj\.", name) else 1.0
    bound = gain * math.sqrt(6 / (shape[0] + shape[1]))
    return torch.rand(shape, generator=generator) * 2 * bound - bound
