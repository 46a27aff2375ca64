"""The values in the charts and contact maps of a report."""

import csv
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from esmshard.data.batching.loader import Example
from esmshard.errors import InputError
from esmshard.predict import pictures
from esmshard.report import charts
from esmshard.tasks.metrics import Interval
from esmshard.vocab import encode


@pytest.fixture
def axes() -> Any:
    return Figure().add_subplot()


def points(artist: Any) -> list[list[float]]:
    return np.asarray(artist.get_offsets()).tolist()


def test_curves_keep_their_points_or_their_range(axes: Any) -> None:
    lines = {"training": (np.array([1.0, 2, 3, 4]), np.array([5.0, np.nan, 7, 8])), "validation": (np.ones(1),) * 2}
    charts.curves(axes, "loss", lines, (3, 7), from_zero=True)
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[1, 5], [3, 7], [4, 8]], [[1, 1]], [[3, 7]]]
    assert len(axes.collections) == 0
    assert axes.get_ylim()[0] == 0
    axes.clear()
    y = np.ones(100_000)
    y[54_321] = 50.0
    charts.curves(axes, "loss", {"training": (np.arange(100_000.0), y)})
    assert len(axes.lines[0].get_xydata()) == charts.POINTS
    assert axes.lines[0].get_ydata().mean() == pytest.approx(y.mean())
    assert axes.collections[0].get_paths()[0].vertices[:, 1].max() == 50


def test_dots_and_intervals_are_where_their_values_are(axes: Any) -> None:
    charts.dots(axes, np.array([1.0, 2.0]), np.array([3.0, -4.0]), "x", "y", same_unit=True)
    assert points(axes.collections[0]) == [[1, 3], [2, -4]]
    assert axes.lines[0].get_xydata().tolist() == [[-4, -4], [3, 3]]
    axes.clear()
    rows = {"ours": Interval(0.5, 0.4, 0.6), "none": Interval(np.nan, np.nan, np.nan), "bare": Interval(0.2, 0.1, 1)}
    charts.intervals(axes, rows, "ours", "MCC")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bare", "ours"]
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    assert drawn == [[[0.1, 0], [1, 0]], [[0.2, 0]], [[0.4, 1], [0.6, 1]], [[0.5, 1]]]


def test_confusion_has_true_classes_as_rows(axes: Any) -> None:
    charts.confusion(axes, ["H", "E"], np.array([[3.0, 1], [0, 0]]))
    assert axes.images[0].get_array().tolist() == [[0.75, 0.25], [0, 0]]
    texts = {tuple(text.get_position()): text.get_text() for text in axes.texts}
    assert texts == {(0, 0): "3", (1, 0): "1", (0, 1): "0", (1, 1): "0"}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["H", "E"]


def test_many_dots_are_pixels() -> None:
    x, y = np.random.default_rng(0).random((2, 50_000))
    assert len(charts.chart(charts.dots, x, y, "x", "y")) < 300_000


def test_undefined_points_of_a_learning_curve_are_not_drawn(axes: Any) -> None:
    nothing = Interval(np.nan, np.nan, np.nan)
    rows = {"a": {10: Interval(0.5, 0.4, 0.6), 20: nothing, 30: Interval(0.7, 0.6, 0.8)}, "b": {10: nothing}}
    charts.learning_curve(axes, [10, 20, 30], rows)
    (line,) = axes.lines
    assert line.get_ydata().tolist() == [0.5, 0.7]
    assert np.allclose(line.get_xdata(), [10, 30], atol=0.5)
    assert [segment[:, 1].tolist() for segment in axes.collections[0].get_segments()] == [[0.4, 0.6], [0.6, 0.8]]


def test_a_long_map_has_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(charts, "_svg", lambda draw, height, width: figures.append(Figure()) or draw(figures[0]) or "")
    charts.heat_map(np.arange(500.0).reshape(2, 250), 7, np.array([1] * 249 + [-1]), "AC", (0.0, 1.0), "x")
    blocks = [axes for axes in figures[0].axes if axes.images]
    assert [block.images[0].get_array().shape for block in blocks] == [(2, 84), (2, 84), (2, 82)]
    assert blocks[1].images[0].get_array()[0, 0] == 84
    assert [block.images[0].get_extent()[:2] for block in blocks] == [[6.5, 90.5], [90.5, 174.5], [174.5, 256.5]]
    assert blocks[2].lines[0].get_xydata()[-1].tolist() == [255, 1]  # of residue 256 the wild type is not known


def contact_points(probability_LL: Any, target_LL: Any) -> tuple[dict[str, list[list[float]]], Any]:
    axes = Figure().add_subplot()
    image = pictures.draw_map(axes, probability_LL, target_LL)
    return {str(c.get_label()): points(c) for c in axes.collections}, image


def test_contacts_below_and_probabilities_above_the_diagonal() -> None:
    probability_LL, target_LL = np.zeros((9, 9), np.float32), np.zeros((9, 9), np.int8)
    # Six pairs are at least six residues apart: (0,6) (0,7) (0,8) (1,7) (1,8) (2,8). All are among the 9 best.
    probability_LL[0, 7] = probability_LL[7, 0] = 0.8
    # (0, 3) is too near to count, and (1, 7) is not resolved.
    for (i, j), value in {(0, 7): 1, (0, 3): 1, (1, 7): -1}.items():
        target_LL[i, j] = target_LL[j, i] = value
    drawn, image = contact_points(probability_LL, target_LL)
    assert drawn["L best, contact"] == [[1, 8]]
    assert sorted(drawn["L best, no contact"]) == [[1, 7], [1, 9], [2, 9], [3, 9]]
    assert drawn["contact, not among the L best"] == []
    assert image.get_array()[0, 7] == pytest.approx(0.8)
    assert np.ma.getmaskarray(image.get_array())[7, 0]
    assert image.get_extent() == [0.5, 9.5, 9.5, 0.5]  # residue 1 is at 1, and at the top


def test_only_the_l_best_count() -> None:
    probability_LL, target_LL = np.zeros((20, 20), np.float32), np.zeros((20, 20), np.int8)
    i, j = np.triu_indices(20, 6)
    probability_LL[i, j] = np.linspace(0.9, 0.1, len(i))
    target_LL[i[[0, 19, 20]], j[[0, 19, 20]]] = 1
    drawn, _ = contact_points(probability_LL, target_LL)
    assert drawn["L best, contact"] == [[i[0] + 1, j[0] + 1], [i[19] + 1, j[19] + 1]]
    assert drawn["contact, not among the L best"] == [[i[20] + 1, j[20] + 1]]
    assert len(drawn["L best, no contact"]) == 18


@dataclass
class Split:
    """The proteins p0, p1, ... with these lengths."""

    lengths: list[int]
    name: str = "test"
    path: Path = Path("test.fasta")
    digest: str = "d1"

    def __len__(self) -> int:
        return len(self.lengths)

    def id(self, n: int) -> str:
        return f"p{n}"

    def get(self, n: int) -> Example:
        return Example(self.id(n), encode("A" * self.lengths[n]), {})


LENGTHS = [30, 600, 40, 50, 60, 70]
SCORES = ["0.9", "0.95", "0.1", "0.5", "", "0.3"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tested run on six proteins: one too long, one without a score."""
    with open(tmp_path / "per_protein.csv", "w", newline="") as file:
        rows = ([f"p{n}", *pair] for n, pair in enumerate(zip(LENGTHS, SCORES, strict=True)))
        csv.writer(file).writerows([["id", "length", "long P@L"], *rows])

    def inputs(example: Example) -> Any:
        length = len(example.tokens) - 2
        return SimpleNamespace(tokens=example.tokens, target=np.zeros((length, length), dtype=np.int8))

    model = SimpleNamespace(outputs=lambda many: [np.zeros(i.target.shape, dtype=np.float32) for i in many])
    task = SimpleNamespace(inputs=inputs, predict=lambda output: output, labels=None, names=())
    found = SimpleNamespace(model=model, task=task)
    monkeypatch.setattr(charts, "load_finetuned", lambda path, device: found)
    return tmp_path


def test_maps_of_the_best_the_median_and_the_worst(run: Path) -> None:
    drawn = charts.contact_figures(run, Split(LENGTHS))  # type: ignore[arg-type]
    assert [path.name for path in drawn] == ["contacts_best_p0.png", "contacts_median_p3.png", "contacts_worst_p2.png"]
    assert sorted((run / "figures").iterdir()) == sorted(drawn)
    assert drawn[0].read_bytes().startswith(b"\x89PNG")
    (run / "per_protein.csv").write_text("id,length,long P@L\np3,50,0.5\n")
    assert [path.name for path in charts.contact_figures(run, Split(LENGTHS))] == ["contacts_best_p3.png"]  # type: ignore[arg-type]
    (run / "per_protein.csv").write_text("id,length,long P@L\np1,600,0.5\n")
    with pytest.raises(InputError, match="512"):
        charts.contact_figures(run, Split(LENGTHS))  # type: ignore[arg-type]


def test_maps_of_all_records_appear_together(run: Path, tmp_path: Path) -> None:
    folder, data = tmp_path / "maps", Split([30, 40])
    charts.draw_maps(charts.load_finetuned("model", None), data, folder)  # type: ignore[arg-type]
    whole = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert sorted(whole) == ["p0.png", "p1.png"]
    data.lengths.append(0)  # cannot be drawn
    with pytest.raises(ZeroDivisionError):
        charts.draw_maps(charts.load_finetuned("model", None), data, folder)  # type: ignore[arg-type]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == whole
