"""Several runs of one recipe: the runs, the folds of the records, and the summary."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from esmshard.data.splits.recipe_splits import fold_of, open_split
from esmshard.errors import UsageError
from esmshard.io.store import cached
from esmshard.recipe import recipe_file
from esmshard.train import cross_validation as repeats
from esmshard.train.cross_validation import summarise


def test_complexes_are_refused_for_data_without_structures(tiny_recipe: Path) -> None:
    recipe = recipe_file.load(tiny_recipe, ["data.complexes=all"])
    with pytest.raises(UsageError, match=r"data\.complexes: all is for structure files"):
        open_split(recipe, "train", None)


def test_each_record_is_tested_in_one_fold_and_trained_on_in_the_others(tiny_recipe: Path) -> None:
    train = recipe_file.load(tiny_recipe).data.train
    validated, tested = [], []
    for fold in range(3):
        folds = ["data.folds=3", f"data.fold={fold}"]
        sets = []
        for overrides in (folds, [*folds, f"data.valid={train}"]):  # then the next fold is the validation set
            recipe = recipe_file.load(tiny_recipe, overrides)
            splits = [open_split(recipe, name, None) for name in ("train", "valid", "test")]
            sets.append([{split.id(n) for n in range(len(split))} for split in splits])
        (trained, valid, test), (fewer, next_fold, same) = sets
        assert [len(ids) for ids in (trained, valid, test, fewer, next_fold)] == [16, 5, 8, 8, 8]
        assert test == same
        assert not trained & test
        assert trained == fewer | next_fold
        validated.append(next_fold)
        tested.append(test)
    assert len(set.union(*tested)) == 24
    assert validated == [tested[1], tested[2], tested[0]]


def test_folds_do_not_depend_on_the_seed_but_on_clusters(tmp_path: Path, tiny_recipe: Path) -> None:
    fasta = tmp_path / "x.fasta"
    sequences = ["MKTAYIAKQR" + letter * 3 for letter in "ACDEFGHIKLMN"]
    fasta.write_text("".join(f">r{n}\n{s}\n" for n, s in enumerate([*sequences, sequences[4], sequences[4]])))
    store = cached(fasta)
    found_N = fold_of(store, 4, None)
    assert found_N[4] == found_N[12] == found_N[13], "equal sequences stay together"
    assert set(found_N.tolist()) == {0, 1, 2, 3}
    table = tmp_path / "x_cluster.tsv"
    table.write_text("".join(f"r{n % 5}\tr{n}\n" for n in range(14)))
    clustered_N = fold_of(store, 4, str(table))
    assert all(len({int(clustered_N[n]) for n in range(k, 14, 5)}) == 1 for k in range(5))
    one, other = (
        open_split(recipe_file.load(tiny_recipe, ["data.folds=3", "data.fold=0", f"train.seed={seed}"]), "test", None)
        for seed in (1, 2)
    )
    assert [one.id(n) for n in range(len(one))] == [other.id(n) for n in range(len(other))]


def evaluation(value: float | None, baseline: float) -> dict[str, Any]:
    return {
        "task": "sequence",
        "recipe": {"out": "x", "train": {"seed": 0}},
        "columns": ["Spearman"],
        "lower_is_better": False,
        "metrics": {
            "fine-tuned": {"Spearman": {"value": value, "low": 0, "high": 1}},
            "mean": {"Spearman": {"value": baseline, "low": 0, "high": 1}},
            "late": {} if value == 0.5 else {"Spearman": {"value": None, "low": None, "high": None}},
        },
        "differences": {"mean": {"Spearman": {"value": None if value is None else value - baseline}}},
    }


def test_the_summary_has_mean_deviation_and_students_interval(tmp_path: Path, tiny_recipe: Path) -> None:
    runs = repeats.repeats(recipe_file.load(tiny_recipe, [f"out={tmp_path}"]), 3)
    for run, value in zip(runs, (0.5, 0.6, 0.7), strict=True):
        run.out.mkdir()
        (run.out / "evaluation.json").write_text(json.dumps(evaluation(value, 0.25)))
    text = summarise(tmp_path, runs)
    summary = json.loads((tmp_path / "summary.json").read_text())
    row = summary["metrics"]["fine-tuned"]["Spearman"]
    assert (row["mean"], row["deviation"]) == pytest.approx((0.6, 0.1))
    # 4.3027 is Student's t for 2 degrees of freedom.
    assert row["high"] - row["mean"] == pytest.approx(4.3027 * 0.1 / math.sqrt(3), abs=1e-5)
    assert row["mean"] - row["low"] == pytest.approx(row["high"] - row["mean"])
    assert row["runs"] == {"seed-3": 0.5, "seed-4": 0.6, "seed-5": 0.7}
    assert summary["metrics"]["mean"]["Spearman"]["deviation"] == 0
    assert summary["metrics"]["late"]["Spearman"]["mean"] is None
    assert "fine-tuned  0.600 [0.352, 0.848]" in text
    assert text.splitlines()[-1] == summary["verdict"]
    assert "a difference of +0.350 [+0.102, +0.598] (95%, Student's t, paired over 3 runs)" in summary["verdict"]
