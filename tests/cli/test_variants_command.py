"""The whole job on a laboratory's table as it comes: one command to a ranked list, every oddity told once."""

import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import esmshard, in_process
from scipy.stats import spearmanr

from esmshard.io.paths import shipped
from esmshard.vocab import STANDARD

SHIFT = 23
"""What the table's numbering is ahead of the protein's."""
CODES = "Ala Cys Asp Glu Phe Gly His Ile Lys Leu Met Asn Pro Gln Arg Ser Thr Val Trp Tyr"
HGVS = dict(zip(STANDARD, CODES.split(), strict=True))
SMALL = ("model.name=nano", "init=random", "task.zero_shot=false", "train.epochs=2", "task.hidden=8")


def _shifted(part: str) -> str:
    return f"{part[0]}{int(part[1:-1]) + SHIFT}{part[-1]}"


def _messy(path: Path) -> list[str]:
    """A table with everything in it that a spreadsheet does to one; the names of its good variants."""
    with open(shipped("data") / "variants" / "landscape.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mutant"] != "WT"]
    chosen = [rows[int(n)] for n in np.random.default_rng(0).permutation(len(rows))[:150]]
    lines = ["Mutation;Labor;score;Notiz", "WT;A;0,0131;Wildtyp"]
    for n, row in enumerate(chosen):
        parts = [_shifted(part) for part in row["mutant"].split(":")]
        name = (":", " / ", "+")[n % 3].join(parts)
        if n % 5 == 1:
            name = f"p.[{';'.join(HGVS[p[0]] + p[1:-1] + HGVS[p[-1]] for p in parts)}]"
        elif n % 11 == 3:
            name = name.lower()
        cell = f'"{name}"' if ";" in name else name
        lines.append(f"{cell};{'AB'[n % 2]};{row['score'].replace('.', ',')};{'' if n % 3 else 'ok'}")
        if n in (0, 50):
            lines.append(f"{parts[0] if len(parts) == 1 else ':'.join(parts)};B;0,0500;Wiederholung")
        if n == 30:
            lines += ["", ";;;"]
    lines += ["K35*;A;-3,1;Stopp", "K35W;A;;leer", ";A;0,3;ohne Namen", "A99G;B;0,2;falsch", "S24S;A;0,02;synonym"]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n")
    return [row["mutant"] for row in chosen]


def within_folds(rows: Sequence[Mapping[str, Any]], column: str) -> float:
    """The mean of the correlations of the folds, weighted by their rows; folds without an order do not count."""
    total, weight = 0.0, 0
    for fold in {row["fold"] for row in rows}:
        pairs = [(float(row[column]), float(row["measured"])) for row in rows if row["fold"] == fold]
        x_N, y_N = np.array(pairs).T
        if np.ptp(x_N) > 0 and np.ptp(y_N) > 0:
            total, weight = total + len(pairs) * spearmanr(x_N, y_N).statistic, weight + len(pairs)
    return total / weight


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str, list[str]]:
    """The run's directory, what the command printed, and the good variants."""
    directory = tmp_path_factory.mktemp("laboratory")
    names = _messy(directory / "messy.csv")
    (directory / "wt.fasta").write_text((shipped("data") / "variants" / "wild_type.fasta").read_text())
    given = ("data.table=messy.csv", "data.wild_type=wt.fasta", "out=run", *SMALL)
    done = esmshard("finetune", "variants", *given, "--folds", "3", cwd=directory, timeout=600)
    assert done.returncode == 0, done.stderr
    return directory, done.stdout, done.stderr, names


def test_what_a_run_leaves(made: tuple[Path, str, str, list[str]]) -> None:
    directory, printed, _, names = made
    run = directory / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["runs"] == [f"seed-0-fold-{k}" for k in range(3)]
    assert summary["verdict"] in printed
    table = summary["table"]
    assert (table["offset"], table["rows"], table["rows_left_out"]) == (-SHIFT, 158, 5)
    assert table["variants_in_no_set"] == table["variants"] - summary["joint"]["variants"] > 0
    told = " ".join(table["notices"])
    for what in (
        "when shifted by -23, which was done",
        "with a stop codon",
        "averaged 2 variants",
        "A99G (the wild type has K)",
    ):
        assert what in told
    for name in summary["runs"]:
        versions = json.loads((run / name / "versions.json").read_text())
        assert versions["data"]["train"]["notices"] == table["notices"]
        assert json.loads((run / name / "model" / "esmshard.json").read_text())["facts"]["offset"] == -SHIFT
        assert (
            "The positions of the table -23 are those of the wild type"
            in (run / name / "model" / "README.md").read_text()
        )
    methods = ["fine-tuned", "one-hot ridge", "frozen embedding ridge"]
    assert list(summary["joint"]["metrics"]) == methods
    assert summary["joint"]["metrics"]["one-hot ridge"]["value"] is None, "it says the same of all variants of a fold"
    with open(run / "variants.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:4] == ["Mutation", "Labor", "score", "Notiz"]
    assert len(rows) == 1 + 150 + 2 + 5  # every row of the table, but the blank ones
    assert {row["Notiz"]: row["left out because"] for row in rows if not row["variant"]} == {
        "Stopp": "a stop codon",
        "leer": "without a value in 'score'",
        "ohne Namen": "an empty cell",
        "falsch": "A99G (the wild type has K)",
        "synonym": "a synonymous change",
    }
    assert {row["left out because"] for row in rows if row["variant"]} == {""}
    assert {row["variant"] for row in rows} - {""} == {"WT", *names}
    tested = {row["variant"]: int(row["fold"]) for row in rows if row["fold"]}
    position = {name: {int(part[1:-1]) for part in name.split(":")} for name in tested if name != "WT"}
    for fold in range(3):
        file = run / f"seed-0-fold-{fold}" / "model" / "seen_in_training.txt"
        assert sorted(file.read_text().split()) == sorted(name for name in tested if tested[name] != fold)
        here = set().union(*(position[n] for n in position if tested[n] == fold))
        others = set().union(*(position[n] for n in position if tested[n] != fold))
        assert here
        assert not here & others
    once = list({row["variant"]: row for row in rows if row["fold"]}.values())  # replicates were averaged
    for method, column in (("fine-tuned", "predicted"), ("frozen embedding ridge", "frozen embedding ridge")):
        found = summary["joint"]["metrics"][method]
        assert found["value"] == pytest.approx(within_folds(once, column), abs=1e-4)
        assert found["low"] < found["value"] < found["high"]
    left = [row for row in rows if row["variant"] and not row["fold"]]  # doubles whose positions fall apart
    assert left
    assert all(row["measured"] and not row["predicted"] for row in left)
    curve = json.loads((run / "learning_curve.json").read_text())
    assert [point["variants"] for point in curve["points"]] == sorted({p["variants"] for p in curve["points"]})
    assert len(curve["points"]) == 3


def test_the_ranked_list(made: tuple[Path, str, str, list[str]]) -> None:
    with open(made[0] / "run" / "ranked.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 19 * 192
    assert [int(row["rank"]) for row in rows] == list(range(1, len(rows) + 1))
    values = [float(row["prediction"]) for row in rows]
    assert values == sorted(values, reverse=True)
    assert max(float(row["disagreement of models"]) for row in rows) > 0
    singles = {name for name in made[3] if ":" not in name}
    assert {row["mutant"] for row in rows if row["measured"]} == singles
    assert all(row["mutant in table"] == _shifted(row["mutant"]) for row in rows), "what primers are ordered by"
    told = json.loads((made[0] / "run" / "ranked.csv.json").read_text())
    assert told["offset"] == -SHIFT
    assert told["verdict"] == json.loads((made[0] / "run" / "summary.json").read_text())["verdict"]
    seen = {row["mutant"] for row in rows if row["seen in training"] == "yes"}
    assert seen == {row["mutant"] for row in rows if row["out-of-fold prediction"]} == singles


def test_more_of_the_same_protein_is_predicted_from_a_table(made: tuple[Path, str, str, list[str]]) -> None:
    directory = made[0]
    (directory / "more.csv").write_text("id\tmutant\nfirst\tS24A\nsecond\tS24*\nthird\tp.Ser24Trp\n" + "".join(
        f"n{k}\t{_shifted(name)}\n" for k, name in enumerate(n for n in made[3] if ":" not in n)))  # fmt: skip
    done = in_process("predict", "run", "more.csv", "-o", "out.csv", cwd=directory)
    assert done.returncode == 0, done.stderr
    with open(directory / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *("id", "mutant", "mutant in wild type", "prediction", "low 90%", "high 90%"),
        *("disagreement of models", "rank", "out-of-fold prediction", "seen in training", "sites varied in training"),
        "not ranked because",
    ]
    assert {row["id"] for row in rows if not row["rank"]} == {"second"}
    with open(directory / "run" / "ranked.csv", newline="") as file:
        ranked = {row["mutant"]: row["prediction"] for row in csv.DictReader(file)}
    assert next(row for row in rows if row["id"] == "first")["prediction"] == ranked["S1A"]


def test_the_table_of_the_run_is_no_test_of_it(made: tuple[Path, str, str, list[str]]) -> None:
    """The correlation is that of the run's folds."""
    directory = made[0]
    done = in_process("predict", "run", "messy.csv", "-o", "same.csv", cwd=directory)
    assert done.returncode == 0, done.stderr
    with open(directory / "same.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["rank"]]
    tested = [row for row in rows if row["out-of-fold prediction"]]
    seen = json.loads((directory / "same.csv.json").read_text())["compared"]["seen_in_training"]
    assert seen["rows"] == sum(row["seen in training"] == "yes" for row in rows)
    assert seen["rows_out_of_fold"] == len(tested)
    with open(directory / "run" / "variants.csv", newline="", encoding="utf-8") as file:
        fold = {row["Mutation"]: row["fold"] for row in csv.DictReader(file)}
    tested = [row | {"measured": row["score"].replace(",", "."), "fold": fold[row["Mutation"]]} for row in tested]
    rho = within_folds(tested, "out-of-fold prediction")
    assert seen["spearman_out_of_fold"]["value"] == pytest.approx(rho, abs=1e-4)
    assert f"Spearman with score {rho:.3f} [" in done.stderr


def test_a_batch_to_measure_next(made: tuple[Path, str, str, list[str]]) -> None:
    directory = made[0]
    done = in_process("predict", "run", "--all-singles", "--propose", "10", "-o", "next.csv", cwd=directory)
    assert done.returncode == 0, done.stderr
    with open(directory / "next.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["mutant"] for row in rows}) == 10
    assert not {row["mutant"] for row in rows} & set(made[3])
    assert all(row["mutant in table"] == _shifted(row["mutant"]) for row in rows)
    told = json.loads((directory / "next.csv.json").read_text())
    assert told["verdict"] == json.loads((directory / "run" / "summary.json").read_text())["verdict"]
    assert told["verdict"] in done.stderr


def test_baselines_rank_as_they_did_in_the_folds(made: tuple[Path, str, str, list[str]]) -> None:
    """Fitted to all variants, they agree with the measured values better than those of the folds on their test sets."""
    directory = made[0]
    with open(directory / "run" / "variants.csv", newline="", encoding="utf-8") as file:
        known = {row["variant"]: row for row in csv.DictReader(file) if row["predicted"]}
    for name, column in (("one-hot", "one-hot ridge"), ("embedding", "frozen embedding ridge")):
        done = in_process("predict", "run", "--all-singles", "--with", name, "-o", f"{name}.csv", cwd=directory)
        assert done.returncode == 0, done.stderr
        with open(directory / f"{name}.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["mutant"] in known]
        assert {row["mutant"]: row["out-of-fold prediction"] for row in rows} == {
            row["mutant"]: known[row["mutant"]][column] for row in rows
        }
        measured = [float(row["measured"]) for row in rows]
        tested = spearmanr([float(row["out-of-fold prediction"]) for row in rows], measured).statistic
        assert spearmanr([float(row["prediction"]) for row in rows], measured).statistic > max(tested, 0.3)


def test_mistakes_are_one_sentence(made: tuple[Path, str, str, list[str]]) -> None:
    table = ("finetune", "variants", "data.table=messy.csv")
    for arguments, token in (
        ((*table, "data.wild_type=no.fasta", *SMALL), "no.fasta"),
        ((*table, "data.wild_type=wt.fasta", "data.offset=5", *SMALL), "set data.offset=-23"),
        (("predict", "run", "-o", "x.csv"), "--all-singles or --propose"),
        (("evaluate", "run/seed-0-fold-0/model", "messy.csv", "-o", "e"), "predict MODEL TABLE"),
    ):
        done = in_process(*arguments, cwd=made[0])
        assert done.returncode in (1, 2)
        assert token in done.stderr
        assert done.stderr.count("error:") == 1


def test_two_processes_learn_the_same(tmp_path: Path) -> None:
    """The wild type goes through the model in every micro-batch of every process; the step is the same mathematics."""
    _messy(tmp_path / "messy.csv")
    shutil.copy(shipped("data") / "variants" / "wild_type.fasta", tmp_path / "wt.fasta")
    given = ["data.table=messy.csv", "data.wild_type=wt.fasta", "data.folds=3", "data.fold=0", "task.pool=sites"]
    given += [*SMALL[:-2], "train.epochs=null", "train.steps=4", "task.hidden=8", "task.dropout=0", "optim.lr=1e-2"]
    losses = []
    for command, more in ((in_process, ()), (esmshard, ("--nproc", "2"))):
        done = command("finetune", "variants", *given, "batch.sequences=7", f"out=run-{len(more)}", *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = [
            json.loads(line) for line in (tmp_path / f"run-{len(more)}" / "metrics.jsonl").read_text().splitlines()
        ]
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert len(losses[0]) > 4  # steps and validations
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][0] != pytest.approx(losses[0][3], rel=1e-3)
