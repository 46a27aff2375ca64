"""The head `likelihood` of task variant: its losses by hand, its contexts, and a run on any number of ranks."""

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from command import in_process
from ranks import run_ranks
from test_variant_task import NANO, WT, example, log_odds, logits, mutant, task, trunk  # noqa: F401

from esmshard.batch import pack
from esmshard.data.batching.loader import Example
from esmshard.errors import InputError, UsageError
from esmshard.model.families.esm2 import ESM2
from esmshard.model.finetuner import FineTuner
from esmshard.parallel.preemption import Preempted
from esmshard.recipe import recipe_file
from esmshard.tasks.base import collate
from esmshard.tasks.likelihood import LOSSES, fit_line
from esmshard.tasks.variant_baselines import ONE_HOT
from esmshard.tasks.variants import VariantSettings, VariantTask
from esmshard.train import finetune, loop
from esmshard.train.evaluate import score_baselines
from esmshard.train.inputs import prepare
from esmshard.vocab import MASK, encode

SCORES, TARGETS = torch.tensor([0.3, -1.2, 2.0, 0.5, 0.1]), torch.tensor([1.0, 3.0, 2.0, 2.0, -1.0])
RECIPE = """\
task: {{name: variant, head: likelihood}}
model: {{name: starter}}
data: {{table: v.csv, wild_type: wt.fasta, folds: 3, fold: 0}}
batch: {{sequences: 20, tokens_per_rank: 40}}
optim: {{lr: 1.0e-3}}
train: {{steps: 4, eval_every: 2}}
parallel: {{precision: fp32}}
out: {out}
"""


def test_losses_by_hand() -> None:
    x, y = SCORES.double().numpy(), TARGETS.numpy()
    pairs = [np.log1p(np.exp(x[j] - x[i])) for i, j in itertools.permutations(range(5), 2) if y[i] > y[j]]
    part = LOSSES["ranking"](SCORES, TARGETS)
    assert (float(part.sum), int(part.count)) == (pytest.approx(sum(pairs)), len(pairs))
    # The probability that variants are drawn in this order, each among itself and the worse ones.
    draws = [-np.log(np.exp(x[i]) / sum(np.exp(x[j]) for j in range(5) if j == i or y[j] < y[i])) for i in range(5)]
    part = LOSSES["listmle"](SCORES, TARGETS)
    assert (float(part.sum), int(part.count)) == (pytest.approx(sum(draws), rel=1e-5), 4), "the worst is never drawn"
    part = LOSSES["mse"](3 * SCORES - 7, TARGETS)
    assert float(part.sum / part.count) == pytest.approx(2 - 2 * np.corrcoef(x, y)[0, 1], rel=1e-4)
    for loss in LOSSES.values():
        for n in (0, 1):
            assert int(loss(SCORES[:n], TARGETS[:n]).count) == 0, "nothing can be compared"
        better, worse = loss(TARGETS, TARGETS), loss(-TARGETS, TARGETS)
        assert float(better.sum) < float(worse.sum)


def test_the_line_never_turns_the_ranking_around() -> None:
    x = np.arange(20.0)
    slope, intercept = fit_line(x, 3 - 2 * x)
    assert slope > 0
    assert slope * x.mean() + intercept == pytest.approx((3 - 2 * x).mean())
    assert fit_line(x, np.where(x < 10, np.nan, 5 * x + 1)) == (pytest.approx(5), pytest.approx(1))
    assert fit_line(np.ones(3), np.ones(3))[0] > 0


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_are_log_odds_in_each_context(trunk: ESM2, sign: int) -> None:  # noqa: F811
    names = ("K2A", "WT", "M1A:T3V:L23D", "Q9C:S13W")
    lower = ["y"] if sign < 0 else []

    def scores(context: str) -> list[float]:
        made = task(lower=lower, head="likelihood", context=context)
        model = FineTuner(trunk, made.head(NANO)).eval()
        assert not model.head.state_dict()
        return np.concatenate(model.outputs([made.question(example(name)) for name in names])).tolist()

    assert scores("wild_type") == pytest.approx([sign * log_odds(trunk, name) for name in names], abs=1e-4)
    letters = encode("ACDEFGHIKLMNPQRSTVWY")[1:-1].tolist()
    for context in ("masked", "variant"):
        expected = []
        for name in names:
            tokens, wild = encode(mutant(name)), encode(WT)
            places = np.flatnonzero(tokens != wild)
            read = np.where(tokens != wild, MASK, tokens) if context == "masked" else tokens
            with torch.no_grad():
                logits_LV = trunk(pack([read.astype(np.uint8)]), logits_at=torch.arange(len(read))).logits_PV
            assert logits_LV is not None
            log_p = logits_LV[:, letters].log_softmax(-1)
            column = {letter: k for k, letter in enumerate(letters)}
            expected.append(sum(float(log_p[p, column[tokens[p]]] - log_p[p, column[wild[p]]]) for p in places))
        assert scores(context) == pytest.approx([sign * value for value in expected], abs=1e-4)


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_whole_sequences(trunk: ESM2, sign: int) -> None:  # noqa: F811
    """The pseudo-log-likelihood in one pass of the variant minus that of the wild type, also for another length."""
    made = task(lower=["y"] if sign < 0 else [], head="likelihood", context="sequence")
    model = FineTuner(trunk, made.head(NANO)).eval()
    sequences = [mutant("K2A:Q9C"), WT, WT[:5] + WT[8:], WT[:5] + "GWX" + WT[5:]]
    inputs = [made.question(Example(f"v{n}", encode(sequence), {})) for n, sequence in enumerate(sequences)]
    found = np.concatenate(model.outputs(inputs))
    expected = []
    for sequence in sequences:
        with torch.no_grad():
            logits_PV = trunk(pack([encode(sequence)]), logits_at=torch.arange(1, len(sequence) + 1)).logits_PV
        assert logits_PV is not None
        log_p = logits_PV.log_softmax(-1).double().numpy()
        p = np.exp([log_p[k, encode(letter)[1]] for k, letter in enumerate(sequence) if letter != "X"])
        expected.append(np.log(p * 0.005 / (0.105 - 0.1 * p)).sum())  # ESM-2: 10% random letters, 10% unchanged
    assert found == pytest.approx(sign * (np.array(expected) - expected[1]), abs=1e-3)
    assert found[1] == 0


def test_insertions_and_deletions_are_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = ("{w}{p}A", "{w}{p}del", "{w}{p}insAW", "{w}{p}dup")
    names = [kinds[n % 4].format(w=WT[n], p=n + 1) for n in range(24) if WT[n] != "A"]
    (tmp_path / "v.csv").write_text("".join(["mutant,score\n", *(f"{n},{k % 5}\n" for k, n in enumerate(names))]))
    (tmp_path / "wt.fasta").write_text(f">wt\n{WT}\n")
    given = ("data.table=v.csv", "data.wild_type=wt.fasta", "task.context=sequence", "train.steps=2", "out=run")
    done = in_process("finetune", "variants-few", *given, "train.eval_every=2", "--folds", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["joint"]["variants"] == len(names)
    assert set(summary["joint"]["metrics"]) == {"fine-tuned", "zero-shot", "frozen embedding ridge"}
    done = in_process("predict", "run", "v.csv", "-o", "r.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "r.csv").read_text().splitlines()
    assert len(rows) == len(names) + 1
    assert all(row.endswith(",yes,yes,") for row in rows[1:]), "seen in training, at sites that training varied"
    refused = in_process("finetune", "variants", *given[:2], "out=other", cwd=tmp_path)
    assert "task.head=likelihood task.context=sequence" in refused.stderr


def write_recipe(directory: Path) -> Path:
    """30 single substitutions of a protein of 24 residues, in a recipe with three folds."""
    singles = [f"{WT[n]}{n + 1}{letter}" for n in range(1, len(WT)) for letter in "AW" if letter != WT[n]][:30]
    rows = [f"{name},{n * 7 % 11},{n}" for n, name in enumerate(singles)]
    (directory / "v.csv").write_text("\n".join(["mutant,score,other", *rows]) + "\n")
    (directory / "wt.fasta").write_text(f">wt\n{WT}\n")
    path = directory / "few.yaml"
    path.write_text(RECIPE.format(out=directory / "run"))
    return path


def test_a_step_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Pairs of a step are complete although a micro-batch of 40 tokens would have 13 variants."""
    path = str(write_recipe(tmp_path))
    alone, both = (
        run_ranks("test_dropout:train", size, tmp_path, path, [f"out={tmp_path / str(size)}"], None)[0]
        for size in (1, 2)
    )
    assert np.allclose(alone, both, rtol=0, atol=1e-5)
    assert alone[0] > alone[-1]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Train in the directory `name`, and return the steps of the validations, their values, and the model's file."""
    path = write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)

    def train(name: str, *options: str) -> dict[str, Any]:
        given = ["train.eval_every=1", "train.early_stop=3", "checkpoint.keep=1", f"out={name}", *options]
        finetune.run(recipe_file.load(path, given), "auto")
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return {
            "valid": [(line["step"], line["loss"]) for line in lines if line.get("split") == "valid"],
            "model": (tmp_path / name / "model" / "model.safetensors").read_bytes(),
            "best": json.loads((tmp_path / name / "model" / "esmshard.json").read_text())["step"],
        }

    return train


def test_the_start_may_be_the_best_model(trained: Callable[..., dict[str, Any]]) -> None:
    result = trained("run", "optim.lr=1e-12", "train.early_stop=1")  # nothing gets better than the start
    assert [step for step, _ in result["valid"]] == [0, 1]
    assert result["best"] == 0


@pytest.mark.parametrize("place", ["validate", "save", "train_step"])
def test_a_run_that_ends_before_its_first_step_goes_on(
    place: str, trained: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = {"validate": loop.evaluate, "save": loop.Training, "train_step": loop}[place]
    before = getattr(owner, place)

    def end(*args: Any, **given: Any) -> Any:
        if place != "validate":
            raise RuntimeError("killed")
        os.kill(os.getpid(), signal.SIGTERM)
        return before(*args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, end)
        with pytest.raises((RuntimeError, Preempted), match=r"killed|after step 0, which is saved"):
            trained("run")
    assert trained("run") == trained("unbroken")


def test_baselines_keep_the_unit_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the likelihood converts scores, and not the standardised numbers that baselines predict."""
    monkeypatch.chdir(tmp_path)
    job = prepare(recipe_file.load(write_recipe(tmp_path)), 1, 1, torch.device("cpu"))
    network = VariantTask(VariantSettings(name="variant", loss="ranking"), job.task.facts)
    likelihood = VariantTask(job.recipe.task, {**job.task.facts, "line": [2.0, 0.5]})
    fitted = network.baselines([job.train.get(n) for n in range(len(job.train))], None)
    rows = [score_baselines(task, job.test, fitted, None)[ONE_HOT] for task in (network, likelihood)]
    assert [row["prediction"] for row in rows[0]] == [row["prediction"] for row in rows[1]]
    assert likelihood.predict(np.array([0.0], np.float32)) != network.predict(np.array([0.0], np.float32))


def test_mistakes(trunk: ESM2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    path = write_recipe(tmp_path)
    for changes, token in {
        ("task.pool=sites",): "task.head network",
        ("task.loss=huber",): "listmle",
        ("adapt.method=probe",): "no parameters",
        ("task.head=network", "task.loss=null", "task.context=masked"): "task.head likelihood",
    }.items():
        with pytest.raises(InputError, match=token):
            recipe_file.load(path, changes)
    monkeypatch.chdir(tmp_path)
    for changes, token in {
        ("adapt.method=head",): "leaves nothing to train",
        ("data.target=[score, other]",): "learns one target",
        ("model.name=nano", "init=random"): "no trained LM head",
    }.items():
        with pytest.raises((InputError, UsageError), match=token):
            prepare(recipe_file.load(path, changes), 1, 1, torch.device("cpu"))
    batch, targets = collate(made := task(head="likelihood"), [example("K2A", float("nan")), example("WT", 1.0)])
    part = made.loss(FineTuner(trunk, made.head(NANO))(batch), targets)
    assert int(part.count) == 0
