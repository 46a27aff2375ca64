"""SaProt (Su et al. 2024, doi:10.1101/2023.10.01.560349): ESM-2 over pairs of amino acid and structure letter.

The reference for every number is `EsmForMaskedLM` of `transformers` with the authors' 446 tokens;
`tests/parity/test_saprot.py` compares the two. `esmshard.batch` explains the letters of tensor names.
"""

from functools import cache
from typing import ClassVar

import torch

from esmshard.batch import TokenBatch
from esmshard.model.families.esm_blocks import EsmTrunk, LMHead
from esmshard.model.families.saprot.saprot_config import FIRST_ROWS, PAIRS, SPECIAL, STRUCTURE, STRUCTURES, SaprotConfig
from esmshard.model.trunk import ABSENT
from esmshard.vocab import STANDARD, TOKENS


class SaprotHead(LMHead):
    """The LM head, whose probabilities of the pairs of an amino acid are summed, as the authors' scores sum them."""

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        """Map x [P, D] to logits [P, 33]; see `logits_of_tokens`."""
        return logits_of_tokens(super().forward(x_PD))


def logits_of_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Map logits of SaProt's 446 tokens to those of the 33 of `esmshard.vocab`, [P, 446] to [P, 33].

    The softmax over the 33 is the sum of the softmax over the 446: an amino acid has the probability of its 21 pairs,
    and X that of the 21 pairs whose amino acid is `#`. Tokens that SaProt lacks have the logit `ABSENT`.
    """
    special_PV, pairs_PV = logits[:, :PAIRS], logits[:, PAIRS:].reshape(len(logits), -1, STRUCTURES).logsumexp(2)
    found = dict(zip(SPECIAL, special_PV.unbind(1), strict=True))
    found |= dict(zip(STANDARD + "X", pairs_PV.unbind(1), strict=True))
    absent_P = torch.full_like(logits[:, 0], ABSENT)
    return torch.stack([found.get(token, absent_P) for token in TOKENS], dim=1)


class SaProt(EsmTrunk):
    """The SaProt trunk with its two own heads.

    A residue is the pair of its amino acid and its entry in the track `3di`, which is `#` where the track is absent or
    says nothing. `<mask>` hides the amino acid and keeps the structure letter: it is the pair `#v` of a residue with
    the letter v, as in the authors' pre-training and scores. So are X, B, U, Z and O, which SaProt lacks. The row
    `<mask>` of SaProt is never read: the authors' training has no such token either, so that token dropout, which
    counts this token only, multiplies all embeddings by 0.88.
    """

    make_lm_head: ClassVar[type[LMHead]] = SaprotHead
    config: SaprotConfig

    def rows(self, batch: TokenBatch) -> torch.Tensor:
        """Return the row of the embedding of each token, int64 [T]."""
        first_T = _first_rows(batch.tokens_T.device)[batch.tokens_T]
        structure_T = batch.tracks.get(STRUCTURE.name, int(STRUCTURE.unknown))
        return torch.where(first_T < PAIRS, first_T, first_T + structure_T)


@cache
def _first_rows(device: torch.device) -> torch.Tensor:
    """Return `FIRST_ROWS` on a device. The copy to a GPU would make every forward pass wait."""
    return torch.tensor(FIRST_ROWS, device=device)
