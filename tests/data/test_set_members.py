"""A file for training, validation and test set is divided by `SET=` or by a column."""

import itertools
from pathlib import Path

import pytest

from esmshard.data.splits.recipe_splits import fold_of, open_split, sequence_names
from esmshard.errors import InputError, UsageError
from esmshard.io.store import cached
from esmshard.recipe import recipe_file
from esmshard.recipe.sections import Recipe
from esmshard.tasks.registry import new_task

SPLITS = ("train", "valid", "test")
SETS = {"a": "train", "b": "val", "c": "test", "d": "train", "e": "train VALIDATION=True", "f": "TEST"}
IDS = {"train": ["a", "d"], "valid": ["b", "e"], "test": ["c", "f"]}


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))


def write(name: str, sets: dict[str, str], target: bool = True) -> None:
    lines = [
        f">{record}{' TARGET=0.' + str(n) if target else ''}{' SET=' + where if where else ''}\nMKT{'AVLSGC'[n]}\n"
        for n, (record, where) in enumerate(sets.items())
    ]
    Path(name).write_text("".join(lines))


def recipe(task: str, train: str, valid: str, test: str, more: str = "") -> Recipe:
    text = f"task: {{name: {task}}}\nmodel: {{name: starter}}\n"
    text += f"data: {{train: {train}, valid: {valid}, test: {test}, long: full{more}}}\nout: run\n"
    Path("r.yaml").write_text(text)
    return recipe_file.load(Path("r.yaml"))


def ids(of: Recipe) -> dict[str, list[str]]:
    task = new_task(of.task, {})
    splits = {name: open_split(of, name, task.labels) for name in SPLITS}
    return {name: [split.id(n) for n in range(len(split))] for name, split in splits.items()}


def test_set_in_the_headers_divides_one_file() -> None:
    for task in ("mlm", "sequence"):
        write("x.fasta", SETS, target=task == "sequence")
        whole = recipe(task, "x.fasta", "x.fasta", "x.fasta")
        assert ids(whole) == IDS
        test = open_split(whole, "test", None)
        assert len(test.notices) == 1
        assert test.digest not in (test.store.digest, open_split(whole, "train", None).digest)


def test_a_test_set_that_is_the_training_set_is_refused_and_such_a_validation_set_is_told_of() -> None:
    write("x.fasta", dict.fromkeys(SETS, ""))
    write("t.fasta", {"c": "", "f": ""})
    for valid in ("x.fasta", "t.fasta"):
        with pytest.raises(InputError, match=r"x\.fasta: .*esmshard split"):
            open_split(recipe("mlm", "x.fasta", valid, "x.fasta"), "train", None)
    (notice,) = open_split(recipe("mlm", "x.fasta", "x.fasta", "t.fasta"), "valid", None).notices
    assert "nothing divides it, so valid has the records of train" in notice
    folds = recipe("mlm", "x.fasta", "x.fasta", "x.fasta", ", folds: 3, fold: 0")
    tested_twice = recipe("mlm", "x.fasta", "t.fasta", "t.fasta")
    assert not any(open_split(of, name, None).notices for of in (folds, tested_twice) for name in SPLITS)


def test_sets_in_the_sequences_and_labels_in_another_file() -> None:
    write("x.fasta", SETS, target=False)
    Path("y.fasta").write_text("".join(f">{record}\nHHEC\n" for record in [*SETS, "more", "others"]))
    alike = recipe("residue", "x.fasta", "x.fasta", "x.fasta", ", labels: y.fasta")
    assert ids(alike) == IDS
    Path("y.fasta").write_text("".join(f">{r} SET={'train' if r == 'c' else s}\nHHEC\n" for r, s in SETS.items()))
    with pytest.raises(InputError, match=r"record 'c' is of test, but .*y\.fasta says train"):
        ids(alike)


def test_two_splits_may_share_a_file() -> None:
    write("x.fasta", {record: where for record, where in SETS.items() if record not in "cf"})
    write("t.fasta", {"c": "", "f": ""})
    assert ids(recipe("sequence", "x.fasta", "x.fasta", "t.fasta")) == IDS
    gone = recipe("sequence", "sample:gone", "sample:gone", "t.fasta")
    assert len(open_split(gone, "test", None)) == 2, "the files of other splits are not asked for"


def test_a_table_or_a_file_of_labels_divides_one_file() -> None:
    write("x.fasta", dict.fromkeys(SETS, ""), target=False)
    rows = "".join(f"{name},{where.split()[0]},{'True' * (' ' in where)},1\n" for name, where in SETS.items())
    for column in ("set", "split"):
        Path("y.csv").write_text(f"id,{column},validation,target\n{rows}")
        assert ids(recipe("sequence", "x.fasta", "x.fasta", "x.fasta", ", labels: y.csv")) == IDS
    Path("y.fasta").write_text("".join(f">{record} SET={where}\nHHEC\n" for record, where in SETS.items()))
    assert ids(recipe("residue", "x.fasta", "x.fasta", "x.fasta", ", labels: y.fasta")) == IDS


def test_marks_that_do_not_suffice_are_refused() -> None:
    def refused(file: str, sets: dict[str, str], token: str, kind: type = InputError, more: str = "") -> None:
        write(file, sets)
        with pytest.raises(kind, match=token):
            open_split(recipe("mlm", file, file, file, more), "valid", None)

    refused("x.fasta", {"a": "train", "b": "test"}, r"x.fasta: .*no record of valid \(1 of train and")
    refused("y.fasta", {"a": "train", "b": "test", "c": "", "d": "val"}, r"1 of 4 records have no SET= \(c\)")
    refused("z.fasta", SETS, r"data\.folds: divides .*z.fasta", UsageError, ", folds: 3, fold: 0")
    write("v.fasta", {"v": ""})
    assert len(open_split(recipe("mlm", "z.fasta", "v.fasta", "z.fasta", ", folds: 3, fold: 0"), "train", None)) == 4
    (notice,) = open_split(recipe("mlm", "z.fasta", "v.fasta", "v2.fasta"), "train", None).notices
    assert notice.startswith("SET= in its headers is not used")


def test_records_of_one_sequence_or_of_the_same_chains_in_any_order_are_in_one_fold() -> None:
    sequences = [f"MKT{letter}" for letter in "ACDEFGHIK"]
    Path("x.fasta").write_text(
        "".join(f">{n}\n{a}:{b}\n>{n}_turned\n{b}:{a}\n" for n, (a, b) in enumerate(itertools.pairwise(sequences)))
    )
    store = cached(Path("x.fasta"))
    fold_N = fold_of(store, 3, None)
    assert (fold_N[::2] == fold_N[1::2]).all()
    assert set(fold_N.tolist()) == {0, 1, 2}
    assert len(set(sequence_names(store))) == 8
    Path("c.tsv").write_text("".join(f"{'a' if n < 9 else n}\t{store.id(n)}\n" for n in range(len(store))))
    assert len(set(fold_of(store, 3, "c.tsv")[:9].tolist())) == 1
