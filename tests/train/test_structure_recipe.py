"""A contact recipe whose data are folders of structures, and a model that is scored on one."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structure_texts import THREE, Line, chain, cif, pdb

from esmshard.cli import app

RECIPE = """\
task: {{name: contact, channels: 8, blocks: 1}}
model: {{name: nano}}
init: random
data: {{train: train/, valid: valid, test: valid/1tst.cif, max_length: 60}}
batch: {{global_tokens: 100}}
train: {{steps: 2, eval_every: 2}}
parallel: {{precision: fp32}}
out: {out}
"""
LONG = "MKTAYIAKQRGGLVNDECHWSFPMKTAYLLKQRG"


def folded(lines: list[Line]) -> list[Line]:
    """The chain with its residues from 18 on moved, so that 20 lies 5 A from 3."""
    place = {line.seq: line.xyz for line in lines if line.name == "CA"}
    move = [a - b + c for a, b, c in zip(place[3], place[20], (0.0, 5.0, 0.0), strict=True)]
    moved = [replace(x, xyz=tuple(a + b for a, b in zip(x.xyz, move, strict=True))) for x in lines if x.seq >= 18]
    return [line for line in lines if line.seq < 18] + moved


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Path]:
    """Six chains in PDB to train on, two in mmCIF to validate and one of them to test on."""
    for name in ("train", "valid"):
        (tmp_path / name).mkdir()
    for k in range(6):
        sequence = LONG[k:] + LONG[:k]
        text = pdb(folded(chain(sequence, missing=[k + 6])), {"A": [THREE[x] for x in sequence]})
        (tmp_path / "train" / f"{k}trn.pdb").write_text(text)
    for k in (1, 2):
        sequence = LONG[10 * k :] + LONG[: 10 * k]
        text = cif(
            folded(chain(sequence)) + folded(chain(sequence, "B")), {c: [THREE[x] for x in sequence] for c in "AB"}
        )
        (tmp_path / "valid" / f"{k}tst.cif").write_text(text)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(out=tmp_path / "run"))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["esmshard", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        app.main()
    assert left.value.code in (0, None)


def test_folders_of_structures_train_and_score(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = recipe.parent
    run(monkeypatch, "finetune", recipe)
    said = capfd.readouterr().err
    copies = "2 chains left out with the sequence of another chain of the file (1tst_B, 2tst_B)"
    assert said.count(f"{directory}/valid: {copies}") == 1
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "lr" in line] == [1, 2]
    data = json.loads((directory / "run" / "versions.json").read_text())["data"]
    assert {name: Path(facts["path"]).name for name, facts in data.items()} == {
        "train": "train",
        "valid": "valid",
        "test": "1tst.cif",
    }
    assert [facts["records"] for facts in data.values()] == [6, 2, 1]

    run(monkeypatch, "evaluate", directory / "run" / "model", directory / "valid", "--out", directory / "scores")
    assert f"{directory}/valid: {copies}" in capfd.readouterr().err
    rows = (directory / "scores" / "per_protein.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == ["1tst_A", "2tst_A"]
