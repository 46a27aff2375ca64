"""Runs of task `pair` as a user types them: equal on one and two ranks, predicted in any order, scored by class."""

import csv
import json
import random
from pathlib import Path

import pytest
from command import esmshard, in_process

from esmshard.data.splits.recipe_splits import open_split
from esmshard.recipe import recipe_file
from esmshard.tasks.registry import new_task

RECIPE = """\
task: {name: pair, kind: number, dropout: 0.3}
model: {name: nano}
init: random
data: {train: pairs.fasta, valid: pairs.fasta, test: pairs.fasta, long: full}
batch: {global_tokens: 400, tokens_per_rank: 200}
optim: {lr: 1.0e-3, head_lr: 1.0e-2}
train: {steps: 4, eval_every: 4}
parallel: {precision: fp32}
out: run
"""
SEEN, NEW = [f"old{n}" for n in range(12)], [f"new{n}" for n in range(12)]


def write_pairs(path: Path) -> dict[str, str]:
    """54 pairs of 24 proteins: of the 24 test pairs, 12 have two training sequences, six have one, and six none."""
    draw = random.Random(0)
    protein = {name: "".join(draw.choices("ACDEFGHIKLMNPQRSTVWY", k=draw.randint(8, 30))) for name in SEEN + NEW}
    sets = {"train": [(SEEN[n], SEEN[(n + far) % 12]) for n in range(12) for far in (1, 2)]}
    sets["valid"] = [(SEEN[n], NEW[n]) for n in range(6)]
    sets["test"] = [(SEEN[n], SEEN[(n + 3) % 12]) for n in range(12)]
    sets["test"] += [(NEW[n], SEEN[n]) for n in range(6)] + [(NEW[n], NEW[n + 6]) for n in range(6)]
    records = {f"{one}-{other}": (split, one, other) for split, some in sets.items() for one, other in some}
    with open(path, "w", encoding="utf-8") as file:
        for name, (split, one, other) in records.items():
            target = abs(len(protein[one]) - len(protein[other]))
            file.write(f">{name} TARGET={target} SET={split}\n{protein[one]}:{protein[other]}\n")
    return {name: f"{protein[one]}:{protein[other]}" for name, (_, one, other) in records.items()}


def rows(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def losses(run: str) -> list[float]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_from_training_to_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sequences = write_pairs(tmp_path / "pairs.fasta")
    Path("r.yaml").write_text(RECIPE)
    one, two = in_process("finetune", "r.yaml"), esmshard("finetune", "r.yaml", "--nproc", "2", "out=two")
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    assert len(losses("run")) == 4 + 1
    assert losses("run") == pytest.approx(losses("two"), abs=1e-4)

    classes = "24 test pairs 0 are training pairs, in either order; 12 have both sequences in training pairs (C1)"
    assert classes in one.stderr
    assert "linker" not in one.stderr
    evaluation = json.loads(Path("run/evaluation.json").read_text())
    assert any(classes in sentence for sentence in evaluation["leakage"])
    groups = evaluation["groups"]
    assert {name: group["records"] for name, group in groups.items()} == {"C1": 12, "C2": 6, "C3": 6}
    assert set(groups["C3"]["metrics"]) == set(evaluation["metrics"])
    assert groups["C1"]["metrics"]["fine-tuned"]["RMSE"] != groups["C3"]["metrics"]["fine-tuned"]["RMSE"]
    assert "fine-tuned, C3: 6" in one.stdout
    assert evaluation["interval"].startswith("95% percentile bootstrap over sequences")
    scored = rows("run/per_protein.csv")
    assert list(scored[0])[:6] == ["id", "length", "length_a", "length_b", "block", "group"]
    lengths = [len(chain) for chain in sequences[scored[0]["id"]].split(":")]
    assert [int(scored[0][key]) for key in ("length", "length_a", "length_b")] == [sum(lengths), *lengths]

    Path("turned.fasta").write_text(
        "".join(f">{name}\n{':'.join(sequences[name].split(':')[::-1])}\n" for name in sequences)
    )
    for fasta, out in (("pairs.fasta", "x.csv"), ("turned.fasta", "y.csv")):
        done = in_process("predict", "run/model", fasta, "-o", out)
        assert done.returncode == 0, done.stderr
        assert "linker" not in done.stderr
    straight, turned = rows("x.csv"), rows("y.csv")
    assert list(straight[0]) == ["id", "length_a", "length_b", "TARGET"]
    assert [row["id"] for row in straight] == list(sequences)
    for a, b in zip(straight, turned, strict=True):
        assert (a["id"], a["length_a"], a["length_b"]) == (b["id"], b["length_b"], b["length_a"])
        assert float(a["TARGET"]) == pytest.approx(float(b["TARGET"]), rel=1e-5)
    predicted = {row["id"]: float(row["TARGET"]) for row in straight}
    assert [predicted[row["id"]] for row in scored] == pytest.approx([float(row["prediction"]) for row in scored], 1e-4)
    assert len({f"{value:.4f}" for value in predicted.values()}) > 20

    assert in_process("report", "run").returncode == 0
    assert "C3 (6): fine-tuned" in Path("run/report.html").read_text()

    Path("one.fasta").write_text(">a\nMKT:ACD\n>b\nMKTAYIAK\n")
    refused = in_process("predict", "run/model", "one.fasta", "-o", "z.csv")
    assert refused.returncode == 1
    assert "record 'b' has 1 chain, and a pair has two; write its sequence as A:B" in refused.stderr
    assert not Path("z.csv").exists()


def test_folds_keep_both_orders_of_a_pair_together(tmp_path: Path) -> None:
    sequences = write_pairs(tmp_path / "all.fasta")
    with open(tmp_path / "pairs.fasta", "w", encoding="utf-8") as file:
        for n, (name, pair) in enumerate(sequences.items()):
            turned = ":".join(pair.split(":")[::-1])
            file.write(f">{name} TARGET={n}\n{pair}\n>{name}-turned TARGET={n}\n{turned}\n")
    (tmp_path / "r.yaml").write_text(RECIPE)
    tested: list[str] = []
    for fold in range(3):
        recipe = recipe_file.load(tmp_path / "r.yaml", ["data.folds=3", f"data.fold={fold}"])
        test = open_split(recipe, "test", new_task(recipe.task, {}).labels)
        names = {test.id(n) for n in range(len(test))}
        assert names == {name.removesuffix("-turned") + end for name in names for end in ("", "-turned")}
        tested += names
    assert len(tested) == len({*tested}) == 2 * len(sequences)
