"""Variants that a run knows already: numbered as its table, tested out of fold, and the wild type itself."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from variant_models import NAMES, WT, facts, write_run

from esmshard.data.variants.substitutions import name_of, parse_variant, renumbered
from esmshard.errors import InputError, UsageError
from esmshard.predict.variant_ranking import predict

AHEAD = 8
"""What the wild type's numbering is ahead of the table's."""
SEEN = NAMES[:20]
"""Of ten positions, from which on there is an interval."""


def in_table(name: str) -> str:
    return name_of(renumbered(parse_variant(name), -AHEAD))


def variants_csv(predicted: dict[str, float]) -> str:
    lines = ["mutant,y,variant,fold,measured,predicted,sd,one-hot ridge,zero-shot,left out because"]
    values = np.random.default_rng(0).normal(size=len(predicted))
    for (name, value), measured in zip(predicted.items(), values, strict=True):
        lines.append(f"{name},{measured:g},{name},0,{measured:g},{value:g},,1,{-value:g},")
    return "\n".join([*lines, "WT,1.5,WT,0,1.5,1.4,,1,0,", "A4*,3,,,,,,,,a stop codon"]) + "\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose tables count as the wild type does, and otherwise; and one that does not know what it has seen."""
    found = tmp_path_factory.mktemp("runs")
    said = dict(zip(SEEN, np.random.default_rng(1).normal(size=len(SEEN)).tolist(), strict=True))
    joint = {"differences": {"one-hot ridge": {}, "zero-shot": {}}}
    for name, offset, seen in (("plain", 0, [*SEEN, "WT"]), ("shifted", AHEAD, [*SEEN, "WT"]), ("unknown", 0, None)):
        run = write_run(found / name, 3, facts(offset=offset), seen)
        (run / "variants.csv").write_text(variants_csv(said))
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(
            json.dumps({**summary, "joint": joint, "verdict": "It was worse than chance."})
        )
    return found


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rank(run: Path, text: str | None, **given: Any) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    """Rows of the output by their first cell, and the facts beside it."""
    if text is not None:
        Path("v.csv").write_text(text)
    predict(str(run), None if text is None else Path("v.csv"), Path("out.csv"), overwrite=True, **given)
    with open("out.csv", newline="", encoding="utf-8") as file:
        rows = {next(iter(row.values())): row for row in csv.DictReader(file)}
    return rows, json.loads(Path("out.json").read_text())


# What training has seen


def test_variants_of_training_are_compared_out_of_fold(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(runs / "plain" / "variants.csv", newline="") as file:
        own = {row["variant"]: row for row in csv.DictReader(file) if row["variant"]}
    new = {name: float(n % 5) for n, name in enumerate(NAMES[20:])}
    measured = {name: float(own[name]["measured"]) for name in SEEN} | new
    rows, told = rank(runs / "plain", "mutant,y\n" + "".join(f"{name},{value}\n" for name, value in measured.items()))
    seen, unseen = told["compared"]["seen_in_training"], told["compared"]["unseen"]
    assert (seen["rows"], seen["rows_out_of_fold"], unseen["rows"]) == (20, 20, 4)
    apart = spearmanr([float(own[n]["predicted"]) for n in SEEN], [measured[n] for n in SEEN]).statistic
    assert seen["spearman_out_of_fold"]["value"] == pytest.approx(apart, abs=1e-9)
    assert seen["spearman_out_of_fold"]["low"] < apart < seen["spearman_out_of_fold"]["high"]
    assert seen["best_baseline"]["name"] == "zero-shot", "of the other one it is undefined"
    assert seen["best_baseline"]["spearman_out_of_fold"]["value"] == pytest.approx(-apart, abs=1e-9)
    plain = spearmanr([float(rows[n]["prediction"]) for n in new], list(new.values())).statistic
    assert unseen["spearman"]["value"] == pytest.approx(plain, abs=1e-9)
    assert unseen["sites_varied_in_training"] == {"all": 0, "some": 0, "none": 4}
    assert {rows[n]["seen in training"] for n in SEEN} == {"yes"}
    assert {rows[n]["seen in training"] for n in new} == {"no"}
    assert all(rows[n]["out-of-fold prediction"] == own[n]["predicted"] for n in SEEN)
    said = capsys.readouterr().err
    assert f"Spearman with y {apart:.3f} [" in said
    assert "out of fold over 20 rows that the models were trained on, each predicted by the models that had not" in said
    assert f"the best baseline there, zero-shot, has {-apart:.3f} [" in said
    assert f"Spearman with y {plain:.3f} (no interval, for an interval takes 10 variants) over 4 rows" in said
    assert "over 4 rows that no model was trained on" in said
    together = spearmanr([float(rows[n]["prediction"]) for n in measured], list(measured.values())).statistic
    assert f"{together:.3f}" not in said


def test_new_variants_of_known_positions_are_counted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, told = rank(runs / "plain", "mutant,y\nM1A,1\nK2A,2\nF14A,3\n")
    assert told["compared"]["unseen"]["sites_varied_in_training"]["all"] == 2
    assert "2 of them change only sites" in capsys.readouterr().err


def test_of_models_that_do_not_know_there_is_no_correlation(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, told = rank(runs / "unknown", "mutant,y\nM1A,1\nK2A,2\nF14A,3\n")
    said = capsys.readouterr().err
    assert "not given, because it is not recorded beside these models which of the 3 rows" in said
    assert not re.search(r"Spearman with y -?\d", said)
    assert told["compared"]["unseen"] is None
    assert {row["seen in training"] for row in rows.values()} == {""}


def test_the_verdict_stands_beside_proposals(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, told = rank(runs / "plain", None, propose=5)
    assert told["verdict"] == "It was worse than chance."
    assert "how far to trust these proposals: It was worse than chance." in capsys.readouterr().err
    assert not set(rows) & set(SEEN)
    assert told["proposed"]["positions"] == len({name[1:-1] for name in rows})
    assert told["proposed"]["count"] == len(rows) == 5
    assert "kappa x sd" in told["proposed"]["objective"]


# Numbering


def test_tables_are_numbered_as_that_of_the_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few rows that fit the wild type unshifted as well: the shift that the run knows is the one."""
    both = [n for n in range(AHEAD, len(WT)) if WT[n] == WT[n - AHEAD]]
    assert both, "a residue that is the same further on"
    name = f"{WT[both[0]]}{both[0] + 1 - AHEAD}W"  # as numbered by the table; it fits unshifted, too
    rows, told = rank(runs / "shifted", f"mutant\n{name}\n")
    assert rows[name]["mutant in wild type"] == f"{WT[both[0]]}{both[0] + 1}W"
    assert told["offset"] == AHEAD
    assert f"positions were shifted by +{AHEAD}, as those of the run's own table were" in capsys.readouterr().err
    assert told["notices"]
    plain, _ = rank(runs / "plain", f"mutant\n{WT[both[0]]}{both[0] + 1}W\n")
    assert rows[name]["prediction"] == next(iter(plain.values()))["prediction"]


def test_one_row_is_enough(runs: Path) -> None:
    rows, _ = rank(runs / "shifted", f"mutant\n{in_table('F14A')}\n")
    assert rows["F6A"]["mutant in wild type"] == "F14A"
    rows, told = rank(runs / "shifted", "mutant\nF14A\n", offset=0)
    assert "mutant in wild type" not in rows["F14A"]
    assert told["offset"] == 0
    assert "and those of the run's own table by +8" in " ".join(told["notices"])


def test_whole_sequences_have_no_numbering(runs: Path) -> None:
    changed = f"A{WT[1:]}"
    rows, told = rank(runs / "shifted", f"mutated_sequence\n{changed}\n")
    plain, _ = rank(runs / "plain", "mutant\nM1A\n")
    assert rows[changed]["prediction"] == plain["M1A"]["prediction"]
    assert told["offset"] == 0
    assert "mutant in wild type" not in rows[changed]


def test_a_table_that_contradicts_the_run_is_reported(runs: Path) -> None:
    with pytest.raises(InputError) as caught:
        rank(runs / "shifted", "mutant\nF14A\n")
    assert "1 of 1 mutations shifted by +8 do not fit" in str(caught.value)
    with pytest.raises(InputError, match=r"pass --offset -10 to other") as caught:
        rank(runs / "plain", "mutant\n" + "".join(f"{WT[n]}{n + 1 + 10}A\n" for n in range(24) if WT[n] != "A"))
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="--offset is added to the positions of a table"):
        rank(runs / "plain", None, offset=3)


def test_all_singles_stand_in_both_numberings(runs: Path) -> None:
    rows, told = rank(runs / "shifted", None)
    assert rows["M1A"]["mutant in table"] == "M-7A"
    assert rows["F14A"]["mutant in table"] == "F6A"
    assert told["offset"] == AHEAD
    assert any("'mutant in table' counts them as the table of the run does" in one for one in told["notices"])
    rows, told = rank(runs / "plain", None)
    assert "mutant in table" not in rows["M1A"]
    assert told["notices"] == []


# The wild type


def test_the_wild_type_was_measured_and_is_not_predicted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, told = rank(runs / "plain", "mutant,note\nWT,a\nA4A,b\nA4C,c\n")
    for name in ("WT", "A4A"):
        assert rows[name]["prediction"] == rows[name]["rank"] == ""
        assert rows[name]["not ranked because"] == "it is the wild type, whose measured value is 1.5"
    assert rows["A4C"]["rank"] == "1"
    assert told["wild_type"]["measured"] == 1.5
    assert isinstance(told["wild_type"]["predicted"], float)
    assert "not ranked, as it is the wild type, whose measured value is 1.5: 2 rows (line 2, line 3)" in (
        capsys.readouterr().err
    )


def test_each_row_says_why_it_is_not_ranked(runs: Path) -> None:
    names = [*NAMES, "A4*", "K2del", "A9C"]
    rows, _ = rank(runs / "plain", "mutant\n" + "\n".join(names) + "\n")
    assert rows["A4*"]["not ranked because"] == "a stop codon"
    assert "no substitution" in rows["K2del"]["not ranked because"]
    assert rows["A9C"]["not ranked because"] == "A9C (Q is there), another residue than the wild type has"
    assert {rows[name]["not ranked because"] for name in NAMES} == {""}


def test_unknown_residues_are_in_no_ranking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", 2, facts(protein="X" + WT[1:]))
    rows, told = rank(run, None)
    assert len(rows) == 19 * 23
    assert not [name for name in rows if name.startswith("X")]
    assert told["notices"] == ["not ranked, as the wild type has none of the 20 amino acids there: X1"]
    assert told["notices"][0] in capsys.readouterr().err
