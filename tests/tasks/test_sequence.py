"""The sequence task: labels, facts, head, loss, metrics, baselines and the probe."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from label_files import LabelFiles, data, recorded_fits
from model_files import TINY, fair_esm, ours, tokenise
from scipy import special, stats
from sklearn import metrics as reference

from esmshard.batch import pack
from esmshard.data.batching.loader import Example, Examples
from esmshard.errors import InputError, UsageError
from esmshard.model.families.esm2 import ESM2
from esmshard.model.finetuner import FineTuner
from esmshard.tasks.sequence import SequenceHead, SequenceSettings, SequenceTask
from esmshard.vocab import STANDARD, encode, is_residue

NUMBERS = {"targets": ["Tm"], "mean": [50.0], "std": [4.0]}
THREE = {"classes": ["x", "y", "z"], "counts": [6, 3, 1], "records": 10}


def task(facts: dict[str, Any] = NUMBERS, **given: Any) -> SequenceTask:
    return SequenceTask(SequenceSettings(name="sequence", **given), facts)


class Files(LabelFiles):
    """A FASTA file of some records, and tables beside it."""

    def learn(self, settings: dict[str, Any], text: str, **given: Any) -> tuple[SequenceTask, Examples]:
        """A task that has read its training labels."""
        return self.learned(SequenceTask(SequenceSettings(name="sequence", **settings), {}), text, **given)

    def table(self, text: str) -> str:
        (self.directory / "labels.csv").write_text(text)
        return str(self.directory / "labels.csv")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture(scope="module")
def trunk() -> ESM2:
    return ours(fair_esm(TINY), TINY)


def examples(n: int, kind: str = "number", seed: int = 0) -> list[Example]:
    """Random proteins whose label is the share of tryptophan, or follows from it."""
    rng = np.random.default_rng(seed)
    found = []
    for k in range(n):
        bias = np.ones(20)
        bias[STANDARD.index("W")] = rng.choice([0.1, 4, 12])
        letters = rng.choice(list(STANDARD), rng.integers(20, 60), p=bias / bias.sum())
        share = float((letters == "W").mean())
        target: Any = np.array([100 * share], np.float32)
        if kind == "class":
            target = np.array(int(share > 0.08) + int(share > 0.25))
        elif kind == "multilabel":
            target = np.array([share > 0.08, share > 0.25, share <= 0.25], np.float32)
        found.append(Example(str(k), encode("".join(letters)), {"target": target}))
    return found


def test_numbers_are_standardised_by_the_training_split_and_come_back_in_their_unit(files: Files) -> None:
    table = files.table("id,Tm,other\na,10,1\nb,20,\nc,,\nd,60,5\n")
    text = "a MKT\nb ACD\nc WWW\nd MK"
    found, train = files.learn({}, text, labels=table, target=["Tm", "other"])
    assert [train.id(n) for n in range(len(train))] == ["a", "b", "d"]
    assert any("left out" in notice and "c" in notice for notice in train.notices)
    assert found.facts["targets"] == ["Tm", "other"]
    assert found.facts["mean"] == pytest.approx([30, 3])
    assert found.facts["std"] == pytest.approx([math.sqrt((400 + 100 + 900) / 3), 2])
    target = found.inputs(train.get(0)).target
    assert target.dtype == np.float32
    assert target == pytest.approx([-20 / math.sqrt(1400 / 3), -1])
    assert np.isnan(found.inputs(train.get(1)).target).tolist() == [False, True]
    assert found.predict(target) == pytest.approx([10, 1])
    assert found.names == ("Tm", "other")


def test_one_file_serves_all_splits_with_the_classes_of_training(files: Files) -> None:
    table = files.table("id,fold\na,y\nb,w\nc,y\nv,w\nu,z\nfar,k\n")
    found, train = files.learn({"kind": "class"}, "a MKT\nb ACD\nc WWW", labels=table, target=["fold"])
    assert found.facts == {"classes": ["w", "y"], "counts": [1, 2], "records": 3}
    assert train.notices == []
    assert [int(found.inputs(train.get(n)).target) for n in range(3)] == [1, 0, 1]
    given = data(labels=table, target=["fold"])
    labels = found.labels(*files.split("valid", "v MKT\na AC"), given)
    assert [int(labels[n]["target"]) for n in range(2)] == [0, 1]
    with pytest.raises(InputError, match=r"test\.fasta: record 'u' has the class 'z'"):
        found.labels(*files.split("test", "v MKT\nu ACD"), given)


def test_several_labels_come_from_one_column_or_from_columns_of_flags(files: Files) -> None:
    for text, target, counts in (
        ("id,x,y\na,1,0\nb,1,1\nc,0,0\nv,0,1\n", ["x", "y"], [2, 1]),
        ("id,label\na,x\nb,y;x\nc,y\nv,y\nfar,k\n", ["label"], [2, 2]),
    ):
        given = {"labels": files.table(text), "target": target}
        found, train = files.learn({"kind": "multilabel"}, "a MKT\nb ACD\nc WWW", **given)
        assert found.facts == {"classes": ["x", "y"], "counts": counts, "records": 3}
        assert [found.inputs(train.get(n)).target.tolist() for n in range(2)] == [[1, 0], [1, 1]]
        assert found.labels(*files.split("valid", "v MKT"), data(**given))[0]["target"].tolist() == [0, 1]
    with pytest.raises(UsageError, match="x, y"):
        found.labels(*files.split("test", "v MKT"), data(labels=files.table("id,y,x\nv,1,0\n"), target=["y", "x"]))


def test_means_are_over_the_residues_of_all_chains() -> None:
    batch = pack([encode("MKTAYIAKQR"), encode("MKTAYIAKQR:GQISFVKSH", linker=4), encode("M:K:W", linker=2)])
    x_TD = torch.randn(len(batch.tokens_T), 8, generator=torch.Generator().manual_seed(0))
    own_T = torch.from_numpy(is_residue(batch.tokens_T.numpy()))
    bounds = ((0, 12), (12, 37), (37, 46))
    expected = torch.stack([x_TD[start:end][own_T[start:end]].mean(0) for start, end in bounds])
    head = SequenceHead(8, 0, 3, 0.0)
    torch.testing.assert_close(torch.stack(head(x_TD, batch)), head.out(head.norm(expected)))


def test_a_new_head_says_what_the_training_labels_are_on_the_whole() -> None:
    batch, x_TD = tokenise(["MKT"])[1], torch.randn(5, 32)
    for made, expected, off in (
        (task(), [50], 2),
        (task(THREE, kind="class"), [0.6, 0.3, 0.1], 0.1),
        (task(THREE | {"counts": [5, 9, 0]}, kind="multilabel"), [5.5 / 11, 9.5 / 11, 0.5 / 11], 0.1),
    ):
        output = made.head(TINY).eval()(x_TD, batch)[0].detach().numpy()
        assert made.predict(output) == pytest.approx(expected, abs=off)


def test_labels_are_counted_each_and_those_that_are_there_may_weigh_more() -> None:
    outputs, targets = [torch.tensor([1.0, 0, -1])], [torch.tensor([1.0, 1, 0])]
    each = [math.log(1 + math.exp(-1)), math.log(2), math.log(1 + math.exp(-1))]
    plain, full = (task(THREE, kind="multilabel", balance=b).loss(outputs, targets) for b in (0, 1))
    assert float(plain.sum) == pytest.approx(sum(each))
    assert float(plain.count) == float(full.count) == 3
    assert float(full.sum) == pytest.approx(4.5 / 6.5 * each[0] + 7.5 / 3.5 * each[1] + each[2], rel=1e-5)


def test_numbers_are_scored_in_the_unit_of_the_labels() -> None:
    predicted, truth = np.random.default_rng(0).normal(size=(2, 40)).round(1).astype(np.float32)  # with ties
    rows = list(map(task().score, predicted[:, None], truth[:, None]))
    assert (rows[3]["prediction"], rows[3]["target"]) == pytest.approx((50 + 4 * predicted[3], 50 + 4 * truth[3]))
    found = task().summary(rows)
    assert found.keys() == set(task().columns)
    assert found["Spearman"] == pytest.approx(stats.spearmanr(predicted, truth).statistic)
    assert found["Pearson"] == pytest.approx(stats.pearsonr(predicted, truth).statistic, rel=1e-5)
    assert found["RMSE"] == pytest.approx(4 * reference.root_mean_squared_error(truth, predicted), rel=1e-5)
    assert found["R2"] == pytest.approx(reference.r2_score(truth, predicted), rel=1e-5)


@pytest.mark.parametrize("n_classes", [2, 4])
def test_classes_are_scored_as_scikit_learn_does(n_classes: int) -> None:
    rng = np.random.default_rng(0)
    logits, truth = rng.normal(size=(80, n_classes)).astype(np.float32), rng.integers(0, n_classes, 80)
    logits[np.arange(80), truth] += 1
    scored = task({"classes": list("abcd")[:n_classes], "counts": [20] * n_classes, "records": 80}, kind="class")
    rows, predicted = list(map(scored.score, logits, map(np.array, truth))), logits.argmax(1)
    found = scored.summary(rows)
    assert found.keys() == set(scored.columns)
    assert found["MCC"] == pytest.approx(reference.matthews_corrcoef(truth, predicted))
    assert found["accuracy"] == pytest.approx((truth == predicted).mean()) == np.mean([row["correct"] for row in rows])
    assert found["macro-F1"] == pytest.approx(reference.f1_score(truth, predicted, average="macro"))
    if n_classes == 2:
        assert found["AUROC"] == pytest.approx(reference.roc_auc_score(truth, logits[:, 1] - logits[:, 0]))
        assert found["AUPRC"] == pytest.approx(reference.average_precision_score(truth, logits[:, 1] - logits[:, 0]))
    confusion = sum(np.asarray(row["confusion"]) for row in rows)
    assert confusion.tolist() == reference.confusion_matrix(truth, predicted).tolist()
    _, confidence, _ = sum(np.asarray(row["calibration"]) for row in rows)
    assert confidence.sum() == pytest.approx(special.softmax(logits, axis=1).max(1).sum(), rel=1e-5)


def test_labels_are_scored_by_fmax() -> None:
    rng = np.random.default_rng(0)
    truth = rng.random((60, 3)) < 0.4
    logits = (rng.normal(size=(60, 3)) + truth).astype(np.float32)
    scored = task(THREE, kind="multilabel")
    found = scored.summary(list(map(scored.score, logits, truth.astype(np.float32))))
    assert found.keys() == set(scored.columns)
    assert found["macro-F1"] == pytest.approx(reference.f1_score(truth, logits >= 0, average="macro"))
    assert found["AUPRC"] == pytest.approx(reference.average_precision_score(truth.ravel(), logits.ravel()), abs=0.01)
    probability, annotated, best = special.expit(logits), truth.any(1), 0.0
    for threshold in np.arange(101) / 100:
        taken = (probability >= threshold)[annotated]
        right, some = (taken & truth[annotated]).sum(1), taken.any(1)
        if right.any():
            precision, recall = (right[some] / taken[some].sum(1)).mean(), (right / truth[annotated].sum(1)).mean()
            best = max(best, 2 * precision * recall / (precision + recall))
    assert found["Fmax"] == pytest.approx(best)


def learned(kind: str) -> tuple[SequenceTask, list[Example]]:
    train = examples(120, kind)
    targets = np.stack([e.labels["target"] for e in train])
    if kind == "number":
        facts = {"targets": ["W"], "mean": [float(targets.mean())], "std": [float(targets.std())]}
    else:
        counts = np.bincount(targets) if kind == "class" else targets.sum(0).astype(int)
        facts = {"classes": list("xyz"), "counts": counts.tolist(), "records": 120}
    return task(facts, kind=kind, hidden=0), train


@pytest.mark.parametrize("kind", ["number", "class", "multilabel"])
def test_baselines_and_the_probe(trunk: ESM2, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels follow from the composition and not from the length; a probe is what scikit-learn fitted."""
    monkeypatch.setattr("esmshard.tasks.baselines.CS", (0.1,))
    made, train = learned(kind)
    head, test = made.head(TINY), examples(60, kind, seed=1)
    base = FineTuner(trunk, head).eval()
    known = made.baselines(train, base)
    outputs: Any = made.baseline_outputs(test, known, base)
    assert {output.dtype for found in outputs.values() for output in found} == {np.dtype(np.float32)}
    first = "majority" if kind == "class" else "mean"
    assert list(outputs) == [first, "length", "composition", "frozen embedding"]
    assert list(made.baseline_outputs(test, known, None)) == [first, "length", "composition"]
    targets = [made.inputs(example).target for example in test]
    scores = {name: made.summary(list(map(made.score, found, targets))) for name, found in outputs.items()}
    metric = {"number": "R2", "class": "accuracy", "multilabel": "Fmax"}[kind]
    assert scores["composition"][metric] > max(0.8, scores["length"][metric] + 0.15, scores[first][metric] + 0.15)
    if kind == "class":  # everything is the most frequent class
        assert made.predict(outputs["majority"][0]) == pytest.approx(np.array(made.facts["counts"]) / 120)
    torch.nn.init.normal_(head.norm.weight)  # as if the base had a head that has learned
    fits = recorded_fits(monkeypatch)
    made.probe(head, train, base, seed=0)
    probed = np.stack(base.outputs([made.inputs(e) for e in train]))
    of_probe = fits[-3:] if kind == "multilabel" else fits[-1:]
    values = [fitted.predict(x) if kind == "number" else fitted.decision_function(x) for fitted, x in of_probe]
    assert probed == pytest.approx(np.stack(values, axis=-1).reshape(probed.shape), abs=1e-4)
    assert np.ptp(probed, axis=0).max() > 0.1
