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

from esmshard.data.variants import read_variants
from esmshard.io.paths import shipped
from esmshard.vocab import STANDARD

SHIFT = 23
"""What the table's numbering is ahead of the protein's."""
CODES = "Ala Cys Asp Glu Phe Gly His Ile Lys Leu Met Asn Pro Gln Arg Ser Thr Val Trp Tyr"
HGVS = dict(zip(STANDARD, CODES.split(), strict=True))
SMALL = ("model.name=nano", "init=random", "task.zero_shot=false", "train.epochs=1", "task.hidden=8")


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


def table_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[str]]:
    """The run's directory, what the command printed, and the good variants."""
    directory = tmp_path_factory.mktemp("laboratory")
    names = _messy(directory / "messy.csv")
    (directory / "wt.fasta").write_text((shipped("data") / "variants" / "wild_type.fasta").read_text())
    given = ("data.table=messy.csv", "data.wild_type=wt.fasta", "out=run", *SMALL)
    done = esmshard("finetune", "variants", *given, "--folds", "3", cwd=directory, timeout=600)
    assert done.returncode == 0, done.stderr
    return directory, done.stdout, names


def test_what_a_run_leaves(made: tuple[Path, str, list[str]]) -> None:
    directory, printed, names = made
    run = directory / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["runs"] == [f"seed-0-fold-{k}" for k in range(3)]
    assert summary["verdict"] in printed
    table = summary["table"]
    assert (table["offset"], table["rows"], table["rows_left_out"]) == (-SHIFT, 158, 5)
    assert table["variants_in_no_set"] == table["variants"] - summary["joint"]["variants"] > 0
    assert [sentence.partition(" (")[0] for sentence in table["left_out"]][-1] == "1 row with a synonymous change"
    told = " ".join(table["notices"])
    for what in ("when shifted by -23, which was done", "with a stop codon", "averaged 2 variants"):
        assert what in told
    for name in summary["runs"]:
        versions = json.loads((run / name / "versions.json").read_text())
        assert versions["data"]["train"]["notices"] == table["notices"]
        assert json.loads((run / name / "model" / "esmshard.json").read_text())["facts"]["offset"] == -SHIFT
    methods = ["fine-tuned", "one-hot ridge", "frozen embedding ridge"]
    assert list(summary["joint"]["metrics"]) == methods
    assert summary["joint"]["metrics"]["one-hot ridge"]["value"] is None, "it says the same of all variants of a fold"
    rows = table_of(run / "variants.csv")
    assert list(rows[0])[:4] == ["Mutation", "Labor", "score", "Notiz"]
    assert len(rows) == 1 + 150 + 2 + 5  # every row of the table, but the blank ones
    assert {row["Notiz"]: row["left out because"] for row in rows if not row["variant"]} == {
        "Stopp": "a stop codon",
        "leer": "without a value in 'score'",
        "ohne Namen": "an empty cell",
        "falsch": "A99G (the wild type has K)",
        "synonym": "a synonymous change",
    }
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
    curve = json.loads((run / "learning_curve.json").read_text())
    assert [point["variants"] for point in curve["points"]] == sorted({p["variants"] for p in curve["points"]})
    assert len(curve["points"]) == 3


def test_a_dry_run_tells_how_the_tables_are_read(made: tuple[Path, str, list[str]]) -> None:
    given = ("data.table=[messy.csv, r2.csv]", "data.wild_type=wt.fasta", "data.target=[score]", "out=none")
    (made[0] / "r2.csv").write_text("mutant,score,well\nWT,3,A1\nS1A,2,A2\nS1*,1,A3\n")
    done = in_process("finetune", "variants", *given, *SMALL, "--dry-run", cwd=made[0])
    assert done.returncode == 0, done.stderr
    lines = [(line[:10].rstrip(), line[10:]) for line in done.stdout.splitlines()]
    text = {label: [content for other, content in lines if other == label] for label, _ in lines}
    assert text["table"][0].endswith("161 rows, 6 left out")
    assert any(content.startswith("2 rows with a stop codon (messy.csv line ") for content in text["left out"])
    assert [content[:15] for content in text["numbering"]] == ["messy.csv: -23 ", "r2.csv: nothing"]
    assert text["columns"][1] == "r2.csv: mutations in 'mutant', values in 'score'"
    assert text["wild type"] == ["3CS1_A, 192 residues, 1 chain"]
    assert text["aligned"][0].endswith(" 1")
    assert not (made[0] / "none").exists()


def test_the_ranked_list(made: tuple[Path, str, list[str]]) -> None:
    rows = table_of(made[0] / "run" / "ranked.csv")
    assert len(rows) == 19 * 192
    assert [int(row["rank"]) for row in rows] == list(range(1, len(rows) + 1))
    values = [float(row["prediction"]) for row in rows]
    assert values == sorted(values, reverse=True)
    assert max(float(row["disagreement of models"]) for row in rows) > 0
    singles = {name for name in made[2] if ":" not in name}
    assert {row["mutant"] for row in rows if row["measured"]} == singles
    assert all(row["mutant in table"] == _shifted(row["mutant"]) for row in rows), "what primers are ordered by"
    seen = {row["mutant"] for row in rows if row["seen in training"] == "yes"}
    assert seen == {row["mutant"] for row in rows if row["out-of-fold prediction"]} == singles


def test_a_batch_to_measure_next(made: tuple[Path, str, list[str]]) -> None:
    directory = made[0]
    done = in_process("predict", "run", "--all-singles", "--propose", "10", "-o", "next.csv", cwd=directory)
    assert done.returncode == 0, done.stderr
    rows = table_of(directory / "next.csv")
    assert len({row["mutant"] for row in rows}) == 10
    assert not {row["mutant"] for row in rows} & set(made[2])
    assert [row["well"] for row in rows] == [f"A{n}" for n in range(1, 11)]
    text = (directory / "next.csv").read_text().splitlines()  # the laboratory adds values
    (directory / "next.csv").write_text(
        "\n".join([f"{text[0]},y", *(f"{line},{n}" for n, line in enumerate(text[1:]))])
    )
    again = read_variants(directory / "next.csv", wild_type=directory / "wt.fasta", targets=["y"])
    assert again.names() == [row["mutant"] for row in rows]
    assert all(row["mutant in table"] == _shifted(row["mutant"]) for row in rows)
    assert json.loads((directory / "run" / "summary.json").read_text())["verdict"] in done.stderr


def test_combinations_to_measure_next(made: tuple[Path, str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    directory, files = made[0], list[bytes]()
    sites = f"{25 + SHIFT},{121 + SHIFT},{124 + SHIFT}"
    given = ("--combine", "3", "--from", "30", "--propose", "10", "--acquisition", "thompson", "--sites", sites)
    for name in ("a.csv", "b.csv"):
        done = in_process("predict", "run", *given, "-o", name, cwd=directory)
        assert done.returncode == 0, done.stderr
        files.append((directory / name).read_bytes())
    assert files[0] == files[1], "random choices have a seed"
    told = json.loads((directory / "a.csv.json").read_text())
    assert (told["combined"]["search"], len(told["combined"]["singles"])) == ("exhaustive", 30)
    variants = [[int(part[1:-1]) for part in row["mutant"].split(":")] for row in table_of(directory / "a.csv")]
    assert len(variants) == 10
    assert all(len({*places}) == len(places) >= 2 and {*places} <= {25, 121, 124} for places in variants)
    monkeypatch.setattr("esmshard.predict.proposals.MOST_PASSES", 100)
    given = ("--combine", "4", "--from", "10", "--with", "embedding", "-o", "c.csv")
    done = in_process("predict", "run", *given, cwd=directory)
    assert done.returncode == 0, done.stderr
    told = json.loads((directory / "c.csv.json").read_text())
    assert told["combined"]["search"] == "beam"
    assert told["rows"] == told["combined"]["predicted"] <= 100 < told["combined"]["combinations"]
    assert not told["additive"]
    assert "epistasis" not in done.stderr


def test_mistakes_are_one_sentence(made: tuple[Path, str, list[str]]) -> None:
    table = ("finetune", "variants", "data.table=messy.csv")
    for arguments, token in (
        ((*table, "data.wild_type=no.fasta", *SMALL), "no.fasta"),
        ((*table, "data.wild_type=wt.fasta", "data.offset=5", *SMALL), "set data.offset=-23"),
        (("predict", "run", "-o", "x.csv"), "--all-singles or --propose"),
        (("predict", "run", "--combine", "2", "--all-singles", "-o", "x.csv"), "pass one of them"),
        (("predict", "run", "--combine", "4", "--from", "200", "-o", "x.csv"), "a lower --combine"),
        (("evaluate", "run/seed-0-fold-0/model", "messy.csv", "-o", "e"), "predict MODEL TABLE"),
    ):
        done = in_process(*arguments, cwd=made[0])
        assert done.returncode in (1, 2)
        assert token in done.stderr
        assert done.stderr.count("error:") == 1


def test_two_processes_learn_the_same(tmp_path: Path) -> None:
    """The wild type goes through the model in every micro-batch of every process."""
    _messy(tmp_path / "messy.csv")
    shutil.copy(shipped("data") / "variants" / "wild_type.fasta", tmp_path / "wt.fasta")
    given = ["data.table=messy.csv", "data.wild_type=wt.fasta", "data.folds=3", "data.fold=0", "task.pool=sites"]
    given += [*SMALL[:-2], "train.epochs=null", "train.steps=4", "task.hidden=8", "task.dropout=0", "optim.lr=1e-2"]
    losses = []
    for command, more in ((in_process, ()), (esmshard, ("--nproc", "2"))):
        done = command("finetune", "variants", *given, "batch.sequences=7", f"out=run-{len(more)}", *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, (tmp_path / f"run-{len(more)}" / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert len(losses[0]) > 4  # steps and validations
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][0] != pytest.approx(losses[0][3], rel=1e-3)
