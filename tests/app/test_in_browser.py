"""The page of `esmshard app` in Chromium: each kind of job on the sample, from the upload to the download.

`make browser` installs what these tests need: playwright, and the Chromium of the system.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from structure_texts import chain, pdb

from esmshard.io.paths import shipped

playwright = pytest.importorskip("playwright.sync_api", reason="run `make browser`")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
WILD_TYPE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVV"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = [sys.executable, "-m", "esmshard", "app", str(tmp_path_factory.mktemp("pages")), "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    flags = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--disable-dev-shm-usage"]
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


class Tab:
    """A tab of a browser. At its end, no script may have failed, and no other host may have been asked."""

    def __init__(self, browser: "playwright.Browser", address: str, **options: object) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda line: line.type == "error" and self.problems.append(line.text))
        home = address.split("?", maxsplit=1)[0]
        self.page.on("request", lambda r: r.url.startswith((home, "data:", "blob:")) or self.problems.append(r.url))
        self.page.goto(address)

    def open(self, kind: str) -> None:
        self.page.goto(re.sub(r"(:\d+)/.*", r"\1/", self.page.url))
        self.page.get_by_role("link", name=kind).first.click()

    def submit(self, button: str = "Start") -> None:
        self.page.get_by_role("button", name=button, exact=True).click()
        self.page.wait_for_url("**/job/*")

    def state(self, *states: str, seconds: float = 300) -> str:
        """Wait until the job is in one of the states."""
        wanted = ", ".join(f'[data-state="{state}"]' for state in states)
        wanted += ", #live > .error"  # The server could not show the job.
        self.page.wait_for_selector(wanted, timeout=1000 * seconds, state="attached")
        return str(self.page.locator("[data-state]").get_attribute("data-state", timeout=1000))

    def problem(self, label: str) -> str:
        """Go back to the form of a job that has failed, and return the sentence beside a question."""
        self.page.get_by_role("link", name="Change").click()
        field = self.page.locator(".field", has=self.page.get_by_label(label))
        return str(field.locator(".error").inner_text())

    def until(self, condition: str, seconds: float = 20) -> None:
        """Wait until a JavaScript expression is true. (Playwright's own way needs `eval`, which the page forbids.)"""
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.1)

    def download(self, name: str) -> Path:
        with self.page.expect_download() as download:
            self.page.get_by_role("link", name=name, exact=True).click()
        return Path(download.value.path())


@pytest.fixture
def tab(browser: "playwright.Browser", address: str) -> Iterator[Tab]:
    tab = Tab(browser, address, viewport={"width": 1200, "height": 900})
    yield tab
    assert tab.problems == []
    tab.context.close()


def rows(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_variants_are_ranked(tab: Tab, tmp_path: Path) -> None:
    """A wrong column is said beside its question; the table is shown before the run; a reload changes nothing."""
    page, sample = tab.page, shipped("data") / "variants"
    table = tmp_path / "measured.csv"
    table.write_text("\n".join(rows(sample / "landscape.csv")[:50]))
    tab.open("Rank variants")
    page.get_by_label("Table of variants").set_input_files(table)
    page.get_by_label("Wild type", exact=True).set_input_files(sample / "wild_type.fasta")
    page.get_by_label("Column of values").fill("sore")
    page.get_by_label("Method").select_option("variants-few")
    tab.submit("Check")
    assert tab.state("refused", "checked") == "refused"
    assert "has no column 'sore'" in tab.problem("Column of values")
    page.get_by_label("Column of values").fill("score")
    tab.submit("Check")
    assert tab.state("refused", "checked") == "checked"
    assert "49 rows, 0 left out" in page.locator("#live").inner_text()
    page.get_by_role("button", name="Start").click()
    tab.state("running")
    page.get_by_alt_text("Loss of").wait_for(timeout=200_000)
    page.reload()
    assert tab.state("done", "failed") == "done"
    assert "--propose 24" in page.locator("#commands").inner_text()
    for text in ("best predicted substitutions", "96-well plate"):
        assert page.get_by_alt_text(text).evaluate("image => image.naturalWidth") > 100
    report = page.frame_locator("iframe.report")
    assert "fine-tuned" in report.locator("body").inner_text().lower()
    plate = rows(tab.download("plate.csv"))
    assert len(plate) == 25
    assert plate[24].endswith("B12")
    assert rows(tab.download("run/ranked.csv"))[0].startswith("mutant,")


def test_contacts_are_drawn_on_a_structure(tab: Tab, tmp_path: Path) -> None:
    page = tab.page
    for name in ("1abc", "2abc"):
        (tmp_path / f"{name}.pdb").write_text(pdb(chain(WILD_TYPE)))
    tab.open("Contacts")
    page.get_by_label("Structures or sequences").set_input_files([tmp_path / "1abc.pdb", tmp_path / "2abc.pdb"])
    tab.submit()
    assert tab.state("done", "failed") == "done"
    tab.until("document.querySelector('#viewer canvas') && document.querySelector('#map').naturalWidth")

    def count() -> int:
        return int(page.locator("#count").inner_text().split()[0])

    tab.until(f"parseInt(document.querySelector('#count').textContent) >= {len(WILD_TYPE)}")
    many = count()
    page.get_by_label("Record").select_option("2abc_A")
    tab.until("document.querySelector('#map').src.includes('2abc_A')")
    page.get_by_label("Probability at least").focus()
    for _ in range(90):
        page.keyboard.press("ArrowRight")
    tab.until(f"parseInt(document.querySelector('#count').textContent) < {many}")
    with np.load(tab.download("contacts.npz")) as maps:
        assert {*maps.files} == {"1abc_A", "2abc_A"}
    (tmp_path / "3abc.pdb").write_text("ATOM nonsense\n")
    tab.open("Contacts")
    page.get_by_label("Structures or sequences").set_input_files(tmp_path / "3abc.pdb")
    tab.submit()
    assert tab.state("done", "failed") == "failed"
    assert "3abc.pdb" in page.get_by_role("alert").inner_text()


def test_residues_are_coloured_by_their_labels(tab: Tab, tmp_path: Path) -> None:
    page, draw = tab.page, np.random.default_rng(0)
    lines = ["id,sequence,bend"]
    for n in range(40):
        letters = draw.choice(list("ACDEFGHIKLMNPQRSTVWY"), 30)
        lines.append(f"p{n},{''.join(letters)},{''.join('H' if x in 'AELKMQR' else 'C' for x in letters)}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    tab.open("Labels")
    page.get_by_label("Labels of").select_option(label="residues")
    page.get_by_label("Proteins").set_input_files(tmp_path / "labels.csv")
    page.get_by_label("Column of labels").fill("bent")
    page.get_by_label("The labels are").select_option(label="classes")
    tab.submit()
    assert tab.state("done", "failed") == "failed"
    assert "bent" in tab.problem("Column of labels")
    page.get_by_label("Column of labels").fill("bend")
    tab.submit()
    assert tab.state("done", "failed") == "done"
    assert page.locator(".residues").count() == 4
    assert len({*page.locator(".residues span").evaluate_all("all => all.map((x) => x.style.background)")}) == 2
    assert len(rows(tab.download("predictions.csv"))) == 1 + 4 * 30


def test_embeddings_are_a_picture_and_a_file(tab: Tab, tmp_path: Path) -> None:
    page = tab.page
    lines = [f"p{n},{WILD_TYPE[n : n + 30]},{'even' if n % 2 else 'odd'}" for n in range(30)]
    (tmp_path / "x.csv").write_text("\n".join(["id,sequence,group", *lines]))
    tab.open("Embed")
    page.get_by_label("Sequences").set_input_files(tmp_path / "x.csv")
    page.get_by_label("Colour by column").fill("group")
    page.get_by_label("File").select_option("h5")
    tab.submit()
    assert tab.state("done", "failed") == "done"
    assert "coloured by group" in page.locator("figcaption").inner_text()
    assert tab.download("embeddings.h5").stat().st_size > 30 * 4 * 192
    (tmp_path / "wrong.fasta").write_text(">a\nMK1T\n")
    tab.open("Embed")
    page.get_by_label("Sequences").set_input_files(tmp_path / "wrong.fasta")
    tab.submit()
    assert tab.state("done", "failed") == "failed"
    assert "wrong.fasta:1" in tab.problem("Sequences")


def test_a_job_with_the_keyboard_in_a_dark_narrow_window(browser: "playwright.Browser", address: str) -> None:
    """Two tabs show the same job, and another browser does not."""
    tab = Tab(browser, address, viewport={"width": 380, "height": 700}, color_scheme="dark")
    page = tab.page
    for _ in range(20):
        page.keyboard.press("Tab")
        if "Score" in page.evaluate("document.activeElement.textContent"):
            break
    page.keyboard.press("Enter")
    page.wait_for_url("**/new/score")
    while page.evaluate("document.activeElement.tagName") != "TEXTAREA":
        page.keyboard.press("Tab")
    page.keyboard.type(WILD_TYPE)
    while page.evaluate("document.activeElement.textContent") != "Start":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/job/*")
    second = tab.context.new_page()
    second.goto(page.url)
    assert tab.state("done", "failed") == "done"
    second.wait_for_selector('[data-state="done"]', state="attached")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
    for path in (page.url, address.split("?", maxsplit=1)[0], re.sub("/job/.*", "/new/rank", page.url)):
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380, path
    stranger = Tab(browser, address)
    assert stranger.page.goto(second.url).status == 404
    assert tab.problems == []


def test_a_job_is_stopped_and_a_plan_is_drawn(tab: Tab) -> None:
    page = tab.page
    tab.open("Score")
    page.get_by_label("Protein, as text").fill(WILD_TYPE * 30)
    tab.submit()
    tab.state("running")
    page.get_by_role("button", name="Stop").click()
    assert tab.state("stopped", seconds=60) == "stopped"
    page.get_by_role("button", name="Delete").click()
    tab.open("Plan")
    page.get_by_label("GPUs").fill("9xNothing")
    tab.submit()
    assert tab.state("done", "failed") == "failed"
    assert "9xNothing" in tab.problem("GPUs")
    page.get_by_label("GPUs").fill("8xH100-80GB")
    tab.submit()
    assert tab.state("done", "failed") == "done"
    assert page.get_by_alt_text("Memory of a GPU by part").count() == 1


def test_a_gigabyte_is_uploaded_to_the_disk(tab: Tab, tmp_path: Path) -> None:
    """The server does not hold the file in memory; a file over the limit is refused before it is sent."""
    page, large = tab.page, tmp_path / "large.fasta"
    with large.open("wb") as file:
        file.write(b">a\nMKTAYIAK1\n>")
        file.truncate(1 << 30)
    tab.open("Embed")
    page.get_by_label("Sequences").set_input_files(large)
    page.get_by_role("button", name="Start").click()
    page.wait_for_url("**/job/*", timeout=300_000)
    tab.state("waiting", "running", "failed")
    if (stop := page.get_by_role("button", name="Stop")).count():
        stop.click()
    tab.state("failed", "stopped")
    time.sleep(1)
    page.get_by_role("button", name="Delete").click()
    os.truncate(large, 3 << 30)
    tab.open("Embed")
    page.get_by_label("Sequences").set_input_files(large)
    page.get_by_role("button", name="Start").click()
    assert "too large" in page.locator("#too-large").inner_text()
