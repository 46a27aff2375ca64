"""Pages about runs and sweeps: finished, unfinished, damaged, very long, and for other tasks."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_directories import Page, attempt, evaluation, interval, make, page, proteins, step, valid, whole

from esmshard.errors import InputError
from esmshard.recipe import recipe_file
from esmshard.report import charts
from esmshard.report import page as pages
from esmshard.report.page import report


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Page:
    run = make(tmp_path_factory.mktemp("runs") / "first", whole(), evaluation(), proteins())
    (run / "figures").mkdir()
    for name in ("contacts_best_a.png", "contacts_worst_b.png"):
        (run / "figures" / name).write_bytes(b"\x89PNG")
    return page(run)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Draw no charts, and return the values of each chart."""
    drawn: list[tuple[Any, ...]] = []

    def chart(draw: Any, *values: Any, **options: Any) -> str:
        drawn.append((draw.__name__, *values))
        return "data:image/png;base64,"

    monkeypatch.setattr(pages, "chart", chart)
    return drawn


words = pytest.mark.usefixtures("undrawn")


def test_a_finished_run(done: Page) -> None:
    assert done.figures == {"metrics": 1, "predictions": 4, "curves": 6}
    top = done.words()
    for text in (
        "first Task contact, model",
        "long P@L of fine-tuned on 12 test records is 0.100 [0.080, 0.125]. Fine-tuning beat the best",
        "Done; step 20 of 40: as it was",
        "against separation prior +0.060 [0.050, 0.070], better than the best baseline",
        "steps 20 6.00k residues seen speed 150 residues/s over all steps memory 1.50 GiB",
        "time 1m40s 40% of it in steps that count",
    ):
        assert text in top
    assert done.row("metrics", "fine-tuned", 3) == ["0.100\n[0.080, 0.125]", "0.300\n[0.200, 0.400]"]
    assert done.row("metrics", "base rate", 3) == ["0.020\n[0.010, 0.030]", "undefined"]
    assert done.row("metrics", "minus separation prior", 3) == ["+0.060*\n[0.050, 0.070]", "+0.020\n[-0.010, 0.050]"]
    assert "2 without AUPRC" in done.text["metrics"]
    assert "The best validation long P@L is 0.095 at step 10 (star)." in done.words("curves")
    # (30 * |.2 - .1| + 10 * |.8 - .5|) / 40
    assert "Expected calibration error: 0.150, over 40 predictions." in done.text["predictions"]
    assert done.row("data", "train", 5) == ["train.fasta", "776", "104429", "9c61"]
    assert "2 of 12 test records are identical to training records" in done.text["data"]
    assert "in the split train: 2 records over 1,022 residues left out (a, ...)" in done.text["data"]
    assert "esmshard finetune first/recipe.yaml out=first-again" in done.text["recipe"]
    assert done.row("recipe", "torch", 2) == ["2.13.0"]


def test_what_users_named_is_text(tmp_path: Path) -> None:
    evil = '<b>x</b>"onload=y'
    named = json.loads(json.dumps(evaluation()).replace("separation prior", "evil").replace("AUPRC", "<b>$a^$</b>"))
    for table in ("metrics", "differences"):
        named[table][evil] = named[table].pop("evil")
    named |= {"leakage": [evil], "confusion": {"classes": [evil, "$b$"], "counts": [[1, 2], [3, 4]]}}
    named["profiles"] = [{"id": evil, "score": evil, "value": 1, "observed": [0, 1], "predicted": [1, None]}]
    run = make(tmp_path / evil.replace("/", "_"), whole(), named, proteins())
    status = json.loads((run / "status.json").read_text()) | {"message": evil}
    (run / "status.json").write_text(json.dumps(status))
    (run / "versions.json").write_text(json.dumps({"data": {evil: {"path": evil}}, evil: evil, "processes": 2}))
    found = page(run)
    for section in ("", "metrics", "data", "predictions"):
        assert evil in found.text[section]
    assert found.row("recipe", evil, 2) == [evil]
    assert " --nproc 2 " in found.text["recipe"]


@words
def test_paths_are_shown_without_directories(tmp_path: Path) -> None:
    home = "/home/ada lovelace/data"
    left_out = [f"2 records of {home}/x.fasta, and all of '{home}/old folds/y.fasta', see {tmp_path}/her runs/first/a"]
    tested = evaluation(leakage=["/data/x.fasta: shares 2 records"], left_out=left_out)
    run = make(tmp_path / "her runs" / "first", whole(), tested)
    recipe = recipe_file.load(
        run / "recipe.yaml", [f"data.train={home}/x.fasta", f"data.test={home}/old folds/y.fasta"]
    )
    (run / "recipe.yaml").write_text(recipe_file.dump(recipe))
    (run / "versions.json").write_text(json.dumps({"data": {"train": {"path": f"{home}/x.fasta"}}}))
    found = page(run)
    assert "train: x.fasta" in found.text["recipe"]
    assert found.row("data", "train", 2) == ["x.fasta"]
    assert "x.fasta: shares 2 records" in found.text["data"]
    assert "2 records of x.fasta, and all of 'y.fasta', see first/a." in found.words("metrics")


@words
def test_a_run_without_an_evaluation(tmp_path: Path) -> None:
    found = page(make(tmp_path / "run", whole()[:-2], state="preempted"))
    assert "Preempted; step 20 of 40" in found.text[""]
    assert "best validation long P@L 0.095 at step 10; not tested yet" in found.words()
    assert "has not been tested yet" in found.text["metrics"]
    assert "predictions" not in found.text
    assert "curves" not in page(make(tmp_path / "begun", [attempt(1, 1000.0)], state=None)).text
    killed = page(make(tmp_path / "killed", whole()[:8], state="running"))  # no process holds its lock
    assert "Failed; step 20 of 40: the run ended" in killed.text[""]


@words
def test_restarts_a_line_that_a_crash_cut_off_and_steps_without_numbers(tmp_path: Path) -> None:
    lines = [attempt(1, 1000.0), step(1, 1012.0), step(2, 1014.0)]
    lines += [{"event": "end", "state": "killed", "time": 1030.0}, attempt(2, 5000.0, from_step=2, lost=3, seconds=7.0)]
    lines += [step(3, 5012.0), {"event": "end", "state": "preempted", "time": 5030.0}]
    run = make(tmp_path / "run", lines)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 21, "lo\xff')
    found = page(run)
    assert "2 starts, 3 steps lost to restarts (7s)." in found.words("curves")
    assert "time 1m00s 10% of it" in found.words()  # 30 s and 30 s; three steps of 2 s are kept
    lines = [attempt(1, 0.0), step(1, 1.0), step(2, 2.0, loss=None, grad_norm=None, peak_memory_bytes=None)]
    without_number = page(make(tmp_path / "other", [*lines, valid(2, None, 4.0)]))
    assert "1 step had no finite loss" in without_number.text["curves"]
    assert "(star)" not in without_number.text["curves"]
    assert without_number.figures["curves"] == 5


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    run = make(tmp_path / "run", None, evaluation(), proteins(5000))
    one = json.dumps(step(1, 1.0, ranks={"residues_per_s": [75.123456] * 16}))
    with open(run / "metrics.jsonl", "w") as file:
        for n in range(1, 3_001):
            file.write(one.replace('"step": 1,', f'"step": {n},', 1) + "\n")
    assert "3,000" in page(run).text[""]
    assert (run / "report.html").stat().st_size < 2_000_000


@pytest.mark.parametrize("several", [True, False])
def test_numbers_of_a_protein(tmp_path: Path, undrawn: list[tuple[Any, ...]], several: bool) -> None:
    names = ["prediction Tm", "target Tm", "prediction ddG", "target ddG"] if several else ["prediction", "target"]
    rows = [[f"p{n}", 50 + n, n + 0.5, float(n), *(["", 1.0] if several else [])] for n in range(20)]
    facts = {"targets": ["Tm", "ddG"] if several else ["Tm"]}
    tested = evaluation(task="sequence", differences={}, calibration=None, facts=facts)
    found = page(make(tmp_path / "run", whole(), tested, [["id", "length", *names], *rows]))
    assert "Predicted against measured Tm: 20 dots." in found.text["predictions"]  # of ddG nothing is known
    assert "absolute error of Tm by length" in found.text["predictions"]
    assert "against" not in found.text[""]
    measured, by_length = (values for values in undrawn if values[0] == "dots")
    assert [measured[1][3], measured[2][3], *measured[3:]] == [3.0, 3.5, "measured Tm", "predicted Tm"]
    assert [by_length[1][3], by_length[2][3]] == [53.0, 0.5]


def test_classes(tmp_path: Path, undrawn: list[tuple[Any, ...]]) -> None:
    tested = evaluation(task="residue", columns=["accuracy"], differences={}, without_value={}, calibration=None)
    tested |= {"metrics": {"fine-tuned": {"accuracy": interval(0.7, 0.6, 0.8)}}}
    tested |= {"confusion": {"classes": ["H", "E"], "counts": [[5, 1], [0, 4]]}}
    tested |= {"groups": {"C3": {"records": 6, "metrics": {"fine-tuned": {"accuracy": interval(0.4, None, None)}}}}}
    table = [["id", "length", "accuracy"], *([f"p{n}", 50 + n, 0.5 + n / 20] for n in range(10))]
    found = page(make(tmp_path / "run", whole(), tested, table))
    assert "accuracy by length" in found.text["predictions"]
    assert found.row("metrics", "C3 (6): fine-tuned", 2) == ["0.400\nno interval"]
    (confusion,) = (values for values in undrawn if values[0] == "confusion")
    assert confusion[2].tolist() == [[5, 1], [0, 4]]


@words
def test_before_and_after_where_lower_is_better(tmp_path: Path) -> None:
    values = {"fine-tuned": 8.0, "composition": 17.0, "before fine-tuning": 12.0}
    gains = {"composition": interval(-9.0, -10.0, -8.0), "before fine-tuning": interval(-4.0, -5.0, -3.0)}
    tested = evaluation(
        task="mlm",
        columns=["perplexity"],
        lower_is_better=True,
        metrics={name: {"perplexity": interval(v, v - 1, v + 1)} for name, v in values.items()},
        differences={name: {"perplexity": gain} for name, gain in gains.items()},
        calibration=None,
        without_value={},
    )
    lines = [step(1, 1.0), valid(1, 9.0, 2.0, "perplexity"), step(2, 3.0), valid(2, 7.5, 4.0, "perplexity")]
    found = page(make(tmp_path / "run", [attempt(1, 0.0), *lines], tested))
    assert "is 8.000 [7.000, 9.000], and was 12.000 before." in found.words()
    assert "against before fine-tuning -4.000" in found.words()
    assert "perplexity is 7.500 at step 2 (star)" in found.words("curves")
    assert found.row("metrics", "minus before fine-tuning", 2) == ["-4.000*\n[-5.000, -3.000]"]


@words
def test_an_evaluation_alone_of_few_records(tmp_path: Path) -> None:
    few = ["No interval for long P@L: 2 records with a value; an interval takes 10."]
    gain = {"other": {"long P@L": interval(-0.021, None, None)}}
    one = {"long P@L": interval(0.667, None, None), "AUPRC": interval(0.5, 0.4, 0.6)}
    tested = evaluation(metrics={"fine-tuned": one, "other": one}, differences=gain, without_interval=few)
    (tmp_path / "evaluation.json").write_text(json.dumps(tested))
    found = page(tmp_path)
    assert found.row("metrics", "fine-tuned", 2) == ["0.667\nno interval"]
    assert found.row("metrics", "minus other", 2) == ["-0.021\nno interval"]
    assert few[0] in found.words("metrics")
    assert "esmshard finetune" not in found.text["recipe"]


@words
def test_damaged_files_and_wrong_places_are_named_and_leave_no_page(tmp_path: Path) -> None:
    for name, content, token in (
        ("evaluation.json", '{"columns": []}', "metrics"),
        ("metrics.jsonl", '{"event": "attempt"}\n', "started"),
    ):
        run = make(tmp_path / name, whole(), evaluation(), proteins())
        (run / name).write_text(content)
        with pytest.raises(InputError, match=token):
            report(run)
        assert not (run / "report.html").exists()
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match="contains no run"):
            report(folder, tmp_path / "page.html")
    run = make(tmp_path / "run", whole())
    before = sorted(run.iterdir())
    assert report(run, tmp_path / "other.html") == tmp_path / "other.html"
    assert sorted(run.iterdir()) == before
    with pytest.raises(InputError, match="make it first"):
        report(run, tmp_path / "none" / "page.html")


SPACE = {
    "optim.lr": {"low": 1e-5, "high": 1e-3, "step": None, "log": True, "choices": None},
    "adapt.method": {"low": None, "high": None, "step": None, "log": False, "choices": ["full", "head"]},
}


def trial(number: int, state: str, value: float | None, lr: float, message: str = "") -> dict[str, Any]:
    values = {"optim.lr": lr, "adapt.method": "head" if number % 2 else "full"}
    return {"number": number, "values": values, "state": state, "value": value, "step": 20, "message": message}


@words
def test_a_sweep(tmp_path: Path, undrawn: list[tuple[Any, ...]]) -> None:
    trials = [
        *[trial(n, "complete", value, 10.0**-n) for n, value in ((2, 0.31), (3, 0.62), (4, 0.44))],
        trial(5, "pruned", 0.12, 3e-5, "pruned after step 10"),
        trial(6, "failed", None, 9e-4, "loss or gradient was not finite <5 times>"),
    ]
    raw: dict[str, Any] = {"task": "sequence", "metric": "Spearman", "lower_is_better": False, "state": "done"}
    raw |= {"recipe": {"model": {"name": "starter"}, "init": "pretrained", "adapt": {"method": "full"}}}
    raw |= {"sweep": {"space": SPACE, "sampler": "tpe", "pruner": "median"}, "trials_wanted": 5, "trials": trials}
    raw |= {"best": 3, "best_run": "best-003", "selected": "Trial 3 is the best of 3."}
    (tmp_path / "sweep.json").write_text(json.dumps(raw))
    row = {"mean": 0.487, "deviation": 0.01, "low": 0.4, "high": 0.6, "runs": {"a": 0.48, "b": 0.49}}
    metrics = {"fine-tuned": {"Spearman": row}, "length": {"Spearman": {**row, "mean": 0.111}}}
    summary = {"columns": ["Spearman"], "runs": ["a", "b"], "interval": "95% interval", "metrics": metrics}
    (tmp_path / "best-003").mkdir()
    best = tmp_path / "best-003" / "summary.json"
    best.write_text(json.dumps(summary | {"verdict": "Fine-tuning beat it.", "task": "mlm"}))
    found = page(tmp_path)
    assert "Trial 3 is the best of 3. Fine-tuning beat it." in found.words()
    assert "1 pruned, 1 failed" in found.words()
    assert found.row("tested", "length", 2) == ["0.111\n[0.400, 0.600]"]
    assert found.cells["trials"][7::7] == ["3", "4", "2", "5", "6"], "the best first"
    assert "loss or gradient was not finite <5 times>" in found.text["trials"]
    ((_, _, lines),) = undrawn
    assert np.array(lines["best so far"]).tolist() == [[2, 3, 4], [0.31, 0.62, 0.62]]
    begun = {"state": "searching", "trials": [trial(0, "running", None, 1e-4)]}
    begun |= dict.fromkeys(("best", "best_run", "selected"))
    (tmp_path / "sweep.json").write_text(json.dumps(raw | begun))
    best.unlink()
    assert "The best settings are not tested yet." in page(tmp_path).words()


def test_pictures_are_svg_without_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = charts.chart(charts.dots, np.arange(3.0), np.arange(3.0), "<b>$a^$</b>", "y")
    text = base64.b64decode(picture.partition(",")[2]).decode()
    assert "&lt;b&gt;$a^$&lt;/b&gt;" in text  # and no formula
    assert "<script" not in text
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"matplotlib.*pip install 'esmshard\[plots\]'"):
        report(make(tmp_path / "run", whole()))
