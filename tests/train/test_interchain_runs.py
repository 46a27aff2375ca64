"""Fine-tuning on contacts between chains: planted contacts are learned, and random contacts are not predicted."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from command import esmshard
from structure_texts import chain, cif, three

KEYS = "WYFH"
OTHERS = "AGSTDEKR"
LENGTHS = (26, 22)
RECIPE = """\
task: {{name: contact, channels: 16, blocks: 1}}
model: {{name: nano}}
init: random
data: {{train: train.fasta, valid: valid.fasta, test: test.fasta, join: {{linker: 3}}}}
batch: {{sequences: 16}}
optim: {{lr: 1.0e-3, head_lr: 3.0e-2}}
train: {{steps: {steps}, eval_every: {steps}}}
parallel: {{precision: fp32}}
out: {out}
"""


def write_complexes(directory: Path, name: str, count: int, seed: int, *, planted: bool) -> None:
    """Write pairs of chains with the letters of KEYS at random places. Four pairs of residues are in contact: equal
    letters of KEYS or, if not `planted`, random pairs. All other residues are at least 20 Angstrom apart.
    """
    rng = np.random.default_rng(seed)
    rows, seqs = [], []
    for _ in range(count):
        chains, keyed = [], []
        for length in LENGTHS:
            letters = rng.choice(list(OTHERS), length)
            keyed.append(rng.permutation(length)[: len(KEYS)])
            letters[keyed[-1]] = list(KEYS)
            chains.append("".join(letters))
        cb_L3 = 20.0 * np.arange(sum(LENGTHS))[:, None] * np.array([1, 0, 0])
        pairs = keyed if planted else [rng.permutation(length)[: len(KEYS)] for length in LENGTHS]
        for i, j in zip(*pairs, strict=True):
            cb_L3[LENGTHS[0] + j] = cb_L3[i] + [0, 5, 0]
        seqs.append(":".join(chains))
        rows.append(np.rint(cb_L3 * 10).astype(np.uint16))
    names = [f"{name}{n}" for n in range(count)]
    text = "".join(f">{n}\n{s}\n" for n, s in zip(names, seqs, strict=True))
    (directory / f"{name}.fasta").write_text(text)
    ends = np.arange(count + 1, dtype=np.int32) * sum(LENGTHS)
    np.savez(
        directory / f"{name}.npz", names=np.array(names), seqs=np.array(seqs), offsets=ends, cb_dA=np.concatenate(rows)
    )


def ran(*arguments: str | Path) -> str:
    """Run a command that must succeed, and return its stderr."""
    done = esmshard(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned the planted contacts."""
    directory = tmp_path_factory.mktemp("planted")
    for seed, (name, count) in enumerate((("train", 96), ("valid", 4), ("test", 12))):
        write_complexes(directory, name, count, seed, planted=True)
    (directory / "recipe.yaml").write_text(RECIPE.format(steps=90, out=directory / "run"))
    ran("finetune", directory / "recipe.yaml")
    return directory


def test_planted_contacts_between_chains_are_learned(run: Path) -> None:
    evaluation = json.loads((run / "run" / "evaluation.json").read_text())
    assert evaluation["columns"][-3:] == ["interchain P@L/5", "interchain P@L/10", "interchain AUPRC"]
    metrics = evaluation["metrics"]
    ours = metrics["fine-tuned"]["interchain P@L/5"]
    assert ours["value"] > 0.7
    assert metrics["fine-tuned"]["interchain AUPRC"]["value"] > 0.8
    assert ours["low"] > 10 * metrics["base rate"]["interchain P@L/5"]["value"]
    assert metrics["base rate"]["interchain AUPRC"]["value"] == pytest.approx(4 / (26 * 22))
    assert "interchain AUPRC" not in metrics["separation prior"]
    assert metrics["before fine-tuning"]["interchain AUPRC"]["value"] < 0.1
    rows = list(csv.DictReader((run / "run" / "per_protein.csv").read_text().splitlines()))
    assert [int(row["length"]) for row in rows] == [48] * 12
    assert all(float(row["interchain P@L/5"]) >= 0 for row in rows)


def test_random_contacts_are_not_predicted(run: Path, tmp_path: Path) -> None:
    write_complexes(tmp_path, "random", 12, 3, planted=False)
    ran("evaluate", run / "run" / "model", tmp_path / "random.fasta", "-o", tmp_path / "scores")
    metrics = json.loads((tmp_path / "scores" / "evaluation.json").read_text())["metrics"]["fine-tuned"]
    assert metrics["interchain P@L/5"]["value"] < 0.2
    assert metrics["interchain AUPRC"]["value"] < 0.2


def test_predicted_maps_are_of_the_residues_of_both_chains(run: Path) -> None:
    """The best pairs between the chains are the planted pairs, and the outputs know where the second chain begins."""
    out = run / "maps.npz"
    ran("predict", run / "run" / "model", run / "test.fasta", "-o", out, "--png", run / "png")
    texts = (run / "test.fasta").read_text().split()
    right = 0
    with np.load(out) as maps:
        assert maps.files == [f"test{n}" for n in range(12)]
        for name in maps.files:
            map_LL, (first, second) = maps[name], texts[texts.index(f">{name}") + 1].split(":")
            assert map_LL.shape == (48, 48)
            assert np.array_equal(map_LL, map_LL.T)
            between = map_LL[: LENGTHS[0], LENGTHS[0] :]
            best = {(int(k) // LENGTHS[1], int(k) % LENGTHS[1]) for k in np.argsort(-between, axis=None)[: len(KEYS)]}
            right += len(best & {(first.index(letter), second.index(letter)) for letter in KEYS})
    assert right > 0.7 * 12 * len(KEYS)
    lines = (run / "maps.npz.chains.tsv").read_text().splitlines()
    assert lines[:2] == ["id\tresidues\tjoin", "test0\t26,22\tlinker:3"]
    assert len(lines) == 13
    assert len(list((run / "png").glob("*.png"))) == 12
    (run / "single.fasta").write_text(">a\nMKTAYIAKQRQISFVKSHFSRQ\n")
    ran("predict", run / "run" / "model", run / "single.fasta", "-o", out, "--overwrite")
    assert not (run / "maps.npz.chains.tsv").exists(), "the earlier list is removed"


def test_structures_of_complexes_train_score_and_predict(tmp_path: Path) -> None:
    """Two helices side by side in mmCIF files make one record per file."""
    sequences = ["MKTAYIAKQRGGLV", "GSHMLEDPVRWK", "AVILMFYWSTNQ"]
    structures = tmp_path / "set"
    structures.mkdir()
    for n, (first, second) in enumerate(zip(sequences, [*sequences[1:], sequences[2]], strict=True)):
        lines = chain(first, "A") + chain(second, "B", shift=4)
        (structures / f"{n}abc.cif").write_text(cif(lines, {"A": three(first), "B": three(second)}))
    (tmp_path / "pairs.txt").write_text("1abc_B:A\n2abc_A:B\n")
    data = "train: set, valid: set, test: set/0abc.cif, complexes: all"
    text = RECIPE.replace("train: train.fasta, valid: valid.fasta, test: test.fasta", data)
    (tmp_path / "recipe.yaml").write_text(text.format(steps=2, out=tmp_path / "run"))
    err = ran("finetune", tmp_path / "recipe.yaml")
    assert "3 records of several chains of a file (0abc_A:B, 1abc_A:B, 2abc_A:B)" in err
    rows = list(csv.DictReader((tmp_path / "run" / "per_protein.csv").read_text().splitlines()))
    assert [row["id"] for row in rows] == ["0abc_A:B"]
    assert float(rows[0]["interchain P@L/2"]) >= 0
    model, scores = tmp_path / "run" / "model", tmp_path / "scores"
    ran("evaluate", model, structures, "--complexes", tmp_path / "pairs.txt", "-o", scores)
    rows = list(csv.DictReader((scores / "per_protein.csv").read_text().splitlines()))
    assert [row["id"] for row in rows] == ["1abc_B:A", "2abc_A:B"]
    assert json.loads((scores / "evaluation.json").read_text())["complexes"] == "../pairs.txt"
    ran("predict", model, structures, "--complexes", "all", "-o", tmp_path / "maps.npz")
    with np.load(tmp_path / "maps.npz") as maps:
        assert {name: len(maps[name]) for name in maps.files} == {"0abc_A:B": 26, "1abc_A:B": 24, "2abc_A:B": 24}
