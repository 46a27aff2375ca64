"""Zero-shot scores beside the plainest computation of what they mean: one sequence, one forward pass, one site."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from tracked_model import random_pairs, track, write_model

from esmshard.batch import pack
from esmshard.data.mutations import Mutation, parse_variant
from esmshard.errors import UsageError
from esmshard.io.writers import facts_file
from esmshard.model import weights
from esmshard.model.families.esm2 import ESM2
from esmshard.model.families.family_registry import SIZES
from esmshard.model.trunk import Trunk
from esmshard.predict.variant_tables import single_substitutions
from esmshard.predict.zero_shot import METHODS, score, score_table
from esmshard.tasks import marginals
from esmshard.tasks.marginals import log_probabilities
from esmshard.vocab import MASK, RESIDUES, STANDARD, TOKENS, encode

PROTEIN = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQ"
NUMBER = {aa: int(encode(aa)[1]) for aa in STANDARD}


@pytest.fixture(scope="module")
def model() -> ESM2:
    found = weights.build(weights.fresh(SIZES["nano"], 0), torch.device("cpu"))
    torch.manual_seed(0)
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.3)  # new weights say nearly the same everywhere
    return found.eval()


def expected(model: Trunk, sequence: str, site: int, hidden: bool = True, **given: Any) -> torch.Tensor:
    """log p of all tokens at one site."""
    tokens = encode(sequence).copy()
    if hidden:
        tokens[site + 1] = MASK
    with torch.no_grad():
        logits = model(pack([tokens], **given), logits_at=torch.tensor([site + 1])).logits_PV
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
    monkeypatch.setattr(marginals, "pack", lambda tokens, **rest: seen.append(len(tokens)) or pack(tokens, **rest))
    monkeypatch.setattr(marginals, "TOKENS", 130)
    variants = single_substitutions(PROTEIN)
    assert len(variants) == len(set(variants)) == 19 * len(PROTEIN)
    score(model, PROTEIN, variants)
    assert (sum(seen), max(seen)) == (len(PROTEIN), 2)
    seen.clear()
    score(model, PROTEIN, variants, "wild-type-marginals")
    assert seen == [1]


def test_of_a_long_protein_the_model_sees_a_window_around_the_site(model: ESM2) -> None:
    for hidden in (True, False):
        found = log_probabilities(model, encode(PROTEIN), [0, 30, 55], hidden=hidden, window=11)
        for row, (site, start) in zip(found, ((0, 0), (30, 25), (55, 45)), strict=True):
            log_p = expected(model, PROTEIN[start : start + 11], site - start, hidden)
            assert np.allclose(row[:20], log_p[[NUMBER[aa] for aa in STANDARD]], rtol=0, atol=1e-5)
        whole = log_probabilities(model, encode(PROTEIN), [30], hidden=hidden, window=56)
        assert np.abs(whole[0] - found[1]).max() > 1e-3, "what lies beyond the window matters"


def test_no_variants_and_mistakes(model: ESM2) -> None:
    assert score(model, PROTEIN, []).shape == (0,)
    for given, token in (({"method": "best"}, "masked-marginals"), ({"window": 0}, "give at least 1")):
        with pytest.raises(UsageError, match=token):
            score(model, PROTEIN, VARIANTS, **given)


SEQUENCE, LETTERS = random_pairs({"wt": 40})["wt"]
TRACKED = [f"{SEQUENCE[n]}{n + 1}{'C' if SEQUENCE[n] != 'C' else 'W'}" for n in (0, 7, 20, 39)]
OF_TRACKED = [parse_variant(name) for name in TRACKED]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Trunk]:
    return write_model(tmp_path_factory.mktemp("tracked") / "model")


def with_letters(model: Trunk, window: int) -> list[float]:
    """Masked marginals: each site hidden in a window around it, with the letters of the window."""
    found = []
    for (mutation,) in OF_TRACKED:
        first = min(max(mutation.position - window // 2, 0), len(SEQUENCE) - window)
        part, place = slice(first, first + window), mutation.position - first
        log_p = expected(model, SEQUENCE[part], place, tracks=[{"3di": track(LETTERS[part])}])
        log_p = log_p[[TOKENS.index(letter) for letter in RESIDUES]].log_softmax(-1)
        found.append(float(log_p[RESIDUES.index(mutation.mutant)] - log_p[RESIDUES.index(mutation.wild)]))
    return found


def test_every_method_sees_the_letters_of_the_window(trained: tuple[str, Trunk]) -> None:
    tracks = {"3di": track(LETTERS)}
    for window in (40, 15):
        found = score(trained[1], SEQUENCE, OF_TRACKED, window=window, tracks=tracks)
        np.testing.assert_allclose(found, with_letters(trained[1], window), rtol=0, atol=1e-5)
    for method in METHODS:
        values = [score(trained[1], SEQUENCE, OF_TRACKED, method, tracks=given) for given in (None, tracks)]
        assert (np.abs(values[0] - values[1]) > 1e-5).all()


def test_a_table_with_letters(trained: tuple[str, Trunk], tmp_path: Path) -> None:
    for name, text in (
        ("wt.fasta", f">wt\n{SEQUENCE}\n"),
        ("3di.fasta", f">other\nvv\n>wt\n{LETTERS}\n"),
        ("v.csv", "\n".join(["mutant", *TRACKED]) + "\n"),
    ):
        (tmp_path / name).write_text(text)
    out, tracks = tmp_path / "x.csv", {"3di": str(tmp_path / "3di.fasta")}
    score_table(trained[0], tmp_path / "wt.fasta", tmp_path / "v.csv", out, tracks=tracks)
    found = [float(line.split(",")[1]) for line in out.read_text().splitlines()[1:]]
    np.testing.assert_allclose(found, with_letters(trained[1], 40), rtol=0, atol=1e-4)
    about = json.loads(facts_file(out).read_text())
    assert (about["tracks"], about["wild_type"]) == ({"3di": "3di.fasta"}, "wt.fasta")
    assert "structure letters (3Di) of 40 of 40 residues of the wild type" in str(about["notices"])
