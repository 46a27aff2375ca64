"""The shapes of ESM3. No torch."""

from dataclasses import dataclass
from typing import ClassVar

from esmshard.model.config import MOST, ModelConfig
from esmshard.model.gated_config import GatedConfig

STRUCTURE_TOKENS = 4096
"""Number of the codes that describe the structure around a residue."""
STRUCTURE_MASK = STRUCTURE_TOKENS
"""Row of the structure token of a residue whose structure is unknown."""
TABLES = {
    "structure_tokens_embed": STRUCTURE_TOKENS + 5,
    "ss8_embed": 8 + 3,
    "sasa_embed": 16 + 3,
    "residue_embed": 1478,
}
"""Rows of the embedding tables of the other tracks, by the authors' names, without those of functions."""
FUNCTIONS, FUNCTION_ROWS = 8, 260
"""Number of tables of function tokens, each of 1/8 of the width of the model, and the rows of each."""
PLDDT_BINS = 16
"""Radial basis functions that describe a pLDDT."""
HEADS = {
    "structure_head": STRUCTURE_TOKENS,
    "ss8_head": TABLES["ss8_embed"],
    "sasa_head": TABLES["sasa_embed"],
    "function_head": FUNCTIONS * FUNCTION_ROWS,
    "residue_head": TABLES["residue_embed"],
}
"""Columns of the heads of the other tracks, by the authors' names."""
VECTORS = 15
"""Rows of the projection of geometric attention for each of its heads: five vectors of three numbers."""
COORDINATES, STRUCTURE = "coordinates", "structure_tokens"
"""Names of the tracks that the models read besides the sequence."""


@dataclass(frozen=True, kw_only=True)
class Esm3Config(GatedConfig):
    """The architecture of an ESM3. The reference is `esm/models/esm3.py` of the package `esm`."""

    family: ClassVar[str] = "esm3"

    v_heads: int
    """Heads of the geometric attention in the first block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.v_heads, bool) or not isinstance(self.v_heads, int) or self.v_heads < 1:
            raise ValueError(f"v_heads must be a positive whole number, not {self.v_heads!r}")
        if self.v_heads > MOST["n_heads"]:
            raise ValueError(f"v_heads is {self.v_heads}, and at most {MOST['n_heads']:,} can be read")
        if self.dim % FUNCTIONS:
            raise ValueError(f"dim {self.dim} must be a multiple of {FUNCTIONS}: so many function tokens share it")

    @property
    def geometric_parameters(self) -> int:
        """Parameters of geometric attention: two matrices, a LayerNorm without bias, and two scales for each head."""
        return (VECTORS + 3) * self.v_heads * self.dim + self.dim + 2 * self.v_heads

    def learned_with(self, track: str) -> int:
        """Geometric attention learns with coordinates, and the table of structure tokens with structure tokens."""
        tokens = self.dim * TABLES["structure_tokens_embed"]
        return {COORDINATES: self.geometric_parameters, STRUCTURE: tokens}.get(track, 0)

    def kept_with(self, track: str) -> int:
        """Geometric attention keeps its input, the same normalised, its vectors, and the input of the last matrix."""
        return 2 * self.dim + (VECTORS + 3) * self.v_heads if track == COORDINATES else 0

    @property
    def track_parameters(self) -> int:
        """Parameters that encode the other tracks: tables, and two projections of pLDDT values."""
        return self.dim * (sum(TABLES.values()) + FUNCTION_ROWS + 2 * (PLDDT_BINS + 1))

    @property
    def other_head_parameters(self) -> int:
        """Parameters of the heads of the other tracks."""
        d = self.dim
        return sum(d * d + 3 * d + rows * (d + 1) for rows in HEADS.values())

    @property
    def frozen_parameters(self) -> int:
        """The contact regression, geometric attention, and encoders and heads of the other tracks."""
        mine = self.geometric_parameters + self.track_parameters + self.other_head_parameters
        return super().frozen_parameters + mine


SIZES: dict[str, ModelConfig] = {
    # These are for tests; nothing is released under these names. The authors' files do not tell the width of a head,
    # which is 64 here as in the released model, so that these can be written as such files too.
    "esm3_nano": Esm3Config(n_layers=2, dim=128, n_heads=2, v_heads=8),
    "esm3_mini": Esm3Config(n_layers=6, dim=192, n_heads=3, v_heads=16),
    "esm3_sm_open_v1": Esm3Config(n_layers=48, dim=1536, n_heads=24, v_heads=256),
}
