"""The head `network` of task `variant`, and its ranking loss."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.model.finetuner import of_changes
from esmshard.model.weights import Weights
from esmshard.tasks.labels import LabelHead
from esmshard.tasks.likelihood import AMINO_ACIDS, log_odds, require_lm_head
from esmshard.vocab import STANDARD, VOCAB_SIZE

Pool = Literal["wild_type", "sites", "difference", "mean"]

THRESHOLDS, SHARPNESS = 15, 2.0
"""The ranking loss asks whether a value is above each of THRESHOLDS quantiles, with a logistic of slope SHARPNESS."""
ZERO_SHOT = 0.1
"""The weight of the zero-shot score in a new head, in standard deviations of the target per unit of the score. The
standard deviation of the score is 2 to 4 for single substitutions, so a new head ranks variants nearly by the score."""


class VariantHead(LabelHead):
    """A head that computes a vector for each changed residue, and adds up the vectors of a variant.

    A hidden layer is applied to each vector, and the last layer to the sum, which is zero for the wild type. With pool
    `wild_type` the vector of a change does not depend on other changes, so the effects of changes add up. The vector
    depends on the argument `pool`:

    - `wild_type`: LayerNorm of the wild type's representation at the site; old and new letter; and with `zero_shot` the
      log probabilities of the 20 amino acids at the site.
    - `difference`: the difference of the variant's and the wild type's representations at the site.
    - `sites`: both of the above.
    - `mean`: one vector for the variant instead, the mean representation over all residues of the variant.

    `zero_shot` also adds the language model's score of the changes, from the wild type's logits. `sign_T` is 1 for each
    target, or -1 if lower values of the target are better.
    """

    def __init__(
        self, dim: int, hidden: int, sign_T: npt.NDArray[np.float32], pool: Pool, dropout: float, *, zero_shot: bool
    ) -> None:
        width = dim
        if pool in ("wild_type", "sites"):
            width = dim * (1 if pool == "wild_type" else 2) + 2 * VOCAB_SIZE + (len(STANDARD) if zero_shot else 0)
        super().__init__(dim, width, hidden, len(sign_T), dropout)
        self.pool, self.reads_logits = pool, zero_shot
        self.zero_shot = nn.Parameter(ZERO_SHOT * torch.from_numpy(sign_T)) if zero_shot else None

    def start(self, weights: Weights) -> None:
        """Refuse a model without a trained LM head if this head reads the zero-shot score."""
        if self.reads_logits:
            require_lm_head(weights, "set task.zero_shot=false, or ")

    def forward(
        self, x_TD: torch.Tensor, batch: TokenBatch, logits_MV: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return the T outputs of each variant, [T]."""
        draw_M = batch.draw_N if self.pool == "mean" else of_changes(batch)
        h_NF = self.features(self.norm(x_TD), batch, logits_MV, partial(self._hidden, draw_M=draw_M))
        out_NT = self.out(self.hidden_dropout(h_NF, batch.draw_N))
        if self.zero_shot is not None:
            assert logits_MV is not None
            out_NT = out_NT.float() + log_odds(logits_MV, batch)[:, None] * self.zero_shot
        return list(out_NT)

    def _hidden(self, x_MF: torch.Tensor, draw_M: torch.Tensor | None) -> torch.Tensor:
        return x_MF if self.hidden is None else F.gelu(self.hidden(self.dropout(x_MF, draw_M)))

    def features(
        self,
        x_TD: torch.Tensor,
        batch: TokenBatch,
        logits_MV: torch.Tensor | None,
        each: Callable[[torch.Tensor], torch.Tensor] = lambda x_MF: x_MF,
    ) -> torch.Tensor:
        """Return F features of each of N variants, [N, F]. The function `each` is applied to vectors before the sum."""
        if self.pool == "mean":
            return each(torch.stack(batch.means(x_TD)[: batch.n_records]))
        assert batch.changes_4M is not None
        record_M, letter_M, mutant_M, wild_M = batch.changes_4M
        parts = [] if self.pool == "wild_type" else [x_TD[mutant_M] - x_TD[wild_M]]
        if self.pool != "difference":
            letters = [F.one_hot(at_M, VOCAB_SIZE).to(x_TD) for at_M in (batch.tokens_T[wild_M], letter_M)]
            parts += [x_TD[wild_M], *letters]
            if self.reads_logits:
                assert logits_MV is not None
                parts.append(logits_MV[:, AMINO_ACIDS].float().log_softmax(-1).to(x_TD))
        change_MF = each(torch.cat(parts, 1))
        return change_MF.new_zeros(batch.n_records, change_MF.shape[1]).index_add(0, record_M, change_MF)


def ordinal_loss(output_NT: torch.Tensor, target_NT: torch.Tensor) -> torch.Tensor:
    """Compute the all-threshold loss of ordinal regression (Rennie and Srebro 2005), [N, T].

    The loss is the mean of the logistic losses of predicting whether a value is above each of THRESHOLDS quantiles. It
    depends only on the order of the values. Losses over pairs of records (Bradley-Terry, RankNet) do so too, but also
    depend on which records share a micro-batch, and therefore on the number of processes.

    Args:
        output_NT: predicted normal scores of N variants for T targets.
        target_NT: normal scores of the ranks of the measured values.
    """
    shares = torch.arange(1, THRESHOLDS + 1, device=output_NT.device) / (THRESHOLDS + 1)
    at_K = torch.special.ndtri(shares.float())
    side_NTK = torch.where(target_NT[..., None] > at_K, 1.0, -1.0)
    return F.softplus(-side_NTK * SHARPNESS * (output_NT[..., None] - at_K)).mean(-1)
