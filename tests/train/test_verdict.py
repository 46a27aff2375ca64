"""The verdict on a scored test set, and the reason for a missing interval."""

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from esmshard.tasks.metrics import Interval, means
from esmshard.train import evaluate
from esmshard.train.evaluate import Comparison

NAN = math.nan
NO_INTERVAL = (NAN, NAN)


@pytest.mark.parametrize(
    ("ours", "theirs", "limits", "lower", "expected"),
    [
        (0.7, 0.6, (0.05, 0.2), False, "Fine-tuning beat the best baseline, best: MCC 0.700 against 0.600"),
        (0.527, 0.657, (-0.2, -0.05), False, "was worse than the best baseline, best: MCC 0.527"),
        (0.527, 0.657, (-0.2, 0.05), False, "was not clearly apart from the best baseline, best: MCC 0.527"),
        (8.0, 9.0, (-1.5, -0.5), True, "Fine-tuning beat the best baseline"),
        (0.7, 0.6, NO_INTERVAL, False, "was better in this sample than the best baseline, best: MCC 0.700"),
        (0.7, 0.7, NO_INTERVAL, False, "was equal in this sample to the best baseline"),
        (NAN, 0.7, NO_INTERVAL, False, "MCC is undefined for the model or for every baseline"),
    ],
)
def test_one_sentence(ours: float, theirs: float, limits: tuple[float, float], lower: bool, expected: str) -> None:
    none = Interval(NAN, NAN, NAN)
    values = {"fine-tuned": Interval(ours, 0, 1), "best": Interval(theirs, 0, 1), "none": none}
    gains = {"best": Interval(ours - theirs, *limits), "none": none}
    assert expected in Comparison("MCC", values, gains, lower).verdict("paired over 12 records")


COLUMNS = ("P@L", "rare")
TASK: Any = SimpleNamespace(
    columns=COLUMNS,
    lower_is_better=False,
    facts={},
    names=(),
    settings=SimpleNamespace(pairs=False),
    averages_units=False,
)
TASK.summary, TASK.units = lambda rows: means(rows, COLUMNS), lambda _data: (None, "record")


class Records(list[int]):
    """The part of a split that results name."""

    name, path = "test", Path("x.fasta")

    def id(self, n: int) -> str:
        return f"p{n}"

    def length(self, _n: int) -> int:
        return 50

    def blocks(self) -> None:
        return None


@pytest.mark.parametrize(("count", "rare"), [(2, 0), (12, 3)])
def test_few_records_with_a_value_have_no_interval(tmp_path: Path, count: int, rare: int) -> None:
    """`rare` of `count` records have a value for the metric `rare`."""
    rng = np.random.default_rng(count)
    table: Any = {
        method: [{"P@L": level + 0.1 * rng.random(), "rare": level if n < rare else NAN} for n in range(count)]
        for method, level in (("fine-tuned", 0.5), ("prior", 0.3))
    }
    about = {"recipe": {"task": {"name": "contact"}}, "step": 1, "weights_sha256": "aa"}
    text = evaluate.write(tmp_path, Records(range(count)), TASK, table, about)  # type: ignore[arg-type]
    result = json.loads((tmp_path / "evaluation.json").read_text())
    known = {"P@L": count >= 10, "rare": False}
    for row in (result["metrics"]["fine-tuned"], result["differences"]["prior"]):
        assert row["P@L"]["value"] is not None
        assert {metric: row[metric]["low"] is not None for metric in COLUMNS} == known
    assert len(result["without_interval"]) == 2 - known["P@L"]
    assert all(sentence in text for sentence in result["without_interval"])
    assert (result["interval"] == "none") is not known["P@L"]
    assert text.splitlines()[-1] == result["verdict"]
    if known["P@L"]:
        assert result["verdict"].startswith("Fine-tuning beat the best baseline, prior: P@L 0.5")
        assert f"paired over {count} records" in result["verdict"]
    else:
        assert "Without an interval" in result["verdict"]
    with open(tmp_path / "per_protein.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == count
