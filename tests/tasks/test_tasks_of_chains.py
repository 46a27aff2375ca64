"""What tasks make of records of several chains: what is between chains is no residue."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from model_files import TINY, fair_esm, ours, perturb, write_transformers

from esmshard.batch import pack
from esmshard.predict.zero_shot import score_sequences
from esmshard.tasks.marginals import pseudo_log_likelihoods
from esmshard.tasks.mlm import corrupt
from esmshard.tasks.sequence import SequenceHead
from esmshard.vocab import SEPARATOR, encode, is_residue

A, B = "MKTAYIAKQR", "GQISFVKSH"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference = fair_esm(TINY)
    perturb(reference, deviation=0.3)
    return write_transformers(tmp_path_factory.mktemp("chains") / "model", ours(reference, TINY), TINY)


def test_a_linker_is_never_hidden_and_never_drawn() -> None:
    tokens = encode(f"{A}:{B}", linker=30)
    for draw in range(200):
        corrupted, chosen_P = corrupt(tokens, 0.5, f"draw {draw}")
        assert len(chosen_P) in (9, 10), "half of the residues, whatever the linker"
        assert is_residue(tokens)[chosen_P].all()
        assert (corrupted[tokens == SEPARATOR] == SEPARATOR).all()
        assert (corrupted == SEPARATOR).sum() == 30


def test_means_are_over_the_residues_of_all_chains() -> None:
    batch = pack([encode(A), encode(f"{A}:{B}", linker=4), encode("M:K:W", linker=2)])
    x_TD = torch.randn(len(batch.tokens_T), 8, generator=torch.Generator().manual_seed(0))
    own_T = torch.from_numpy(is_residue(batch.tokens_T.numpy()))
    bounds = ((0, 12), (12, 37), (37, 46))
    expected = torch.stack([x_TD[start:end][own_T[start:end]].mean(0) for start, end in bounds])
    head = SequenceHead(8, 0, 3, 0.0)
    torch.testing.assert_close(torch.stack(head(x_TD, batch)), head.out(head.norm(expected)))


def test_scores_are_of_the_residues_in_the_joined_sequence(model: Path, tmp_path: Path) -> None:
    fasta, out = tmp_path / "x.fasta", tmp_path / "x.csv"
    fasta.write_text(f">ab\n{A}:{B}\n>a\n{A}\n")
    score_sequences(str(model), fasta, out, join="linker:6")
    with open(out, newline="") as file:
        ab, a = csv.DictReader(file)
    assert (ab["length"], ab["not_scored"], ab["window"]) == ("19", "0", "25")
    assert (a["length"], a["window"]) == ("10", "10")
    reference = fair_esm(TINY)
    perturb(reference, deviation=0.3)
    trunk = ours(reference, TINY)
    plain = encode(A + "G" * 6 + B)
    whole = float(pseudo_log_likelihoods(trunk, [(plain, {})], np.array([25]), window=1022)[0])
    for place in range(len(A) + 1, len(A) + 7):  # residues of the linker are in no sum
        hidden = plain.copy()
        hidden[place] = 32
        with torch.no_grad():
            logits_PV = trunk(pack([hidden]), logits_at=torch.tensor([place])).logits_PV
        whole -= float(logits_PV.log_softmax(-1)[0, 6])
    assert math.isclose(float(ab["pseudo_log_likelihood"]), whole, abs_tol=1e-3)
    assert '"join": "linker:6"' in (tmp_path / "x.csv.json").read_text()
