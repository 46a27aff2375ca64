"""Pages about cross-validated runs of variants."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from run_directories import Page, interval, page
from variant_run_directories import CURVE, METRICS, PROTEIN, RANKED, cross_validated, variants, write

from esmshard.errors import InputError
from esmshard.report import charts, variant_page
from esmshard.report.files import intervals
from esmshard.report.page import report
from esmshard.tasks.metrics import Interval
from esmshard.train.evaluate import verdict

SECTIONS = [
    *(
        "compared",
        "table",
        "predictions",
        "map",
        "curve",
        "ranked",
        "runs",
        "recipe",
        "reproduce",
    ),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return report(cross_validated(tmp_path_factory.mktemp("runs") / "v")).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def done(text: str) -> Page:
    return Page(text)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """By the name of a chart its axes, in place of SVG."""
    found: dict[str, Any] = {}

    def chart(name: str, draw: Any, *_size: float, **_sizes: float) -> str:
        assert name not in found
        found[name] = Figure().add_subplot()
        draw(found[name])
        return "<svg></svg>"

    monkeypatch.setattr(charts, "chart", chart)
    return found


def words(page: Page, section: str) -> str:
    return " ".join(page.text[section].split())


def test_it_stands_alone(done: Page, text: str) -> None:
    assert {link for link in done.links if not link.startswith(("#", "data:"))} == set()
    assert len(done.ids) == len(set(done.ids))
    assert "#010203" not in text
    written = re.findall(r"<text[^>]*>", text)
    assert len(written) > 80
    assert all("currentColor" in one for one in written)  # in the dark as well
    assert list(done.text)[1:] == SECTIONS
    assert done.figures == {"compared": 1, "predictions": 1, "map": 2, "curve": 1}
    for part in done.text.values():
        assert not re.search(r"\b(nan|None|inf)\b", part)


def test_the_top_says_whether_it_was_worth_it(done: Page) -> None:
    top = words(done, "")
    assert "model esm2_t6_8M_UR50D (pretrained), adaptation lora. Fine-tuning was not clearly apart from" in top
    assert "Spearman 0.800 [0.700, 0.900]" in top
    assert "against frozen embedding ridge +0.150 [-0.050, 0.400], not clearly apart from the best baseline" in top
    assert "variants 5 tested, at 4 positions folds x seeds 3 x 1 split position" in top  # the wild type changes none


def test_methods_beside_each_other(done: Page) -> None:
    assert done.row("compared", "zero-shot", 6) == [
        *("0.300\n[0.100, 0.500]", "+0.500*\n[0.300, 0.700]", "0.500\n[0.250, 1.000]", "12.5\n[8, 16]", "0.300")
    ]
    assert done.row("compared", "one-hot ridge", 3) == ["undefined"] * 2
    assert done.row("compared", "frozen embedding ridge", 3)[1] == "+0.150\n[-0.050, 0.400]"  # no star
    of_runs = done.cells["compared"][done.cells["compared"].index("mean over runs") :]
    assert of_runs[3:] == ["fine-tuned", *["0.550\n[0.200, 0.900]"] * 2, "one-hot ridge", "undefined", "undefined"]


def test_each_variant_is_drawn_once(tmp_path: Path, drawn: dict[str, Any]) -> None:
    found = page(cross_validated(tmp_path / "v"))
    dots = sorted(map(tuple, np.asarray(drawn["against0"].collections[0].get_offsets()).tolist()))
    assert dots == [(0.5, 0.5), (1, 1.5), (2, 1.5), (3, 5), (4, 4.25)]
    # Three variants of one fold are in order; the other folds have one each.
    assert "score: one dot a variant, 5 of them; Spearman within folds 1.000." in found.text["predictions"]
    assert "2 of 8 rows of the table could not be used, or were in no test set." in found.text["predictions"]


def test_maps_of_singles_on_one_scale(tmp_path: Path, drawn: dict[str, Any]) -> None:
    found = page(cross_validated(tmp_path / "v"))
    measured, predicted = (drawn[name].images[0] for name in ("Measured0", "Predicted0"))
    row = variant_page.LETTERS.index
    grid_AP = measured.get_array()
    assert grid_AP.shape == (20, 4)  # residues 1 to 4, which were measured
    assert {(a, p): grid_AP[a, p] for a, p in zip(*np.nonzero(~grid_AP.mask), strict=True)} == {
        (row("A"), 0): 1,
        (row("C"), 0): 2,
        (row("A"), 1): 3,
    }
    assert (predicted.get_array()[row("A"), :2] == [1.25, 5]).all()
    assert predicted.get_array()[row("D"), 2] == pytest.approx(3.8)
    assert measured.get_clim() == predicted.get_clim()
    dots = drawn["Measured0"].lines[0].get_xydata().tolist()
    assert dots == [[n, row(letter)] for n, letter in enumerate(PROTEIN[:4])]
    assert "Residues 1 to 4:" in found.text["map"]
    assert "Measured score of 3 substitutions." in found.text["map"]


def test_a_long_map_has_several_rows() -> None:
    axes = Figure().add_subplot()
    value_AP = np.arange(500.0).reshape(2, 250)
    charts.heat_map(axes, value_AP, 7, [0] * 250, "AC", (0.0, 1.0), "x", most=100)
    assert [image.get_array().shape for image in axes.images] == [(2, 84), (2, 84), (2, 82)]
    assert axes.images[1].get_array()[0, 0] == 84
    bottoms = [image.get_extent()[2] for image in axes.images]
    tops = [image.get_extent()[3] for image in axes.images]
    assert bottoms[0] < tops[1] < bottoms[1] < tops[2]
    numbers = [text.get_text() for text in axes.texts]
    assert numbers == ["7", *(str(n) for n in range(10, 257, 10))]
    assert [(t.get_position()[0]) for t in axes.texts if t.get_text() == "100"] == [9]  # the 94th residue of the map


def test_a_map_that_is_too_long_says_what_it_leaves_out(
    tmp_path: Path, drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variant_page, "MOST_POSITIONS", 3)
    found = page(cross_validated(tmp_path / "v"))
    assert "Residues 1 to 3:" in found.text["map"]
    assert "Changed residues after 3, up to 4, are not shown." in found.text["map"]
    assert drawn["Predicted0"].images[0].get_array().shape == (20, 3)


def test_the_learning_curve(done: Page) -> None:
    assert "tested on the same 40 variants: fold 2 (counted from 0), seed 7." in done.text["curve"]
    assert done.cells["curve"][:3] == ["training variants", "25", "100"]
    assert done.row("curve", "fine-tuned", 3) == ["0.450\n[0.350, 0.550]", "0.800\n[0.700, 0.900]"]
    assert done.row("curve", "one-hot ridge", 3) == ["undefined", "undefined"]
    assert "undefined for every number of them: one-hot ridge." in done.text["curve"]


def test_undefined_points_are_not_drawn() -> None:
    axes, nan = Figure().add_subplot(), float("nan")
    rows = [{"a": Interval(0.5, 0.4, 0.6), "b": Interval(nan, nan, nan)}, {"a": Interval(nan, nan, nan)}]
    charts.learning_curve(axes, [(10, rows[0]), (20, rows[1]), (30, {"a": Interval(0.7, 0.6, 0.8)})], ["a", "b"])
    (line,) = axes.lines
    assert line.get_ydata().tolist() == [0.5, 0.7]
    assert np.allclose(line.get_xdata(), [10, 30], atol=0.5)
    assert [segment[:, 1].tolist() for segment in axes.collections[0].get_segments()] == [[0.4, 0.6], [0.6, 0.8]]


def test_the_head_of_the_ranked_list(done: Page, tmp_path: Path) -> None:
    assert done.row("ranked", "1", 5) == ["K2A", "5", "0.25", "3"]
    assert done.row("ranked", "20", 5) == ["T3Y", "2.2", "0.5", "-"]
    assert len(done.cells["ranked"]) == 5 * 21
    assert "The first 20 of 21 single substitutions, by score: higher is better." in done.text["ranked"]
    run = cross_validated(tmp_path / "v")
    write(run / "ranked.csv", [RANKED[0], *reversed(RANKED[1:])])
    assert page(run).cells["ranked"][5:7] == ["1", "K2A"]


def test_what_was_done_to_the_table(done: Page, tmp_path: Path, drawn: dict[str, Any]) -> None:
    text = words(done, "table")
    assert "t.csv: 8 rows, of which 1 could not be used; variants.csv has them all, with the reason for each." in text
    assert "t.csv: left out 1 row whose 'mutant' names no substitutions: line 7 'junk'" in text
    assert "its positions -23 are those of the wild type" in text
    run = cross_validated(tmp_path / "v")
    ranking = [["mutant", "mutant in table", *RANKED[0][1:]], *([row[0], "M24A", *row[1:]] for row in RANKED[1:])]
    write(run / "ranked.csv", ranking)
    assert page(run).row("ranked", "1", 6) == ["K2A", "M24A", "5", "0.25", "3"]
    assert "How far to trust them: Fine-tuning was not clearly apart" in words(done, "ranked")


def test_runs_recipe_and_command(done: Page) -> None:
    row = ["done", "40", "320", "17", "0.500\n[0.400, 0.900]", "0.250\n[0.200, 0.300]"]
    assert done.row("runs", "seed-3-fold-0", 7) == row
    assert done.row("runs", "seed-3-fold-2", 7) == ["missing", *["-"] * 5]
    assert "global_tokens: 96" in done.text["recipe"]
    command = words(done, "reproduce")
    assert "seed-3-fold-0/recipe.yaml data.folds=null data.fold=0" in command
    assert command.endswith("-again --folds 3")


def test_several_targets_and_seeds(tmp_path: Path, drawn: dict[str, Any]) -> None:
    run = cross_validated(tmp_path / "v")
    summary = json.loads((run / "summary.json").read_text())
    summary["joint"] |= {"seeds": [3, 4], "of_each_seed": {name: [0.25, None] for name in METRICS}}
    (run / "summary.json").write_text(json.dumps(summary))
    for n in range(2):
        path = run / f"seed-3-fold-{n}" / "evaluation.json"
        told = json.loads(path.read_text())
        told["facts"] |= {"targets": ["Kd", "kcat"], "lower_is_better": ["Kd"]}
        path.write_text(json.dumps(told))
    ours = ["variant", "fold", "measured Kd", "predicted Kd", "sd Kd", "measured kcat", "predicted kcat", "sd kcat"]
    rows = [["M1A", "M1A", "0", "1e-7", "2e-7", "", "", "7", "", "1e-7"]]
    rows += [["K2A", "K2A", "0", "4e-7", "1e-7", "", "6", "8", "", "4e-7"]]
    write(run / "variants.csv", [["mutant", *ours, "measured"], *rows])
    ranking = [
        [
            "mutant",
            "measured",
            *(f"{c} {t}" for t in ("Kd", "kcat") for c in ("prediction", "disagreement of models")),
            "rank",
        ]
    ]
    write(run / "ranked.csv", [*ranking, ["M1A", "1e-7", "2e-7", "3e-8", "7", "0.5", "1"]])
    found = page(run)
    assert {"against0", "against1", "Measured0", "Predicted0", "Measured1", "Predicted1"} <= drawn.keys()
    assert np.asarray(drawn["against1"].collections[0].get_offsets()).tolist() == [[6, 8]]
    assert "kcat: one dot a variant, 1 of them; Spearman undefined." in found.text["predictions"]
    assert "Kd: one dot a variant, 2 of them; Spearman -1.000." in found.text["predictions"]
    assert found.row("ranked", "1", 7) == ["M1A", "2e-07", "3e-08", "7", "0.5", "1e-07"]
    assert "by Kd: lower is better." in found.text["ranked"]
    assert found.row("compared", "zero-shot", 7)[4:] == ["0.250", "undefined"]
    assert found.text["reproduce"].rstrip().endswith("--folds 3 --seeds 2")


def test_a_table_with_columns_of_our_names(tmp_path: Path, drawn: dict[str, Any]) -> None:
    run = cross_validated(tmp_path / "v")
    write(run / "variants.csv", variants(prefix="esmshard ", user="measured"))
    assert page(run).text["predictions"].count("5 of them") == 1
    assert max(x for x, _ in np.asarray(drawn["against0"].collections[0].get_offsets()).tolist()) == 4  # and not 77


def test_parts_that_are_missing(tmp_path: Path, drawn: dict[str, Any]) -> None:
    run = cross_validated(tmp_path / "v")
    for name in ("learning_curve.json", "variants.csv", "ranked.csv", "seed-3-fold-0/recipe.yaml"):
        (run / name).unlink()
    summary = json.loads((run / "summary.json").read_text())
    del summary["joint"], summary["table"], summary["verdict"]
    summary["recipe"]["data"]["folded"] = 1  # of a later version
    (run / "summary.json").write_text(json.dumps(summary))
    found = page(run)
    assert list(found.text)[1:] == SECTIONS
    assert "The runs have not been taken together" in found.text[""]
    assert "has no joint results" in found.text["compared"]
    assert "does not say what was done to it" in found.text["table"]
    assert "learning_curve.json is missing" in found.text["curve"]
    for section in ("predictions", "map"):
        assert "variants.csv" in found.text[section]
    assert "ranked.csv is missing" in found.text["ranked"]
    assert "folded" in found.text["recipe"]
    assert "recipe.yaml of the first run is missing" in found.text["reproduce"]
    assert not drawn


def test_a_sentence_that_begins_with_a_path_is_shown_whole(tmp_path: Path, drawn: dict[str, Any]) -> None:
    run = cross_validated(tmp_path / "v")
    summary = json.loads((run / "summary.json").read_text())
    notice = f"{tmp_path}/t.csv: left out 2 rows with another residue than {tmp_path}/gb1_wt.fasta has: line 19 W9A"
    summary["table"]["notices"] = [notice]
    (run / "summary.json").write_text(json.dumps(summary))
    assert notice.replace(f"{tmp_path}/", "") in words(page(run), "table")


def test_multiple_mutants_without_intervals_promise_neither_map_nor_interval(
    tmp_path: Path, drawn: dict[str, Any]
) -> None:
    """The box on top says of the best baseline what the verdict says."""
    run = cross_validated(tmp_path / "v")
    write(run / "variants.csv", variants([["M1A:K2C", "M1A:K2C", "0", "1", "2"]]))
    summary = json.loads((run / "summary.json").read_text())
    scores = {name: interval(0.5 + n / 10, None, None) for n, name in enumerate(METRICS)}
    summary["joint"] |= {"metrics": scores, "interval": "none: of 5 variants, and an interval takes 10"}
    summary["joint"]["differences"] = {
        name: interval(0.5 - one["value"], None, None) for name, one in scores.items() if name != "fine-tuned"
    }
    summary["verdict"] = verdict(
        "Spearman", *(intervals(summary["joint"][key]) for key in ("metrics", "differences")), "paired over 5 variants"
    )
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "learning_curve.json").write_text(json.dumps({**CURVE, "points": [{"variants": 5, "metrics": scores}]}))
    found = page(run)
    assert "Measured0" not in drawn
    assert "0 substitutions" not in found.text["map"]
    for section in ("compared", "curve"):
        assert "95%" not in found.text[section].replace("95% interval of the mean over runs", "")
    assert found.text[""].count("worse in this sample than the best baseline") == 2
    assert "not clearly apart" not in found.text[""]


def test_a_map_without_a_ranking(tmp_path: Path, drawn: dict[str, Any]) -> None:
    run = cross_validated(tmp_path / "v")
    (run / "ranked.csv").unlink()
    assert "ranked.csv is missing" in page(run).text["map"]
    assert "Measured0" in drawn
    assert "Predicted0" not in drawn


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("summary.json", '{"task": "variant"', "not a JSON object"),
        ("summary.json", '{"task": "variant", "runs": [], "recipe": {}, "joint": {}}', "verdict"),
        ("variants.csv", "mutant,variant\nM1A\n", "row 1 has not as many cells"),
        ("variants.csv", "variant,fold,measured\nM1A,0,1\n", "predicted"),
        ("ranked.csv", "mutant,prediction,rank\nM1A,1,\n", "int"),
        ("learning_curve.json", '{"points": [{"variants": 3}]}', "metrics"),
        ("seed-3-fold-1/evaluation.json", "{}", "damaged"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, text: str, why: str) -> None:
    run = cross_validated(tmp_path / "v")
    (run / name).write_text(text)
    with pytest.raises(InputError, match=re.escape(why)) as caught:
        report(run)
    assert str(run / name) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (run / "report.html").exists()


def test_the_baseline_that_was_better_is_named_with_its_command(tmp_path: Path) -> None:
    run = cross_validated(tmp_path / "v")
    summary = json.loads((run / "summary.json").read_text())
    scores = summary["joint"]
    scores["metrics"]["one-hot ridge"] = {"value": 0.9, "low": 0.8, "high": 0.95}
    for high, named in ((-0.1, True), (0.1, False)):
        scores["differences"]["one-hot ridge"] = {"value": -0.2, "low": -0.3, "high": high}
        (run / "summary.json").write_text(json.dumps(summary | {"joint": scores}))
        assert ("--all-singles --with one-hot -o" in page(run).text["ranked"]) is named


def test_what_users_named_is_text(tmp_path: Path) -> None:
    evil = "<b>x</b>$a^$"
    run = cross_validated(tmp_path / "v", verdict=evil)
    for n in range(2):
        path = run / f"seed-3-fold-{n}" / "evaluation.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"facts": {"targets": [evil]}}))
    text = report(run).read_text()
    found = Page(text)
    assert "b" not in found.tags
    assert evil in found.text[""]
    assert f"by {evil}: higher" in found.text["ranked"]
    assert "measured &lt;b&gt;x&lt;/b&gt;$a^$" in text


def test_cross_validations_of_other_tasks_are_refused_as_before(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"task": "contact"}')
    with pytest.raises(InputError, match="holds no run"):
        report(tmp_path)
