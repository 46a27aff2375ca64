"""Runs of variants with small random models: ranks, intervals, proposals, and what is said of measured values."""

import csv
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import TINY, fair_esm, ours, write_transformers
from scipy.stats import spearmanr
from torch import nn

from esmshard.checkpoint.consolidate import FORMAT, VERSION
from esmshard.data.batching.loader import SEEN, Example
from esmshard.data.mutations import Mutation, name_of, parse_variant
from esmshard.errors import InputError, UsageError
from esmshard.predict.variant_tables import models_of
from esmshard.predict.variants import rank
from esmshard.tasks.finetuned import load_finetuned
from esmshard.tasks.variants import VariantSettings, VariantTask
from esmshard.vocab import STANDARD, encode

WT = "MKTAYIAKQRQISFVKSHFSRQLE"
NAMES = [f"{WT[n]}{n + 1}{letter}" for n in range(12) for letter in "CW"]
TRAINED = NAMES[:20]
"""Of ten positions, from which on there is an interval."""
AHEAD = 8
"""What the wild type's numbering is ahead of the table's."""
LIMITS = ("low 90%", "high 90%")
SD = "disagreement of models"
FURTHER = ("rank", "out-of-fold prediction", "seen in training", "sites varied in training")
SITES, FOLDS = (4, 6, 7, 15), 4
EFFECTS = np.random.default_rng(1).normal(size=(4, 20))


def write_model(directory: Path, seed: int, facts: dict[str, Any]) -> Path:
    """A consolidated model with a random head, as `consolidate` leaves it."""
    settings = VariantSettings(name="variant", pool="wild_type", hidden=4, zero_shot=False)
    torch.manual_seed(seed)
    head = VariantTask(settings, facts).head(TINY)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.5)
    directory.parent.mkdir(parents=True, exist_ok=True)
    write_transformers(directory, ours(fair_esm(TINY), TINY), TINY, head.state_dict())
    about = {"format": FORMAT, "version": VERSION, "step": 2, "recipe": {"task": settings.model_dump()}}
    (directory / "esmshard.json").write_text(json.dumps({**about, "facts": facts}))
    return directory


def facts(*targets: str, **changes: Any) -> dict[str, Any]:
    unit = {"kind": "none", "mean": 10.0, "deviation": 2.0, "values": [], "scores": []}
    names = list(targets or ("y",))
    found = {"targets": names, "lower_is_better": [], "scales": [unit] * len(names)}
    return found | {"protein": WT, "first": 0, "length": 24, "offset": 0, "breaks": [], "linker": 25} | changes


def write_run(
    directory: Path,
    count: int,
    known: dict[str, Any],
    seen: Sequence[str] | None = (),
    rows: Sequence[str] = (),
    **summary: Any,
) -> Path:
    """A cross-validation of that many models, trained on the variants `seen`; None leaves that unrecorded."""
    names = [f"seed-0-fold-{n}" for n in range(count)]
    for n, name in enumerate(names):
        model = write_model(directory / name / "model", n, known)
        if seen is not None:
            (model / SEEN).write_text("".join(f"{variant}\n" for variant in seen))
    (directory / "summary.json").write_text(json.dumps({"task": "variant", "runs": names, **summary}))
    if rows:
        (directory / "variants.csv").write_text("\n".join(rows) + "\n")
    return directory


def planted(letters: np.ndarray) -> float:
    """The true value of the variant with these letters at the sites: additive, and skewed upwards."""
    return float(np.exp(0.5 * EFFECTS[np.arange(4), letters].sum()))


def combination(letters: np.ndarray) -> tuple[Mutation, ...]:
    return tuple(Mutation(n, WT[n], STANDARD[k]) for n, k in zip(SITES, letters, strict=True) if STANDARD[k] != WT[n])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose tables count as the wild type does, and otherwise; that have tested variants, and that have not."""
    found = tmp_path_factory.mktemp("runs")
    rng, predicted_N = np.random.default_rng(0), np.random.default_rng(1).normal(size=len(TRAINED))
    rows = ["mutant,y,variant,fold,measured,predicted,sd,one-hot ridge,zero-shot,left out because"]
    for name, predicted, measured in zip(TRAINED, predicted_N, rng.normal(size=len(TRAINED)), strict=True):
        rows.append(f"{name},{measured:g},{name},0,{measured:g},{predicted:g},,1,{-predicted:g},")
    rows += ["WT,1.5,WT,0,1.5,1.4,,1,0,", "A4*,3,,,,,,,,a stop codon"]
    about = {
        "joint": {"differences": {"one-hot ridge": {}, "zero-shot": {}}, "metrics": {}},
        "verdict": "It was worse than chance.",
    }
    write_run(found / "plain", 3, facts(), [*TRAINED, "WT"], rows, **about)
    write_run(found / "shifted", 2, facts(offset=AHEAD), [*TRAINED, "WT"], rows, **about)
    write_run(found / "unknown", 1, facts(), None, rows, **about)
    write_run(found / "lower", 3, facts(lower_is_better=("y",)))
    write_run(found / "two", 2, facts("y", "kd", lower_is_better=("kd",)))
    write_run(found / "part", 2, facts(first=4, length=10))
    # A library of four sites, whose models are no good. One-hot ridge was clearly better.
    letters_N4 = np.stack(np.unravel_index(rng.choice(20**4, 384, replace=False), (20,) * 4), axis=1)
    names = [name_of(combination(letters)) for letters in letters_N4]
    rows = ["mutant,variant,fold,measured,predicted,sd,one-hot ridge,left out because"]
    for n, (name, letters) in enumerate(zip(names, letters_N4, strict=True)):
        value = planted(letters) + 0.1 * rng.normal()
        error = rng.gumbel() * (1 if n % FOLDS else 3)  # the errors of one fold are larger
        rows.append(f"{name},{name},{n % FOLDS},{value:.5f},{value + error:.5f},,{value + rng.normal():.5f},")
    better = {"differences": {"one-hot ridge": {"value": -0.3, "low": -0.4, "high": -0.2}}}
    better["metrics"] = {"one-hot ridge": {"value": 0.6}}
    write_run(found / "library", FOLDS, facts(), names, rows, joint=better)
    return found


opened = cache(load_finetuned)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model is read once for all tests, which takes most of their time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("esmshard.predict.variants.load_finetuned", opened)


def ranked(run: Path, text: str | None = None, **given: Any) -> tuple[list[dict[str, str]], dict[str, Any]]:
    if text is not None:
        Path("v.csv").write_text(text)
    count = rank(str(run), None if text is None else Path("v.csv"), Path("out.csv"), overwrite=True, **given)
    rows = read_csv(Path("out.csv"))
    assert count == len(rows)
    return rows, json.loads(Path("out.csv.json").read_text())


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def by_name(rows: Sequence[dict[str, str]]) -> dict[str, dict[str, str]]:
    return {row.get("variant") or row["mutant"]: row for row in rows}


def by_hand(run: Path, names: Sequence[str]) -> np.ndarray:
    """By each model of each variant, one at a time, [M, N, T]."""
    found = []
    for path in sorted(run.glob("*/model")):
        model = opened(str(path), None)
        part, each = slice(model.task.facts["first"], None), []
        for name in names:
            residues = list(WT)
            for mutation in parse_variant(name):
                residues[mutation.position] = mutation.mutant
            seen = "".join(residues)[part][: model.task.facts["length"]]
            output = model.model.outputs([model.task.question(Example("x", encode(seen), {}))])[0]
            each.append(model.task.predict(output))
        found.append(np.stack(each))
    return np.stack(found)


def table(names: Sequence[str]) -> str:
    return "mutant,note\n" + "".join(f'{name},"of, {n}"\n' for n, name in enumerate(names))


def numbers(rows: Sequence[dict[str, str]], column: str) -> list[float]:
    return [float(row[column]) for row in rows]


def test_variants_stand_in_order_with_the_columns_of_their_table(runs: Path) -> None:
    names = [*NAMES[::2], "K2C:T3W"]
    for name, sign in (("plain", -1), ("lower", 1)):
        rows, _ = ranked(runs / name, table(names))
        assert list(rows[0]) == ["mutant", "note", "prediction", *LIMITS, SD, *FURTHER, "not ranked because"]
        values = by_hand(runs / name, names)[:, :, 0]
        mean, sd = values.mean(0), values.std(0, ddof=1)
        order = np.argsort(sign * mean, kind="stable")
        assert [(row["mutant"], row["note"]) for row in rows] == [(names[n], f"of, {n}") for n in order]
        assert numbers(rows, "prediction") == pytest.approx(mean[order], abs=1e-3)
        assert numbers(rows, SD) == pytest.approx(sd[order], abs=1e-3)
        assert numbers(rows, "rank") == list(range(1, len(names) + 1))
        assert sd.min() > 0.01
    rows, _ = ranked(runs / "two", table(names))
    first = [f"{name} y" for name in ("prediction", *LIMITS, SD)]
    assert list(rows[0]) == [
        *("mutant", "note", *first, "prediction kd", f"{SD} kd", "rank"),
        *("out-of-fold prediction y", "out-of-fold prediction kd", *FURTHER[2:], "not ranked because"),
    ]
    mean = by_hand(runs / "two", [row["mutant"] for row in rows]).mean(0)
    assert numbers(rows, "prediction kd") == pytest.approx(mean[:, 1], abs=1e-3)
    assert numbers(rows, "prediction y") == sorted(numbers(rows, "prediction y"), reverse=True)


def test_rows_that_cannot_be_ranked_stand_at_the_end(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unusable = {"A4*": "stop codon", "K2del": "no substitution", "A9C": "wild type has Q", "WT": "1.5", "A7A": "1.5"}
    first, *rest = unusable
    rows, told = ranked(runs / "plain", table([first, *NAMES, *rest, NAMES[0]]))
    assert [row["mutant"] for row in rows[-5:]] == list(unusable)
    assert all(row[column] == "" for row in rows[-5:] for column in ("prediction", SD, "rank"))
    reasons = [row["not ranked because"] for row in rows]
    assert reasons[:-5] == [""] * 25
    assert all(token in reason for reason, token in zip(reasons[-5:], unusable.values(), strict=True))
    assert len({row["prediction"] for row in rows if row["mutant"] == NAMES[0]}) == 1
    assert told["wild_type"]["measured"] == 1.5
    assert told["wild_type"]["predicted"] == pytest.approx(by_hand(runs / "plain", ["WT"]).mean(), abs=1e-3)
    assert "measured value is 1.5" in capsys.readouterr().err


def test_residues_that_the_model_does_not_see_are_not_ranked(runs: Path) -> None:
    rows, told = ranked(runs / "part", table(["K2C", "Y5C", "F14C", "V15C", "Y5C:V15C", "WT"]))
    assert {row["mutant"] for row in rows[:3]} == {"Y5C", "F14C", "WT"}
    assert [row["mutant"] for row in rows[3:]] == ["K2C", "V15C", "Y5C:V15C"]
    mean = by_hand(runs / "part", [row["mutant"] for row in rows[:3]]).mean(0)[:, 0]
    assert numbers(rows[:3], "prediction") == pytest.approx(mean, abs=1e-3)
    assert "3 variants (line 2, line 5, line 6), as it changes a residue" in told["notices"][-1]
    assert len(ranked(runs / "part")[0]) == 19 * 10
    with pytest.raises(InputError, match="no row can be ranked"):
        ranked(runs / "part", table(["K2C"]))


def test_all_single_substitutions_have_what_was_measured(runs: Path, tmp_path: Path) -> None:
    rows, _ = ranked(runs / "plain")
    assert list(rows[0]) == ["mutant", "measured", "prediction", *LIMITS, SD, *FURTHER]
    assert len(rows) == len({row["mutant"] for row in rows}) == 19 * 24
    assert {row["mutant"] for row in rows if row["measured"]} == set(TRAINED)
    rows, told = ranked(write_run(tmp_path / "x", 1, facts(protein="X" + WT[1:])))
    assert len(rows) == 19 * 23
    assert not [row for row in rows if row["mutant"].startswith("X")]
    assert "X at residue 1," in told["notices"][0]


def test_a_run_with_one_model_or_none(runs: Path, tmp_path: Path) -> None:
    alone = runs / "lower" / "seed-0-fold-1"
    rows, _ = ranked(alone, table(NAMES[:4]))
    assert {row[SD] for row in rows} == {""}
    values = by_hand(runs / "lower", [row["mutant"] for row in rows])[1, :, 0]
    assert numbers(rows, "prediction") == pytest.approx(values, abs=1e-3)
    with pytest.raises(UsageError, match="--propose"):
        ranked(alone, table(NAMES), propose=2)
    assert models_of(str(runs / "lower")) == [runs / "lower" / f"seed-0-fold-{n}" / "model" for n in range(3)]
    assert models_of(str(alone)) == models_of(str(alone / "model")) == [alone / "model"]
    (tmp_path / "esmshard.json").write_text('{"recipe": {"task": {"name": "residue"}}}')
    assert models_of(str(tmp_path)) == models_of(str(tmp_path / "nowhere")) == []
    (tmp_path / "summary.json").write_text('{"task": "variant", "runs": ["seed-0"]}')
    with pytest.raises(InputError, match="there is no model"):
        models_of(str(tmp_path))


def test_mistakes(runs: Path, tmp_path: Path) -> None:
    Path("y.csv").write_text("mine")
    mixed = write_run(tmp_path / "mixed", 1, facts())
    write_model(mixed / "b" / "model", 0, facts(protein=WT[::-1]))
    (mixed / "summary.json").write_text(json.dumps({"task": "variant", "runs": ["seed-0-fold-0", "b"]}))
    ahead = table([f"{WT[n]}{n + 11}A" for n in range(24) if WT[n] != "A"])
    for kind, token, run, text, out, given in (
        (InputError, "column 'rank' already", "plain", "mutant,rank\nK2C,1\n", "x.csv", {}),
        (InputError, "has no column 'name'", "plain", "mutant,rank\nK2C,1\n", "x.csv", {"mutant": "name"}),
        (InputError, "do not fit", "plain", table(["A2C", "A3C"]), "x.csv", {}),
        (InputError, "--offset -10", "plain", ahead, "x.csv", {}),
        (UsageError, "--offset is added", "plain", None, "x.csv", {"offset": 3}),
        (UsageError, "--sites", "plain", None, "x.csv", {"sites": "1"}),
        (UsageError, "one-hot, zero-shot", "plain", None, "x.csv", {"baseline": "ridge"}),
        (UsageError, ".csv", "plain", None, "x.txt", {}),
        (UsageError, "exists already", "plain", None, "y.csv", {}),
        (InputError, "different proteins", str(mixed), None, "x.csv", {}),
    ):
        Path("v.csv").write_text(text or "")
        with pytest.raises(kind, match=re.escape(token)):
            rank(str(runs / run), None if text is None else Path("v.csv"), Path(out), **given)
    assert {path.name for path in Path().iterdir()} == {"mixed", "v.csv", "y.csv"}
    assert Path("y.csv").read_text() == "mine"


def test_variants_of_training_are_compared_out_of_fold(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_run = by_name(read_csv(runs / "plain" / "variants.csv"))
    new = {name: float(n % 5) for n, name in enumerate(NAMES[20:])}
    measured = {name: float(of_run[name]["measured"]) for name in TRAINED} | new
    rows, told = ranked(runs / "plain", "mutant,y\n" + "".join(f"{name},{value}\n" for name, value in measured.items()))
    found, seen, unseen = by_name(rows), told["compared"]["seen_in_training"], told["compared"]["unseen"]
    assert (seen["rows"], seen["rows_out_of_fold"], unseen["rows"], unseen["rows_at_varied_sites"]) == (20, 20, 4, 0)
    apart = spearmanr([float(of_run[n]["predicted"]) for n in TRAINED], [measured[n] for n in TRAINED]).statistic
    assert seen["spearman_out_of_fold"]["value"] == pytest.approx(apart, abs=1e-9)
    assert seen["spearman_out_of_fold"]["low"] < apart < seen["spearman_out_of_fold"]["high"]
    plain = spearmanr([float(found[n]["prediction"]) for n in new], list(new.values())).statistic
    assert unseen["spearman"]["value"] == pytest.approx(plain, abs=1e-9)
    assert {n for n in measured if found[n]["seen in training"] == "yes"} == set(TRAINED)
    assert all(found[n]["out-of-fold prediction"] == of_run[n]["predicted"] for n in TRAINED)
    message = capsys.readouterr().err
    for token in (f"Spearman with y {apart:.3f} [", f"y {plain:.3f} (no interval"):
        assert token in message
    rows, told = ranked(runs / "unknown", "mutant,y\nM1A,1\nK2A,2\nF14A,3\n")
    assert not re.search(r"Spearman with y -?\d", capsys.readouterr().err), "models that do not know"
    assert (told["compared"]["unseen"], {row["seen in training"] for row in rows}) == (None, {""})


def test_tables_are_numbered_as_that_of_the_run(runs: Path) -> None:
    """One row that fits the wild type unshifted as well: the shift that the run knows is the one."""
    place = next(n for n in range(AHEAD, len(WT)) if WT[n] == WT[n - AHEAD])
    name, of_protein = f"{WT[place]}{place + 1 - AHEAD}W", f"{WT[place]}{place + 1}W"
    for text, given, variant, offset, notice in (
        (f"mutant\n{name}\n", {}, of_protein, AHEAD, f"shifted by +{AHEAD}"),
        ("mutant\nF14A\n", {"offset": 0}, "F14A", 0, "by +8"),
        (f"mutated_sequence\nA{WT[1:]}\n", {}, "M1A", 0, ""),  # whole sequences have no numbering
    ):
        ((row,), told) = ranked(runs / "shifted", text, **given)
        assert (row.get("mutant in wild type"), told["offset"]) == (variant if offset else None, offset)
        assert notice in "".join(told["notices"])
        assert float(row["prediction"]) == pytest.approx(by_hand(runs / "shifted", [variant]).mean(), abs=1e-3)
    singles = by_name(ranked(runs / "shifted")[0])
    assert (singles["M1A"]["mutant in table"], singles["F14A"]["mutant in table"]) == ("M-7A", "F6A")
    with pytest.raises(InputError, match=r"shifted by \+8 do not fit"):
        ranked(runs / "shifted", "mutant\nF14A\n")


def test_the_coverage_is_that_of_folds_left_out(runs: Path, tmp_path: Path) -> None:
    rows, told = ranked(runs / "library")
    known = read_csv(runs / "library" / "variants.csv")
    error_N = np.subtract(numbers(known, "measured"), numbers(known, "predicted"))
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
    assert 0.8 < told["interval"]["coverage"] < np.mean((low <= error_N) & (error_N <= high)) - 0.005, "out of sample"
    varied = {f"{WT[n]}{n + 1}{to}" for n in SITES for to in STANDARD if to != WT[n]}
    assert {row["mutant"] for row in rows if row["sites varied in training"] == "yes"} == varied
    assert {row["mutant"] for row in rows if row["low 90%"] and row["high 90%"]} == varied
    lines = [f"{WT[n]}{n + 1}C,{WT[n]}{n + 1}C,{n % 2},{n},{n / 2}" for n in (1, 2, 3, 4)]
    few = write_run(tmp_path / "few", 1, facts(), ["K2C"], ["mutant,variant,fold,measured,predicted", *lines])
    rows, told = ranked(few)
    assert {row["low 90%"] for row in rows} == {""}
    assert "50" in told["interval"]["why"]


def test_proposals_were_not_measured_and_stay_at_varied_sites(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, told = ranked(runs / "plain", propose=5)
    assert not {row["mutant"] for row in rows} & set(TRAINED)
    assert {int(row["mutant"][1:-1]) for row in rows} <= set(range(1, 11))
    assert (told["proposed"]["count"], told["verdict"]) == (5, "It was worse than chance.")
    assert "trust these proposals: It was worse than chance." in capsys.readouterr().err
    rows, told = ranked(runs / "library", propose=20, sites="1,2")
    assert [rows[n]["well"] for n in (0, 11, 12, 19)] == ["A1", "A12", "B1", "B8"]
    assert {int(row["mutant"][1:-1]) for row in rows} == set(told["proposed"]["sites"]) == {1, 2}
    rows, told = ranked(runs / "library", propose=12, sites="5,7", all_singles=False)
    measured = [parse_variant(row["variant"]) for row in read_csv(runs / "library" / "variants.csv")]
    inside = sum({m.position for m in variant} <= {4, 6} for variant in measured)
    assert told["proposed"]["candidates"] == 20**2 - 1 - inside
    chosen = [parse_variant(row["mutant"]) for row in rows]
    assert {m.position for variant in chosen for m in variant} == {4, 6}
    assert max(map(len, chosen)) == 2
    with pytest.raises(UsageError, match="25"):
        ranked(runs / "library", propose=2, sites="25")


def test_combinations_of_good_singles(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    for run, sign in (("shifted", 1), ("lower", -1)):
        sites = "" if run == "lower" else f"{5 - AHEAD},{7 - AHEAD},{8 - AHEAD}"  # of the table
        rows, told = ranked(runs / run, combine=3, best_singles=12, sites=sites or None)
        assert "no epistasis" in capsys.readouterr().err
        variants = [parse_variant(row["mutant"]) for row in rows]
        assert {len({m.position for m in variant}) for variant in variants} == {*map(len, variants)} <= {2, 3}
        assert told["additive"]
        singles = ranked(runs / run)[0]
        allowed = [row["mutant"] for row in singles if not sites or int(row["mutant"][1:-1]) in (5, 7, 8)]
        assert told["combined"]["singles"] == allowed[:12]
        assert {str(m) for variant in variants for m in variant} == {*allowed[:12]}
        assert told["combined"]["combinations"] == len(rows) == len({*variants})
        effect_of = dict(zip((row["mutant"] for row in singles), numbers(singles, "prediction"), strict=True))
        base = told["wild_type"]["predicted"]
        sums = [base + sum(effect_of[str(m)] - base for m in variant) for variant in variants]
        assert numbers(rows, "prediction") == pytest.approx(sums, abs=1e-2)
        assert numbers(rows, "prediction") == sorted(numbers(rows, "prediction"), reverse=sign > 0)
    monkeypatch.setattr("esmshard.predict.proposals.MOST_PASSES", 20)
    given = {"combine": 3, "best_singles": 12, "baseline": "one-hot", "sites": "5,7,16"}
    rows, told = ranked(runs / "library", propose=9, acquisition="greedy", diversity=0, **given)
    assert told["combined"]["search"] == "exhaustive", "no pass is needed"
    measured = {row["variant"] for row in read_csv(runs / "library" / "variants.csv")}
    assert not {row["mutant"] for row in rows} & measured
    assert told["proposed"]["acquisition"] == "greedy"
    assert numbers(rows, "prediction") == sorted(numbers(rows, "prediction"), reverse=True)
    for token, given in (
        ("--from is", {"best_singles": 3}),
        ("--acquisition ei chooses", {"acquisition": "ei"}),
        ("--kappa", {"acquisition": "ei", "propose": 3, "kappa": 2.0}),
        ("one-hot ridge is one", {"acquisition": "thompson", "propose": 3, "baseline": "one-hot"}),
        ("only 92 of", {"combine": 3, "best_singles": 12, "propose": 99, "sites": "5,7,8"}),
    ):
        with pytest.raises(UsageError, match=token):
            ranked(runs / "plain", **given)


def test_proposals_of_a_table_keep_their_ranks(runs: Path) -> None:
    """Less is better; the run's columns have a prefix, as the table has one of their names; a variant has two rows."""
    (path := runs / "lower" / "variants.csv").write_text(
        "mutant,variant,esmshard variant,esmshard fold,esmshard measured\n"
        + "".join(f"x,y,{name},0,2.5\n" for name in NAMES[:18])
    )
    names = [*NAMES[12:], *NAMES[12:], "WT"]
    text = table(names).replace("note", "well")  # the user's column keeps its name
    rows, _ = ranked(runs / "lower", text, propose=6, kappa=0, diversity=0, sites="all")
    assert [(row["well"][:4], row["esmshard well"]) for row in rows] == [("of, ", f"A{n}") for n in range(1, 7)]
    mean_N = by_hand(runs / "lower", NAMES[18:]).mean(0)[:, 0]
    assert [row["mutant"] for row in rows] == [NAMES[18:][n] for n in np.argsort(mean_N)]
    ranks = {int(row["rank"]) for row in ranked(runs / "lower", table(names))[0] if row["mutant"] in NAMES[18:]}
    assert {int(row["rank"]) for row in rows} < ranks, "among all that were given"
    with pytest.raises(UsageError, match=r"--propose 7: only 6"):
        ranked(runs / "lower", table(names), propose=7, sites="all")
    path.unlink()


def test_a_ranking_by_a_baseline(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, letters_N4 = runs / "library", np.random.default_rng(5).integers(0, 20, (300, 4))
    truth = {name_of(combination(letters)): planted(letters) for letters in letters_N4}
    text = "mutant\n" + "\n".join(truth) + "\n"

    def agreement(rows: list[dict[str, str]]) -> float:
        return float(spearmanr(numbers(rows, "prediction"), [truth[row["mutant"]] for row in rows]).statistic)

    rows, _ = ranked(run, text)
    assert agreement(rows) < 0.5
    assert "--with one-hot" in capsys.readouterr().err
    rows, told = ranked(run, text, baseline="one-hot")
    assert agreement(rows) > 0.9
    assert told["ranked_by"] == "one-hot ridge"
    known = read_csv(run / "variants.csv")
    error_N = np.sort(np.subtract(numbers(known, "measured"), numbers(known, "one-hot ridge")))
    width = float(rows[0]["high 90%"]) - float(rows[0]["low 90%"])
    assert width == pytest.approx(error_N[365] - error_N[18], abs=1e-3), "by its own errors"
    best, _ = ranked(run, propose=8, all_singles=False, baseline="one-hot ridge", sites="5,7,16")
    assert "--kappa has no effect" in capsys.readouterr().err
    chosen = [{m.position: m.mutant for m in parse_variant(row["mutant"])} for row in best]
    letters = [[STANDARD.index(one.get(n, WT[n])) for n in SITES] for one in chosen]
    assert np.mean([planted(np.array(one)) for one in letters]) > np.quantile(list(truth.values()), 0.9)
    with pytest.raises(InputError, match="zero_shot"):
        ranked(run, baseline="augmented")
    with pytest.raises(InputError, match="cross-validation"):
        ranked(run / "seed-0-fold-0", baseline="one-hot")
