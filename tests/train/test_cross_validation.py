"""The joint result of folds: a library of four sites with additive values, and models with an offset in each fold."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Planted(NamedTuple):
    run: Path
    folds: Sequence[Sequence[dict[str, Any]]]
    """The test variants of each fold: `id`, `measured`, and the prediction of each method."""
    printed: str


def planted(directory: Path, count: int = 384, **divided: Any) -> Planted:
    """The values are sums over the sites, with noise. The model of each fold adds another offset."""
    rng = np.random.default_rng(0)
    effect_SA, chosen = rng.normal(size=(4, 20)), dict[str, float]()
    while len(chosen) < count:
        letters = rng.integers(0, 20, 4)
        new = ["ACDEFGHIKLMNPQRSTVWY"[a] for a in letters]
        parts = [f"{WT[site]}{site + 1}{a}" for site, a in zip(SITES, new, strict=True) if WT[site] != a]
        value = float(effect_SA[range(4), letters].sum() + rng.normal(scale=0.3))
        chosen[":".join(parts) or "WT"] = round(value, 5)
    rows = ["mutant,score,cv", *(f"{name},{value:.5f},{n % 6 or ''}" for n, (name, value) in enumerate(chosen.items()))]
    (directory / "t.csv").write_text("\n".join(rows) + "\n")
    (directory / "wt.fasta").write_text(f">wt\n{WT}\n")
    run = directory / "run"
    data = {"table": str(directory / "t.csv"), "wild_type": str(directory / "wt.fasta")}
    data |= divided or {"split": "random"}
    recipe = Recipe.model_validate(
        {"task": {"name": "variant"}, "model": {"name": "nano"}, "data": data, "out": str(run)}
    )
    fold_N, _ = divide(recipe.data.model_copy(update={"folds": recipe.data.folds or FOLDS}))
    names, folds, runs = table_of(recipe.data).names(), [], []
    for fold in range(FOLDS):
        folds.append([{"id": names[n], "measured": chosen[names[n]]} for n in np.flatnonzero(fold_N == fold)])
        lines = ["id,length,block,prediction,target,prediction of one-hot ridge"]
        for row in folds[-1]:
            row["fine-tuned"] = round(row["measured"] + rng.normal(scale=1.5) + 30 * fold, 4)
            row["one-hot ridge"] = round(row["measured"] + rng.normal(scale=3) - 30 * fold, 4)
            lines.append(f"{row['id']},{len(WT)},0,{row['fine-tuned']},{row['measured']},{row['one-hot ridge']}")
        runs.append(Repeat(run / f"seed-0-fold-{fold}"))
        runs[-1].out.mkdir(parents=True)
        (runs[-1].out / "per_protein.csv").write_text("\n".join(lines) + "\n")
        evaluation = {"recipe": {"train": {"seed": 0}, "data": {"fold": fold}}, "facts": {"targets": ["score"]}}
        evaluation |= {"metrics": {"fine-tuned": {}, "one-hot ridge": {}}}
        (runs[-1].out / "evaluation.json").write_text(json.dumps(evaluation))
        (runs[-1].out / "versions.json").write_text(json.dumps({"data": {"train": {"records": 250}}}))
    (run / "summary.json").write_text(json.dumps({"task": "variant", "folds": recipe.data.folds or FOLDS}))
    return Planted(run, folds, conclude(recipe, runs))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted(tmp_path_factory.mktemp("library"))


def by_hand(library: Planted, method: str) -> float:
    """Return the mean of scipy's correlations in the folds, weighted by their variants."""
    rho = [spearmanr([r[method] for r in rows], [r["measured"] for r in rows]).statistic for rows in library.folds]
    return float(np.average(rho, weights=[len(rows) for rows in library.folds]))


def joint(library: Planted) -> Any:
    return json.loads((library.run / "summary.json").read_text())["joint"]


def test_scores_are_within_folds_with_an_interval_over_variants(library: Planted) -> None:
    result, methods = joint(library), ("fine-tuned", "one-hot ridge")
    rows = [row for fold in library.folds for row in fold]
    pooled = spearmanr([row["fine-tuned"] for row in rows], [row["measured"] for row in rows]).statistic
    expected = {method: by_hand(library, method) for method in methods}
    assert pooled < expected["fine-tuned"] / 2
    for method in methods:
        metric = result["metrics"][method]
        assert metric["value"] == pytest.approx(expected[method], abs=1e-5)
        assert metric["low"] < metric["value"] < metric["high"]
    gain = result["differences"]["one-hot ridge"]
    assert gain["value"] == pytest.approx(expected["fine-tuned"] - expected["one-hot ridge"], abs=1e-5)
    assert gain["low"] < gain["high"]
    assert (result["unit"], result["positions"], result["variants"]) == ("variant", 4, 384)
    assert f"{result['metrics']['fine-tuned']['value']:.3f}" in library.printed

    hits, chosen = 0, []
    for fold in library.folds:
        count = round(len(fold) / 100)  # 1 of 76 or 77 variants
        top, best = (sorted(fold, key=lambda row: -row[key])[:count] for key in ("fine-tuned", "measured"))
        hits += len({row["id"] for row in top} & {row["id"] for row in best})
        chosen += [row["measured"] for row in top]
    best = result["best"]
    assert best["count"] == len(chosen) == 5
    assert best["recall"]["fine-tuned"]["value"] == pytest.approx(hits / 5)
    assert best["mean_of_chosen"]["fine-tuned"]["value"] == pytest.approx(np.mean(chosen), rel=1e-4)
    assert best["mean_of_all"] == pytest.approx(np.mean([row["measured"] for row in rows]), rel=1e-4)


def test_new_variants_are_counted_by_all_their_sites(library: Planted) -> None:
    (library.run / "seen_in_training.txt").write_text("K10A:A24C\nK10C\n")
    known = variants.read_known(library.run, [library.run], ["score"])
    names = ["K10D", "A24D:K10W", "K10D:W40A", "W40A", "M1A"]
    facts, _ = variants.compared(known, names, np.arange(5.0), np.arange(5.0), "score")
    assert facts["unseen"]["rows_at_varied_sites"] == 2


def test_folds_of_a_column_are_compared_with_published_ones(tmp_path: Path) -> None:
    library = planted(tmp_path, folds="cv")
    summary = json.loads((library.run / "summary.json").read_text())
    assert (summary["folds"], summary["joint"]["split"], summary["joint"]["variants"]) == (5, "cv", 320)
    assert summary["table"]["variants_in_no_set"] == 64
    assert "split cv; test positions also occur in training" in library.printed
    assert summary["joint"]["metrics"]["fine-tuned"]["value"] == pytest.approx(by_hand(library, "fine-tuned"), abs=1e-3)
    rows = [row for fold in library.folds for row in fold]
    over_all = spearmanr([row["fine-tuned"] for row in rows], [row["measured"] for row in rows]).statistic
    assert summary["joint"]["over_all_folds"]["fine-tuned"] == pytest.approx(over_all, abs=1e-6)
    head, first, second, *_ = (library.run / "variants.csv").read_text().splitlines()
    assert head.endswith("left out because")
    assert first.endswith("without a value in 'cv'")
    assert second.split(",")[2:5:2] == ["1", "0"], "the first value of the column is fold 0"
