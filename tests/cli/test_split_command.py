"""`esmshard split` as a user runs it: what it writes, what it says, what it refuses."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import in_process
from conftest import write_subset
from structure_texts import chain, expected_cb, pdb, three

from esmshard.data.labels.coordinates import CoordinateLabels
from esmshard.data.splits import clusters, split_files
from esmshard.io.paths import shipped
from esmshard.io.sequences import read_fasta
from esmshard.io.store import cached

Run = Callable[..., tuple[int, str, str]]
SETS = ("train", "valid", "test")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Exit code, stdout and stderr of a split in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def split(*arguments: object) -> tuple[int, str, str]:
        done = in_process("split", *map(str, arguments))
        return done.returncode, done.stdout, done.stderr

    return split


def write_fasta(path: Path, count: int = 20) -> None:
    """Records of 30 residues with headers; r0 and r1 are one sequence, and the clusters r2 and r3, r4 and r5, ..."""
    letters = "ACDEFGHIKLMNPQRSTVWY"
    sequences = ["".join(letters[(n * 7 + k * (n + 3)) % 20] for k in range(30)) for n in range(count)]
    sequences[1] = sequences[0]
    path.write_text("".join(f">r{n} SCORE={n} of many\n{s.lower()}\n" for n, s in enumerate(sequences)))
    lines = [f"r{n - n % 2}\tr{n}\n" for n in range(2, count)]
    path.with_name("clusters.tsv").write_text("".join(["r0\tr0\nr1\tr1\n", *lines]))


def ids(directory: Path) -> dict[str, list[str]]:
    return {name: [record.id for record in read_fasta(directory / f"{name}.fasta")] for name in SETS}


def listed(out: Path) -> dict[str, list[str]]:
    """Cells of splits.tsv by id, and its header."""
    rows = [line.split("\t") for line in (out / "splits.tsv").read_text().splitlines()]
    return {row[0]: row[1:] for row in rows}


# sequences


def test_mmseqs_is_run_where_no_clusters_are_given(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mmseqs(program: str, *arguments: str) -> str:
        if arguments[0] == "easy-cluster":
            Path(f"{arguments[2]}_cluster.tsv").write_text("".join(f"{n - n % 4}\t{n}\n" for n in range(20)))
        return "9\n"

    write_fasta(tmp_path / "x.fasta")
    monkeypatch.setattr(clusters, "_run", mmseqs)
    monkeypatch.setattr(split_files.shutil, "which", lambda program: f"/bin/{program}")
    code, _, err = run("x.fasta", "-o", "deep/out", "--ratios", "3,1,1")
    assert (code, err.splitlines()[0]) == (0, "clustering 20 records with MMseqs2")
    assert listed(tmp_path / "deep" / "out")["r7"][1] == "r4"
    assert json.loads((tmp_path / "deep" / "out" / "split.json").read_text())["clusters"].startswith("MMseqs2 9")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_clusters_and_duplicates_are_not_cut(run: Run, tmp_path: Path) -> None:
    write_fasta(tmp_path / "x.fasta")
    code, out, err = run("x.fasta", "-o", "out", "--clusters", "clusters.tsv", "--ratios", "0.6,0.2,0.2")
    assert code == 0
    assert [line.split() for line in out.splitlines()[2:]] == [
        ["train", "12", "360", "6"],
        *([name, "4", "120", "2"] for name in SETS[1:]),
    ]
    side = {record: name for name, records in ids(tmp_path / "out").items() for record in records}
    assert sorted(side) == sorted(f"r{n}" for n in range(20))
    assert all(side[f"r{n}"] == side[f"r{n + 1}"] for n in range(0, 20, 2))
    rows = listed(tmp_path / "out")
    assert rows.pop("id") == ["set", "cluster"]
    assert list(rows) == [f"r{n}" for n in range(20)]
    assert {record: cells[0] for record, cells in rows.items()} == side
    assert (rows["r0"][1], rows["r1"][1], rows["r7"][1]) == ("r0", "r0", "r6")
    assert "x.fasta: lower-case letters were read as upper case in 20 records (r0, r1, r2, ...)" in err
    assert "leakage: none of 4 valid records and 4 test records" in err
    by_id = {r.id: r for name in SETS for r in read_fasta(tmp_path / "out" / f"{name}.fasta")}
    assert by_id["r5"].description == "r5 SCORE=5 of many"
    assert by_id["r5"].sequence == next(r for r in read_fasta(tmp_path / "x.fasta") if r.id == "r5").sequence
    told = json.loads((tmp_path / "out" / "split.json").read_text())
    assert (told["method"]["by"], told["method"]["seed"], told["method"]["ratios"]) == ("cluster", 0, [0.6, 0.2, 0.2])
    assert told["counts"]["train"] == {"records": 12, "residues": 360, "clusters": 6}


def test_coordinates_are_cut_along(run: Run, tmp_path: Path) -> None:
    source = write_subset(tmp_path, "x", "valid", range(12))
    with np.load(tmp_path / "x.npz") as file:
        arrays = dict(file)
    arrays["dssp8"] = np.array([f"H{n}" for n in range(12)])
    arrays["odd"] = np.zeros(3)
    lines = source.read_text().split(">")[1:]
    # In another order than the coordinates, which have two chains more.
    source.write_text("".join(f">{line}" for line in reversed(lines[2:])))
    np.savez(tmp_path / "x.npz", **arrays)
    code, _, err = run(source, "-o", "out", "--by", "ratio", "--ratios", "6,2,2")
    assert code == 0
    assert f"{tmp_path}/x.npz: left out odd, which has no row for each chain or residue" in err
    assert f"{tmp_path}/x.npz: left out 2 chains that x.fasta does not have" in err
    with np.load(shipped("data") / "contact" / "valid.npz") as file:
        names, offsets, cb = file["names"].tolist(), file["offsets"], file["cb_dA"]
    seen = 0
    for name in SETS:
        fasta = tmp_path / "out" / f"{name}.fasta"
        store = cached(fasta)
        labels = CoordinateLabels(fasta, store)  # compares names, lengths and sequences
        for n in range(len(store)):
            k = names.index(store.id(n))
            expected = cb[offsets[k] : offsets[k + 1]].astype(np.float32) / np.float32(10)
            assert np.array_equal(labels[n]["cb"], expected)
            seen += 1
        with np.load(tmp_path / "out" / f"{name}.npz") as cut:
            assert sorted(cut.files) == ["cb_dA", "dssp8", "names", "offsets", "seqs"]
            assert cut["dssp8"].tolist() == [f"H{names.index(i)}" for i in cut["names"].tolist()]
    assert seen == 10


def test_structures_are_split_with_their_coordinates(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for n, letter in enumerate("ACDEF"):
        (folder / f"{n}abc.pdb").write_text(pdb(chain(sequence := f"MKTAY{letter}AKQRGG"), {"A": three(sequence)}))
    (folder / "notes.txt").write_text("no structure\n")
    code, _, err = run("set", "-o", "out", "--by", "ratio", "--ratios", "3,1,1")
    assert code == 0
    assert "1 file not read" in err
    found = []
    for name in SETS:
        fasta = tmp_path / "out" / f"{name}.fasta"
        store = cached(fasta)
        labels = CoordinateLabels(fasta, store)
        for n in range(len(store)):
            cb, expected = labels[n]["cb"], expected_cb(12)
            # Coordinates are stored in tenths of an angstrom, from another origin.
            assert np.allclose(cb - cb[0], expected - expected[0], atol=0.11)
            found.append(store.id(n))
    assert sorted(found) == [f"{n}abc_A" for n in range(5)]


def test_headers_can_give_the_sets(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_text(
        ">a SET=train\nMKTAY\n>b SET=train VALIDATION=True\nAGVWY\n>c SET=test\nWYWYA\n>d\nGGGGG\n>e SET=train\nLLLLV\n"
    )
    code, out, err = run("x.fasta", "-o", "out", "--by", "given")
    assert code == 0
    assert ids(tmp_path / "out") == {"train": ["a", "e"], "valid": ["b"], "test": ["c"]}
    assert listed(tmp_path / "out")["d"] == ["none"]
    assert out.splitlines()[-1].split() == ["none", "1", "5"]
    assert "(d)" in err
    text = "sequence,target,set,validation\nMKTAY,1,train,\nAGVWY,2,train,True\nWYWYA,3,test,\nMMMMM,3,test,\n"
    (tmp_path / "x.fasta").write_text(">a\nMKTAY\n>b\nAGVWY\n>c\nWYWYA\n>d\nGGGGG\n")
    (tmp_path / "x.csv").write_text(text)
    code, _, err = run("x.fasta", "-o", "out3", "--by", "given", "--sets", "x.csv")
    assert code == 0
    assert ids(tmp_path / "out3") == {"train": ["a"], "valid": ["b"], "test": ["c"]}
    assert listed(tmp_path / "out3")["d"] == ["none"], "in no set, and said"
    assert "(d)" in err


def test_folds_have_directories_of_their_own(run: Run, tmp_path: Path) -> None:
    write_fasta(tmp_path / "x.fasta")
    code, out, err = run("x.fasta", "-o", "out", "--clusters", "clusters.tsv", "--folds", 5)
    assert code == 0
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["fold", "records", "residues", "clusters"],
        *([str(k), "4", "120", "2"] for k in range(5)),
    ]
    rows = listed(tmp_path / "out")
    assert rows["id"] == ["fold", "cluster"]
    for k in range(5):
        directory = tmp_path / "out" / f"fold_{k}"
        held = {name: {int(rows[record][0]) for record in records} for name, records in ids(directory).items()}
        assert held == {"test": {k}, "valid": {(k + 1) % 5}, "train": set(range(5)) - {k, (k + 1) % 5}}
        assert f"fold_{k}: leakage: none of 4 valid records and 4 test records" in err


# variants

WILD = "MKTAYIAKQRQISFVKSHFSRQLEERLG"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """The wild type and two substitutions at each of 20 positions, numbered from 101; then double mutants."""
    (tmp_path / "wt.fasta").write_text(f">w\n{WILD}\n")
    rows = [("WT", 0.5, "as, quoted"), ("M101*", 0.0, "stop")]
    for k in range(20):
        rows += [(f"{WILD[k]}{k + 101}C", k / 20, f"n{k}"), (f"{WILD[k]}{k + 101}W", k / 20 + 0.01, "")]
    rows += [("M101C:K102C", 0.9, "near"), ("M101W:F119W", 0.95, "far")]
    path = tmp_path / "v.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("mutant", "score", "note"), *rows])
    return path


VARIANTS = ("--wild-type", "wt.fasta", "--offset", "-100")


def cells(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_positions_are_not_cut_and_columns_are_kept(run: Run, table: Path, tmp_path: Path) -> None:
    code, out, err = run("v.csv", "-o", "out", *VARIANTS, "--ratios", "0.6,0.2,0.2")
    assert code == 0
    places: dict[str, set[str]] = {}
    source = cells(table)
    for name in SETS:
        header, *rows = cells(tmp_path / "out" / f"{name}.csv")
        assert header == ["mutant", "score", "note"]
        assert all(row in source for row in rows)
        places[name] = {part[1:-1] for row in rows if row[0] != "WT" for part in row[0].split(":")}
    assert not places["train"] & places["valid"]
    assert not places["train"] & places["test"]
    assert not places["valid"] & places["test"]
    assert set.union(*places.values()) == {str(k) for k in range(101, 121)}
    assert out.splitlines()[1].split() == ["set", "variants", "positions"]
    assert "with a stop codon (line 3)" in err
    rows = listed(tmp_path / "out")
    assert rows["id"] == ["set", "line"]
    assert rows["WT"] == ["train", "2"]
    assert rows["Y5W"][1] == "13"
    assert "M1*" not in rows
    assert run("v.csv", "-o", "other", *VARIANTS, "--ratios", "0.6,0.2,0.2", "--seed", 1)[0] == 0
    assert listed(tmp_path / "other") != rows
    assert "leakage: none of" in err


def test_variants_across_sets_are_left_out_and_named(run: Run, table: Path, tmp_path: Path) -> None:
    """20 positions in stretches of four: 101 and 102 are in the first, 119 in the last."""
    code, out, err = run("v.csv", "-o", "out", *VARIANTS, "--by", "contiguous", "--folds", 5)
    assert code == 0
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["fold", "variants", "positions"],
        ["0", "10", "4"],
        *([str(k), "8", "4"] for k in range(1, 5)),
        ["none", "1", "2"],
    ]
    assert "v.csv: left out 1 variant that change positions of several sets (M1W:F19W)" in err
    assert listed(tmp_path / "out")["M1W:F19W"] == ["none", "45"]
    tested = cells(tmp_path / "out" / "fold_4" / "test.csv")
    assert [row[0] for row in tested[1:]] == [f"{WILD[k]}{k + 101}{m}" for k in range(16, 20) for m in "CW"]
    assert len(cells(tmp_path / "out" / "fold_4" / "train.csv")) == 1 + 24
    assert run("v.csv", "-o", "out2", *VARIANTS, "--by", "modulo", "--folds", 5)[0] == 0
    modulo = listed(tmp_path / "out2")
    assert [modulo[f"{WILD[k]}{k + 1}C"][0] for k in range(7)] == ["0", "1", "2", "3", "4", "0", "1"]
    assert modulo["M1C:K2C"][0] == "none"


def test_rows_of_one_variant_stay_together(run: Run, table: Path, tmp_path: Path) -> None:
    """A measurement in four rows, and a synonymous change beside the wild type."""
    with open(table, "a") as file:
        file.write("M101C,0.1,again\np.Met101Cys,0.9,again\nM101C,0.4,again\nM101M,0.5,silent\n")
    for by in ("ratio", "low-to-high", "mutations"):
        for seed in range(2):
            arguments = ("--by", by, "--seed", seed, "--overwrite", "--ratios", "1,1,1")
            assert run("v.csv", "-o", "out", *VARIANTS, *arguments)[0] == 0
            lines = [line.split("\t") for line in (tmp_path / "out" / "splits.tsv").read_text().splitlines()]
            assert len({line[1] for line in lines if line[0] == "M1C"}) == 1
            assert sum(line[0] == "M1C" for line in lines) == 4
            if by == "ratio":
                assert len({line[1] for line in lines if line[0] in ("WT", "M1M")}) == 1


# refusals


def test_options_that_do_not_fit(run: Run, tmp_path: Path) -> None:
    write_fasta(tmp_path / "x.fasta")
    (tmp_path / "wt.fasta").write_text(f">w\n{WILD}\n")
    cases: list[tuple[tuple[str, ...], str]] = [
        (("--by", "position"), "--by position"),
        (("--by", "ratio", "--clusters", "c.tsv"), "--clusters"),
        ((*VARIANTS, "--by", "mutations", "--folds", "5"), "--folds"),
        (("--by", "ratio", "--folds", "5", "--ratios", "1,1,1"), "--ratios"),
        ((*VARIANTS, "--by", "modulo"), "--by modulo"),
        (("--by", "ratio", "--folds", "2"), "--folds 2"),
        (("--by", "ratio", "--ratios", "1,nan,1"), "--ratios 1,nan,1"),
        (("--by", "ratio", "--offset", "3"), "--mutant and --offset"),
        (("--by", "ratio", "--sets", "x.csv"), "--sets"),
        ((*VARIANTS, "--id-column", "id"), "--sequence-column and --id-column"),
    ]
    for arguments, token in cases:
        code, out, err = run("x.fasta", "-o", "out", *arguments)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {token}"), arguments
        assert err.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_a_result_is_replaced_when_asked_and_nothing_else_ever(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write_fasta(tmp_path / "x.fasta")
    split = ("x.fasta", "-o", "out", "--by", "ratio")
    (tmp_path / "out").mkdir()
    assert run(*split, "--seed", 1)[0] == 0  # an empty directory is no obstacle
    before = (tmp_path / "out" / "splits.tsv").read_text()
    code, _, err = run(*split, "--seed", 2)
    assert (code, err) == (2, "error: out: exists already; choose another directory or pass --overwrite\n")
    with monkeypatch.context() as patch:
        patch.setattr(split_files, "_write_sets", fail)
        code, _, err = run(*split, "--seed", 2, "--overwrite")
    assert (code, err) == (1, "error: no space left on device\n")
    assert (tmp_path / "out" / "splits.tsv").read_text() == before
    (tmp_path / "out" / "test.npz").write_text("")
    assert run(*split, "--seed", 2, "--overwrite")[0] == 0
    assert (tmp_path / "out" / "splits.tsv").read_text() != before
    assert not (tmp_path / "out" / "test.npz").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    code, _, err = run("x.fasta", "-o", "mine", "--by", "ratio", "--overwrite")
    assert code == 2
    assert "thesis.txt" in err
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert run("x.fasta", "-o", "x.fasta", "--by", "ratio", "--overwrite")[0] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["clusters.tsv", "mine", "out", "x.fasta"]
