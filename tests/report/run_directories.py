"""Run directories with chosen content, and a parser of pages."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from esmshard.report.page import report

RECIPE = """\
task: {name: contact}
model: {name: mini}
init: random
data: {train: sample:contact/train, valid: sample:contact/valid, test: sample:contact/test}
batch: {global_tokens: 1024}
out: runs/contact
"""
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """A well-formed page: text, cells and figures by section, tags, and attributes that load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: dict[str, str] = {"": ""}
        self.cells: dict[str, list[str]] = {}
        self.links: list[str] = []
        self.figures: dict[str, int] = {}
        self.section = ""
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), "no script"
            if name in ("src", "href", "xlink:href", "data", "action", "srcset"):
                self.links.append(str(value))
        if tag == "section":
            self.section = str(dict(attrs)["id"])
            self.text[self.section] = ""
        if tag in ("dt", "dd"):
            self.text[self.section] += " "
        if tag in ("th", "td"):
            self.cells.setdefault(self.section, []).append("")
        if tag == "img":
            self.figures[self.section] = self.figures.get(self.section, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag
        if tag == "section":
            self.section = ""

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text[self.section] += data
            if {"th", "td"} & set(self.open):
                self.cells[self.section][-1] += data

    def words(self, section: str = "") -> str:
        return " ".join(self.text[section].split())

    def row(self, section: str, head: str, width: int) -> list[str]:
        """Return the cells after the first cell of a row, which is `head`."""
        cells = self.cells[section]
        return cells[cells.index(head) + 1 :][: width - 1]


def interval(value: float | None, low: float | None, high: float | None) -> dict[str, float | None]:
    return {"value": value, "low": low, "high": high}


def evaluation(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"esmshard": "0.1.0", "step": 20, "weights_sha256": "aa", "recipe": {}, "task": "contact"}
    found |= {"split": "test", "data": "sample:contact/test", "records": 12, "lower_is_better": False, "facts": {}}
    found |= {"columns": ["long P@L", "AUPRC"], "without_value": {"long P@L": 0, "AUPRC": 2}, "confusion": None}
    found |= {"verdict": "Fine-tuning beat the best baseline, separation prior."}
    found |= {"interval": "95% percentile bootstrap over records"}
    found["metrics"] = {
        "fine-tuned": {"long P@L": interval(0.1, 0.08, 0.125), "AUPRC": interval(0.3, 0.2, 0.4)},
        "base rate": {"long P@L": interval(0.02, 0.01, 0.03), "AUPRC": interval(None, None, None)},
        "separation prior": {"long P@L": interval(0.04, 0.03, 0.05), "AUPRC": interval(0.28, 0.2, 0.36)},
    }
    found["differences"] = {
        "base rate": {"long P@L": interval(0.08, 0.07, 0.09), "AUPRC": interval(None, None, None)},
        "separation prior": {"long P@L": interval(0.06, 0.05, 0.07), "AUPRC": interval(0.02, -0.01, 0.05)},
    }
    found["leakage"] = ["leakage: 2 of 12 test records are identical to training records"]
    found["calibration"] = {"count": [30, 10], "confidence": [0.2, 0.8], "accuracy": [0.1, 0.5]}
    return found | changes


def step(n: int, at: float, **changes: Any) -> dict[str, Any]:
    line = {"step": n, "epoch": 0, "loss": 1.0 / n, "lr": 1e-4, "grad_norm": 0.5, "records": 4, "residues": 300}
    line |= {"skipped": False, "step_s": 2.0, "residues_per_s": 150.0, "mfu": None, "peak_memory_bytes": 3 * 2**29}
    return line | {"ranks": {"residues_per_s": [75.0, 75.0]}, "time": at} | changes


def valid(n: int, value: float | None, at: float, metric: str = "long P@L") -> dict[str, Any]:
    return {"step": n, "split": "valid", "loss": 0.9, metric: value, "AUPRC": 0.1, "time": at}


def attempt(n: int, started: float, from_step: int = 0, lost: int = 0, seconds: float = 0.0) -> dict[str, Any]:
    line = {"event": "attempt", "attempt": n, "started": started, "time": started + 10}
    return line | {"from_step": from_step, "steps_lost": lost, "seconds_lost": seconds}


def whole() -> list[dict[str, Any]]:
    """Return 20 steps of 2 s in one attempt of 100 s. The best of two validations is at step 10."""
    lines: list[dict[str, Any]] = [attempt(1, 1000.0)]
    lines += [step(n, 1010.0 + 2 * n) for n in range(1, 11)]
    lines += [valid(10, 0.095, 1035.0), {"event": "checkpoint", "step": 10, "stall_s": 4.0, "time": 1039.0}]
    lines += [step(n, 1040.0 + 2 * (n - 10)) for n in range(11, 21)]
    return [*lines, valid(20, 0.09, 1065.0), {"event": "end", "state": "done", "time": 1100.0}]


def proteins(count: int = 12) -> list[list[Any]]:
    rows = [[f"p{n}", 40 + 10 * n, 0.02 * n, 0.1] for n in range(count)]
    return [["id", "length", "long P@L", "AUPRC"], *rows]


def make(
    run: Path,
    lines: Sequence[Mapping[str, Any]] | None = None,
    tested: Mapping[str, Any] | None = None,
    table: Sequence[Sequence[Any]] | None = None,
    state: str | None = "done",
) -> Path:
    """Make a run directory with the given files."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "recipe.yaml").write_text(RECIPE)
    data = {"path": "/data/train.fasta", "records": 776, "residues": 104429, "tokens_sha256": "9c61"}
    data["notices"] = ["2 records over 1,022 residues left out (a, ...)"]
    (run / "versions.json").write_text(json.dumps({"esmshard": "0.1.0", "torch": "2.13.0", "data": {"train": data}}))
    if lines is not None:
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if tested is not None:
        (run / "evaluation.json").write_text(json.dumps(tested))
    if table is not None:
        with open(run / "per_protein.csv", "w", newline="") as file:
            csv.writer(file).writerows(table)
    if state is not None:
        numbers = {"step": 20, "steps": 40, "attempt": 1, "started": 1000.0, "updated": 1100.0}
        others = {"exit_code": None, "message": "as it was", "checkpoint": None, "job": None, "host": "h"}
        (run / "status.json").write_text(json.dumps({"state": state} | numbers | others))
    return run


def page(run: Path) -> Page:
    """Write and read the page of a run. The page must load nothing and run no script."""
    text = report(run).read_text(encoding="utf-8")
    found = Page(text)
    assert all(link.startswith("data:image/") for link in found.links)
    assert not found.tags & {"script", "link", "iframe", "object", "embed", "base", "b"}
    assert "url(" not in text
    assert "@import" not in text
    for section in found.text.values():
        assert not re.search(r"\b(nan|None|inf)\b", section)
    return found
