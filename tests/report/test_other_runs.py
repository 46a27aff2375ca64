"""Pages about runs that are not done, are damaged, very long, or of other tasks."""

import json
import sys
from pathlib import Path

import pytest
from run_directories import SECTIONS, Page, attempt, evaluation, interval, make, page, proteins, step, valid, whole

from esmshard.errors import InputError
from esmshard.report import charts, run_page
from esmshard.report.files import read_run
from esmshard.report.page import report


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty charts: quick, where it is words that matter."""
    monkeypatch.setattr(charts, "chart", lambda name, draw, *size, **sizes: "<svg></svg>")


words = pytest.mark.usefixtures("undrawn")


@words
def test_a_run_without_an_evaluation(tmp_path: Path) -> None:
    lines = whole()[:-2]
    found = page(make(tmp_path / "run", lines, state="preempted"))
    assert "Preempted; step 20 of 40" in found.text[""]
    assert "best validation long P@L 0.095 at step 10; not tested yet" in " ".join(found.text[""].split())
    assert "has not been tested yet" in found.text["metrics"]
    assert "none before the model is tested" in found.text["predictions"]
    assert "per_protein.csv is missing" in found.text["length"]
    assert "Not tested yet" in found.text["calibration"]
    assert "has no leakage check" in found.text["data"]
    assert list(found.text)[1:] == SECTIONS
    assert "evaluate" not in found.text["reproduce"]


@words
def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    found = page(make(tmp_path / "run", [attempt(1, 1000.0)], state=None))
    assert "no step yet" in found.text["curves"]
    assert "no step yet" in found.text["speed"]
    assert "There is no status.json" in found.text[""]
    assert "10s in 1 attempt" in found.text["time"]


@words
def test_a_run_that_was_killed_is_not_running(tmp_path: Path) -> None:
    found = page(make(tmp_path / "run", whole()[:8], state="running"))  # nobody holds its lease
    assert "Failed; step 20 of 40: the run ended without a word after step 20" in found.text[""]


def test_one_step_and_no_validation(tmp_path: Path) -> None:
    found = page(make(tmp_path / "run", [attempt(1, 1000.0), step(1, 1012.0)]))
    assert found.figures["curves"] == 3
    assert "There is no validation yet." in found.text["curves"]
    assert "steps 1 300 residues seen" in " ".join(found.text[""].split())


@words
def test_steps_without_a_number(tmp_path: Path) -> None:
    lines = [step(1, 1.0), step(2, 2.0, loss=None, grad_norm=None), step(3, 3.0, peak_memory_bytes=None)]
    found = page(make(tmp_path / "run", [*lines, valid(3, None, 4.0)]))
    assert "1 step had no finite loss" in found.text["curves"]
    assert "does not tell when the run was started" in found.text["time"]
    assert "star" not in found.text["curves"]


@words
def test_no_memory_recorded(tmp_path: Path) -> None:
    found = page(make(tmp_path / "run", [step(n, n, peak_memory_bytes=None) for n in range(1, 4)]))
    assert "Memory was not recorded." in found.text["speed"]
    assert found.figures["speed"] == 1


@words
def test_restarts(tmp_path: Path) -> None:
    lines = [
        attempt(1, 1000.0),
        step(1, 1012.0),
        {"event": "first_step", "seconds": 12.0, "time": 1012.0},
        step(2, 1014.0),
        {"event": "end", "state": "killed", "time": 1030.0},
        attempt(2, 5000.0, from_step=2, lost=3, seconds=7.0),
        step(3, 5012.0),
        {"event": "first_step", "seconds": 65.0, "time": 5012.0},
        {"event": "end", "state": "preempted", "time": 5030.0},
    ]
    found = page(make(tmp_path / "run", lines, state="preempted"))
    # 30 s and 30 s; three steps of 2 s are kept.
    assert "1m00s in 2 attempts, 10% of it" in found.text["time"]
    assert "3 steps had to be taken again after a restart: 7s of work." in found.text["time"]
    assert found.row("time", "1", 5) == ["0", "0", "12s", "killed"]
    assert found.row("time", "2", 5) == ["2", "3", "1m05s", "preempted"]


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    run = make(tmp_path / "run", None, evaluation(), proteins(5000))
    one = json.dumps(step(1, 1.0, ranks={"residues_per_s": [75.123456] * 16}))
    with open(run / "metrics.jsonl", "w") as file:
        file.write(json.dumps(attempt(1, 0.0)) + "\n")
        for n in range(1, 100_001):
            file.write(one.replace('"step": 1,', f'"step": {n},', 1) + "\n")
            if n % 100 == 0:
                file.write(json.dumps(valid(n, 0.1, float(n))) + "\n")
    out = report(run)
    assert out.stat().st_size < 2_000_000
    text = Page(out.read_text()).text
    assert "Each point is the mean of up to 250 steps" in text["curves"]
    assert "100,000" in text[""]


@words
def test_numbers_of_a_protein(tmp_path: Path) -> None:
    rows = [[f"p{n}", 50 + n, n + 0.5, float(n), "", 1.0] for n in range(20)]
    table = [["id", "length", "prediction Tm", "target Tm", "prediction ddG", "target ddG"], *rows]
    spearman = {"fine-tuned": {"Spearman": interval(0.9, 0.8, 0.95)}}
    rest = {"differences": {}, "without_value": {}, "calibration": None, "facts": {"targets": ["Tm", "ddG"]}}
    tested = evaluation(task="sequence", columns=["Spearman"], metrics=spearman, **rest)
    found = page(make(tmp_path / "run", whole(), tested, table))
    assert found.figures["predictions"] == 1  # of ddG nothing is known
    assert "Predicted against measured Tm" in found.text["predictions"]
    assert "20 of them" in found.text["predictions"]
    assert "absolute error of Tm by length" in found.text["length"]
    assert "no probabilities" in found.text["calibration"]
    assert "no baselines" in found.text["metrics"]
    assert "against" not in found.text[""]


@words
def test_classes(tmp_path: Path) -> None:
    tested = evaluation(
        task="residue",
        columns=["accuracy"],
        metrics={"fine-tuned": {"accuracy": interval(0.7, 0.6, 0.8)}},
        differences={},
        confusion={"classes": ["H", "E", "C"], "counts": [[5, 1, 0], [0, 4, 2], [0, 0, 0]]},
    )
    table = [["id", "length", "accuracy"], *([f"p{n}", 50 + n, 0.5 + n / 20] for n in range(10))]
    run = make(tmp_path / "run", whole(), tested, table)
    text = report(run).read_text()
    found = Page(text)
    assert found.figures["predictions"] == 1
    assert "accuracy by length" in found.text["length"]


@words
def test_one_number_of_a_protein(tmp_path: Path) -> None:
    table = [["id", "length", "prediction", "target"], *([f"p{n}", 50 + n, n, 2.0 * n] for n in range(20))]
    tested = evaluation(task="sequence", facts={"targets": ["Tm"]})
    found = page(make(tmp_path / "run", whole(), tested, table))
    assert "Predicted against measured Tm" in found.text["predictions"]
    assert "absolute error of Tm by length" in found.text["length"]


def test_measured_and_predicted_are_named_on_their_axes(tmp_path: Path) -> None:
    table = [["id", "length", "prediction", "target"], *([f"p{n}", 50 + n, n, 2.0 * n] for n in range(20))]
    tested = evaluation(task="sequence", facts={"targets": ["Tm"]})
    (figure,) = run_page.predictions(read_run(make(tmp_path / "run", whole(), tested, table))).figures
    assert ">measured Tm<" in figure.svg
    assert ">predicted Tm<" in figure.svg


@words
def test_the_number_of_a_class_is_no_measurement(tmp_path: Path) -> None:
    head = ["id", "length", "target", "prediction", "correct", "confidence"]
    table = [head, *([f"p{n}", 50 + n, 1, n % 2, n % 2, 0.6] for n in range(20))]
    tested = evaluation(task="sequence", columns=["accuracy"], facts={"classes": ["a", "b"]}, differences={})
    tested["metrics"] = {"fine-tuned": {"accuracy": interval(0.5, 0.4, 0.6)}}
    found = page(make(tmp_path / "run", whole(), tested, table))
    assert "predictions" not in found.figures
    assert "right (1) or wrong (0) by length" in found.text["length"]
    assert found.figures["length"] == 1


@words
def test_perplexity_before_and_after_and_lower_is_better(tmp_path: Path) -> None:
    values = {"fine-tuned": 8.0, "composition": 17.0, "before fine-tuning": 12.0}
    tested = evaluation(
        task="mlm",
        columns=["perplexity"],
        lower_is_better=True,
        metrics={name: {"perplexity": interval(v, v - 1, v + 1)} for name, v in values.items()},
        differences={
            "composition": {"perplexity": interval(-9.0, -10.0, -8.0)},
            "before fine-tuning": {"perplexity": interval(-4.0, -5.0, -3.0)},
        },
        calibration=None,
    )
    lines = [step(1, 1.0), valid(1, 9.0, 2.0, "perplexity"), step(2, 3.0), valid(2, 7.5, 4.0, "perplexity")]
    table = [["id", "length", "perplexity"], *([f"p{n}", 50 + n, 8.0] for n in range(4))]
    found = page(make(tmp_path / "run", lines, tested, table))
    top = " ".join(found.text[""].split())
    assert "After fine-tuning, perplexity of 12 test records is 8.000 [7.000, 9.000], and was 12.000 before." in top
    assert "lower is better" in found.text["metrics"]
    assert "against before fine-tuning -4.000" in top
    assert "Best (star): 7.500 at step 2" in found.text["curves"]
    assert found.row("metrics", "minus before fine-tuning", 2) == ["-4.000*\n[-5.000, -3.000]"]
    assert "leaves nothing to draw" in found.text["predictions"]


@words
@pytest.mark.parametrize(
    ("low", "high", "lower", "said"),
    [
        (0.01, 0.03, False, "better than"),
        (0.01, 0.03, True, "worse than"),
        (-0.03, -0.01, True, "better than"),
        (-0.03, -0.01, False, "worse than"),
        (-0.01, 0.03, False, "not clearly apart from"),
        (None, None, False, "no interval, better in this sample than"),
        (None, None, True, "no interval, worse in this sample than"),
    ],
)
def test_whether_it_beats_the_best_baseline(
    tmp_path: Path, low: float | None, high: float | None, lower: bool, said: str
) -> None:
    one = {"long P@L": interval(0.5, 0.4, 0.6), "AUPRC": interval(0.5, 0.4, 0.6)}
    gain = {"other": {"long P@L": interval(0.01, low, high)}}
    tested = evaluation(metrics={"fine-tuned": one, "other": one}, differences=gain, lower_is_better=lower)
    assert f"{said} the best baseline" in page(make(tmp_path / "run", whole(), tested)).text[""]


@words
def test_an_evaluation_alone(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation()))
    found = page(tmp_path)
    assert found.row("metrics", "fine-tuned", 3)[0] == "0.100\n[0.080, 0.125]"
    for part in ("versions", "recipe", "reproduce"):
        assert "missing" in found.text[part]
    assert "versions.json is missing" in found.text["data"]
    assert "has no step." in found.text["curves"]


@words
def test_a_recipe_of_another_version(tmp_path: Path) -> None:
    run = make(tmp_path / "run", whole(), evaluation())
    (run / "recipe.yaml").write_text("task: {name: contact}\nwhatever: 1\n")
    found = page(run)
    assert "This version of esmshard cannot use it: " in found.text["recipe"]
    assert "recipe.yaml:1:1: model: Field required" in found.text["recipe"]
    assert "Task contact." in found.text[""]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("evaluation.json", "[]", "evaluation.json: damaged"),
        ("evaluation.json", json.dumps(evaluation(columns=["other"])), "other"),
        ("evaluation.json", json.dumps(evaluation(metrics={"a": {"long P@L": {"mean": 1}}})), "value"),
        ("status.json", "{}", "status.json: damaged"),
        ("metrics.jsonl", "\x00\x00\n", "metrics.jsonl: damaged, no line"),
        ("metrics.jsonl", '{"event": "attempt"}\n', "metrics.jsonl: damaged"),
        ("per_protein.csv", "id,length,x\na,1\n", "per_protein.csv: damaged"),
    ],
)
def test_damage_is_one_sentence(tmp_path: Path, name: str, content: str, said: str) -> None:
    run = make(tmp_path / "run", whole(), evaluation(), proteins())
    (run / name).write_text(content)
    with pytest.raises(InputError) as caught:
        report(run)
    assert said in str(caught.value)
    assert str(run / name) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (run / "report.html").exists()


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        report(tmp_path / "none")
    with pytest.raises(InputError, match="holds no run"):
        report(tmp_path)


@words
def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    run = make(tmp_path / "run", whole())
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 21, "lo\xff')
    assert "steps 20 " in " ".join(page(run).text[""].split())


@words
def test_where_it_is_written(tmp_path: Path) -> None:
    run = make(tmp_path / "run", whole())
    assert report(run) == run / "report.html"
    before = sorted(run.iterdir())
    assert report(run, tmp_path / "other.html") == tmp_path / "other.html"
    assert sorted(run.iterdir()) == before
    assert not [path for path in [*before, *tmp_path.iterdir()] if "tmp-" in path.name]
    with pytest.raises(InputError, match="make it first"):
        report(run, tmp_path / "none" / "page.html")


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path / "run", whole())
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"{package}.*pip install 'esmshard\[plots\]'"):
        report(run)


@words
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from esmshard.cli import train

    train.report(make(tmp_path / "run", whole()), None)
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'report.html'}\n"


@words
def test_the_verdict_comes_first(tmp_path: Path) -> None:
    said = "Fine-tuning was worse than the best baseline, composition: MCC 0.527 against 0.657."
    top = page(make(tmp_path / "run", whole(), evaluation(verdict=said))).text[""]
    before, _, rest = " ".join(top.split()).partition(said)
    assert before.endswith("After fine-tuning, long P@L of 12 test records is 0.100 [0.080, 0.125]. ")
    assert "Done; step" in rest


@words
def test_too_few_records_have_no_star(tmp_path: Path) -> None:
    few = {"long P@L": "2 records with a value; an interval takes 10"}
    gain = {"other": {"long P@L": interval(-0.021, None, None)}}
    one = {"long P@L": interval(0.667, None, None), "AUPRC": interval(0.5, 0.4, 0.6)}
    tested = evaluation(metrics={"fine-tuned": one, "other": one}, differences=gain, without_interval=few, records=2)
    found = page(make(tmp_path / "run", whole(), tested))
    assert found.row("metrics", "fine-tuned", 2) == ["0.667\nno interval"]
    assert found.row("metrics", "minus other", 2) == ["-0.021\nno interval"]
    assert "No interval for long P@L: 2 records with a value; an interval takes 10." in found.text["metrics"]
