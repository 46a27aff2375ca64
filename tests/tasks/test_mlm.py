"""The masked-language-model task: what is hidden, loss, scores, baselines; and training lowers the loss."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from model_files import TINY, fair_esm, ours

from esmshard.data.batching.loader import Example, Examples
from esmshard.io.store import ingest
from esmshard.model.finetuner import FineTuner, LanguageModelHead
from esmshard.tasks.base import collate
from esmshard.tasks.mlm import MlmSettings, MlmTask, corrupt
from esmshard.vocab import CLS, EOS, MASK, SEPARATOR, encode, is_residue

SETTINGS = MlmSettings(name="mlm")
TASK = MlmTask(SETTINGS, {})
LETTERS = list("ACDEFGHIKLMNPQRSTVWY")


def example(sequence: str, draw: str = "0:0", record_id: str = "a") -> Example:
    return Example(record_id, encode(sequence), {}, draw)


def records(n_residues: int) -> list[Example]:
    """Random records of several lengths, `n_residues` in all at least; every tenth residue is no standard one."""
    rng, lengths = np.random.default_rng(1), (8, 30, 77, 350, 1022)
    found: list[Example] = []
    while sum(len(e.tokens) - 2 for e in found) < n_residues:
        letters = rng.choice(LETTERS, lengths[len(found) % len(lengths)])
        letters[5::10] = rng.choice(list("XBUZO"), len(letters[5::10]))
        found.append(example("".join(letters), record_id=f"r{len(found)}"))
    return found


@pytest.fixture(scope="module")
def model() -> FineTuner:
    return FineTuner(ours(fair_esm(TINY), TINY), LanguageModelHead()).eval()


def test_shares_are_those_of_esm() -> None:
    amino_acids, eligible, parts = encode("".join(LETTERS))[1:-1], 0, []
    for one in records(120_000):
        inputs = TASK.inputs(one)
        rest = np.delete(np.arange(len(one.tokens)), inputs.logits_at)
        assert (inputs.tokens[rest] == one.tokens[rest]).all()
        assert (inputs.target == one.tokens[inputs.logits_at]).all()
        eligible += int(np.isin(one.tokens, amino_acids).sum())
        parts.append([inputs.target, inputs.tokens[inputs.logits_at]])
    was, now = np.concatenate(parts, axis=1)
    assert len(was) / eligible == pytest.approx(0.15, abs=0.003)
    assert (now == MASK).mean() == pytest.approx(0.8, abs=0.01)
    assert (now == was).mean() == pytest.approx(0.1 + 0.1 / 20, abs=0.01)  # one in twenty is the same again
    counts = np.bincount(now[(now != MASK) & (now != was)], minlength=33)
    assert counts.sum() / len(was) == pytest.approx(0.1 * 19 / 20, abs=0.01)
    assert np.flatnonzero(counts).tolist() == sorted(amino_acids)  # all of the 20, and nothing else
    expected = counts.sum() / 20
    assert (np.abs(counts[counts > 0] - expected) < 5 * math.sqrt(expected)).all()


def test_only_standard_residues_are_told() -> None:
    for n in range(200):
        inputs = TASK.inputs(example("XXBUZOMXX", record_id=str(n)))
        # The one M, always: short sequences have at least one.
        assert (inputs.logits_at.tolist(), inputs.target.tolist()) == ([7], [20])
    nothing = TASK.inputs(example("XXBUZO"))
    assert (len(nothing.logits_at), len(nothing.target)) == (0, 0)
    assert nothing.tokens.tolist() == encode("XXBUZO").tolist()


def test_validation_hides_the_same_whatever_the_seed_and_training_another_choice_each_epoch(tmp_path: Path) -> None:
    path = tmp_path / "a.fasta"
    path.write_text(f">r0\nMKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ\n>r1\n{'MLKKHEWYTV' * 12}\n")
    store = ingest([path], tmp_path / "store")

    def seen(seed: int, epoch: int | None) -> list[list[int]]:
        examples = Examples("valid", path, store, None, long="crop", max_length=100, seed=seed)
        return [TASK.inputs(examples.get(n, epoch)).tokens.tolist() for n in range(2)]

    assert seen(0, None) == seen(7, None)
    assert seen(0, 1) == seen(0, 1)
    for other in (seen(0, 2), seen(1, 1)):
        assert all(a != b for a, b in zip(seen(0, 1), other, strict=True))
    # The same for ever: a change would make perplexities of old and new runs differ.
    fixed = [TASK.inputs(example("MKTAYIAKQRQISFVKSHFS", "fixed", name)).logits_at.tolist() for name in ("P1", "P2")]
    assert fixed[0] == [8, 11, 13] != fixed[1]


def test_a_linker_is_never_hidden_and_never_drawn() -> None:
    tokens = encode("MKTAYIAKQR:GQISFVKSH", linker=30)
    for draw in range(200):
        corrupted, chosen_P = corrupt(tokens, 0.5, f"draw {draw}")
        assert len(chosen_P) in (9, 10), "half of the residues, whatever the linker"
        assert is_residue(tokens)[chosen_P].all()
        assert (corrupted[tokens == SEPARATOR] == SEPARATOR).all()
        assert (corrupted == SEPARATOR).sum() == 30


def test_loss_scores_and_summary_are_over_residues() -> None:
    rng, counts = np.random.default_rng(5), (4, 0, 9)
    outputs = [(rng.standard_normal((n, 33)) * 3).astype(np.float32) for n in counts]
    targets = [rng.integers(4, 24, n) for n in counts]
    targets[0][:3] = outputs[0][:3].argmax(1)
    targets[0][3] = (outputs[0][3].argmax() + 1) % 33
    rows = list(map(TASK.score, outputs, targets))
    losses = [  # one residue after the other
        sum(math.log(sum(map(math.exp, x_V))) - x_V[t] for x_V, t in zip(o.tolist(), target_P.tolist(), strict=True))
        for o, target_P in zip(outputs, targets, strict=True)
    ]
    part = TASK.loss([torch.from_numpy(o) for o in outputs], [torch.from_numpy(t) for t in targets])
    assert (float(part.sum), float(part.count)) == (pytest.approx(sum(losses), rel=1e-5), 13)
    assert [row["nll"] for row in rows] == pytest.approx(losses, rel=1e-6)
    assert [row["masked"] for row in rows] == [4, 0, 9]
    assert rows[0]["perplexity"] == pytest.approx(math.exp(losses[0] / 4), rel=1e-6)
    assert rows[0]["accuracy"] == 0.75
    assert np.isnan([rows[1]["perplexity"], rows[1]["accuracy"]]).all()
    found = TASK.summary(rows)
    assert tuple(found) == TASK.columns == ("perplexity", "accuracy")
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / 13), rel=1e-6)
    assert found["accuracy"] == (3 + int((outputs[2].argmax(1) == targets[2]).sum())) / 13
    assert all(np.isnan(v) for v in TASK.summary([rows[1]]).values())


def test_diffusion_masks_a_share_that_is_uniform_and_weights_the_loss_by_it() -> None:
    """The weight is (T - t + 1) / T with T = 500, as in the authors' code with `weight: linear`."""
    task, one = MlmTask(MlmSettings(name="mlm", masking="diffusion"), {}), example("X".join(LETTERS) * 50)
    residues, shares = np.flatnonzero(np.isin(one.tokens, encode("".join(LETTERS))[1:-1])), []
    for n in range(1000):
        inputs = task.inputs(example("X".join(LETTERS) * 50, f"0:{n}"))
        hidden = np.flatnonzero(inputs.tokens == MASK)
        assert (inputs.logits_at == hidden).all()
        assert set(hidden) <= set(residues)
        assert (np.delete(inputs.tokens, hidden) == np.delete(one.tokens, hidden)).all()
        if len(hidden):
            token_P, weight_P = inputs.target.T
            assert (token_P == one.tokens[hidden]).all()
            (weight,) = set(weight_P.tolist())
            shares.append((len(hidden) / len(residues), (501 - weight) / 500))
    share_N, t_N = np.array(shares).T
    assert share_N == pytest.approx(t_N, abs=5 * 0.5 / math.sqrt(len(residues)))
    assert np.histogram(t_N, 4, (0, 1))[0] == pytest.approx(250, abs=5 * math.sqrt(250 * 3 / 4))
    fixed = example("MKTAYIAKQRQISFVKSHFS", "fixed")
    assert task.inputs(fixed).tokens.tolist() == TASK.inputs(fixed).tokens.tolist(), "evaluations are comparable"

    logits, weights = torch.randn(3, 33), torch.tensor([500, 250, 250])
    part = task.loss(
        [logits[:1], logits[1:1], logits[1:]],
        [torch.tensor([[4, 500]]), torch.empty(0, 2).long(), torch.tensor([[5, 250], [6, 250]])],
    )
    losses = -logits.log_softmax(1)[range(3), [4, 5, 6]]
    assert float(part.sum) == pytest.approx(float((losses * weights / 500).sum()), rel=1e-5)
    assert float(part.count) == 3


def test_predictions_are_probabilities_of_the_20_amino_acids(model: FineTuner) -> None:
    one = example("MKTXAYIAKQR")
    question = TASK.question(one)
    assert question.tokens.tolist() == one.tokens.tolist()
    assert question.logits_at.tolist() == list(range(1, 12))
    logits_LV = model.outputs([question])[0]
    found = TASK.predict(logits_LV)
    order = [int(encode(letter)[1]) for letter in LETTERS]
    assert found == pytest.approx(torch.from_numpy(logits_LV)[:, order].softmax(1).numpy(), abs=1e-6)
    assert (found.dtype, list(TASK.names), TASK.per_residue) == (np.float32, LETTERS, True)


def test_the_frequencies_baseline_guesses_alike_everywhere(model: FineTuner) -> None:
    known = TASK.baselines([example("MMMKX"), example("MKB")], model)
    logits_V = known["amino-acid frequencies"]
    found = np.exp(logits_V.astype(np.float64))
    assert found[20] == pytest.approx(5 / 26)  # 4 of 6 standard residues are M, and one more of each of the 20
    assert found[15] == pytest.approx(3 / 26)
    assert found[4] == pytest.approx(1 / 26)
    assert found[[CLS, EOS, MASK, 24, 25]] == pytest.approx(0, abs=1e-12)
    assert found.sum() == pytest.approx(1)

    one = example("MKTAYIAKQRQISFVKSHFS", "fixed")
    outputs = TASK.baseline_outputs([one], known, model)
    assert list(outputs) == ["amino-acid frequencies", "before fine-tuning"]
    with torch.no_grad():
        assert np.array_equal(outputs["before fine-tuning"][0], model(collate(TASK, [one])[0])[0].numpy())
    target = TASK.inputs(one).target
    row = TASK.score(np.asarray(outputs["amino-acid frequencies"][0]), target)
    assert row["nll"] == pytest.approx(-sum(math.log(found[t]) for t in target), rel=1e-5)
