"""The shapes of models whose blocks are `esmshard.model.gated_layer.GatedLayer`. No torch."""

from dataclasses import dataclass
from typing import ClassVar

from esmshard.model.config import Matrix, ModelConfig
from esmshard.vocab import SEPARATOR

ROWS = 64
"""Rows of the embedding and columns of the logits. The first 33 are tokens, the others have no meaning."""

CHAIN_BREAK = SEPARATOR
"""The token `|` between chains. ESM-C was never trained on it, by its authors' own words (Biohub/esm#166)."""


def swiglu_width(dim: int) -> int:
    """Return the width of the feed-forward part of a model of this width: 8/3 of it, up to a multiple of 256."""
    return (8 * dim // 3 + 255) // 256 * 256


@dataclass(frozen=True, kw_only=True)
class GatedConfig(ModelConfig):
    """The architecture of an ESM-C, or of the trunk of an ESM3; other families override what differs.

    Everything else (vocabulary, QK LayerNorm, rotary positions of base 10000, eps 1e-5, the divisor of the branches) is
    fixed.
    """

    gated: ClassVar[bool] = True
    qk_norm: ClassVar[bool] = True
    chain_break: ClassVar[bool] = True

    ffn: int | None = None
    """Width of the feed-forward part; None for the width of all released models, which follows from the model's."""

    @property
    def n_logits(self) -> int:
        """All rows of the embedding. The loss of the authors is over all of them."""
        return ROWS

    @property
    def ffn_width(self) -> int:
        """Width of gate and up."""
        return swiglu_width(self.dim) if self.ffn is None else self.ffn

    @property
    def branch_scale(self) -> float:
        """Factor of what attention and feed-forward part add: 1 / sqrt(layers / 36)."""
        return float((36 / self.n_layers) ** 0.5)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Attention's four projections; gate and up, which are both `fc1`; and down."""
        d, f = self.dim, self.ffn_width
        return (
            Matrix("q", "self_attn.q_proj", d, d, "qkv"),
            Matrix("k", "self_attn.k_proj", d, d, "qkv"),
            Matrix("v", "self_attn.v_proj", d, d, "qkv"),
            Matrix("out", "self_attn.out_proj", d, d, "out"),
            Matrix("fc1", "gate", d, f, "fc1"),
            Matrix("fc1", "up", d, f, "fc1"),
            Matrix("fc2", "down", f, d, "fc2"),
        )

    @property
    def layer_parameters(self) -> int:
        """Matrices without biases, two LayerNorms with them, and those of queries and keys without."""
        return sum(matrix.rows * matrix.columns for matrix in self.matrices) + 6 * self.dim

    @property
    def layer_biases(self) -> int:
        """Biases of two LayerNorms."""
        return 2 * self.dim

    @property
    def embedding_parameters(self) -> int:
        """The token embedding."""
        return ROWS * self.dim

    @property
    def end_parameters(self) -> int:
        """The LayerNorm after the blocks, which has no bias."""
        return self.dim

    @property
    def end_biases(self) -> int:
        """None."""
        return 0

    @property
    def lm_head_parameters(self) -> int:
        """A dense layer, a LayerNorm, and the last matrix, which is not the embedding's."""
        return self.dim * self.dim + 3 * self.dim + ROWS * (self.dim + 1)
