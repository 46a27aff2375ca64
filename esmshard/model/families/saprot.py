"""Defines the model family SaProt (Su et al. 2024, doi:10.1101/2023.10.01.560349): an ESM-2 whose tokens are pairs of
an amino acid and a structure letter.

All outputs must equal the outputs of `EsmForMaskedLM` of `transformers` with the authors' 446 tokens.
`tests/parity/test_saprot.py` compares the outputs. `esmshard.batch` explains the letters of tensor names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from esmshard.batch import TokenBatch
from esmshard.model.config import ModelConfig
from esmshard.model.families.esm2 import ESM2, EsmConfig, EsmFamily, LMHead
from esmshard.model.families.family import Released
from esmshard.model.trunk import ABSENT
from esmshard.vocab import MASK, RESIDUES, STANDARD, TOKENS, Track

STRUCTURE = Track("3di", "structure letters (3Di)", "letters", unknown=20, letters="pynwrqhgdlvtmfsaeikc")

SPECIAL = ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>")
UNKNOWN = "#"
"""The symbol in a pair for an unknown amino acid or structure letter."""
VOCABULARY = SPECIAL + tuple(
    residue + structure for residue in STANDARD + UNKNOWN for structure in STRUCTURE.letters + UNKNOWN
)
PAIRS = len(SPECIAL)
"""The index of the embedding's row for the first pair. The 21 pairs of an amino acid have neighbouring rows."""
STRUCTURES = len(STRUCTURE.letters) + 1


def _first_row(token: str) -> int:
    """Return the index of the embedding's row for a token of `esmshard.vocab`. For a residue, return the index of the
    row of its first pair. `<mask>` and letters that SaProt lacks count as an unknown amino acid.
    """
    if token in (*RESIDUES, TOKENS[MASK]):
        residue = token if token in STANDARD else UNKNOWN
        return PAIRS + STRUCTURES * (STANDARD + UNKNOWN).index(residue)
    return SPECIAL.index(token if token in SPECIAL else "<unk>")


@cache
def _first_rows(device: torch.device) -> torch.Tensor:
    """Return `_first_row` of all tokens, on `device`. The cache avoids a copy to the device in each forward pass."""
    return torch.tensor([_first_row(token) for token in TOKENS], device=device)


@dataclass(frozen=True, kw_only=True)
class SaprotConfig(EsmConfig):
    """The architecture of a SaProt model."""

    family: ClassVar[str] = "saprot"
    vocabulary: ClassVar[tuple[str, ...]] = VOCABULARY


class SaprotHead(LMHead):
    """The LM head of SaProt, with logits for the tokens of `esmshard.vocab`.

    After the softmax, an amino acid has the summed probability of its 21 pairs, as in the authors' scores. X stands for
    the amino acid `#`. Tokens that SaProt lacks have the logit `ABSENT`.
    """

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        """Map x [P, D] to logits [P, 33]."""
        logits = super().forward(x_PD)
        special_PV, pairs_PV = logits[:, :PAIRS], logits[:, PAIRS:].reshape(len(logits), -1, STRUCTURES).logsumexp(2)
        columns = dict(zip(SPECIAL, special_PV.unbind(1), strict=True))
        columns |= dict(zip(STANDARD + "X", pairs_PV.unbind(1), strict=True))
        absent_P = torch.full_like(logits[:, 0], ABSENT)
        return torch.stack([columns.get(token, absent_P) for token in TOKENS], dim=1)


class SaProt(ESM2):
    """The SaProt language model with LM head and contact regression.

    The model reads each residue as a pair of its amino acid and its structure letter (track `3di`). An unknown
    structure letter is `#`. `<mask>` hides only the amino acid: a residue with structure letter v becomes the pair
    `#v`, as in the authors' pre-training and scores. X, B, U, Z and O, which SaProt lacks, become `#v`, too. SaProt's
    token `<mask>` never occurs, so token dropout multiplies all embeddings by 0.88.
    """

    make_lm_head: ClassVar[type[LMHead]] = SaprotHead
    config: SaprotConfig

    def rows(self, batch: TokenBatch) -> torch.Tensor:
        first_T = _first_rows(batch.tokens_T.device)[batch.tokens_T]
        structure_T = batch.tracks.get(STRUCTURE.name, int(STRUCTURE.unknown))
        return torch.where(first_T < PAIRS, first_T, first_T + structure_T)


_SU = "Su et al. 2024, ICLR, doi:10.1101/2023.10.01.560349"


class SaprotFamily(EsmFamily):
    """Describes all SaProt models."""

    title = "SaProt"
    config = SaprotConfig
    trunk = SaProt
    sizes: ClassVar[Mapping[str, ModelConfig]] = {
        # For tests and for training from scratch on a laptop; no released model has these names.
        "saprot_nano": SaprotConfig(n_layers=2, dim=32, n_heads=4),
        "saprot_mini": SaprotConfig(n_layers=6, dim=128, n_heads=8),
        "saprot_35m_af2": SaprotConfig(n_layers=12, dim=480, n_heads=20),
        "saprot_650m_af2": SaprotConfig(n_layers=33, dim=1280, n_heads=20),
        "saprot_650m_pdb": SaprotConfig(n_layers=33, dim=1280, n_heads=20),
    }
    released: ClassVar[Mapping[str, Released]] = {
        f"saprot_{size.lower()}": Released(
            f"westlake-repl/SaProt_{size}", "mit", "westlake-repl", _SU, ("contact_head",)
        )
        for size in ("35M_AF2", "650M_AF2", "650M_PDB")
    }
    paper = _SU
    window = 1022
    vocab_size = len(VOCABULARY)
    tracks = (STRUCTURE,)


FAMILY = SaprotFamily()
