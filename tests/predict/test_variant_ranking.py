"""Ranks of variants over the models of a cross-validation, and which to measure next."""

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from variant_models import NAMES, WT, facts, write_model, write_run

from esmshard.data.batching.loader import Example
from esmshard.data.variants.substitutions import parse_variant
from esmshard.errors import InputError, UsageError
from esmshard.predict import proposals
from esmshard.predict.variant_ranking import models_of, predict
from esmshard.tasks.finetuned import load_finetuned
from esmshard.tasks.variants import VariantTask
from esmshard.vocab import encode

LIMITS = ("low 90%", "high 90%")
SD = "disagreement of models"
BESIDE = ("rank", "out-of-fold prediction", "seen in training", "sites varied in training")

# Batches


def batch(values_MN: np.ndarray, count: int, kappa: float = 1.0) -> list[int]:
    """What is chosen where nothing but the predictions counts."""
    return proposals.choose(values_MN, [()] * values_MN.shape[1], count, kappa, diversity=0)


def dense(values_MN: np.ndarray, count: int, kappa: float) -> list[int]:
    """GP-BUCB with the whole covariance: half of it between variants is shared, half of each variance its own."""
    mean_N = values_MN.mean(0)
    spread_MN = values_MN - mean_N
    between_NN = spread_MN.T @ spread_MN / (len(values_MN) - 1)
    own_N = 0.5 * between_NN.diagonal()
    prior_NN = 0.5 * between_NN
    chosen: list[int] = []
    for _ in range(count):
        posterior_NN = prior_NN
        if chosen:
            k_NC = prior_NN[:, chosen]
            measured_CC = prior_NN[np.ix_(chosen, chosen)] + np.diag(own_N[chosen])
            posterior_NN = prior_NN - k_NC @ np.linalg.solve(measured_CC, k_NC.T)
        bound_N = mean_N + kappa * np.sqrt(np.maximum(posterior_NN.diagonal(), 0) + own_N)
        bound_N[chosen] = -np.inf
        chosen.append(int(bound_N.argmax()))
    return chosen


@pytest.mark.parametrize("kappa", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("models", [2, 5])
def test_batches_are_those_of_the_whole_covariance(models: int, kappa: float) -> None:
    rng = np.random.default_rng(models)
    shared = rng.normal(size=(models, 3)) @ rng.normal(size=(3, 40))
    values_MN = shared + 0.3 * rng.normal(size=(models, 40)) + 0.5 * rng.normal(size=40)
    found = batch(values_MN, 12, kappa)
    assert found == dense(values_MN, 12, kappa)
    assert len(set(found)) == 12
    bounds = values_MN.mean(0) + kappa * values_MN.std(0, ddof=1)
    assert found[0] == int(bounds.argmax())
    assert found != np.argsort(-bounds)[:12].tolist(), "it is not the plain upper bound"


def test_without_kappa_means_decide() -> None:
    values_MN = np.random.default_rng(0).normal(size=(4, 30))
    assert batch(values_MN, 10, 0.0) == np.argsort(-values_MN.mean(0))[:10].tolist()


def test_variants_on_which_models_err_together_are_one_question() -> None:
    """Ten are as uncertain as ten others, and have higher means; but the models say the same of all of them."""
    rng = np.random.default_rng(0)
    together = np.repeat([[-1.0], [1.0], [-1.0], [1.0]], 10, axis=1)
    apart = np.sign(rng.normal(size=(4, 10)))
    apart[2:] = -apart[:2]
    values_MN = np.concatenate([together + 0.05, apart - apart.mean(0)], axis=1)
    found = batch(values_MN, 10, 2.0)
    assert found[0] < 10
    assert sum(n < 10 for n in found) < 8
    assert sum(n < 10 for n in batch(values_MN, 10, 0.0)) == 10


def test_models_that_agree_leave_the_means() -> None:
    assert batch(np.array([[1.0, 3.0, 2.0]] * 3), 3, 5.0) == [1, 2, 0]


# Models and tables


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models of one target, of one of which less is better, and of two targets."""
    found = tmp_path_factory.mktemp("runs")
    write_run(found / "higher", 3, facts())
    write_run(found / "lower", 3, facts(lower=("y",)))
    write_run(found / "two", 2, facts("y", "kd", lower=("kd",)))
    write_run(found / "part", 2, facts(first=4, length=10))
    return found


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rank(run: Path, text: str | None, **given: Any) -> list[dict[str, str]]:
    table = None
    if text is not None:
        table = Path("v.csv")
        table.write_text(text)
    count = predict(str(run), table, Path("out.csv"), overwrite=True, **given)
    with open("out.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert count == len(rows)
    return rows


def said(run: Path, names: Sequence[str]) -> np.ndarray:
    """By each model of each variant, one at a time, [M, N, T]."""
    found = []
    for path in sorted(run.glob("*/model")):
        opened = load_finetuned(str(path))
        task = opened.task
        assert isinstance(task, VariantTask)
        each = []
        for name in names:
            residues = list(WT)
            for mutation in parse_variant(name):
                residues[mutation.position] = mutation.mutant
            part = "".join(residues)[task.facts["first"] :][: task.facts["length"]]
            each.append(task.predict(opened.model.outputs([task.question(Example("x", encode(part), {}))])[0]))
        found.append(np.stack(each))
    return np.stack(found)


def table(names: Sequence[str]) -> str:
    return "mutant,note\n" + "".join(f'{name},"of, {n}"\n' for n, name in enumerate(names))


def numbers(rows: list[dict[str, str]], column: str) -> list[float]:
    return [float(row[column]) for row in rows]


@pytest.mark.parametrize(("name", "sign"), [("higher", -1), ("lower", 1)])
def test_variants_stand_in_order_with_the_columns_of_their_table(runs: Path, name: str, sign: int) -> None:
    names = [*NAMES, "WT", "K2C:T3W"]
    rows = rank(runs / name, table(names))
    assert list(rows[0]) == ["mutant", "note", "prediction", *LIMITS, SD, *BESIDE, "not ranked because"]
    values = said(runs / name, names)[:, :, 0]
    mean, sd = values.mean(0), values.std(0, ddof=1)
    order = np.argsort(sign * mean, kind="stable")
    assert [row["mutant"] for row in rows] == [names[n] for n in order]
    assert [row["note"] for row in rows] == [f"of, {n}" for n in order]
    assert numbers(rows, "prediction") == pytest.approx(mean[order], abs=1e-3)
    assert numbers(rows, SD) == pytest.approx(sd[order], abs=1e-3)
    assert [row["rank"] for row in rows] == [str(n) for n in range(1, len(names) + 1)]
    assert sd.min() > 0.01


def test_the_correlation_with_measured_values_is_said(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = said(runs / "higher", NAMES).mean(0)[:, 0]
    measured = [*np.argsort(np.argsort(values))[:-3], "", "", ""]
    rows = "".join(f"{name},{value}\n" for name, value in zip(NAMES, measured, strict=True))
    rank(runs / "higher", "mutant,y\n" + rows)
    assert "Spearman with y 1.000 [1.000, 1.000] (95% over positions) over 21 rows that no" in capsys.readouterr().err
    rank(runs / "higher", table(NAMES))
    assert "Spearman" not in capsys.readouterr().err


def test_of_several_targets_the_first_is_ranked(runs: Path) -> None:
    rows = rank(runs / "two", table(NAMES))
    assert list(rows[0]) == [
        "mutant",
        "note",
        "prediction y",
        *(f"{limit} y" for limit in LIMITS),
        f"{SD} y",
        "prediction kd",
        f"{SD} kd",
        "rank",
        *("out-of-fold prediction y", "out-of-fold prediction kd", *BESIDE[2:], "not ranked because"),
    ]
    mean = said(runs / "two", [row["mutant"] for row in rows]).mean(0)
    assert numbers(rows, "prediction kd") == pytest.approx(mean[:, 1], abs=1e-3)
    assert numbers(rows, "prediction y") == sorted(numbers(rows, "prediction y"), reverse=True)


def test_rows_that_cannot_be_ranked_stand_at_the_end(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["A4*", *NAMES, "K2del", "A7A", NAMES[0]]
    rows = rank(runs / "higher", table(names))
    assert [row["mutant"] for row in rows[-2:]] == ["A4*", "K2del"]
    assert all(row[column] == "" for row in rows[-2:] for column in ("prediction", SD, "rank"))
    assert sorted(row["mutant"] for row in rows) == sorted(names)
    both = [row["prediction"] for row in rows if row["mutant"] == NAMES[0]]
    assert len(both) == 2
    assert len(set(both)) == 1
    (same,) = [float(row["prediction"]) for row in rows if row["mutant"] == "A7A"]
    assert same == pytest.approx(said(runs / "higher", ["WT"]).mean(), abs=1e-3)
    told = capsys.readouterr().err
    assert "stop codon" in told
    assert "'K2del' is no substitution" in told


def test_residues_that_the_model_does_not_see_are_not_ranked(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["K2C", "Y5C", "F14C", "V15C", "Y5C:V15C", "WT"]
    rows = rank(runs / "part", table(names))
    assert {row["mutant"] for row in rows[:3]} == {"Y5C", "F14C", "WT"}
    assert [row["mutant"] for row in rows[3:]] == ["K2C", "V15C", "Y5C:V15C"]
    mean = said(runs / "part", [row["mutant"] for row in rows[:3]]).mean(0)[:, 0]
    assert numbers(rows[:3], "prediction") == pytest.approx(mean, abs=1e-3)
    assert (
        "not ranked, as the model does not see the residue that it changes: 3 rows (line 2" in capsys.readouterr().err
    )
    assert len(rank(runs / "part", None)) == 19 * 10
    with pytest.raises(InputError, match="no row can be ranked, as the model does not see the residue that it changes"):
        rank(runs / "part", table(["K2C"]))


def test_all_single_substitutions_have_what_was_measured(runs: Path) -> None:
    (runs / "higher" / "variants.csv").write_text(
        "mutant,variant,fold,measured,predicted\nk2c,K2C,0,1.5,9\nT3W,T3W,,,\n"
    )
    rows = rank(runs / "higher", None)
    assert list(rows[0]) == ["mutant", "measured", "prediction", *LIMITS, SD, *BESIDE]
    assert len(rows) == len({row["mutant"] for row in rows}) == 19 * 24
    assert [(row["mutant"], row["measured"]) for row in rows if row["measured"]] == [("K2C", "1.5")]
    assert numbers(rows, "prediction") == sorted(numbers(rows, "prediction"), reverse=True)
    (runs / "higher" / "variants.csv").unlink()


def test_proposals_are_a_batch_of_what_was_not_measured(runs: Path) -> None:
    names = [*NAMES, "WT"]
    (path := runs / "lower" / "variants.csv").write_text(
        "mutant,variant,esmshard variant,esmshard fold,esmshard measured\n"
        + "".join(f"x,y,{name},0,2.5\n" for name in NAMES[:12])
    )
    rows = rank(runs / "lower", table(names), propose=5, kappa=1.5, diversity=0, sites="all")
    free = NAMES[12:]
    values_MN = -said(runs / "lower", free)[:, :, 0]  # less is better
    assert [row["mutant"] for row in rows] == [free[n] for n in dense(values_MN, 5, 1.5)]
    unlike = rank(runs / "lower", table(names), propose=5, kappa=1.5, diversity=9, sites="all")
    assert len({row["mutant"][1:-1] for row in unlike}) == 5, "no position twice"
    of_all = rank(runs / "lower", table(names))
    ranks = {row["mutant"]: row["rank"] for row in of_all}
    assert [row["rank"] for row in rows] == [ranks[row["mutant"]] for row in rows], "among all that were given"
    with pytest.raises(UsageError, match=r"--propose 13: only 12 of the variants .* yet; pass --propose 12"):
        rank(runs / "lower", table(names), propose=13, sites="all")
    path.unlink()


def test_no_variant_is_proposed_twice(runs: Path) -> None:
    twice = [name for name in NAMES[:6] for _ in range(2)]
    rows = rank(runs / "higher", table(twice), propose=6)
    assert len({row["mutant"] for row in rows}) == 6


def test_one_model_ranks_and_does_not_propose(runs: Path) -> None:
    alone = runs / "higher" / "seed-0-fold-1"
    assert models_of(str(alone)) == models_of(str(alone / "model")) == [alone / "model"]
    rows = rank(alone, table(NAMES))
    assert {row[SD] for row in rows} == {""}
    values = said(runs / "higher", [row["mutant"] for row in rows])[1, :, 0]
    assert numbers(rows, "prediction") == pytest.approx(values, abs=1e-3)
    with pytest.raises(
        UsageError, match=r"--propose needs several models, and .* has one; pass the run of a cross-validation"
    ):
        rank(alone, table(NAMES), propose=2)


def test_what_holds_no_model_of_variants(runs: Path, tmp_path: Path) -> None:
    assert models_of(str(runs / "higher")) == [runs / "higher" / f"seed-0-fold-{n}" / "model" for n in range(3)]
    assert models_of(str(tmp_path / "nowhere")) == models_of("esm2_t6_8M_UR50D") == []
    (tmp_path / "weights.pt").write_bytes(b"weights")
    assert models_of(str(tmp_path / "weights.pt")) == [], "a file is no run, and says what it is elsewhere"
    other = tmp_path / "other"
    other.mkdir()
    (other / "esmshard.json").write_text('{"recipe": {"task": {"name": "residue"}}}')
    assert models_of(str(other)) == []
    (other / "summary.json").write_text('{"task": "variant", "runs": ["seed-0"]}')
    with pytest.raises(InputError, match="there is no model; repeat the finetune command with --resume auto"):
        models_of(str(other))
    (other / "summary.json").write_text("{")
    with pytest.raises(InputError, match=r"summary\.json: damaged"):
        models_of(str(other))


def test_models_of_other_proteins_are_not_mixed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mixed", 1, facts())
    write_model(run / "b" / "model", 0, facts(protein=WT[::-1]))
    (run / "summary.json").write_text(json.dumps({"task": "variant", "runs": ["seed-0-fold-0", "b"]}))
    with pytest.raises(InputError, match="its runs are of different proteins or targets; fine-tune them again"):
        rank(run, None)


def test_mistakes(runs: Path) -> None:
    def refuse(kind: type[InputError], says: str, text: str, **given: Any) -> None:
        with pytest.raises(kind, match=re.escape(says)):
            rank(runs / "higher", text, **given)
        assert not Path("out.csv").exists()

    refuse(InputError, "the table has a column 'rank' already; rename it in the input", "mutant,rank\nK2C,1\n")
    refuse(InputError, "the table has a column 'low 90%' already", "mutant,low 90%\nK2C,1\n")
    refuse(InputError, "has no column 'name'", "mutant,rank\nK2C,1\n", mutant="name")
    refuse(InputError, "do not fit", table(["A2C", "A3C"]))
    with pytest.raises(UsageError, match=r"x\.txt: variants are ranked in a \.csv file"):
        predict(str(runs / "higher"), None, Path("x.txt"))
    Path("y.csv").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        predict(str(runs / "higher"), None, Path("y.csv"))
    assert Path("y.csv").read_text() == "mine"
