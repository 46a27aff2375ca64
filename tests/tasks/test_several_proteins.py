"""Variants of several proteins in one table: mixed batches, folds of similar proteins, and scores within proteins."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import in_process
from scipy.stats import spearmanr
from test_variant_task import NANO, POOLS, UNIT, model, trunk  # noqa: F401

from esmshard.batch import pack
from esmshard.data.batching.loader import Example, Examples
from esmshard.data.mutations import parse_name, wild_type_of
from esmshard.data.splits.recipe_splits import open_split
from esmshard.data.variants import read_variants
from esmshard.errors import InputError, UsageError
from esmshard.model.families.esm2 import ESM2
from esmshard.model.finetuner import FineTuner
from esmshard.predict.zero_shot import score
from esmshard.recipe import recipe_file
from esmshard.tasks.variant_baselines import FROZEN, ONE_HOT, SCORE
from esmshard.tasks.variants import VariantSettings, VariantTask
from esmshard.vocab import decode, encode

WT = {"a": "MKTAYIAKQRQISFVKSHFSRQLE", "b": "GGSVLLPAMW:KKLLE", "c": "MKTAYIAKQRQISFV"}
NAMES = ("a/K2A", "b/V4A:K11E", "c/K2A", "b/WT", "a/WT", "a/E24P:T3V", "c/Q9R", "b/E15D", "a/Q9R", "c/V15A")


def task(**given: Any) -> VariantTask:
    facts = {"targets": ["y"], "lower_is_better": [], "scales": [UNIT], "proteins": WT, "linker": 3}
    return VariantTask(VariantSettings(name="variant", **given), facts)


def example(name: str, value: float = 0.0) -> Example:
    protein, mutations = parse_name(name)
    tokens = encode(wild_type_of(WT[protein]).mutated(mutations), 3)
    return Example(name, tokens, {"target": np.array([value], np.float32)})


@pytest.mark.parametrize("pool", POOLS)
def test_a_variant_says_the_same_beside_those_of_other_proteins(trunk: ESM2, pool: str) -> None:  # noqa: F811
    made = task(pool=pool, hidden=8)
    found = model(trunk, made)
    asked = [made.question(example(name)) for name in NAMES]
    together, alone = np.stack(found.outputs(asked)), np.concatenate([found.outputs([one]) for one in asked])
    assert together == pytest.approx(alone, abs=1e-5)
    assert len(np.unique(together.round(4))) >= len(NAMES) - 1


def test_metrics_are_means_over_proteins() -> None:
    made, rng = task(), np.random.default_rng(0)
    targets, outputs = rng.normal(size=len(NAMES)), rng.normal(size=len(NAMES))
    rows = [
        made.score(np.array([x], np.float32), made.inputs(example(name, y)).target)
        for name, x, y in zip(NAMES, outputs, targets, strict=True)
    ]
    of_protein = {}
    for protein in WT:
        members = [n for n, name in enumerate(NAMES) if name.startswith(protein)]
        of_protein[protein] = spearmanr(outputs[members], targets[members]).statistic
    assert made.summary(rows)["Spearman"] == pytest.approx(np.mean(list(of_protein.values())), abs=1e-6)
    assert made.averages_units


def test_baselines_of_several_proteins(trunk: ESM2) -> None:  # noqa: F811
    """They are those of each protein, and letters are counted, since positions do not correspond."""
    made = task()
    base = model(trunk, made)
    examples = [example(name, n % 7) for n, name in enumerate(NAMES)]
    known = made.baselines(examples, base)
    found: Any = made.baseline_outputs(examples, known, base)
    mean, deviation = known["score_scale"]
    for protein in ("a", "c"):
        members = [n for n, name in enumerate(NAMES) if name.startswith(protein)]
        variants = [parse_name(NAMES[n])[1] for n in members]
        expected = score(trunk, WT[protein], variants, "wild-type-marginals")
        scores = np.stack([found[SCORE][n] for n in members])[:, 0] * deviation + mean
        assert scores == pytest.approx(expected, abs=1e-4)
    same = {name: float(values[0]) for name, values in zip(NAMES, found[ONE_HOT], strict=True)}
    assert same["a/K2A"] == same["c/K2A"] != same["a/Q9R"] == same["c/Q9R"]
    assert len(np.unique(np.stack(found[FROZEN]))) >= len(NAMES) - 1, "both wild types say the bias"


AMINO = "ACDEFGHIKLMNPQRSTVWY"
HYDROPHOBIC = dict(zip(AMINO, (1.8, 2.5, -3.5, -3.5, 2.8, -0.4, -3.2, 4.5, -3.9, 3.8, 1.9, -3.5, -1.6, -3.5, -4.5, -0.8,
                               -0.7, 4.2, -0.9, -1.3), strict=True))  # fmt: skip


def write_proteins(directory: Path) -> None:
    """12 proteins with 15 variants each. Proteins 0 and 1 differ in one residue. Mutations to polar residues harm."""
    rng, lines, records = np.random.default_rng(0), ["name,mutant,y"], []
    for k in range(12):
        sequence = "".join(rng.choice(list(AMINO), 40))
        if k == 1:
            first = records[0].split()[1]
            sequence = first[:20] + ("A" if first[20] != "A" else "G") + first[21:]
        records.append(f">p{k}\n{sequence}\n")
        lines.append(f"p{k},WT,0")
        for place in rng.choice(40, 14, replace=False):
            letter = rng.choice([letter for letter in AMINO if letter != sequence[place]])
            change = HYDROPHOBIC[letter] - HYDROPHOBIC[sequence[place]] + rng.normal()
            lines.append(f"p{k},{sequence[place]}{place + 1}{letter},{change:.3f}")
    (directory / "v.csv").write_text("\n".join(lines) + "\n")
    (directory / "wt.fasta").write_text("".join(records))


GIVEN = (
    *("model.name=nano", "init=random", "data.table=v.csv", "data.wild_type=wt.fasta", "data.protein=name"),
    *("task.zero_shot=false", "task.hidden=0", "adapt.method=probe", "--folds", "4", "out=run"),
)


def test_a_table_of_several_proteins(tmp_path: Path) -> None:
    write_proteins(tmp_path)
    done = in_process("finetune", "variants", *GIVEN, "--report", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    with open(tmp_path / "run" / "proteins.csv", newline="") as file:
        proteins = {row["protein"]: row for row in csv.DictReader(file)}
    assert len(proteins) == 12
    assert proteins["p0"]["fold"] == proteins["p1"]["fold"], "similar proteins are in one fold"
    assert "12 proteins in 11 clusters" in " ".join(summary["table"]["notices"])
    with open(tmp_path / "run" / "variants.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 180
    each = []
    for name, of_protein in proteins.items():
        members = [row for row in rows if row["name"] == name]
        assert {row["fold"] for row in members} == {of_protein["fold"]}
        pairs = np.array([[float(row["predicted"]), float(row["measured"])] for row in members])
        each.append(spearmanr(*pairs.T).statistic)
        assert float(of_protein["Spearman of fine-tuned"]) == pytest.approx(each[-1], abs=1e-4)
    joint = summary["joint"]
    ours = joint["metrics"]["fine-tuned"]
    assert ours["value"] == pytest.approx(np.mean(each), abs=1e-4)
    assert ours["low"] < ours["value"] < ours["high"]
    assert ours["high"] - ours["low"] == pytest.approx(2 * 1.96 * np.std(each) / 12**0.5, rel=0.25)
    assert (joint["unit"], joint["proteins"]) == ("protein", 12)
    assert joint["metrics"]["one-hot ridge"]["value"] > 0.5, "letters alone tell most of it"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "The first 12 of 12 proteins" in page

    # A protein of the table, without the prefix of its variants; and another protein.
    (tmp_path / "p0.fasta").write_text((tmp_path / "wt.fasta").read_text()[: len(">p0\n") + 41])
    (tmp_path / "new.fasta").write_text(f">new\n{WT['a']}\n")
    for fasta, measured in (("p0.fasta", 14), ("new.fasta", 0)):
        more = ("--all-singles", "-o", "r.csv", "--overwrite")
        done = in_process("predict", "run", "--wild-type", fasta, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        with open(tmp_path / "r.csv", newline="") as file:
            ranked = list(csv.DictReader(file))
        assert len(ranked) == 19 * (40 if measured else len(WT["a"]))
        assert sum(bool(row["measured"]) for row in ranked) == measured
        assert all(row["low 90%"] for row in ranked)
    for arguments, sentence in {
        ("--all-singles",): "learned several proteins; name the protein to rank, as --wild-type wt.fasta",
        ("--all-singles", "--wild-type", "p0.fasta", "--with", "one-hot"): "the baselines of a run of several proteins",
        ("--all-singles", "--wild-type", "wt.fasta"): "has 12 records",
    }.items():
        done = in_process("predict", "run", *arguments, "-o", "x.csv", cwd=tmp_path)
        assert done.returncode != 0
        assert sentence in done.stderr


WHOLE = "data.protein=null task.zero_shot=true task.head=likelihood task.context=sequence"


def test_sets_of_several_proteins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_proteins(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.tsv").write_text("".join(f"p{k // 3}\tp{k}\n" for k in range(12)))
    data = ["data.table=v.csv", "data.wild_type=wt.fasta", "data.protein=name", "data.folds=3", "data.fold=1"]
    data += ["model.name=nano", "init=random", "task.zero_shot=false"]

    def split(name: str, *more: str) -> Examples:
        recipe = recipe_file.load(recipe_file.resolve("variants"), [*data, *more])
        return open_split(recipe, name, VariantTask(recipe.task, {}).labels)

    def proteins(name: str, *more: str) -> set[str]:
        found = split(name, *more)
        return {parse_name(found.id(n))[0] for n in range(len(found))}

    for more in ((), ("data.clusters=c.tsv",)):
        sets = [proteins(name, *more) for name in ("train", "valid", "test")]
        assert sum(map(len, sets)) == len(set.union(*sets)) == 12, "no protein is in two sets"
    clusters = [{f"p{3 * k + n}" for n in range(3)} for k in range(4)]
    assert all(any(cluster <= part for part in sets) for cluster in clusters)
    assert proteins("train", "data.split=random") & proteins("test", "data.split=random")
    assert split("train").tokens.tolist() == [42] * len(split("train")), "each example may have another wild type"
    assert split("train", "task.pool=sites").tokens.tolist() == [84] * len(split("train"))
    for changes, sentence in {
        "task.head=gp": "gp learns one protein",
        "data.split=position": "position is for one protein",
        "data.tracks={3di: t.fasta}": "for variants of one protein",
        "data.protein=null data.split=protein": "name their column in data.protein",
        "data.protein=nothing": "name another column in data.protein",
        "data.indels=keep": "keep is for task.head likelihood with task.context sequence",
        f"{WHOLE} data.tracks.3di=t.fasta": "other lengths",
    }.items():
        with pytest.raises((InputError, UsageError), match=sentence):
            split("train", *([changes] if ": " in changes else changes.split(" ")))


def test_chains_are_joined_and_positions_count_through_all(
    trunk: ESM2,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = "MKTAYIAKQRQ", "GGSVLLPAMWKKLLE"
    names = [f"{letter}{n}C" for n, letter in enumerate(first + second, 1)]
    (tmp_path / "v.csv").write_text("".join(["mutant,y\n", *(f"{name},{n % 5}\n" for n, name in enumerate(names))]))
    (tmp_path / "wt.fasta").write_text(f">pair\n{first}:{second}\n")
    given = ["data.table=v.csv", "data.wild_type=wt.fasta", "data.folds=3", "data.fold=0", "data.join={linker: 4}"]
    recipe = recipe_file.load(recipe_file.resolve("variants-few"), [*given, "model.name=nano", "init=random"])
    task = VariantTask(recipe.task, {})
    train = open_split(recipe, "train", task.labels)
    task = task.learn(train)
    model = FineTuner(trunk, task.head(NANO)).eval()
    examples = [train.get(n) for n in range(len(train))]
    with torch.no_grad():
        tokens = encode(f"{first}:{second}", 4)
        logits_TV = trunk(pack([tokens]), logits_at=torch.arange(len(tokens))).logits_PV
    assert logits_TV is not None
    found = np.concatenate(model.outputs([task.question(one) for one in examples]))
    for one, value in zip(examples, found, strict=True):
        place = int(one.id[1:-1])
        assert decode(one.tokens) == ":".join(
            (f"{first}{second}"[: place - 1] + "C" + f"{first}{second}"[place:])[a:b] for a, b in ((0, 11), (11, 26))
        )
        at = place if place <= len(first) else place + 4
        assert value == pytest.approx(float(logits_TV[at, encode("C")[1]] - logits_TV[at, tokens[at]]), abs=1e-4)
    (tmp_path / "s.csv").write_text(f"sequence\n{first}:{second[:-1]}A\n")
    again = read_variants(tmp_path / "s.csv", wild_type=tmp_path / "wt.fasta", targets=None)
    assert again.names() == ["E26A"]
    long = ["data.long=window", "data.max_length=20"]
    with pytest.raises(InputError, match="a window has one chain"):
        open_split(recipe_file.load(recipe_file.resolve("variants"), [*given, *long]), "train", task.labels)
