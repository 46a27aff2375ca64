"""Zero-shot scores beside the plainest computation of what they mean: one sequence, one forward pass, one site."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from esmshard.batch import pack
from esmshard.data.variants import Mutation
from esmshard.errors import UsageError
from esmshard.model import weights
from esmshard.model.families.esm2 import ESM2
from esmshard.model.families.family_registry import SIZES
from esmshard.predict.variants import single_substitutions
from esmshard.predict.zero_shot import score
from esmshard.tasks import marginals
from esmshard.tasks.marginals import log_probabilities
from esmshard.vocab import MASK, STANDARD, encode

PROTEIN = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQ"
NUMBER = {aa: int(encode(aa)[1]) for aa in STANDARD}


@pytest.fixture(scope="module")
def model() -> ESM2:
    found = weights.build(weights.fresh(SIZES["nano"], 0), torch.device("cpu"))
    torch.manual_seed(0)
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.3)  # new weights say nearly the same everywhere
    return found.eval()


def expected(model: ESM2, sequence: str, site: int, hidden: bool = True) -> torch.Tensor:
    """log p of all tokens at one site."""
    tokens = encode(sequence).copy()
    if hidden:
        tokens[site + 1] = MASK
    with torch.no_grad():
        logits = model(pack([tokens]), logits_at=torch.tensor([site + 1])).logits_PV
    assert logits is not None
    return logits[0].log_softmax(-1)


def variant(*names: str) -> tuple[Mutation, ...]:
    return tuple(Mutation(int(name[1:-1]) - 1, name[0], name[-1]) for name in names)


VARIANTS = [variant("K2A"), variant(), variant("M1W", "Q56C"), variant("K2C"), variant("A4V", "Y5F", "I6V")]


def test_marginals_are_sums_over_the_mutated_sites(model: ESM2) -> None:
    for hidden, method in ((True, "masked-marginals"), (False, "wild-type-marginals")):
        found = score(model, PROTEIN, VARIANTS, method)  # type: ignore[arg-type]
        assert found.dtype == np.float64
        for value, mutations in zip(found, VARIANTS, strict=True):
            by_hand = 0.0
            for mutation in mutations:
                log_p = expected(model, PROTEIN, mutation.position, hidden)
                by_hand += float(log_p[NUMBER[mutation.mutant]] - log_p[NUMBER[mutation.wild]])
            assert value == pytest.approx(by_hand, abs=1e-5)
        assert found[1] == 0, "the wild type"
        assert np.ptp(found) > 0.1


def test_pseudo_perplexity_hides_each_residue_of_the_variant(model: ESM2) -> None:
    found = score(model, PROTEIN, VARIANTS[:2], "pseudo-perplexity")
    mutant = PROTEIN[0] + "A" + PROTEIN[2:]
    for value, sequence in zip(found, (mutant, PROTEIN), strict=True):
        own = [float(expected(model, sequence, n)[NUMBER[residue]]) for n, residue in enumerate(sequence)]
        assert value == pytest.approx(np.mean(own), abs=1e-5)
    assert len(own) == 56, "the first and the last residue count too"


def test_a_site_costs_one_pass_however_many_the_variants(model: ESM2, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(tokens: list[np.ndarray], **rest: Any) -> Any:
        seen.append(len(tokens))
        return pack(tokens, **rest)

    monkeypatch.setattr(marginals, "pack", counted)
    variants = single_substitutions(PROTEIN)
    assert len(variants) == len(set(variants)) == 19 * len(PROTEIN)
    found = score(model, PROTEIN, variants)
    assert sum(seen) == len(PROTEIN)
    monkeypatch.setattr(marginals, "TOKENS", 130)
    seen.clear()
    assert np.allclose(score(model, PROTEIN, variants), found, rtol=0, atol=1e-5)
    assert max(seen) == 2, "whatever the pack"
    seen.clear()
    score(model, PROTEIN, variants, "wild-type-marginals")
    assert seen == [1]


def test_of_a_long_protein_the_model_sees_a_window_around_the_site(model: ESM2) -> None:
    for hidden in (True, False):
        found = log_probabilities(model, PROTEIN, [0, 30, 55], hidden=hidden, window=11)
        for row, (site, start) in zip(found, ((0, 0), (30, 25), (55, 45)), strict=True):
            log_p = expected(model, PROTEIN[start : start + 11], site - start, hidden)
            assert np.allclose(row[:20], log_p[[NUMBER[aa] for aa in STANDARD]], rtol=0, atol=1e-5)
        whole = log_probabilities(model, PROTEIN, [30], hidden=hidden, window=56)
        assert np.abs(whole[0] - found[1]).max() > 1e-3, "what lies beyond the window matters"


def test_mistakes(model: ESM2) -> None:
    assert score(model, PROTEIN, []).shape == (0,)
    with pytest.raises(UsageError, match="masked-marginals"):
        score(model, PROTEIN, VARIANTS, "best")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give at least 1"):
        score(model, PROTEIN, VARIANTS, window=0)
