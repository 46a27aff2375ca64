"""The files and the page of a task of residues."""

import json
from pathlib import Path

import numpy as np
import pytest
from label_files import LabelFiles
from run_directories import page

from esmshard.data.batching.loader import Examples
from esmshard.report import page as pages
from esmshard.tasks.registry import new_task, settings_of
from esmshard.train import evaluate

NUMBERS = {"targets": ["value"], "mean": [10.0], "std": [2.0]}
CLASSES = {"classes": ["HGI", "EB"], "counts": [5, 5], "records": 1}


@pytest.mark.parametrize("kind", ["number", "class"])
def test_profiles_are_drawn_and_other_metrics_are_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = new_task(settings_of({"name": "residue", "kind": kind}), NUMBERS if kind == "number" else CLASSES)
    rng = np.random.default_rng(0)
    targets, outputs, others = [], [], []
    for noise in np.linspace(0, 2, 20):
        value_L = rng.normal(size=40).astype(np.float32)
        output_L = (value_L + noise * rng.normal(size=40)).astype(np.float32)
        if kind == "number":
            value_L[3] = np.nan
            value_L, output_L = value_L[:, None], output_L[:, None]
            outputs.append(output_L)
        else:
            value_L = np.where(np.arange(40) == 3, -1, value_L > 0)  # type: ignore[assignment]
            outputs.append(np.stack([-output_L, output_L], axis=1))
        targets.append(value_L)
        others.append(4 * outputs[-1])  # ranks and classes are the same, and errors and log loss are not
    data = Examples("test", *LabelFiles(tmp_path).split("test", "\n".join(f"p{n} {'M' * 40}" for n in range(20))), None)
    table = {"fine-tuned": list(map(task.score, outputs, targets))}
    table["one-hot window"] = list(map(task.score, others, targets))
    about = {"recipe": {"task": {"name": "residue"}}, "step": 1}
    (tmp_path / "figures").mkdir()
    for old in ("contacts_best_old.png", "mine.png"):
        (tmp_path / "figures" / old).touch()
    text = evaluate.write(tmp_path, data, task, table, about)
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["mine.png"]
    said = text.splitlines()[-1]
    assert "not clearly apart" in said
    assert f"clearly better than the best baseline in {'RMSE' if kind == 'number' else 'log loss'} (-" in said
    assert "Spearman per" not in said
    raw = json.loads((tmp_path / "evaluation.json").read_text())
    best = raw["profiles"][0]
    assert (best["id"], best["observed"][3], best["predicted"][3]) == ("p0", None, None)
    if kind == "number":
        assert best["observed"][0] == pytest.approx(10 + 2 * targets[0][0, 0], abs=1e-3)
        assert best["predicted"][0] == pytest.approx(10 + 2 * outputs[0][0, 0], abs=1e-3)
        assert len(raw["residues"]["observed"]) == 20 * 39
    else:
        assert best["observed"][0] == targets[0][0]
        assert best["predicted"][0] == outputs[0][0].argmax()
    if kind == "number":
        monkeypatch.setattr(pages, "chart", lambda *_, **__: "data:image/png;base64,")
    found = page(tmp_path)
    assert found.text["predictions"].count("p0, ") == 1
    # Three profiles, the score by length, and dots of all residues, or the confusion of classes and their calibration.
    assert found.figures["predictions"] == (5 if kind == "number" else 6)
