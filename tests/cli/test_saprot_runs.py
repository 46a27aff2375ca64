"""SaProt as a user trains it on sequences alone: runs from random weights, and what is made of their models."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from command import esmshard
from family_runs import losses, run
from transformers import EsmForMaskedLM, EsmTokenizer

from esmshard.model import weights
from esmshard.model.families.family_registry import SIZES

SEQUENCES = {"a": "MKTAYIAKQRQISFVK", "b": "MXBUZOKT"}
PAIRS = ["M#K#T#A#Y#I#A#K#Q#R#Q#I#S#F#V#K#", "M###########K#T#"]
"""The sequences as the authors write them, where no structure is known."""


def test_masked_language_modelling_embeddings_and_scores(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    directory = run(tmp_path, "saprot_nano", "{name: mlm}", ranks=2)
    expected = losses(run(tmp_path / "alone", "saprot_nano", "{name: mlm}"))
    assert len(expected) == 4
    assert losses(directory) == pytest.approx(expected, rel=1e-5), "on two ranks as on one"
    model = directory / "model"
    made, start = weights.read(str(model)), weights.fresh(SIZES["saprot_nano"], 3)
    moved = (made["embed_tokens.weight"] - start["embed_tokens.weight"]).abs().amax(1) > 0
    assert made.config == SIZES["saprot_nano"]
    assert moved.all(), "every row is a column of the logits"

    fasta = tmp_path / "some.fasta"
    fasta.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in SEQUENCES.items()))
    done = esmshard("embed", model, fasta, "-o", tmp_path / "out.npy")
    assert done.returncode == 0, done.stderr
    theirs, tokenizer = EsmForMaskedLM.from_pretrained(model).eval(), EsmTokenizer.from_pretrained(model)
    for mine, pairs in zip(np.load(tmp_path / "out.npy"), PAIRS, strict=True):
        with torch.no_grad():
            said = theirs(**tokenizer(pairs, return_tensors="pt"), output_hidden_states=True)
        assert np.abs(mine - said.hidden_states[-1][0, 1:-1].mean(0).numpy()).max() < 1e-5

    one = tmp_path / "one.fasta"
    one.write_text(f">a\n{SEQUENCES['a']}\n")
    done = esmshard("score", model, one, "--all-singles", "-o", tmp_path / "scores.csv")
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "scores.csv", newline="") as file:
        scores = {row["mutant"]: float(row["masked_marginals"]) for row in csv.DictReader(file)}
    assert len(scores) == 19 * len(SEQUENCES["a"])
    with torch.no_grad():
        said = theirs(**tokenizer(PAIRS[0].replace("K#", "##", 1), return_tensors="pt")).logits[0, 2]
    a, k = (
        said.softmax(0)[5 + 21 * n : 26 + 21 * n].sum() for n in (0, 8)
    )  # A is the first amino acid, and K the 9th.
    assert scores["K2A"] == pytest.approx(float((a / k).log()), abs=1e-5)
