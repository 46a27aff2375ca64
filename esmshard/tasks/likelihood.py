"""The head `likelihood` of task `variant`: the language model's own score ranks the variants, and is fine-tuned.

Head and losses have no parameters. With few measurements this is better than a new head, since the model starts from
its zero-shot ranking (Hawkins-Hooker et al. 2024, doi:10.1101/2024.05.28.596156; ConFit, Zhao et al. 2024; FSFP, Zhou
et al. 2024, doi:10.1038/s41467-024-49798-6).
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.errors import InputError
from esmshard.model.families.family import Corruption
from esmshard.model.weights import Weights
from esmshard.tasks.base import LossSum
from esmshard.tasks.marginals import as_masked
from esmshard.vocab import STANDARD, encode

AMINO_ACIDS = encode(STANDARD)[1:-1].tolist()
"""The tokens of the 20 amino acids."""
LEAST_SLOPE = 0.1
"""The minimum correlation that `fit_line` assumes, so that a line never turns the ranking around."""


def log_odds(logits_MV: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return the zero-shot score of N variants, float32 [N]: log p(mutant) - log p(wild type), summed over changes.

    `logits_MV` are the logits at the M changes of `batch.changes_4M`. Changes from or to letters other than the 20
    amino acids do not count, as models hardly ever predict them.
    """
    assert batch.changes_4M is not None
    record_M, letter_M, _, wild_M = batch.changes_4M
    both_M2 = torch.stack([letter_M, batch.tokens_T[wild_M]], 1)
    mutant, wild = logits_MV.float().gather(1, both_M2).unbind(1)  # the softmax has the same divisor in both
    # The tokens of the 20 amino acids are successive numbers.
    known_M = ((both_M2 >= min(AMINO_ACIDS)) & (both_M2 <= max(AMINO_ACIDS))).all(1)
    return mutant.new_zeros(batch.n_records).index_add(0, record_M, (mutant - wild) * known_M)


def require_lm_head(weights: Weights, fix: str) -> None:
    """Raise `InputError` if a model has no trained LM head. `fix` is the end of the sentence: what can be done."""
    if "lm_head" in weights.unlearned:
        raise InputError(
            f"{weights.source}: has no trained LM head, which computes the zero-shot score; {fix}train the LM head "
            "first (task mlm, adapt.method head)"
        )


def sequence_scores(logits_PV: torch.Tensor, batch: TokenBatch, visible: Corruption) -> torch.Tensor:
    """Return the pseudo-log-likelihood of each of N variants minus that of their wild type, float32 [N].

    All variants have the same wild type, and may be longer or shorter. `logits_PV` are the logits at all residues of
    all sequences. The pseudo-log-likelihood is the sum of `as_masked` over the residues that are amino acids.
    """
    assert batch.logits_at_P is not None
    token_P = batch.tokens_T[batch.logits_at_P]
    log_p_P = logits_PV.float().log_softmax(-1).gather(1, token_P[:, None])[:, 0]
    known_P = (token_P >= min(AMINO_ACIDS)) & (token_P <= max(AMINO_ACIDS))
    sums = [part.sum() for part in (as_masked(log_p_P, visible) * known_P).split(batch.logit_counts)]
    score_N: torch.Tensor = torch.stack(sums[: batch.n_records]) - sums[-1]
    return score_N


class LikelihoodHead(nn.Module):
    """Computes the score `log_odds` of each variant, times `sign`: 1, or -1 if lower values are better.

    The logits come from one forward pass of the wild type, or from a pass for each variant (`Inputs.logits_from`). With
    `visible`, the shares of visible residues in pre-training, the score is that of `sequence_scores`.
    """

    reads_logits = True

    def __init__(self, sign: float, visible: Corruption | None = None) -> None:
        super().__init__()
        self.sign, self.visible = sign, visible

    def start(self, weights: Weights) -> None:
        """Refuse a model without a trained LM head."""
        require_lm_head(weights, "choose task.head: network with task.zero_shot: false, or ")

    def forward(self, _x_TD: torch.Tensor, batch: TokenBatch, logits_MV: torch.Tensor) -> list[torch.Tensor]:
        """Return the score of each variant, [1]."""
        if self.visible is not None:
            return list(self.sign * sequence_scores(logits_MV, batch, self.visible)[:, None])
        return list(self.sign * log_odds(logits_MV, batch)[:, None])


def pairs_loss(score_N: torch.Tensor, target_N: torch.Tensor) -> LossSum:
    """Return the loss of Bradley and Terry 1952 over all pairs of variants with different targets.

    The loss of a pair is -log sigmoid(score of the better variant - score of the other).
    """
    better_NN = target_N[:, None] > target_N[None]
    losses_NN = F.softplus(score_N[None] - score_N[:, None])
    return LossSum((losses_NN * better_NN).sum(), better_NN.sum())


def list_loss(score_N: torch.Tensor, target_N: torch.Tensor) -> LossSum:
    """Return ListMLE (Xia et al. 2008): -log p of the order of the targets in the model of Plackett and Luce.

    Variants are drawn one after the other, each with probability proportional to exp(score) among those that are left.
    Of variants with equal targets, none counts among those that are left when another of them is drawn.
    """
    order = target_N.argsort(descending=True, stable=True)
    x_N, y_N = score_N[order], target_N[order]
    from_here_N = x_N.flip(0).logcumsumexp(0).flip(0)
    # The number of the first variant with a lower target, for each variant; N if there is none.
    below_N = torch.searchsorted(-y_N, -y_N, right=True)
    is_last_N = below_N == len(x_N)
    lower_N = from_here_N[below_N.clamp(max=len(x_N) - 1)]
    losses_N = F.softplus(lower_N - x_N).masked_fill(is_last_N, 0.0)
    return LossSum(losses_N.sum(), (~is_last_N).sum())


def squared_loss(score_N: torch.Tensor, target_N: torch.Tensor) -> LossSum:
    """Return the squared errors between scores and targets, both standardised over the N variants.

    The scores have no unit, so each step standardises them. The mean of the errors is 2 - 2 x Pearson's correlation.
    """
    if len(score_N) < 2:
        return LossSum(score_N.sum() * 0, torch.zeros_like(score_N.sum()))

    def standardised(x_N: torch.Tensor) -> torch.Tensor:
        return (x_N - x_N.mean()) / (x_N.std(correction=0) + 1e-6)

    errors_N = (standardised(score_N) - standardised(target_N)).square()
    return LossSum(errors_N.sum(), torch.full_like(errors_N.sum(), len(errors_N)))


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], LossSum]] = {
    "ranking": pairs_loss,
    "listmle": list_loss,
    "mse": squared_loss,
}
"""The losses over the variants of a step, by their names in recipes. Arguments: scores [N] and targets [N]."""


def fit_line(score_N: npt.NDArray[np.float64], target_N: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return slope and intercept of the line that predicts standardised targets from scores of validation variants.

    It is the least-squares line for a correlation of LEAST_SLOPE or more. Without two different scores and targets, the
    slope is LEAST_SLOPE, and the line goes through the means.
    """
    known_N = ~np.isnan(target_N)
    x_N, y_N = score_N[known_N], target_N[known_N]
    if not len(x_N):
        return LEAST_SLOPE, 0.0
    deviations = float(x_N.std()), float(y_N.std())
    slope = LEAST_SLOPE
    if min(deviations) > 0:
        slope = max(LEAST_SLOPE, float(np.corrcoef(x_N, y_N)[0, 1])) * deviations[1] / deviations[0]
    return slope, float(y_N.mean() - slope * x_N.mean())
