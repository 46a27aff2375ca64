"""The shapes and the vocabulary of SaProt. No torch."""

from dataclasses import dataclass
from typing import ClassVar

from esmshard.model.config import ModelConfig
from esmshard.model.families.esm_shapes import EsmShape
from esmshard.vocab import MASK, RESIDUES, STANDARD, TOKENS, Track

STRUCTURE = Track("3di", "structure letters (3Di)", "letters", unknown=20, letters="pynwrqhgdlvtmfsaeikc")

SPECIAL = ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>")
UNKNOWN = "#"
"""What stands in a pair for an amino acid, or for a structure letter, that is not known."""
VOCABULARY = SPECIAL + tuple(
    residue + structure for residue in STANDARD + UNKNOWN for structure in STRUCTURE.letters + UNKNOWN
)
PAIRS = len(SPECIAL)
"""The row of the first pair. All 21 pairs of an amino acid follow each other."""
STRUCTURES = len(STRUCTURE.letters) + 1


def _first_row(token: str) -> int:
    """Return the row of a token of `esmshard.vocab`; of a residue, the first of its pairs.

    `<mask>` is a residue whose amino acid is not known, and so are the letters that SaProt lacks.
    """
    if token in (*RESIDUES, TOKENS[MASK]):
        residue = token if token in STANDARD else UNKNOWN
        return PAIRS + STRUCTURES * (STANDARD + UNKNOWN).index(residue)
    return SPECIAL.index(token if token in SPECIAL else "<unk>")


FIRST_ROWS = tuple(_first_row(token) for token in TOKENS)
"""For each token of `esmshard.vocab` its row; for residues and `<mask>`, the first of the rows of their pairs."""


@dataclass(frozen=True, kw_only=True)
class SaprotConfig(EsmShape):
    """The architecture of a SaProt: an ESM-2 whose tokens are pairs of amino acid and structure letter."""

    family: ClassVar[str] = "saprot"
    vocabulary: ClassVar[tuple[str, ...]] = VOCABULARY


SIZES: dict[str, ModelConfig] = {
    # These are for tests and for training from scratch on a laptop; nothing is released under these names.
    "saprot_nano": SaprotConfig(n_layers=2, dim=32, n_heads=4),
    "saprot_mini": SaprotConfig(n_layers=6, dim=128, n_heads=8),
    # Su et al. 2024 (doi:10.1101/2023.10.01.560349).
    "saprot_35m_af2": SaprotConfig(n_layers=12, dim=480, n_heads=20),
    "saprot_650m_af2": SaprotConfig(n_layers=33, dim=1280, n_heads=20),
    "saprot_650m_pdb": SaprotConfig(n_layers=33, dim=1280, n_heads=20),
}
