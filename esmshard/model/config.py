"""The numbers that define an ESM model, and the registry SIZES."""

from dataclasses import dataclass

from esmshard.vocab import PAD, VOCAB_SIZE

MOST = {"n_layers": 1000, "dim": 65536, "n_heads": 4096, "max_positions": 10**7}
"""Limits far above every ESM model (the largest has 48 layers of width 5120), so that a damaged number cannot make a
model that fills the memory.
"""


@dataclass(frozen=True, kw_only=True)
class EsmConfig:
    """The architecture of one model: ESM-2, or ESM-1b and ESM-1v with `max_positions`.

    Everything else (vocabulary, 4 x feed-forward, exact gelu, LayerNorm before each part, eps 1e-5) is fixed.
    """

    n_layers: int
    dim: int
    n_heads: int
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

    def __post_init__(self) -> None:
        for name in ("n_layers", "dim", "n_heads", "max_positions"):
            value = getattr(self, name)
            if name == "max_positions" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive whole number, not {value!r}")
            if value > MOST[name]:
                raise ValueError(f"{name} is {value}, and at most {MOST[name]:,} can be read")
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 x n_heads ({self.n_heads}): rotary turns pairs")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    @property
    def rotary(self) -> bool:
        """Whether positions are rotary (ESM-2) instead of learned (ESM-1b, ESM-1v)."""
        return self.max_positions is None

    @property
    def position_rows(self) -> int:
        """Number of rows of the table of learned positions. fairseq counts positions from `<pad>`'s number + 1."""
        return (self.max_positions or 0) + PAD + 1

    @property
    def n_parameters(self) -> int:
        """Number of parameters of trunk, LM head (its matrix is the embedding's) and contact regression."""
        d, norm = self.dim, 2 * self.dim
        layer = 4 * (d * d + d) + (4 * d * d + 4 * d) + (4 * d * d + d) + 2 * norm
        lm_head = d * d + d + norm + VOCAB_SIZE
        positions = 0 if self.rotary else self.position_rows * d
        before = norm if self.emb_layer_norm_before else 0
        contacts = self.n_layers * self.n_heads + 1
        return VOCAB_SIZE * d + positions + before + self.n_layers * layer + norm + lm_head + contacts


LINEAR = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.out_proj",
    "fc1": "fc1",
    "fc2": "fc2",
}
"""Linear layers of a block by their names in a recipe's `adapt.targets`."""

STARTER = "starter"
"""Name of the small trained model that comes with the package. It is not an ESM-2."""

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
