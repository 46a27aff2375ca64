"""The joint result of the folds of a planted library: four sites, additive values, folds whose models have offsets."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from esmshard.data.splits.variant_records import divide, table_of
from esmshard.predict import variants
from esmshard.recipe.sections import Recipe
from esmshard.train.cross_validation import Repeat, conclude

WT = "MTYKLILNGKTLKGETTTEAVDAAATEKVFKQYANDNGVDGEWTYDDATKTFTVTE"
SITES = (9, 15, 23, 38)
FOLDS = 5


@dataclass(frozen=True)
class Planted:
    """A concluded run."""

    run: Path
    folds: Sequence[Sequence[dict[str, Any]]]
    """The test variants of each fold: `id`, `measured`, and the prediction of each method."""
    printed: str


def write(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def planted(directory: Path, count: int = 384) -> Planted:
    """The values are sums over the sites, with noise. The model of each fold adds an offset of its own."""
    rng = np.random.default_rng(0)
    effect_SA, chosen = rng.normal(size=(4, 20)), dict[str, float]()
    while len(chosen) < count:
        letters = rng.integers(0, 20, 4)
        parts = [
            f"{WT[site]}{site + 1}{'ACDEFGHIKLMNPQRSTVWY'[a]}"
            for site, a in zip(SITES, letters, strict=True)
            if WT[site] != "ACDEFGHIKLMNPQRSTVWY"[a]
        ]
        chosen[":".join(parts) or "WT"] = float(effect_SA[range(4), letters].sum() + rng.normal(scale=0.3))
    write(directory / "t.csv", [["mutant", "score"], *([name, f"{value:.5f}"] for name, value in chosen.items())])
    (directory / "wt.fasta").write_text(f">wt\n{WT}\n")
    run = directory / "run"
    data = {"table": str(directory / "t.csv"), "wild_type": str(directory / "wt.fasta"), "split": "random"}
    recipe = Recipe.model_validate(
        {"task": {"name": "variant"}, "model": {"name": "nano"}, "data": data, "out": str(run)}
    )
    fold_N, _ = divide(recipe.data.model_copy(update={"folds": FOLDS}))
    names, folds, runs = table_of(recipe.data).names(), [], []
    for fold in range(FOLDS):
        one = run / f"seed-0-fold-{fold}"
        rows = []
        for n in np.flatnonzero(fold_N == fold):
            value = round(chosen[names[n]], 5)
            ours = round(value + rng.normal(scale=1.5) + 30 * fold, 4)
            rows.append({"id": names[n], "measured": value, "fine-tuned": ours})
            rows[-1]["one-hot ridge"] = round(value + rng.normal(scale=3) - 30 * fold, 4)
        cells = [[row["id"], len(WT), 0, row["fine-tuned"], row["measured"], row["one-hot ridge"]] for row in rows]
        head = ["id", "length", "block", "prediction", "target", "prediction of one-hot ridge"]
        write(one / "per_protein.csv", [head, *cells])
        methods: dict[str, Any] = {"fine-tuned": {}, "one-hot ridge": {}}
        told = {"train": {"seed": 0}, "data": {"fold": fold}}
        evaluation = {"recipe": told, "facts": {"targets": ["score"]}, "metrics": methods}
        (one / "evaluation.json").write_text(json.dumps(evaluation))
        (one / "versions.json").write_text(json.dumps({"data": {"train": {"records": 250}}}))
        folds.append(rows)
        runs.append(Repeat(one))
    (run / "summary.json").write_text(json.dumps({"task": "variant", "folds": FOLDS}))
    return Planted(run, folds, conclude(recipe, runs))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted(tmp_path_factory.mktemp("library"))


def by_hand(library: Planted, method: str) -> float:
    """The mean of scipy's correlations of the folds, weighted by their variants."""
    of_folds = [
        (len(rows), spearmanr([row[method] for row in rows], [row["measured"] for row in rows]).statistic)
        for rows in library.folds
    ]
    return float(np.average([rho for _, rho in of_folds], weights=[count for count, _ in of_folds]))


def joint(library: Planted) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((library.run / "summary.json").read_text())["joint"]
    return found


def test_the_headline_is_within_folds_and_has_an_interval_over_variants(library: Planted) -> None:
    found = joint(library)
    every = [row for rows in library.folds for row in rows]
    pooled = spearmanr([row["fine-tuned"] for row in every], [row["measured"] for row in every]).statistic
    assert pooled < by_hand(library, "fine-tuned") / 2
    for method in ("fine-tuned", "one-hot ridge"):
        one = found["metrics"][method]
        assert one["value"] == pytest.approx(by_hand(library, method), abs=1e-5)
        assert one["low"] < one["value"] < one["high"]
    gain = found["differences"]["one-hot ridge"]
    assert gain["value"] == pytest.approx(by_hand(library, "fine-tuned") - by_hand(library, "one-hot ridge"), abs=1e-5)
    assert gain["low"] < gain["high"]
    assert (found["unit"], found["positions"], found["variants"]) == ("variant", 4, 384)
    assert f"{found['metrics']['fine-tuned']['value']:.3f}" in library.printed


def test_the_top_of_the_list_is_measured(library: Planted) -> None:
    best = joint(library)["best"]
    hits, chosen = 0, []
    for rows in library.folds:
        k = round(len(rows) / 100)  # of 76 or 77 variants
        top = sorted(rows, key=lambda row: -row["fine-tuned"])[:k]
        hits += len({id(r) for r in top} & {id(r) for r in sorted(rows, key=lambda row: -row["measured"])[:k]})
        chosen += [row["measured"] for row in top]
    assert best["count"] == len(chosen) == 5
    assert best["recall"]["fine-tuned"]["value"] == pytest.approx(hits / 5)
    assert best["mean_of_chosen"]["fine-tuned"]["value"] == pytest.approx(np.mean(chosen), rel=1e-4)
    assert best["mean_of_all"] == pytest.approx(
        np.mean([row["measured"] for rows in library.folds for row in rows]), rel=1e-4
    )


def test_new_variants_are_counted_by_all_their_sites(library: Planted) -> None:
    (library.run / "seen_in_training.txt").write_text("K10A:A24C\nK10C\n")
    known = variants.read_known(library.run, [library.run], ["score"])
    names = ["K10D", "A24D:K10W", "K10D:W40A", "W40A", "M1A"]
    facts, _ = variants.compared(known, names, np.arange(5.0), np.arange(5.0), "score")
    assert facts["unseen"]["rows_at_varied_sites"] == 2
