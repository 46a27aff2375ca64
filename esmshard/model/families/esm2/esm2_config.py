"""The shapes of ESM-2, ESM-1b and ESM-1v, and their registry. No torch."""

from dataclasses import dataclass
from typing import ClassVar

from esmshard.model.config import STARTER, Matrix, ModelConfig
from esmshard.vocab import PAD, VOCAB_SIZE


@dataclass(frozen=True, kw_only=True)
class EsmConfig(ModelConfig):
    """The architecture of an ESM-2, or of an ESM-1b or ESM-1v with `max_positions`.

    Everything else (vocabulary, 4 x feed-forward, exact gelu, LayerNorm before each part, eps 1e-5) is fixed.
    """

    family: ClassVar[str] = "esm2"
    token_dropout: bool = True
    """Whether `<mask>` embeddings are set to zero and the others rescaled, as in training. All
    released models do this.
    """
    max_positions: int | None = None
    """Number of tokens that the table of learned positions covers (ESM-1b, ESM-1v: 1024); None for rotary positions
    (ESM-2).
    """
    emb_layer_norm_before: bool = False
    """Whether a LayerNorm follows the embeddings, before the first layer."""

    @property
    def rotary(self) -> bool:
        """Whether positions are rotary (ESM-2) instead of learned (ESM-1b, ESM-1v)."""
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
        """The 33 tokens."""
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
        return self.dim * (VOCAB_SIZE + (0 if self.rotary else self.position_rows))

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
        return self.dim * self.dim + 3 * self.dim + VOCAB_SIZE


SIZES: dict[str, EsmConfig] = {
    # These are for tests and for training from scratch on a laptop; nothing is released under these names.
    "nano": EsmConfig(n_layers=2, dim=32, n_heads=4),
    "mini": EsmConfig(n_layers=6, dim=128, n_heads=8),
    # data/starter has its trained weights.
    STARTER: EsmConfig(n_layers=6, dim=192, n_heads=12),
    # Lin et al. 2023 (doi:10.1126/science.ade2574), as released in fair-esm.
    "esm2_t6_8M_UR50D": EsmConfig(n_layers=6, dim=320, n_heads=20),
    "esm2_t12_35M_UR50D": EsmConfig(n_layers=12, dim=480, n_heads=20),
    "esm2_t30_150M_UR50D": EsmConfig(n_layers=30, dim=640, n_heads=20),
    "esm2_t33_650M_UR50D": EsmConfig(n_layers=33, dim=1280, n_heads=20),
    "esm2_t36_3B_UR50D": EsmConfig(n_layers=36, dim=2560, n_heads=40),
    "esm2_t48_15B_UR50D": EsmConfig(n_layers=48, dim=5120, n_heads=40),
    # Rives et al. 2021 (doi:10.1073/pnas.2016239118) and Meier et al. 2021 (five models, for variant effects).
    "esm1b_t33_650M_UR50S": EsmConfig(
        n_layers=33, dim=1280, n_heads=20, max_positions=1024, emb_layer_norm_before=True
    ),
    **{
        f"esm1v_t33_650M_UR90S_{n}": EsmConfig(n_layers=33, dim=1280, n_heads=20, max_positions=1024)
        for n in range(1, 6)
    },
}
