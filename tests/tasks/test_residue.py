"""The residue task: labels, classes of letters, head, loss, metrics, baselines and the probe."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from label_files import LabelFiles, recorded_fits
from model_files import TINY, fair_esm, ours, tokenise
from scipy import special, stats
from sklearn import metrics as reference

from esmshard.data.batching.loader import Example, Examples
from esmshard.model.families.esm2 import ESM2
from esmshard.model.finetuner import FineTuner
from esmshard.tasks import metrics
from esmshard.tasks.residue import ResidueSettings, ResidueTask
from esmshard.vocab import STANDARD, encode

STATES = ("HGI", "EB", "STC")
Q3 = {"classes": list(STATES), "counts": [60, 30, 10]}
TWO = {"classes": ["-", "B"], "counts": [90, 10]}
NUMBER = {"targets": ["value"], "mean": [10.0], "std": [5.0]}


def task(facts: dict[str, Any] = Q3, **given: Any) -> ResidueTask:
    return ResidueTask(ResidueSettings(name="residue", **given), facts)


@pytest.fixture(scope="module")
def trunk() -> ESM2:
    return ours(fair_esm(TINY), TINY)


def examples(n: int, kind: str = "class", seed: int = 0, back: int = 3) -> list[Example]:
    """Random proteins; a residue's label follows from the one some places before it, and some are undefined."""
    rng, found = np.random.default_rng(seed), []
    for k in range(n):
        codes = rng.integers(0, 20, rng.integers(10, 60))
        before = np.concatenate([[-1] * back, codes[: len(codes) - back]])
        target: Any = (before + rng.normal(size=len(codes))).astype(np.float32)
        if kind == "class":  # letters of HGI EB STC: 0 1 2, 3 4, 5 6 7
            target = np.select([before < 7, before < 14], [np.int8(1), np.int8(3)], np.int8(6)).astype(np.int8)
        target[rng.random(len(codes)) < 0.1] = -1 if kind == "class" else np.nan
        found.append(Example(str(k), encode("".join(STANDARD[c] for c in codes)), {"target": target}))
    return found


def learn(directory: Path, settings: dict[str, Any], text: str, **given: Any) -> tuple[ResidueTask, Examples]:
    return LabelFiles(directory).learned(task({}, **settings), text, **given)


def test_letters_are_joined_to_classes(tmp_path: Path) -> None:
    text = "a TARGET=HHGI MASK=1101 MKTA\nb TARGET=ECB MASK=111 ACD"
    found, train = learn(tmp_path, {"classes": list(STATES)}, text)
    assert found.facts == {"classes": ["HGI", "EB", "STC"], "counts": [3, 2, 1], "records": 2}
    assert [found.inputs(train.get(n)).target.tolist() for n in range(2)] == [[0, 0, -1, 0], [1, 2, 1]]
    assert (found.names, found.per_residue, found.one_of_names) == (("HGI", "EB", "STC"), True, True)


def test_labels_come_from_a_table_a_label_file_and_an_npz(tmp_path: Path) -> None:
    (table := tmp_path / "x.csv").write_text("id,ss\na,HHE\nb,EE\nfar,CCC\n")
    (fasta := tmp_path / "x.fasta").write_text(">b\nEE\n>a\nHHE\n>far\nCCC\n")
    (mask := tmp_path / "m.fasta").write_text(">b\n11\n>a\n101\n>far\n111\n")
    arrays = tmp_path / "train.npz"
    np.savez(arrays, names=["far", "b", "a"], seqs=["MMM", "AC", "MKT"], ss=["CCC", "EE", "HHE"])
    for given in (
        {"labels": str(table), "target": ["ss"]},
        {"labels": str(fasta)},
        {"target": ["ss"]},
        {"labels": str(arrays), "target": ["ss"]},
        {"labels": str(fasta), "mask": str(mask)},
    ):
        found, train = learn(tmp_path, {}, "a MKT\nb AC", **given)
        masked = "mask" in given
        assert (found.facts["classes"], found.facts["counts"]) == (["E", "H"], [3, 1 if masked else 2])
        assert found.inputs(train.get(0)).target.tolist() == [1, -1 if masked else 1, 0]
        assert train.notices == []


def test_all_labelled_residues_count_alike() -> None:
    outputs = [torch.tensor([[1.0, 0, 0], [9.0, 9, 9]]), torch.tensor([[0.0, 0, 2]] * 2)]
    targets = [torch.tensor([0, -1]), torch.tensor([1, 2])]
    first, second = math.log(math.e + 2) - 1, math.log(2 + math.e**2)
    for balance in (0, 0.5, 1):
        raw = np.array([0.6, 0.3, 0.1]) ** -balance
        weight = raw / (raw @ [0.6, 0.3, 0.1])  # the mean over the training labels is 1
        found = task(balance=balance).loss(outputs, targets)
        assert float(found.sum) == pytest.approx(weight @ [first, second, second - 2], rel=1e-5)
        assert float(found.count) == pytest.approx(weight.sum(), rel=1e-5)


def test_a_batch_without_labels_keeps_the_graph() -> None:
    for made, target in ((task(), torch.full((3,), -1)), (task(NUMBER, kind="number"), torch.full((3, 1), math.nan))):
        head = made.head(TINY)
        found = made.loss(head(torch.randn(5, 32), tokenise(["MKT"])[1]), [target])
        assert (float(found.sum.detach()), float(found.count)) == (0, 0)
        found.sum.backward()
        assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


def test_q3_counts_labelled_residues_and_is_pooled_over_proteins() -> None:
    logits = np.eye(3, dtype=np.float32)
    outputs = [logits[[0, 1, 2, 2]], logits[[0]], logits[[1, 1]]]
    targets = [np.array([0, -1, 2, 0]), np.array([1]), np.array([-1, -1])]
    rows = list(map(task().score, outputs, targets))
    assert [row["labelled"] for row in rows] == [3, 1, 0]
    assert [row["Q3"] for row in rows] == pytest.approx([2 / 3, 0, math.nan], nan_ok=True)
    found = task().summary(rows)
    assert found["Q3"] == pytest.approx(2 / 4)
    assert found["Q3 per protein"] == pytest.approx((2 / 3 + 0) / 2)
    assert set(task().columns) == found.keys()
    assert all(math.isnan(value) for value in task().summary(rows[2:]).values())


@pytest.mark.parametrize("n_classes", [2, 3])
def test_classes_are_scored_as_scikit_learn_does(n_classes: int) -> None:
    rng, made = np.random.default_rng(0), task(TWO if n_classes == 2 else Q3)
    targets = [rng.integers(-1, n_classes, length) for length in rng.integers(1, 80, 40)]
    outputs = [(rng.normal(size=(len(t), n_classes)) * 2).astype(np.float32) for t in targets]
    for output, target in zip(outputs, targets, strict=True):
        output[np.arange(len(target)), target] += 1.5
    rows = list(map(made.score, outputs, targets))
    found = made.summary(rows)
    logits, truth = np.concatenate(outputs), np.concatenate(targets)
    logits, truth = logits[truth >= 0], truth[truth >= 0]
    predicted = logits.argmax(1)
    assert found["MCC"] == pytest.approx(reference.matthews_corrcoef(truth, predicted))
    assert found[f"Q{n_classes}"] == pytest.approx(reference.accuracy_score(truth, predicted))
    assert found["macro-F1"] == pytest.approx(reference.f1_score(truth, predicted, average="macro"))
    confidence = special.softmax(logits, axis=1).max(1)
    bins, right = (confidence * 15).astype(int), predicted == truth
    expected = sum(abs(confidence[bins == b].sum() - right[bins == b].sum()) for b in range(15)) / len(truth)
    assert found["ECE"] == pytest.approx(expected, rel=1e-4)
    assert set(made.columns) == found.keys()
    if n_classes == 2:
        score = logits[:, 1] - logits[:, 0]
        assert found["AUPRC"] == pytest.approx(reference.average_precision_score(truth, score))
        assert found["AUROC"] == pytest.approx(reference.roc_auc_score(truth, score))
        assert made.summary(metrics.ranked(rows))["AUROC"] == pytest.approx(found["AUROC"])


def test_numbers_are_ranked_over_all_residues_and_within_proteins(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = [np.exp(2 * rng.normal(size=length)).round(3) for length in (30, 50, 9)]  # far from a normal distribution
    lines = [f"{k} TARGET={';'.join(map(str, v.tolist()))} {'M' * len(v)}" for k, v in enumerate(values)]
    made, train = learn(tmp_path, {"kind": "number"}, "\n".join(lines))
    targets = [made.inputs(train.get(n)).target for n in range(3)]
    outputs = [(target + 0.2 * rng.normal(size=target.shape)).astype(np.float32) for target in targets]
    targets[1][:20] = np.nan
    rows = list(map(made.score, outputs, targets))
    found = made.summary(rows)
    known = [~np.isnan(target[:, 0]) for target in targets]
    each = [(o[k, 0], t[k, 0]) for o, t, k in zip(outputs, targets, known, strict=True)]
    predicted, truth = np.concatenate(each, axis=1)
    assert found["Spearman"] == pytest.approx(stats.spearmanr(predicted, truth).statistic)
    assert made.summary(metrics.ranked(rows))["Spearman"] == pytest.approx(found["Spearman"])
    rho = [stats.spearmanr(*both).statistic for both in each]
    assert [row["Spearman"] for row in rows] == pytest.approx(rho)
    assert found["Spearman per protein"] == pytest.approx(np.mean(rho))
    assert found["RMSE"] == pytest.approx(made.facts["std"][0] * np.sqrt(((predicted - truth) ** 2).mean()), rel=1e-4)
    assert set(made.columns) == found.keys()
    nothing = made.score(outputs[0], np.full((30, 1), np.nan, np.float32))
    assert all(math.isnan(value) for value in (nothing["Spearman"], *made.summary([nothing]).values()))


@pytest.mark.parametrize("kind", ["class", "number"])
def test_baselines_see_the_neighbourhood(trunk: ESM2, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esmshard.tasks.baselines.CS", (0.1,))
    train, test = examples(40, kind), examples(15, kind, seed=1)
    made = task(Q3 if kind == "class" else NUMBER, kind=kind)
    base = FineTuner(trunk, made.head(TINY)).eval()
    known = made.baselines(train, base)
    outputs: Any = made.baseline_outputs(test, known, base)
    first = "majority" if kind == "class" else "mean"
    assert list(outputs) == [first, "length", "one-hot window", "frozen embedding"]
    assert list(made.baseline_outputs(test, known, None)) == [first, "length", "one-hot window"]
    assert all(np.ptp(output, axis=0).max() == 0 for output in outputs["length"])  # alike for all of a protein
    targets = [made.inputs(example).target for example in test]
    scores = {name: made.summary(list(map(made.score, found, targets))) for name, found in outputs.items()}
    metric = "Q3" if kind == "class" else "Spearman"
    assert scores["one-hot window"][metric] > 0.85
    assert scores["frozen embedding"][metric] < 0.85
    if kind == "class":
        assert {k for o in outputs["majority"] for k in o.argmax(1)} == {0}
    else:
        assert math.isnan(scores["mean"]["Spearman"])
        assert made.predict(outputs["mean"][0]) == pytest.approx(np.full(len(targets[0]), 10.0))


def test_a_probe_is_what_scikit_learn_fitted(trunk: ESM2, monkeypatch: pytest.MonkeyPatch) -> None:
    train, made = examples(20, back=0), task()
    head = made.head(TINY)
    torch.nn.init.normal_(head.norm.weight)  # as if the base had a head that has learned
    model = FineTuner(trunk, head).eval()
    fits = recorded_fits(monkeypatch)
    made.probe(head, train, model, seed=0)
    outputs = np.concatenate([model.outputs([made.inputs(e)])[0] for e in train])
    known = np.concatenate([made.inputs(e).target for e in train]) >= 0
    fitted, x = fits[-1]
    assert outputs[known] == pytest.approx(fitted.decision_function(x), abs=1e-4)
    assert np.ptp(outputs, axis=0).min() > 0.1
