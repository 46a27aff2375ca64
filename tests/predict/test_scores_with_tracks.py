"""Zero-shot scores of a model that reads structure letters of the wild type."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tracked_model import random_pairs, track, write_model

from esmshard.batch import pack
from esmshard.data.variants import parse_variant
from esmshard.io.writers import facts_file
from esmshard.model.trunk import Trunk
from esmshard.predict.zero_shot import METHODS, score, score_table
from esmshard.vocab import MASK, RESIDUES, TOKENS, encode

SEQUENCE, LETTERS = random_pairs({"wt": 40})["wt"]
NAMES = [f"{SEQUENCE[n]}{n + 1}{'C' if SEQUENCE[n] != 'C' else 'W'}" for n in (0, 7, 20, 39)]
VARIANTS = [parse_variant(name) for name in NAMES]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Trunk]:
    return write_model(tmp_path_factory.mktemp("tracked") / "model")


@torch.no_grad()
def by_hand(model: Trunk, window: int) -> list[float]:
    """Masked marginals: each site hidden in a window around it, with the letters of the window."""
    found = []
    for (mutation,) in VARIANTS:
        first = min(max(mutation.position - window // 2, 0), len(SEQUENCE) - window)
        tokens = encode(SEQUENCE[first : first + window]).copy()
        place = mutation.position - first + 1
        tokens[place] = MASK
        batch = pack([tokens], logits_at=[np.array([place])], tracks=[{"3di": track(LETTERS[first : first + window])}])
        logits_PV = model(batch, logits_at=batch.logits_at_P).logits_PV
        assert logits_PV is not None
        columns = [TOKENS.index(letter) for letter in RESIDUES]
        log_p = logits_PV[0, columns].log_softmax(-1)
        found.append(float(log_p[RESIDUES.index(mutation.mutant)] - log_p[RESIDUES.index(mutation.wild)]))
    return found


def test_every_method_sees_the_letters_of_the_window(trained: tuple[str, Trunk]) -> None:
    tracks = {"3di": track(LETTERS)}
    for window in (40, 15):
        found = score(trained[1], SEQUENCE, VARIANTS, window=window, tracks=tracks)
        np.testing.assert_allclose(found, by_hand(trained[1], window), rtol=0, atol=1e-5)
    for method in METHODS:
        values = [score(trained[1], SEQUENCE, VARIANTS, method, tracks=given) for given in (None, tracks)]
        assert (np.abs(values[0] - values[1]) > 1e-5).all()


def test_a_table_with_letters(trained: tuple[str, Trunk], tmp_path: Path) -> None:
    name, model = trained
    (tmp_path / "wt.fasta").write_text(f">wt\n{SEQUENCE}\n")
    (tmp_path / "3di.fasta").write_text(f">other\nvv\n>wt\n{LETTERS}\n")
    (tmp_path / "v.csv").write_text("\n".join(["mutant", *NAMES]) + "\n")
    expected = by_hand(model, 40)
    out = tmp_path / "x.csv"
    score_table(name, tmp_path / "wt.fasta", tmp_path / "v.csv", out, tracks={"3di": str(tmp_path / "3di.fasta")})
    found = [float(line.split(",")[1]) for line in out.read_text().splitlines()[1:]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    about = json.loads(facts_file(out).read_text())
    assert about["tracks"] == {"3di": "3di.fasta"}
    assert about["wild_type"] == "wt.fasta"
    assert "structure letters (3Di) of 40 of 40 residues of the wild type" in str(about["notices"])
