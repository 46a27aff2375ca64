"""What a scored test set says in the end: the verdict, and why an interval is missing, in every place."""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from esmshard.tasks.metrics import Interval, means
from esmshard.train import evaluate
from esmshard.train.evaluate import Comparison

NAN = math.nan
NO_INTERVAL = (NAN, NAN)


def of(metric: str, ours: float, theirs: float, limits: tuple[float, float], **how: Any) -> str:
    intervals = {"fine-tuned": Interval(ours, 0, 1), "best": Interval(theirs, 0, 1), "none": Interval(NAN, NAN, NAN)}
    gains = {"best": Interval(ours - theirs, *limits), "none": Interval(NAN, NAN, NAN)}
    return Comparison(metric, intervals, gains, **how).verdict("paired over 12 records")


def test_one_sentence() -> None:
    for said, expected in (
        (of("MCC", 0.7, 0.6, (0.05, 0.2)), "Fine-tuning beat the best baseline, best: MCC 0.700 against 0.600"),
        (of("MCC", 0.527, 0.657, (-0.2, -0.05)), "Fine-tuning was worse than the best baseline, best: MCC 0.527"),
        (of("MCC", 0.527, 0.657, (-0.2, 0.05)), "was not clearly apart from the best baseline, best: MCC 0.527 "),
        (of("ppl", 8.0, 9.0, (-1.5, -0.5), lower_is_better=True), "Fine-tuning beat the best baseline"),
        (of("MCC", 0.7, 0.6, NO_INTERVAL), "was better in this sample than the best baseline, best: MCC 0.700"),
        (of("MCC", 0.7, 0.7, NO_INTERVAL), "Fine-tuning was equal in this sample to the best baseline"),
        (of("MCC", NAN, 0.7, NO_INTERVAL), "MCC is undefined for the model or for every baseline"),
    ):
        assert expected in said


COLUMNS = ("P@L", "rare")
TASK: Any = SimpleNamespace(
    columns=COLUMNS,
    lower_is_better=False,
    facts={},
    summary=lambda rows: means(rows, COLUMNS),
    names=(),
    settings=SimpleNamespace(pairs=False),
    units=lambda _data: (None, "record"),
)


class Records:
    """As much of a split as results name."""

    name, path = "test", Path("x.fasta")

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def id(self, n: int) -> str:
        return f"p{n}"

    def length(self, _n: int) -> int:
        return 50

    def blocks(self) -> None:
        return None


def written(out: Path, count: int, rare: int = 0) -> tuple[str, dict[str, Any]]:
    """What is said of so many records, of which so many have the metric `rare`."""
    rng = np.random.default_rng(count)

    def rows(level: float) -> Sequence[Any]:
        values = level + 0.1 * rng.random(count)
        return [{"P@L": v, "rare": v if n < rare else NAN} for n, v in enumerate(values)]

    table = {"fine-tuned": rows(0.5), "prior": rows(0.3)}
    data: Any = Records(count)
    about = {"recipe": {"task": {"name": "contact"}}, "step": 1, "weights_sha256": "aa"}
    text = evaluate.write(out, data, TASK, table, about)
    return text, json.loads((out / "evaluation.json").read_text())


def test_two_proteins_have_neither_interval_nor_star(tmp_path: Path) -> None:
    text, found = written(tmp_path, 2)
    for table in (found["metrics"]["fine-tuned"], found["differences"]["prior"]):
        assert table["P@L"]["value"] is not None
        assert (table["P@L"]["low"], table["P@L"]["high"]) == (None, None)
    assert "[" not in text.splitlines()[1]
    assert len(found["without_interval"]) == 2
    assert found["interval"] == "none"
    assert all(sentence in text for sentence in found["without_interval"])
    assert text.splitlines()[-1] == found["verdict"]
    assert "cannot be said" in found["verdict"]


def test_records_without_a_value_do_not_count(tmp_path: Path) -> None:
    text, found = written(tmp_path, 12, rare=3)
    assert found["metrics"]["fine-tuned"]["P@L"]["low"] is not None
    assert found["metrics"]["fine-tuned"]["rare"]["low"] is None
    assert found["differences"]["prior"]["rare"]["low"] is None
    assert ["rare: 3 records" in sentence for sentence in found["without_interval"]] == [True]
    assert found["verdict"].startswith("Fine-tuning beat the best baseline, prior: P@L 0.5")
    assert "paired over 12 records" in text.splitlines()[-1]
    with open(tmp_path / "per_protein.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 12
