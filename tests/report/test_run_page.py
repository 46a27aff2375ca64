"""The page about a finished run: what it says, and that it stands alone."""

import json
import re
from pathlib import Path

import pytest
from run_directories import SECTIONS, Page, evaluation, make, proteins, whole

from esmshard.report import charts, run_page
from esmshard.report.files import read_run
from esmshard.report.page import report


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = make(tmp_path_factory.mktemp("runs") / "first", whole(), evaluation(), proteins())
    return report(run).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def done(text: str) -> Page:
    return Page(text)


def test_it_stands_alone(done: Page) -> None:
    assert {link for link in done.links if not link.startswith(("#", "data:"))} == set()
    assert not done.tags & {"script", "link", "iframe", "object", "embed", "base"}
    assert len(done.ids) == len(set(done.ids))
    local = {link[1:] for link in done.links if link.startswith("#")}
    assert local <= set(done.ids)


def test_styles_load_nothing(text: str) -> None:
    assert "@import" not in text
    assert {found for found in re.findall(r"url\(([^)]*)\)", text) if not found.startswith("#")} == set()
    ids = set(re.findall(r' id="([^"]+)"', text))
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= ids
    assert "prefers-color-scheme: dark" in text
    assert "#010203" not in text  # every chart has the ink of the page
    assert "currentColor" in text


def test_every_section_is_there(done: Page) -> None:
    assert list(done.text)[1:] == SECTIONS
    assert done.figures == {"metrics": 1, "curves": 4, "length": 1, "calibration": 1, "speed": 2, "time": 1}


def test_the_top_says_how_it_went(done: Page) -> None:
    top = " ".join(done.text[""].split())
    assert "first Task contact, model" in top
    assert "Done; step 20 of 40: as it was." in top
    assert "long P@L 0.100 [0.080, 0.125], 12 test records" in top
    assert "against separation prior +0.060 [0.050, 0.070], better than the best baseline" in top
    assert "steps 20 6.00k residues seen" in top
    assert "speed 150 residues/s over all steps" in top
    assert "memory 1.50 GiB" in top
    assert "time 1m40s 40% of it in steps that count" in top


def test_metrics_beside_baselines(done: Page) -> None:
    assert done.row("metrics", "fine-tuned", 3) == ["0.100\n[0.080, 0.125]", "0.300\n[0.200, 0.400]"]
    assert done.row("metrics", "base rate", 3) == ["0.020\n[0.010, 0.030]", "undefined"]
    assert done.row("metrics", "minus separation prior", 3) == ["+0.060*\n[0.050, 0.070]", "+0.020\n[-0.010, 0.050]"]
    assert done.row("metrics", "minus base rate", 3) == ["+0.080*\n[0.070, 0.090]", "undefined"]
    assert "higher is better" in done.text["metrics"]
    assert "2 without AUPRC." in done.text["metrics"]


def test_nothing_undefined_is_shown(done: Page) -> None:
    for text in done.text.values():
        assert not re.search(r"\b(nan|None|inf)\b", text)


def test_the_best_validation_is_marked(done: Page) -> None:
    assert "Best (star): 0.095 at step 10. The model that was tested is that of step 20." in done.text["curves"]


def test_time_is_accounted_for(done: Page) -> None:
    assert "1m40s in 1 attempt, 40% of it in steps that count (goodput)." in done.text["time"]
    assert done.row("time", "1", 5) == ["0", "0", "-", "done"]


def test_what_the_time_went_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[dict[str, float]] = []
    monkeypatch.setattr(charts, "bars", lambda axes, rows: drawn.append(rows))
    lines = whole()
    lines[0] = lines[0] | {"seconds_lost": 5.0, "steps_lost": 1}
    run_page.time(read_run(make(tmp_path / "run", lines)))
    (parts,) = drawn
    assert list(parts.values()) == [40.0, 5.0, 10.0, 4.0, 41.0]  # of 100 s
    assert next(iter(parts)) == "steps that count"


def test_calibration_error(done: Page) -> None:
    # (30 * |.2 - .1| + 10 * |.8 - .5|) / 40
    assert "Expected calibration error: 0.150, over 40 predictions in 2 bins." in done.text["calibration"]


def test_data_recipe_and_command(done: Page) -> None:
    assert done.row("data", "train", 5) == ["train.fasta", "776", "104,429", "9c61"]
    assert "\n2 of 12 test records are identical to training records" in done.text["data"]
    assert "Changed or left out: 2 records over 1,022 residues left out (a, ...)" in done.text["data"]
    assert "global_tokens:" in done.text["recipe"]
    assert "esmshard finetune " in done.text["reproduce"]
    assert done.row("versions", "torch", 2) == ["2.13.0"]


def test_what_users_named_is_text(tmp_path: Path) -> None:
    evil = "<b>x</b>"
    named = json.loads(json.dumps(evaluation()).replace("separation prior", evil).replace("AUPRC", f"{evil}$a^$"))
    named |= {"leakage": [evil], "confusion": {"classes": [evil, "$b$"], "counts": [[1, 2], [3, 4]]}}
    table = [["id", "length", "long P@L", "AUPRC"], *([f"{evil}{n}", 50 + n, 0.1 * n, 0.2] for n in range(9))]
    run = make(tmp_path / evil.replace("/", "_"), whole(), named, table)
    status = json.loads((run / "status.json").read_text()) | {"message": evil}
    (run / "status.json").write_text(json.dumps(status))
    (run / "versions.json").write_text(json.dumps({"data": {evil: {"path": evil}}, evil: evil, "processes": 2}))
    text = report(run).read_text()
    found = Page(text)
    assert "b" not in found.tags
    assert evil in found.text[""]
    assert evil in found.text["data"]
    assert found.row("versions", evil, 2) == [evil]
    assert "&lt;b&gt;x&lt;/b&gt;" in text[text.index("<svg") : text.index("</svg>")]
    assert ">$b$<" in text  # and no formula
    assert " --nproc 2 " in found.text["reproduce"]
