"""The head `gp` of task `variant`: a Gaussian process on features of the frozen language model.

It suits some ten to some thousand measurements of one protein. Its mean function is the zero-shot score, as in Kermut
(Groth et al. 2024, doi:10.48550/arXiv.2407.00002). Its kernel adds up over pairs of changes, and compares sites by the
language model's own representations and distributions, where Kermut takes the distributions of an inverse-folding
model. scikit-learn's Gaussian process would need this kernel's gradients by hand; torch computes them.

In tensor names, N are variants, M their changes, and A the 20 amino acids. All computing is in float64 on the CPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from Bio.Align import substitution_matrices
from scipy.optimize import minimize
from torch import nn

from esmshard.batch import TokenBatch
from esmshard.errors import InputError
from esmshard.model.weights import Weights
from esmshard.tasks.likelihood import AMINO_ACIDS, log_odds, require_lm_head
from esmshard.vocab import STANDARD, VOCAB_SIZE

MOST = 5000
"""The maximum number of training variants: the covariance of 5,000 variants has 200 MB, and is inverted in seconds."""
MOST_FITTED = 500
"""The hyperparameters are fitted to at most this number of training variants, evenly drawn, in seconds."""
PRIOR = {
    "noise": 0.6,
    "size": 0.3,
    "site": 0.25,
    "distribution": 0.5,
    "mutant": 0.1,
    "wild": 0.05,
    "slope": 0.03,
    "difference_size": 0.3,
    "difference": 0.5,
    "near_size": 0.1,
    "near": 1.0,
}
"""The medians of the hyperparameters' log-normal priors, in units of standardised targets and features. The logarithms
have standard deviation 1. They were chosen on beta-lactamase and on the shipped landscape: `benchmarks/results`.

- `noise`: the variance of a measurement. `size`: the variance of the effect of a change.
- `site`, `distribution`, `mutant`, `wild`: how fast the correlation of two changes falls with the squared distance of
  the representations of their sites, of the distributions there, of their new and of their old amino acids.
- `slope`: the variance of the slope of the zero-shot score, whose mean is SLOPE.
- `difference_size`, `difference`: variance and fall for the differences of representations, for pool `sites`.
- `near_size`, `near`: variance and fall, per 10 Angstrom, for the distances of sites, if there is a structure.
"""
SLOPE = 0.4  # the expected correlation between zero-shot score and target


@cache
def _descriptors() -> torch.Tensor:
    """Return 6 numbers for each token, float64 [V, 6]: the amino acids' coordinates in BLOSUM62, 0 for other tokens."""
    matrix = substitution_matrices.load("BLOSUM62")  # type: ignore[no-untyped-call]
    values, vectors = np.linalg.eigh(np.array([[matrix[a][b] for b in STANDARD] for a in STANDARD], dtype=np.float64))
    x_A6 = vectors[:, -6:] * np.sqrt(values[-6:])
    x_V6 = torch.zeros(VOCAB_SIZE, 6, dtype=torch.float64, device="cpu")
    x_V6[AMINO_ACIDS] = torch.from_numpy((x_A6 - x_A6.mean(0)) / x_A6.std())
    return x_V6


OF_CHANGES = ("wild_M", "mutant_M", "site_MD", "root_MA", "place_M3")


@dataclass
class Features:
    """The features of N variants with M changes, float64 on the CPU. Record numbers and letters are int64."""

    record_M: torch.Tensor
    """The number of each change's variant."""
    wild_M: torch.Tensor
    """The old token of each change."""
    mutant_M: torch.Tensor
    """The new token of each change."""
    site_MD: torch.Tensor
    """The wild type's representation at each changed residue, standardised over the wild type, divided by sqrt(D)."""
    root_MA: torch.Tensor
    """The square roots of the model's probabilities at each changed residue, for the Hellinger distance. Without
    zero-shot scores A is 0."""
    place_M3: torch.Tensor
    """The place of each changed residue in 10 Angstrom; empty without a structure."""
    score_N: torch.Tensor
    """The zero-shot score of each variant; 0 without zero-shot scores."""
    difference_ND: torch.Tensor
    """The differences of the variant's and the wild type's representations at the changed residues, added up. For pool
    `wild_type` D is 0."""

    @property
    def count(self) -> int:
        """The number N of variants."""
        return len(self.score_N)

    def of(self, chosen_K: torch.Tensor) -> "Features":
        """Return the features of the variants with the numbers `chosen_K`."""
        number_N = torch.full((self.count,), -1).index_put((chosen_K,), torch.arange(len(chosen_K)))
        kept_M = number_N[self.record_M] >= 0
        chosen: dict[str, torch.Tensor] = {"record_M": number_N[self.record_M[kept_M]]}
        chosen |= {name: getattr(self, name)[kept_M] for name in OF_CHANGES}
        chosen |= {name: getattr(self, name)[chosen_K] for name in ("score_N", "difference_ND")}
        return Features(**chosen)

    @staticmethod
    def joined(parts: "list[Features]") -> "Features":
        """Join the features of several batches."""
        first = np.cumsum([0, *(part.count for part in parts)]).tolist()
        columns = {f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Features)}
        columns["record_M"] = torch.cat([part.record_M + n for part, n in zip(parts, first, strict=False)])
        return Features(**columns)


class GaussianProcessHead(nn.Module):
    """Predicts a standardised number for each variant: mean, standard deviation, and that of a measurement, [3].

    The head has no parameters that are trained. `fit` stores the features and targets of training variants in buffers.
    `sizes` has the numbers of `variants` and of their `changes`. `sign` is -1 if lower values of the target are better,
    otherwise 1. `places` has the coordinates of each residue in Angstrom, and None for an unknown place.
    """

    target_N: torch.Tensor

    def __init__(
        self,
        dim: int,
        sizes: Mapping[str, int],
        sign: float,
        *,
        differences: bool,
        zero_shot: bool,
        places: Sequence[Sequence[float] | None] | None = None,
    ) -> None:
        super().__init__()
        # Residues with unknown places are far from all others.
        known = [[1e6 * n, 0.0, 0.0] if place is None else [*place] for n, place in enumerate(places or (), 1)]
        self._place_L3 = None if places is None else torch.tensor(known, dtype=torch.float64, device="cpu") / 10
        self.sign, self.reads_logits, self.differences = sign, zero_shot, differences
        n, m = sizes["variants"], sizes["changes"]
        letters, probabilities = torch.zeros(m, dtype=torch.int64), torch.zeros(m, len(STANDARD) if zero_shot else 0)
        stored = Features(
            letters,
            letters,
            letters,
            torch.zeros(m, dim),
            probabilities,
            torch.zeros(m, 0 if places is None else 3),
            torch.zeros(n),
            torch.zeros(n, dim * differences),
        )
        for name, value in vars(stored).items():
            self.register_buffer(name, value.clone())
        self.register_buffer("target_N", torch.zeros(n))
        self.hyperparameters = nn.Parameter(torch.tensor([*PRIOR.values()]))
        self._posterior: tuple[Features, torch.Tensor, torch.Tensor] | None = None

    def start(self, weights: Weights) -> None:
        """Refuse a model without a trained LM head if this head reads the zero-shot score."""
        if self.reads_logits:
            require_lm_head(weights, "set task.zero_shot=false, or ")

    def features(self, x_TD: torch.Tensor, batch: TokenBatch, logits_MV: torch.Tensor | None) -> Features:
        """Return the features of the variants of a batch, from the last layer and the logits at the changes."""
        assert batch.changes_4M is not None
        record_M, letter_M, mutant_M, wild_M = batch.changes_4M
        wild_LD = batch.residues(x_TD)[-1].cpu().double()  # Apple's GPUs have no float64
        site_MD = (x_TD[wild_M].cpu().double() - wild_LD.mean(0)) / (wild_LD.std(0) + 1e-6) / wild_LD.shape[1] ** 0.5
        difference_MD = (x_TD[mutant_M] - x_TD[wild_M]).cpu().double()[:, : x_TD.shape[1] * self.differences]
        score_N, root_MA = torch.zeros(batch.n_records), torch.zeros(len(record_M), 0)
        if logits_MV is not None:
            score_N = self.sign * log_odds(logits_MV, batch)
            root_MA = logits_MV[:, AMINO_ACIDS].float().softmax(-1).sqrt()
        place_M3 = torch.zeros(len(record_M), 0, dtype=torch.float64)
        if self._place_L3 is not None:
            place_M3 = self._place_L3[batch.position_T[wild_M].cpu() - 1]
        zeros_ND = torch.zeros(batch.n_records, difference_MD.shape[1], dtype=torch.float64)
        return Features(
            record_M.cpu(),
            batch.tokens_T[wild_M].cpu(),
            letter_M.cpu(),
            site_MD,
            root_MA.cpu().double(),
            place_M3,
            score_N.cpu().double(),
            zeros_ND.index_add(0, record_M.cpu(), difference_MD),
        )

    def fit(self, features: Features, target_N: torch.Tensor) -> None:
        """Store the training variants, and fit the hyperparameters: the maximum of marginal likelihood times prior.

        Raises `InputError` if a feature is not finite.
        """
        if not all(torch.isfinite(values).all() for values in vars(features).values()):
            raise InputError("the model's representations or scores of variants are NaN or infinite; use another model")
        for name, value in vars(features).items():
            getattr(self, name).copy_(value)
        self.target_N.copy_(target_N)
        self._posterior = None
        chosen = torch.from_numpy(np.linspace(0, features.count - 1, min(features.count, MOST_FITTED)).astype(np.int64))
        known, y_N = self._standardised(features.of(chosen)), target_N.double()[chosen]
        prior_K = torch.tensor([*PRIOR.values()], dtype=torch.float64).log()

        def loss(values_K: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
            with torch.enable_grad():
                log_K = torch.tensor(values_K, requires_grad=True)
                factor_NN, weight_N = self._solved(known, y_N, log_K.exp())
                residual_N = y_N - SLOPE * known.score_N
                likelihood = -0.5 * residual_N @ weight_N - factor_NN.diagonal().log().sum()
                minus = 0.5 * (log_K - prior_K).square().sum() - likelihood
            (gradient_K,) = torch.autograd.grad(minus, log_K)
            return minus.item(), gradient_K.numpy()

        bounds = [(middle - 4, middle + 4) for middle in prior_K.tolist()]
        best = minimize(loss, prior_K.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 60})
        self.hyperparameters.copy_(torch.from_numpy(np.exp(best.x)))

    @torch.no_grad()
    def forward(
        self, x_TD: torch.Tensor, batch: TokenBatch, logits_MV: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return mean, standard deviation of the mean, and standard deviation of a measurement of each variant, [3]."""
        if self._posterior is None:
            known = self._standardised(Features(**{field.name: self._double(field.name) for field in fields(Features)}))
            factor_NN, weight_N = self._solved(known, self._double("target_N"), self._double("hyperparameters"))
            self._posterior = known, factor_NN, weight_N
        known, factor_NN, weight_N = self._posterior
        values_K, asked = self._double("hyperparameters"), self._standardised(self.features(x_TD, batch, logits_MV))
        shared_NK = self._kernel(known, asked, values_K)
        mean_K = shared_NK.T @ weight_N + SLOPE * asked.score_N
        explained_K = torch.linalg.solve_triangular(factor_NN, shared_NK, upper=False).square().sum(0)
        # Only the diagonal is needed, so variants are compared in small groups.
        parts = (asked.of(number_K) for number_K in torch.split(torch.arange(asked.count), 256))
        own_K = torch.cat([self._kernel(part, part, values_K).diagonal() for part in parts])
        variance_K = (own_K - explained_K).clamp(min=1e-9)
        output_K3 = torch.stack([mean_K, variance_K.sqrt(), (variance_K + values_K[0]).sqrt()], 1)
        return list(output_K3.to(x_TD.device, torch.float32))

    def _double(self, name: str) -> torch.Tensor:
        buffer: torch.Tensor = getattr(self, name).detach().cpu()
        return buffer.double() if buffer.is_floating_point() else buffer

    def _standardised(self, x: Features) -> Features:
        """Standardise scores, and scale differences, by the training variants."""
        score_N, difference_ND = self._double("score_N"), self._double("difference_ND")
        deviation = score_N.std() if len(score_N) > 1 else torch.tensor(0.0)
        scores = (x.score_N - score_N.mean()) / (deviation if deviation > 0 else 1.0)
        scale = difference_ND.square().sum(1).mean().sqrt()
        changed = {"score_N": scores, "difference_ND": x.difference_ND / (scale if scale > 0 else 1.0)}
        return Features(**(vars(x) | changed))

    def _solved(
        self, known: Features, target_N: torch.Tensor, values_K: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the Cholesky factor of the targets' covariance, and the weight of each training variant."""
        noise_N = (values_K[0] + 1e-6).expand(known.count)
        factor_NN = torch.linalg.cholesky(self._kernel(known, known, values_K) + noise_N.diag())
        residual_N = target_N - SLOPE * known.score_N
        return factor_NN, torch.cholesky_solve(residual_N[:, None], factor_NN)[:, 0]

    def _kernel(self, a: Features, b: Features, values_K: torch.Tensor) -> torch.Tensor:
        """Return the covariance of the variants of `a` and `b` without noise, float64 [N, N]. `values_K` are as in
        PRIOR. The variance of the unknown mean of all variants is 1.
        """
        value = dict(zip(PRIOR, values_K, strict=True))
        letters = _descriptors()
        of_letters_MM = value["mutant"] * _squares(letters[a.mutant_M], letters[b.mutant_M])
        of_letters_MM = of_letters_MM + value["wild"] * _squares(letters[a.wild_M], letters[b.wild_M])
        of_sites_MM = value["site"] * _squares(a.site_MD, b.site_MD) + value["distribution"] * 0.5 * _squares(
            a.root_MA, b.root_MA
        )
        effect_MM = value["size"] * torch.exp(-of_sites_MM - of_letters_MM)
        if self._place_L3 is not None:
            distance_MM = torch.cdist(a.place_M3, b.place_M3, compute_mode="donot_use_mm_for_euclid_dist")
            effect_MM = effect_MM + value["near_size"] * torch.exp(-value["near"] * distance_MM - of_letters_MM)
        over_a_NM = effect_MM.new_zeros(a.count, len(b.record_M)).index_add(0, a.record_M, effect_MM)
        effect_NN = effect_MM.new_zeros(a.count, b.count).index_add(1, b.record_M, over_a_NM)
        kernel_NN: torch.Tensor = 1 + effect_NN + value["slope"] * torch.outer(a.score_N, b.score_N)
        if self.differences:
            fall_NN = torch.exp(-value["difference"] * _squares(a.difference_ND, b.difference_ND))
            kernel_NN = kernel_NN + value["difference_size"] * fall_NN
        return kernel_NN


def _squares(a_ND: torch.Tensor, b_ND: torch.Tensor) -> torch.Tensor:
    """Return the squared distances of all pairs of rows, [N, N]."""
    squares_NN: torch.Tensor = a_ND.square().sum(1)[:, None] + b_ND.square().sum(1) - 2 * a_ND @ b_ND.T
    return squares_NN.clamp(min=0)
