"""Pages about cross-validated runs of variants."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_directories import Page, interval, page

from esmshard.errors import InputError
from esmshard.recipe import recipe_file
from esmshard.report import charts
from esmshard.report import page as pages
from esmshard.report.page import report

RECIPE = """\
task: {name: variant}
model: {name: esm2_t6_8M_UR50D}
adapt: {method: lora}
data: {table: t.csv, wild_type: w.fasta, folds: 3, fold: 0}
batch: {global_tokens: 96}
train: {steps: 50, eval_every: epoch, early_stop: 5}
out: runs/v
"""
COLUMNS = ["Spearman", "RMSE"]
METRICS = {
    "fine-tuned": interval(0.8, 0.7, 0.9),
    "zero-shot": interval(0.3, 0.1, 0.5),
    "one-hot ridge": interval(None, None, None),
    "frozen embedding ridge": interval(0.65, 0.5, 0.8),
}
GAINS = {
    "zero-shot": interval(0.5, 0.3, 0.7),
    "one-hot ridge": interval(None, None, None),
    "frozen embedding ridge": interval(0.15, -0.05, 0.4),
}
VARIANTS = [
    # cell, name, fold, measured, predicted
    ["m1a", "M1A", "0", "1", "1.5"],
    ["M1C", "M1C", "1", "2", "1.5"],
    ["K2A", "K2A", "2", "3", "5"],
    ["K2A", "K2A", "2", "3", "5"],
    ["M1A:K2C", "M1A:K2C", "", "", ""],
    ["junk", "", "", "", ""],
    ["T3A:A4C", "T3A:A4C", "0", "4", "4.25"],
    ["WT", "WT", "0", "0.5", "0.5"],
]


def write(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def variants(rows: Sequence[Sequence[str]] = VARIANTS, prefix: str = "", user: str = "score") -> list[list[str]]:
    ours = [f"{prefix}{name}" for name in ("variant", "fold", "measured", "predicted", "sd", "zero-shot")]
    return [["mutant", user, *ours], *([cell, "77", *rest, "", "9"] for cell, *rest in rows)]


RANKED = [
    ["mutant", "measured", "prediction", "disagreement of models", "rank"],
    ["K2A", "3", "5", "0.25", "1"],
    *([f"T3{letter}", "", str(4 - n / 10), "0.5", str(n + 2)] for n, letter in enumerate("ACDEFGHIKLMNPQRSVWY")),
    ["M1A", "1", "1.25", "0.125", "21"],
]
CURVE = {
    "tested_on": 40,
    "fold": 2,
    "seed": 7,
    "points": [
        {"variants": size, "metrics": METRICS | {"fine-tuned": interval(value, value - 0.1, value + 0.1)}}
        for size, value in ((100, 0.8), (25, 0.45))
    ],
}


def cross_validated(run: Path, **changes: Any) -> Path:
    run.mkdir(parents=True)
    (run / "whole.yaml").write_text(RECIPE)
    recipe = recipe_file.load(run / "whole.yaml")
    spread = {"mean": 0.55, "deviation": 0.1, "low": 0.2, "high": 0.9}
    summary: dict[str, Any] = {"recipe": recipe.model_dump(mode="json"), "recipe_yaml": recipe_file.dump(recipe)}
    summary |= {"task": "variant", "runs": [f"seed-3-fold-{fold}" for fold in range(3)], "folds": 3, "columns": COLUMNS}
    summary |= {"lower_is_better": False, "interval": "95% interval of the mean over runs"}
    summary |= {"verdict": "Fine-tuning was not clearly apart from the best baseline."}
    by_method = {"fine-tuned": spread, "one-hot ridge": dict.fromkeys(spread)}
    summary["metrics"] = {name: dict.fromkeys(COLUMNS, values) for name, values in by_method.items()}
    counts = {"rows": 8, "rows_left_out": 1, "variants": 6, "variants_averaged": 1, "variants_in_no_set": 1}
    notices = ["t.csv: left out 1 row whose 'mutant' names no substitutions: line 7 'junk'"]
    summary["table"] = {"path": "t.csv", "offset": -23, "notices": notices, **counts}
    joint: dict[str, Any] = {"statistic": "Spearman within folds", "targets": "score", "variants": 5, "positions": 4}
    joint["proteins"] = None
    joint |= {"interval": "95% percentile bootstrap of 12 positions", "split": "position", "seeds": [3]}
    joint |= {"metrics": METRICS, "differences": GAINS}
    joint["of_each_seed"] = {name: [one["value"]] for name, one in METRICS.items()}
    best: dict[str, Any] = {"target": "score", "lower_is_better": False, "count": 2, "mean_of_all": 10.5}
    best["recall"] = dict.fromkeys(METRICS, interval(0.5, 0.25, 1))
    best["mean_of_chosen"] = dict.fromkeys(METRICS, interval(12.5, 8, 16))
    summary |= {"joint": joint | {"best": best}, **changes}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "learning_curve.json").write_text(json.dumps(CURVE))
    write(run / "variants.csv", variants())
    write(run / "ranked.csv", RANKED)
    return run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page(cross_validated(tmp_path_factory.mktemp("runs") / "v"))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """Draw no charts, and return the values of each chart by its name."""
    found: dict[str, tuple[Any, ...]] = {}

    def chart(draw: Any, *values: Any, **_sizes: float) -> str:
        found[values[-1] if draw is charts.dots else draw.__name__] = values
        return "data:image/png;base64,"

    def heat_map(*values: Any) -> str:
        found[f"map of {values[-1]}"] = values
        return "data:image/png;base64,"

    monkeypatch.setattr(pages, "chart", chart)
    monkeypatch.setattr(charts, "heat_map", heat_map)
    return found


def edit(run: Path, **changes: Any) -> None:
    """Change entries of the summary and of its entry `joint`."""
    summary = json.loads((run / "summary.json").read_text())
    joint = summary["joint"] | changes.pop("joint", {})
    (run / "summary.json").write_text(json.dumps(summary | changes | {"joint": joint}))


def test_a_cross_validated_run(done: Page) -> None:
    assert done.figures == {"compared": 1, "predictions": 1, "map": 2, "curve": 1}
    top = done.words()
    assert "model esm2_t6_8M_UR50D (pretrained), adaptation lora. Fine-tuning was not clearly apart from" in top
    assert "Spearman 0.800 [0.700, 0.900]" in top
    assert "against frozen embedding ridge +0.150 [-0.050, 0.400], not clearly apart from the best baseline" in top
    assert "variants 5 tested, at 4 positions folds x seeds 3 x 1 split position" in top
    *row, seed = done.row("compared", "zero-shot", 6)
    lines = ["0.300 [0.100, 0.500]", "+0.500* [0.300, 0.700]", "0.500 [0.250, 1.000]", "12.500 [8.000, 16.000]"]
    assert ([cell.replace("\n", " ") for cell in row], seed) == (lines, "0.300")
    assert done.row("compared", "one-hot ridge", 3) == ["undefined"] * 2
    assert done.row("compared", "frozen embedding ridge", 3)[1] == "+0.150\n[-0.050, 0.400]"  # no star
    of_runs = done.cells["compared"][done.cells["compared"].index("RMSE") :]
    assert of_runs[1:] == ["fine-tuned", *["0.550\n[0.200, 0.900]"] * 2, "one-hot ridge", "undefined", "undefined"]
    text = done.words("table")
    assert "t.csv: 8 rows; 1 could not be used" in text
    assert "t.csv: left out 1 row whose 'mutant' names no substitutions: line 7 'junk'" in text
    assert "-23 was added to the table's positions" in text
    assert "tested on the same 40 variants" in done.text["curve"]
    assert done.cells["curve"][:3] == ["training variants", "25", "100"]
    assert done.row("curve", "fine-tuned", 3) == ["0.450\n[0.350, 0.550]", "0.800\n[0.700, 0.900]"]
    assert done.row("curve", "one-hot ridge", 3) == ["undefined", "undefined"]


def test_each_variant_is_drawn_once_and_singles_on_one_scale(
    tmp_path: Path, drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cross_validated(tmp_path / "v")
    found = page(run)
    dots = sorted(zip(*(drawn["predicted score"][k].tolist() for k in (0, 1)), strict=True))
    assert dots == [(0.5, 0.5), (1, 1.5), (2, 1.5), (3, 5), (4, 4.25)]
    # Three variants of one fold are in order; the other folds have one each.
    assert "score: one dot for each variant (5); Spearman 1.000." in found.text["predictions"]
    measured_AP, first, wild_P, letters, limits, _ = drawn["map of measured score"]
    assert (measured_AP.shape, first) == ((20, 4), 1)  # residues 1 to 4, which were measured
    cells = {(letters[a], p): measured_AP[a, p] for a, p in zip(*np.nonzero(np.isfinite(measured_AP)), strict=True)}
    assert cells == {("A", 0): 1, ("C", 0): 2, ("A", 1): 3}
    assert "".join(letters[a] for a in wild_P) == "MKTA"
    assert "Residues 1 to 4." in found.text["map"]
    assert "measured score of 3 substitutions." in found.text["map"]
    assert drawn["map of predicted score"][0][letters.index("A"), :2].tolist() == [1.25, 5]
    assert drawn["map of predicted score"][4] == limits
    monkeypatch.setattr(pages, "MOST_POSITIONS", 3)
    assert "Residues 1 to 3; changed residues up to 4 are not shown." in page(run).text["map"]


def test_the_head_of_the_ranked_list(done: Page, tmp_path: Path, drawn: dict[str, Any]) -> None:
    assert done.row("ranked", "1", 5) == ["K2A", "5", "0.25", "3"]
    assert "v/seed-3-fold-0/recipe.yaml data.folds=null data.fold=null --folds 3 out=v-again" in done.text["recipe"]
    assert done.row("ranked", "20", 5) == ["T3Y", "2.2", "0.5", "-"]
    assert len(done.cells["ranked"]) == 5 * 21
    assert "The first 20 of 21 single substitutions in ranked.csv, by score: higher is better." in done.text["ranked"]
    run = cross_validated(tmp_path / "v")
    ranking = [["mutant", "mutant in table", *RANKED[0][1:]], *([row[0], "M24A", *row[1:]] for row in RANKED[1:])]
    write(run / "ranked.csv", [ranking[0], *reversed(ranking[1:])])
    assert page(run).row("ranked", "1", 6) == ["K2A", "M24A", "5", "0.25", "3"]


def test_several_targets_and_seeds(tmp_path: Path, drawn: dict[str, Any]) -> None:
    run = cross_validated(tmp_path / "v")
    best = json.loads((run / "summary.json").read_text())["joint"]["best"] | {"target": "Kd", "lower_is_better": True}
    of_each_seed = {name: [0.25, None] for name in METRICS}
    edit(run, joint={"seeds": [3, 4], "of_each_seed": of_each_seed, "best": best})
    ours = ["variant", "fold", "measured Kd", "predicted Kd", "sd Kd", "measured kcat", "predicted kcat", "sd kcat"]
    rows = [["M1A", "M1A", "0", "1e-7", "2e-7", "", "", "7", "", "1e-7"]]
    rows += [["K2A", "K2A", "0", "4e-7", "1e-7", "", "6", "8", "", "4e-7"]]
    write(run / "variants.csv", [["mutant", *ours, "measured"], *rows])
    values = [f"{c} {t}" for t in ("Kd", "kcat") for c in ("prediction", "disagreement of models")]
    ranked = [["mutant", "measured", *values, "rank"], ["M1A", "1e-7", "2e-7", "3e-8", "7", "0.5", "1"]]
    write(run / "ranked.csv", ranked)
    found = page(run)
    assert {f"map of {what} {name}" for what in ("measured", "predicted") for name in ("Kd", "kcat")} <= drawn.keys()
    assert "kcat: one dot for each variant (1); Spearman undefined." in found.text["predictions"]
    assert "Kd: one dot for each variant (2); Spearman -1.000." in found.text["predictions"]
    assert found.row("ranked", "1", 7) == ["M1A", "2e-07", "3e-08", "7", "0.5", "1e-07"]
    assert "by Kd: lower is better." in found.text["ranked"]
    assert found.row("compared", "zero-shot", 7)[4:] == ["0.250", "undefined"]
    assert "--folds 3 --seeds 2" in found.text["recipe"]


def test_columns_of_our_names_multiple_mutants_and_missing_files(tmp_path: Path, drawn: dict[str, Any]) -> None:
    run = cross_validated(tmp_path / "v")
    write(run / "variants.csv", variants(prefix="esmshard ", user="measured"))
    assert "each variant (5)" in page(run).text["predictions"]
    assert np.nanmax(drawn.pop("map of measured score")[0]) == 3, "the column of the user has 77"
    for name in ("learning_curve.json", "ranked.csv"):
        (run / name).unlink()
    write(run / "variants.csv", variants([["M1A:K2C", "M1A:K2C", "0", "1", "2"]]))
    scores = {name: interval(0.5 + n / 10, None, None) for n, name in enumerate(METRICS)}
    gains = {name: interval(0.5 - one["value"], None, None) for name, one in scores.items() if name != "fine-tuned"}
    edit(run, joint={"metrics": scores, "differences": gains})
    found = page(run)
    assert "map of measured score" not in drawn
    assert "no interval, worse in this sample than the best baseline" in found.text[""]
    assert not {"map", "curve", "ranked"} & found.text.keys()


def test_what_users_named_is_text_and_damaged_files_are_named(tmp_path: Path) -> None:
    evil = '<b>x</b>"$a^$'
    run = cross_validated(tmp_path / "v", verdict=evil)
    edit(run, joint={"targets": evil})
    found = page(run)
    assert evil in found.text[""]
    assert f"measured {evil} of 3" in found.text["map"]
    (run / "report.html").unlink()
    (run / "summary.json").write_text('{"task": "contact"}')
    with pytest.raises(InputError, match="contains no run"):
        report(run)
    assert not (run / "report.html").exists()


def test_the_baseline_that_was_better_is_named(tmp_path: Path, drawn: dict[str, Any]) -> None:
    run = cross_validated(tmp_path / "my runs" / "v 1")
    for high, named in ((-0.1, True), (0.1, False)):
        metrics = METRICS | {"one-hot ridge": interval(0.9, 0.8, 0.95)}
        edit(run, joint={"metrics": metrics, "differences": {"one-hot ridge": interval(-0.2, -0.3, high)}})
        assert ("predict 'v 1' --all-singles --with one-hot -o" in page(run).text["ranked"]) is named
