"""The page on a sweep."""

import json
from pathlib import Path
from typing import Any

import pytest

from esmshard.errors import InputError
from esmshard.report.page import report

SPACE = {
    "optim.lr": {"low": 1e-5, "high": 1e-3, "step": None, "log": True, "choices": None},
    "adapt.method": {"low": None, "high": None, "step": None, "log": False, "choices": ["full", "head"]},
}


def trial(number: int, state: str, value: float | None, lr: float, message: str = "") -> dict[str, Any]:
    values = {"optim.lr": lr, "adapt.method": "head" if number % 2 else "full"}
    validations = {} if value is None else {"10": value / 2, "20": value}
    more = {"step": 20, "message": message, "exit_code": 0, "validations": validations}
    return {"number": number, "values": values, "state": state, "value": value, **more}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A finished sweep of five trials."""
    trials = [
        *[trial(n, "complete", value, 10.0**-n) for n, value in ((2, 0.31), (3, 0.62), (4, 0.44))],
        trial(5, "pruned", 0.12, 3e-5, "pruned after step 10"),
        trial(6, "failed", None, 9e-4, "loss or gradient was not finite <5 times>"),
    ]
    raw = {
        "task": "sequence",
        "recipe": {"model": {"name": "starter"}, "init": "pretrained", "adapt": {"method": "full"}},
        "sweep": {"space": SPACE, "sampler": "tpe", "pruner": "median"},
        "metric": "Spearman",
        "lower_is_better": False,
        "trials_wanted": 5,
        "state": "done",
        "best": 3,
        "trials": trials,
        "selected": "Trial 3 is the best of 3.",
        "honest": "The same settings with 2 new seeds: 0.5.",
        "runs": ["best-003-seed-1", "best-003-seed-2"],
    }
    (tmp_path / "sweep.json").write_text(json.dumps(raw))
    row = {"mean": 0.487, "deviation": 0.01, "low": 0.4, "high": 0.6, "runs": {"a": 0.48, "b": 0.49}}
    metrics = {"fine-tuned": {"Spearman": row}, "length": {"Spearman": {**row, "mean": 0.111}}}
    summary = {"columns": ["Spearman"], "runs": raw["runs"], "interval": "95% interval", "metrics": metrics}
    summary |= {"verdict": "Fine-tuning beat the best baseline.", "task": "sequence"}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def test_the_page_shows_trials_settings_and_the_test(out: Path) -> None:
    page = report(out).read_text()
    for text in (
        "Trial 3 is the best of 3.",
        "2 new seeds",
        "Fine-tuning beat the best baseline.",
        "1 pruned, 1 failed",
    ):
        assert text in page
    assert "0.487" in page, "the mean test value"
    assert "loss or gradient was not finite &lt;5 times&gt;" in page
    assert page.count("<svg") == 1, "the trials in their order"
    rows = [line for line in page.splitlines() if "complete</td>" in line]
    assert [row.split("</th>")[0][-1] for row in rows] == ["3", "4", "2"], "the best first"


def test_a_sweep_that_has_begun_has_a_page(out: Path) -> None:
    (out / "summary.json").unlink()
    raw = json.loads((out / "sweep.json").read_text())
    raw |= {"state": "searching", "best": None, "selected": None}
    raw["trials"] = [trial(0, "running", None, 1e-4)]
    (out / "sweep.json").write_text(json.dumps(raw))
    page = report(out).read_text()
    assert "The best settings are not tested yet." in page
    assert page.count("<svg") == 0


def test_a_damaged_file_is_named(out: Path) -> None:
    (out / "sweep.json").write_text('{"trials": 1}')
    with pytest.raises(InputError, match=r"sweep\.json: damaged"):
        report(out)
