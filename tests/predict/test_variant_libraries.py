"""A planted four-site library: what is proposed, what intervals hold, and a ranking by a baseline."""

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from variant_models import WT, facts, write_run

from esmshard.data.variants.substitutions import Mutation, name_of, parse_variant
from esmshard.errors import InputError, UsageError
from esmshard.predict import proposals
from esmshard.predict.variant_ranking import predict
from esmshard.vocab import STANDARD

SITES = (4, 6, 7, 15)
FOLDS = 4
EFFECTS = np.random.default_rng(1).normal(size=(4, 20))


def planted(letters: np.ndarray) -> float:
    """The true value of the variant with these letters at the sites: additive, and skewed upwards."""
    return float(np.exp(0.5 * EFFECTS[np.arange(4), letters].sum()))


def variant(letters: np.ndarray) -> tuple[Mutation, ...]:
    return tuple(Mutation(n, WT[n], STANDARD[k]) for n, k in zip(SITES, letters, strict=True) if STANDARD[k] != WT[n])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cross-validation of 384 variants, whose models are no good. One-hot ridge was clearly better."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(20**4, 384, replace=False)
    letters_N4 = np.stack(np.unravel_index(drawn, (20,) * 4), axis=1)
    names = [name_of(variant(letters)) for letters in letters_N4]
    directory = write_run(tmp_path_factory.mktemp("library") / "run", FOLDS, facts(), names)
    lines = ["mutant,variant,fold,measured,predicted,sd,one-hot ridge,left out because"]
    for n, (name, letters) in enumerate(zip(names, letters_N4, strict=True)):
        value = planted(letters) + 0.1 * rng.normal()
        lines.append(f"{name},{name},{n % FOLDS},{value:.5f},{value + rng.gumbel():.5f},,{value + rng.normal():.5f},")
    (directory / "variants.csv").write_text("\n".join(lines) + "\n")
    better = {"differences": {"one-hot ridge": {"value": -0.3, "low": -0.4, "high": -0.2}}}
    better |= {"metrics": {"one-hot ridge": {"value": 0.6}}}
    summary = json.loads((directory / "summary.json").read_text())
    (directory / "summary.json").write_text(json.dumps(summary | {"joint": better}))
    return directory


def variants_csv(run: Path) -> list[dict[str, str]]:
    with open(run / "variants.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rank(run: Path, tmp_path: Path, table: str | None = None, **given: Any) -> tuple[list[dict[str, str]], Any]:
    """The rows of the output, and the facts beside it."""
    if table is not None:
        (tmp_path / "v.csv").write_text(table)
    predict(str(run), tmp_path / "v.csv" if table else None, tmp_path / "out.csv", overwrite=True, **given)
    with open(tmp_path / "out.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file)), json.loads((tmp_path / "out.json").read_text())


def test_sites_that_were_never_varied_are_marked_and_have_no_interval(run: Path, tmp_path: Path) -> None:
    rows, _ = rank(run, tmp_path)
    varied = {row["mutant"] for row in rows if row["sites varied in training"] == "yes"}
    assert varied == {f"{WT[n]}{n + 1}{to}" for n in SITES for to in STANDARD if to != WT[n]}
    assert {row["mutant"] for row in rows if row["low 90%"] and row["high 90%"]} == varied


def test_proposals_stay_at_varied_sites(run: Path, tmp_path: Path) -> None:
    rows, told = rank(run, tmp_path, propose=20)
    assert {int(row["mutant"][1:-1]) - 1 for row in rows} <= set(SITES)
    rows, told = rank(run, tmp_path, propose=20, sites="1,2")
    assert {int(row["mutant"][1:-1]) for row in rows} == {1, 2}
    assert told["proposed"]["sites"] == [1, 2]
    rows, _ = rank(run, tmp_path, propose=400, sites="all")
    assert len({row["mutant"][1:-1] for row in rows}) > 4
    with pytest.raises(UsageError, match="25"):
        rank(run, tmp_path, propose=2, sites="25")
    with pytest.raises(UsageError, match="--sites"):
        rank(run, tmp_path, sites="1")


def test_the_candidates_of_a_library_are_combinations(run: Path, tmp_path: Path) -> None:
    rows, told = rank(run, tmp_path, propose=12, sites="5,7", all_singles=False)
    assert told["proposed"]["candidates"] == 20**2 - 1 - sum(
        {m.position for m in parse_variant(row["variant"])} <= {4, 6} for row in variants_csv(run)
    )
    assert {m.position for row in rows for m in parse_variant(row["mutant"])} == {4, 6}
    assert max(len(parse_variant(row["mutant"])) for row in rows) == 2


def test_all_combinations_of_four_sites_and_a_part_of_more() -> None:
    library = [variant(np.array(letters)) for letters in itertools.product(range(5), repeat=4)]
    every, _ = proposals.candidates(WT, SITES, library, 160_000)
    assert len(set(every)) == len(every) == 160_000
    some, about = proposals.candidates(WT, SITES, library, 1000)
    assert len(set(some)) == 1000
    assert "1,000 of 160,000" in about
    singles, _ = proposals.candidates(WT, SITES, [one for one in library if len(one) < 2], 10)
    assert len(singles) == 4 * 19, "without combinations in the table, none are candidates"


def test_the_coverage_is_that_of_folds_left_out(run: Path, tmp_path: Path) -> None:
    rows, told = rank(run, tmp_path)
    known = variants_csv(run)
    error_N = np.array([float(row["measured"]) - float(row["predicted"]) for row in known])
    fold_N = np.array([int(row["fold"]) for row in known])
    low, high = np.sort(error_N)[384 - 366], np.sort(error_N)[366 - 1]  # 366 is 0.95 x 385, rounded up
    row = next(row for row in rows if row["low 90%"])
    assert float(row["low 90%"]) - float(row["prediction"]) == pytest.approx(low, abs=1e-3)
    assert float(row["high 90%"]) - float(row["prediction"]) == pytest.approx(high, abs=1e-3)
    held = []
    for fold in range(FOLDS):
        others = np.sort(error_N[fold_N != fold])  # 288 of them; 275 is 0.95 x 289, rounded up
        held += [others[288 - 275] <= error <= others[275 - 1] for error in error_N[fold_N == fold]]
    assert told["interval"]["coverage"] == pytest.approx(np.mean(held))
    assert 0.85 < told["interval"]["coverage"] < 0.95


def test_too_few_residuals_give_no_interval(tmp_path: Path) -> None:
    few = write_run(tmp_path / "few", 2, facts(), ["K2C"])
    lines = [f"{WT[n]}{n + 1}C,{WT[n]}{n + 1}C,{n % 2},{n},{n / 2}" for n in (1, 2, 3, 4)]
    (few / "variants.csv").write_text("\n".join(["mutant,variant,fold,measured,predicted", *lines]) + "\n")
    rows, told = rank(few, tmp_path)
    assert {row["low 90%"] for row in rows} == {""}
    assert told["interval"]["coverage"] is None
    assert "50" in told["interval"]["why"]


def test_a_ranking_by_a_baseline(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    letters_N4 = np.random.default_rng(5).integers(0, 20, (300, 4))
    names = [name_of(variant(letters)) for letters in letters_N4]
    table, truth_N = "mutant\n" + "\n".join(names) + "\n", [planted(letters) for letters in letters_N4]
    by_name = dict(zip(names, truth_N, strict=True))

    def agreement(rows: list[dict[str, str]]) -> float:
        found = [(float(row["prediction"]), by_name[row["mutant"]]) for row in rows]
        return float(spearmanr(*zip(*found, strict=True)).statistic)

    rows, told = rank(run, tmp_path, table)
    assert agreement(rows) < 0.5
    assert "--with one-hot" in capsys.readouterr().err
    rows, told = rank(run, tmp_path, table, baseline="one-hot")
    assert agreement(rows) > 0.9
    assert told["ranked_by"] == "one-hot ridge"
    assert {row["mutant"]: row["prediction"] for row in rows} == {
        row["mutant"]: row["prediction"] for row in rank(run, tmp_path, table, baseline="one-hot ridge")[0]
    }
    error_N = [float(row["measured"]) - float(row["one-hot ridge"]) for row in variants_csv(run)]
    width = float(rows[0]["high 90%"]) - float(rows[0]["low 90%"])
    assert width == pytest.approx(np.sort(error_N)[365] - np.sort(error_N)[18], abs=1e-3), "by its own errors"
    best, _ = rank(run, tmp_path, propose=8, all_singles=False, baseline="one-hot")
    chosen = [parse_variant(row["mutant"]) for row in best]
    measured = [planted(letters) for letters in letters_N4]
    letters = [[STANDARD.index({m.position: m.mutant for m in one}.get(n, WT[n])) for n in SITES] for one in chosen]
    assert np.mean([planted(np.array(one)) for one in letters]) > np.quantile(measured, 0.99)
    with pytest.raises(UsageError, match="one-hot, zero-shot"):
        rank(run, tmp_path, baseline="ridge")
    with pytest.raises(InputError, match="zero_shot"):
        rank(run, tmp_path, baseline="augmented")
    with pytest.raises(InputError, match="cross-validation"):
        rank(run / "seed-0-fold-0", tmp_path, baseline="one-hot")
