"""What the charts and contact maps of a report show."""

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from esmshard.data.batching.loader import Example
from esmshard.errors import InputError
from esmshard.predict import pictures
from esmshard.report import charts, run_page
from esmshard.report.files import read_run
from esmshard.tasks.metrics import Interval
from esmshard.vocab import encode


@pytest.fixture
def axes() -> Any:
    return Figure().add_subplot()


def points(artist: Any) -> list[list[float]]:
    return np.asarray(artist.get_offsets()).tolist()


def test_a_short_curve_is_as_it_is(axes: Any) -> None:
    charts.curve(axes, np.array([1.0, 2, 3, 4]), np.array([5.0, np.nan, 7, 8]))
    assert axes.lines[0].get_xydata().tolist() == [[1, 5], [3, 7], [4, 8]]
    assert len(axes.collections) == 0


def test_a_long_curve_is_means_in_a_band(axes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    y = np.array([1.0, 5, 2, 4, 0, 6])
    monkeypatch.setattr(charts, "neighbours", lambda count: np.array_split(np.arange(count), 2))
    charts.curve(axes, np.arange(6.0), y)
    assert axes.lines[0].get_xydata().tolist() == [[1, 8 / 3], [4, 10 / 3]]
    (band,) = axes.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners == {(1, 1), (1, 5), (4, 0), (4, 6)}


def test_no_spike_of_a_long_curve_is_lost(axes: Any) -> None:
    y = np.ones(100_000)
    y[54_321] = 50.0
    charts.curve(axes, np.arange(100_000.0), y)
    assert len(axes.lines[0].get_xydata()) == charts.POINTS
    assert axes.collections[0].get_paths()[0].vertices[:, 1].max() == 50


def test_bins_hold_as_many_proteins_each() -> None:
    length_N = np.array([300.0, *range(10, 200, 10)])
    bins = charts.length_bins(length_N)
    assert [sorted(length_N[b]) for b in bins] == [
        [10, 20, 30, 40, 50, 60, 70, 80, 90, 100],
        [110, 120, 130, 140, 150, 160, 170, 180, 190, 300],
    ]
    assert [len(b) for b in charts.length_bins(np.arange(600.0))] == [100] * 6


def test_one_length_is_one_bin() -> None:
    assert [len(b) for b in charts.length_bins(np.full(50, 120.0))] == [50]
    assert charts.length_bins(np.empty(0)) == []


def test_interval_of_a_mean_is_that_of_scipy() -> None:
    values = np.random.default_rng(3).gamma(2.0, 1.0, 40)
    found = charts.mean_interval(values)
    expected = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, random_state=1)
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(expected.confidence_interval.low, abs=0.05)
    assert found.high == pytest.approx(expected.confidence_interval.high, abs=0.05)


def test_scores_by_length(axes: Any) -> None:
    length_N = np.arange(10.0, 30.0)
    length_N[-1] = 90.0
    charts.by_length(axes, length_N, np.repeat([0.25, 0.75], 10))
    assert len(points(axes.collections[0])) == 20
    spans = [line.get_xydata().tolist() for line in axes.lines if len(line.get_xydata()) == 2]
    assert [[10, 0.25], [19, 0.25]] in spans
    assert [[20, 0.75], [90, 0.75]] in spans
    assert [[24.5, 0.75], [24.5, 0.75]] in spans  # the interval, at the median length


def test_methods_with_intervals(axes: Any) -> None:
    rows = {"ours": Interval(0.5, 0.4, 0.6), "none": Interval(np.nan, np.nan, np.nan), "bare": Interval(0.2, np.nan, 1)}
    charts.intervals(axes, rows, "ours")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bare", "ours"]
    drawn = [(line.get_xydata().tolist(), line.get_color()) for line in axes.lines]
    assert drawn == [
        ([[0.2, 0]], charts.GREY),
        ([[0.4, 1], [0.6, 1]], charts.BLUE),
        ([[0.5, 1]], charts.BLUE),
    ]


def test_empty_bins_of_confidence_are_not_drawn(axes: Any) -> None:
    charts.reliability(axes, np.array([4.0, 0, 2]), np.array([0.1, np.nan, 0.9]), np.array([0.2, np.nan, 0.7]))
    assert points(axes.collections[0]) == [[0.1, 0.2], [0.9, 0.7]]
    assert axes.lines[0].get_xydata().tolist() == [[0, 0], [1, 1]]


def test_confusion_has_true_classes_as_rows(axes: Any) -> None:
    charts.confusion(axes, ["H", "E"], np.array([[3.0, 1], [0, 0]]))
    assert axes.images[0].get_array().tolist() == [[0.75, 0.25], [0, 0]]
    texts = {tuple(text.get_position()): text.get_text() for text in axes.texts}
    assert texts == {(0, 0): "3", (1, 0): "1", (0, 1): "0", (1, 1): "0"}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["H", "E"]


def test_many_classes_are_not_written_over_each_other() -> None:
    names = [f"class number {n}" for n in range(61)]
    text = charts.chart("many", lambda axes: charts.confusion(axes, names, np.eye(61)))
    assert text.count("class number") == 2 * 21  # each third, on both axes


def test_measured_across_and_predicted_up(axes: Any) -> None:
    charts.against(axes, np.array([1.0, 2.0]), np.array([3.0, -4.0]))
    assert points(axes.collections[0]) == [[1, 3], [2, -4]]
    assert axes.lines[0].get_xydata().tolist() == [[-4, -4], [3, 3]]


def test_bars_from_the_top(axes: Any) -> None:
    charts.bars(axes, {"steps": 3.0, "start": 1.0})
    assert [bar.get_width() for bar in axes.patches] == [1, 3]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["start", "steps"]


def test_amounts_begin_at_zero(axes: Any) -> None:
    charts.curve(axes, np.array([1.0, 2]), np.array([7.0, 8]))
    charts.from_zero(axes)
    low, high = axes.get_ylim()
    assert low == 0
    assert 8 < high < 9


def test_a_great_cloud_is_a_picture() -> None:
    rng = np.random.default_rng(0)
    text = charts.chart("cloud", lambda axes: charts.cloud(axes, rng.random(50_000), rng.random(50_000)))
    assert len(text) < 300_000
    assert "data:image/png" in text


PROBABILITY_LL = np.zeros((9, 9), dtype=np.float32)
TARGET_LL = np.zeros((9, 9), dtype=np.int8)


def contact_points(probability_LL: Any, target_LL: Any) -> tuple[dict[str, list[list[float]]], Any]:
    figure = Figure()
    own = figure.add_subplot()
    image = pictures.draw_map(own, probability_LL, target_LL)
    return {str(c.get_label()): points(c) for c in own.collections}, image


def test_contacts_below_and_probabilities_above_the_diagonal() -> None:
    probability_LL, target_LL = PROBABILITY_LL.copy(), TARGET_LL.copy()
    # Six pairs are six or more apart: (0,6) (0,7) (0,8) (1,7) (1,8) (2,8). All are among the 9 best.
    probability_LL[0, 7] = probability_LL[7, 0] = 0.8
    target_LL[0, 7] = target_LL[7, 0] = 1
    target_LL[0, 3] = target_LL[3, 0] = 1  # too near to count
    target_LL[1, 7] = target_LL[7, 1] = -1  # not resolved: in no rank
    found, image = contact_points(probability_LL, target_LL)
    assert found["L best, contact"] == [[1, 8]]
    assert sorted(found["L best, no contact"]) == [[1, 7], [1, 9], [2, 9], [3, 9]]
    assert found["contact, not among the L best"] == []
    shown_LL = image.get_array()
    assert shown_LL[0, 7] == pytest.approx(0.8)
    assert np.ma.getmaskarray(shown_LL)[7, 0]
    assert image.get_extent() == [0.5, 9.5, 9.5, 0.5]  # residue 1 lies at 1, and at the top


def test_only_the_l_best_count() -> None:
    length = 20
    probability_LL = np.zeros((length, length), dtype=np.float32)
    i, j = np.triu_indices(length, 6)
    probability_LL[i, j] = np.linspace(0.9, 0.1, len(i))
    target_LL = np.zeros((length, length), dtype=np.int8)
    for n in (0, 19, 20):  # of the ranks
        target_LL[i[n], j[n]] = 1
    found, _ = contact_points(probability_LL, target_LL)
    assert found["L best, contact"] == [[i[0] + 1, j[0] + 1], [i[19] + 1, j[19] + 1]]
    assert found["contact, not among the L best"] == [[i[20] + 1, j[20] + 1]]
    assert len(found["L best, no contact"]) == 18


@dataclass
class Split:
    """Proteins p0, p1, ... of so many residues each."""

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
    from esmshard.recipe import recipe_file

    (tmp_path / "recipe.yaml").write_text(recipe_file.dump(recipe_file.load(recipe_file.resolve("contact"), ["out=x"])))
    one = {"long P@L": {"value": 0.5, "low": 0.4, "high": 0.6}}
    about = {"task": "contact", "split": "test", "records": 6, "interval": "", "step": 1, "weights_sha256": "w1"}
    tested = {"columns": ["long P@L"], "lower_is_better": False, "metrics": {"fine-tuned": one}, "differences": {}}
    (tmp_path / "evaluation.json").write_text(json.dumps(about | tested))
    (tmp_path / "versions.json").write_text(json.dumps({"data": {"test": {"tokens_sha256": "d1"}}}))
    with open(tmp_path / "per_protein.csv", "w", newline="") as file:
        rows = ([f"p{n}", *pair] for n, pair in enumerate(zip(LENGTHS, SCORES, strict=True)))
        csv.writer(file).writerows([["id", "length", "long P@L"], *rows])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"0")

    def inputs(example: Example) -> Any:
        length = len(example.tokens) - 2
        return SimpleNamespace(tokens=example.tokens, target=np.zeros((length, length), dtype=np.int8))

    model = SimpleNamespace(outputs=lambda many: [np.zeros(i.target.shape, dtype=np.float32) for i in many])
    task = SimpleNamespace(inputs=inputs, predict=lambda output: output, labels=None, names=())
    found = SimpleNamespace(model=model, task=task, about={"weights_sha256": "w1"})
    monkeypatch.setattr(run_page, "load_finetuned", lambda path, device: found)
    monkeypatch.setattr(run_page, "open_split", lambda recipe, name, labels, tracks: Split(LENGTHS, name))
    return tmp_path


def test_maps_of_the_best_the_median_and_the_worst(run: Path) -> None:
    section = run_page.predictions(read_run(run))
    assert [figure.caption for figure in section.figures] == [
        "Best: p0, 30 residues, long P@L 0.900.",
        "Median: p5, 70 residues, long P@L 0.300.",
        "Worst: p2, 40 residues, long P@L 0.100.",
    ]
    assert all(figure.png.startswith("data:image/png;base64,iVBORw0KGgo") for figure in section.figures)
    assert "of the 4 of up to 512 residues" in section.texts[0]


def test_one_protein_is_drawn_once(run: Path) -> None:
    (run / "per_protein.csv").write_text("id,length,long P@L\np3,50,0.5\n")
    assert [figure.caption for figure in run_page.predictions(read_run(run)).figures] == [
        "Best: p3, 50 residues, long P@L 0.500."
    ]


def test_why_there_are_no_maps(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> str:
        section = run_page.predictions(read_run(run))
        assert not section.figures
        return section.missing

    with monkeypatch.context() as patch:
        patch.setattr(run_page, "open_split", lambda *_: (_ for _ in ()).throw(InputError("test.fasta: gone")))
        assert said() == "No contact maps: test.fasta: gone"
    with monkeypatch.context() as patch:
        patch.setattr(run_page, "LARGEST_MODEL", 0)
        assert "takes too long" in said()
    with monkeypatch.context() as patch:
        patch.setattr(run_page, "LONGEST_MAP", 20)
        assert said() == "No contact maps: no protein of up to 20 residues has a long P@L."
    with monkeypatch.context() as patch:
        patch.setattr(run_page, "open_split", lambda recipe, name, labels, tracks: Split(LENGTHS[:1]))
        assert said() == "No contact maps: test.fasta is no longer what the model was tested on."
    (run / "versions.json").write_text(json.dumps({"data": {"test": {"tokens_sha256": "d2"}}}))
    assert said() == "No contact maps: test.fasta is no longer what the model was tested on."
    tested = json.loads((run / "evaluation.json").read_text()) | {"weights_sha256": "w2"}
    (run / "evaluation.json").write_text(json.dumps(tested))
    assert "other weights" in said()
    (run / "model" / "model.safetensors").unlink()
    assert said() == f"No contact maps: the model is not in {run / 'model'}."
    (run / "per_protein.csv").unlink()
    assert said() == "No contact maps: per_protein.csv with long P@L is missing."


def test_the_figure_of_a_run_is_of_the_median_protein(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_page.load_finetuned("", None)
    monkeypatch.setattr("esmshard.report.charts.load_finetuned", lambda path, device: found)
    out = charts.contact_figure(run, Split(LENGTHS))  # type: ignore[arg-type]
    assert out == run / "figures" / "contacts_p3.png"
    from PIL import Image

    assert min(Image.open(io.BytesIO(out.read_bytes())).size) > 500
