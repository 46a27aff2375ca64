"""The temperature of the probabilities of classes: its fit, what it changes, and what it leaves as it is."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_files import LabelFiles

from esmshard.data.batching.loader import Examples
from esmshard.tasks.base import Task
from esmshard.tasks.labels import fit_temperature
from esmshard.tasks.registry import new_task, settings_of
from esmshard.train import evaluate

THREE = {"classes": list("xyz"), "counts": [5, 3, 2], "records": 10}


def too_sure(kind: str, records: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Return logits three times as large as those that the labels are drawn from."""
    rng = np.random.default_rng(seed)
    outputs, targets = [], []
    for _ in range(records // 20 if kind == "residue" else records):
        logits = rng.normal(size=(20 if kind == "residue" else 1, 3))
        if kind == "multilabel":
            target: Any = (rng.random(3) < 1 / (1 + np.exp(-logits[0]))).astype(np.float32)
        else:
            shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            target = np.array([rng.choice(3, p=share) for share in shares])
            target = target if kind == "residue" else target[0]
        outputs.append((3 * logits if kind == "residue" else 3 * logits[0]).astype(np.float32))
        targets.append(target)
    return outputs, targets


def made(kind: str, **facts: Any) -> Task:
    section = {"name": "residue"} if kind == "residue" else {"name": "sequence", "kind": kind}
    return new_task(settings_of(section), THREE | facts)


@pytest.mark.parametrize("kind", ["class", "multilabel", "residue"])
def test_probabilities_are_scaled_by_the_temperature_of_the_validation_set(kind: str) -> None:
    task = made(kind)
    facts = fit_temperature(list(map(task.score, *too_sure(kind, 600, seed=0))))
    assert facts["temperature"] == pytest.approx(3, rel=0.15)
    scaled = made(kind, **facts)
    outputs, targets = too_sure(kind, 1500, seed=1)
    before, after = (made.summary(list(map(made.score, outputs, targets))) for made in (task, scaled))
    assert after["ECE"] < 0.05
    assert after["ECE before scaling"] > 0.1
    assert after["ECE before scaling"] == pytest.approx(before["ECE"])
    assert after["log loss"] < after["log loss before scaling"]
    assert after["log loss before scaling"] == pytest.approx(before["log loss"])
    same = before.keys() - {"ECE", "log loss", "Fmax"}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert scaled.predict(outputs[0]) == pytest.approx(task.predict(outputs[0] / np.float32(facts["temperature"])))


def test_results_name_classes_and_have_both_calibration_errors(tmp_path: Path) -> None:
    task = made("class", temperature=2.83, validation_records=600)
    outputs, targets = too_sure("class", 40, seed=0)
    rows = list(map(task.score, outputs, targets))
    data = Examples("test", *LabelFiles(tmp_path).split("test", "\n".join(f"{n} MKT" for n in range(40))), None)
    text = evaluate.write(tmp_path, data, task, {"fine-tuned": rows}, {"recipe": {"task": {"name": "sequence"}}})
    written = json.loads((tmp_path / "evaluation.json").read_text())
    errors = written["metrics"]["fine-tuned"]
    assert errors["ECE"]["value"] < errors["ECE before scaling"]["value"]
    assert "2.83" in written["calibration"]["scaling"]
    assert written["calibration"]["scaling"] in text
    with (tmp_path / "per_protein.csv").open(newline="") as file:
        lines = [(line["prediction"], line["target"]) for line in csv.DictReader(file)]
    assert lines == [("xyz"[x_C.argmax()], "xyz"[target]) for x_C, target in zip(outputs, targets, strict=True)]
