"""Every shipped recipe runs: a step of a tiny model on a few chains, through to the scores and the report."""

import csv
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import write_subset

from esmshard.io.paths import shipped
from esmshard.model.families.family_registry import SIZES
from esmshard.predict.heads import predict
from esmshard.predict.variants import rank
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe
from esmshard.report.page import report
from esmshard.tasks import metrics
from esmshard.train import finetune

SMALL = ("init=random", "train.epochs=null", "train.steps=1", "train.eval_every=1")
SMALL += ("batch.global_tokens=800", "batch.tokens_per_rank=800", "data.max_length=128", "parallel.precision=fp32")


def small(recipe: Recipe) -> list[str]:
    """Overrides that make a recipe small, with the smallest model of its family."""
    family = SIZES[recipe.model.name].family
    return [f"model.name={'nano' if family == 'esm2' else f'{family}_nano'}", *SMALL]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve chains to train on, three to validate and four to test on, and labels as the recipes name them."""
    path = tmp_path_factory.mktemp("recipes")
    rows, letters = [["id", "label"]], []
    for split, count in (("train", 12), ("valid", 3), ("test", 4)):
        write_subset(path, split, split, range(count))
        with np.load(path / f"{split}.npz") as file:
            for record, dssp in zip(file["names"], file["dssp8"], strict=True):
                rows.append([str(record), f"{str(dssp).count('H') / len(str(dssp)):.4f}"])
                letters.append(f">{record}\n{str(dssp).translate(str.maketrans('GIBSTC', 'HHELLL'))}\n")
        pairs = (shipped("data") / "pairs" / f"{split}.fasta").read_text().split(">")[1 : 1 + count]
        (path / f"{split}-pairs.fasta").write_text("".join(f">{pair}" for pair in pairs))
        rows += [[pair.split()[0], str(len(pair))] for pair in pairs]
    with open(path / "labels.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    (path / "labels.fasta").write_text("".join(letters))
    return path


DRAWN: set[str] = set()
"""The tasks of which a report was drawn, which takes seconds."""


def night(names: Iterable[str]) -> list[Any]:
    """A recipe such as `contact-esm2` takes the same way as `contact`, with other settings."""
    return [pytest.param(name, marks=pytest.mark.slow if "-esm" in name else ()) for name in names]


@pytest.mark.parametrize("name", night(name for name in recipe_file.names() if not name.startswith("variants")))
def test_a_shipped_recipe_runs(name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "RESAMPLES", 50)
    copy = data / f"{name}.yaml"
    shutil.copy(shipped("recipes") / f"{name}.yaml", copy)
    given = recipe_file.load(copy)
    ending = "-pairs.fasta" if given.task.pairs else ".fasta"
    splits = [f"data.{split}={data / split}{ending}" for split in ("train", "valid", "test")]
    recipe = recipe_file.load(copy, [*small(given), *splits, f"out={tmp_path / 'run'}"])
    out = finetune.run(recipe)
    assert out is not None
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert evaluation["records"] == 4
    assert evaluation["metrics"]["fine-tuned"][evaluation["columns"][0]]["value"] is not None
    assert len(evaluation["differences"]) >= 2, "it stands beside its baselines"
    # What the recipe leaves to a default or says of its own is what was run, but for what was made small here.
    changed = recipe_file.differences(given, recipe_file.load(out / "recipe.yaml"))
    sections = {line.split(" ")[0].split(".")[0] for line in changed}
    assert sections <= {"model", "init", "train", "batch", "data", "parallel", "out"}
    if recipe.task.name in DRAWN:
        return
    DRAWN.add(recipe.task.name)
    assert report(out).stat().st_size > 10_000
    table = tmp_path / ("x.npz" if recipe.task.name == "contact" else "x.csv")
    assert predict(str(out / "model"), data / f"test{ending}", table)[0] == 4
    if recipe.task.name == "residue":
        with open(table, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        with np.load(data / "test.npz") as file:
            assert "".join(row["residue"] for row in rows) == "".join(str(s) for s in file["seqs"])
        columns = rows[0].keys() - {"id", "position", "residue", "prediction"}
        sums = [sum(float(row[column]) for column in columns) for row in rows]
        assert sums == pytest.approx([1.0] * len(rows), abs=1e-3), "probabilities"


@pytest.mark.parametrize("name", night(name for name in recipe_file.names() if name.startswith("variants")))
def test_a_recipe_of_variants_runs(name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fold of the first residues of the shipped table, and the ranks of all single substitutions there."""
    monkeypatch.setattr(metrics, "RESAMPLES", 50)
    copy = data / f"{name}.yaml"
    shutil.copy(shipped("recipes") / f"{name}.yaml", copy)
    sample = shipped("data") / "variants"
    protein = "".join((sample / "wild_type.fasta").read_text().splitlines()[1:])[:40]
    (tmp_path / "wt.fasta").write_text(f">wt\n{protein}\n")
    head, *rows = (sample / "landscape.csv").read_text().splitlines()
    changed = {row: [int(one[1:-1]) for one in row.split(",")[0].split(":")] for row in rows if row[:2] != "WT"}
    (tmp_path / "v.csv").write_text("\n".join([head, *(r for r, at in changed.items() if max(at) <= 40)]) + "\n")
    some = [one for one in small(recipe_file.load(copy)) if not one.startswith("batch.global_tokens")]
    files = (f"data.table={tmp_path / 'v.csv'}", f"data.wild_type={tmp_path / 'wt.fasta'}", f"out={tmp_path / 'run'}")
    likelihood = name == "variants-few"  # It needs a trained LM head.
    model = ("model.name=starter", "init=pretrained") if likelihood else ("task.zero_shot=false",)
    if name == "variants-auto":  # a single fold has a single head
        model += ("task.head=gp",)
    out = finetune.run(recipe_file.load(copy, [*some, *files, "data.folds=5", "data.fold=0", *model]))
    assert out is not None
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert evaluation["metrics"]["fine-tuned"]["Spearman"]["value"] is not None
    assert evaluation["metrics"]["one-hot ridge"]["Spearman"]["value"] is None, "the same for all unseen positions"
    assert len(evaluation["differences"]) == (4 if likelihood else 2)
    assert evaluation["interval"].startswith("95% percentile bootstrap over site combinations")
    assert rank(str(out / "model"), None, tmp_path / "x.csv") == 19 * 40
