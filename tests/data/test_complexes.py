"""Records of several chains of one structure: which are joined, how they are called, and which contacts they have."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structure_texts import OTHER, SEQ, chain, cif, expected_cb, nucleic, pdb, three, write

from esmshard.data.structures.structure_folder import cached_split, notices, read_list, read_records, to_split
from esmshard.errors import InputError
from esmshard.io.symbols import Edits

SHORT = "MKTAY"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dimer of two proteins with a peptide and DNA, a dimer of one protein twice, and a monomer."""
    path = tmp_path / "set"
    path.mkdir()
    lines = chain(SEQ, "A", missing=[3]) + chain(OTHER, "B", shift=4) + chain(SHORT, "P", shift=30) + nucleic("D")
    kinds = {"D": "polydeoxyribonucleotide"}
    poly = {"A": three(SEQ), "B": three(OTHER), "P": three(SHORT), "D": ["DA", "DG", "DC", "DT"] * 4}
    write(path / "1ABC.cif", cif(lines, poly, kinds))
    write(path / "2abc_model.pdb", pdb(chain(SEQ, "H") + chain(SEQ, "L", shift=5)))
    write(path / "3abc.pdb", pdb(chain(OTHER, "A")))
    return path


def split(folder: Path, chains: str) -> tuple[dict[str, str], dict[str, np.ndarray], list[str]]:
    """Sequences and coordinates in 0.1 A by id, and what was said."""
    fasta, npz = folder.parent / "out.fasta", folder.parent / "out.npz"
    said = to_split(folder, fasta, npz, complexes=chains)
    lines = fasta.read_text().splitlines()
    with np.load(npz) as file:
        ends = file["offsets"]
        rows = {str(name): file["cb_dA"][ends[k] : ends[k + 1]] for k, name in enumerate(file["names"])}
        assert dict(zip(file["names"], file["seqs"], strict=True)) == dict(
            zip((line[1:] for line in lines[::2]), lines[1::2], strict=True)
        )
    fasta.unlink()
    npz.unlink()
    return dict(zip((line[1:] for line in lines[::2]), lines[1::2], strict=True)), rows, said


def test_each_chain_is_a_record_by_default(folder: Path) -> None:
    fasta = folder.parent / "out.fasta"
    to_split(folder, fasta, fasta.with_suffix(".npz"))
    assert fasta.read_text().split()[::2] == [">1abc_A", ">1abc_B", ">2abc_model_H", ">3abc_A"]
    assert ":" not in fasta.read_text()


def test_all_chains_of_a_file_are_one_record(folder: Path) -> None:
    """Peptides and second copies belong to a complex, DNA does not."""
    sequences, rows, said = split(folder, "all")
    assert sequences == {
        "1abc_A:B:P": f"{SEQ}:{OTHER}:{SHORT}",
        "2abc_model_H:L": f"{SEQ}:{SEQ}",
        "3abc_A": OTHER,
    }
    assert {name: len(cb) for name, cb in rows.items()} == {"1abc_A:B:P": 31, "2abc_model_H:L": 28, "3abc_A": 12}
    assert "2 records of several chains of a file (1abc_A:B:P, 2abc_model_H:L)" in said
    assert not [sentence for sentence in said if "sequence of another chain" in sentence]


def test_coordinates_of_joined_chains_keep_their_distances(folder: Path) -> None:
    """Each chain alone is shifted to its own corner; joined chains are shifted together."""
    _, rows, _ = split(folder, str(write(folder.parent / "list", "1abc_A:B\n")))
    first, second = expected_cb(len(SEQ), missing=[3]), expected_cb(len(OTHER)) + 4
    assert (rows["1abc_A:B"][3] == 65535).all()
    for i in (0, 5, 13):
        for j in (0, 7, 11):
            found = math.dist(rows["1abc_A:B"][i].tolist(), rows["1abc_A:B"][14 + j].tolist()) / 10
            assert found == pytest.approx(math.dist(first[i], second[j]), abs=0.2)


def test_records_are_joined_in_the_order_of_their_names(folder: Path) -> None:
    sequences, rows, _ = split(folder, str(write(folder.parent / "list", "1abc_P:A\n1abc_B\n1abc_B:A\n")))
    assert sequences == {"1abc_B": OTHER, "1abc_P:A": f"{SHORT}:{SEQ}", "1abc_B:A": f"{OTHER}:{SEQ}"}
    assert np.array_equal(rows["1abc_B:A"][12:] == 65535, rows["1abc_P:A"][5:] == 65535)


def test_a_list_names_the_records(folder: Path) -> None:
    path = write(folder.parent / "pairs.txt", "# my pairs\n\n1ABC_B:A\n2abc_model_H:L\n3abc_A\n9xyz_A:B\n8xyz_A:B\n")
    sequences, _, said = split(folder, str(path))
    assert sequences == {"1abc_B:A": f"{OTHER}:{SEQ}", "2abc_model_H:L": f"{SEQ}:{SEQ}", "3abc_A": OTHER}
    assert "2 records of pairs.txt left out, as there is no such file here (9xyz_A:B, 8xyz_A:B)" in said


def test_files_that_a_list_does_not_name_are_not_read(folder: Path) -> None:
    (folder / "2abc_model.pdb").write_text("<html>")
    path = write(folder.parent / "pairs.txt", "1abc_A:B")
    assert list(split(folder, str(path))[0]) == ["1abc_A:B"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1abc_A:B\n1abc\n", r"pairs\.txt:2: '1abc' is no record; write the name of a file .* as 1abc_A:B"),
        ("1abc_A:\n", r"pairs\.txt:1: '1abc_A:' is no record"),
        ("1abc_A B\n", r"pairs\.txt:1: '1abc_A B' is no record"),
        ("1abc_A:B\n\n1abc_A:B\n", r"pairs\.txt:3: '1abc_A:B' stands in line 1 too"),
        ("1abc_A:A\n", r"pairs\.txt:1: '1abc_A:A' has a chain twice; name each chain once"),
        ("7abc_A:B\n", r"pairs\.txt: has no record of the 3 structure files here \(1ABC\.cif, \.\.\.\); .* 1abc_A:B"),
        ("", r"pairs\.txt: has no record of the 3 structure files"),
        ("1abc_A:Z\n", r"1ABC\.cif: has no protein chain 'Z'; it has A, B, P"),
        ("1abc_A:D\n", r"1ABC\.cif: has no protein chain 'D'; it has A, B, P"),
    ],
)
def test_a_wrong_list_is_one_sentence(folder: Path, text: str, message: str) -> None:
    path = write(folder.parent / "pairs.txt", text)
    with pytest.raises(InputError, match=message) as error:
        split(folder, str(path))
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"no\.txt"):
        split(folder, str(folder.parent / "no.txt"))


def test_molecules_that_share_a_chain_name_cannot_be_joined(tmp_path: Path) -> None:
    lines = [replace(line, asym="AA") for line in chain(SEQ, "A")]
    lines += [replace(line, asym="AB") for line in chain(OTHER, "A", first=30)] + chain(OTHER, "B", asym="B")
    path = write(tmp_path / "1abc.cif", cif(lines, {"AA": three(SEQ), "AB": three(OTHER), "B": three(OTHER)}))
    with pytest.raises(InputError, match=r"has several molecules with the chain name 'A' \(1abc_A_AA, 1abc_A_AB\)"):
        read_records(path, ["A:B"])
    assert [one.id for one in read_records(path, "all")] == ["1abc_A_AA:A_AB:B"]


def test_the_longest_name_of_a_file_counts(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("1abc.cif", "1abc_a.cif", "2abc.pdb", "2abc.cif")]
    path = write(tmp_path / "list", "1abc_A_B:C\n1abc_B\n2abc_A:B")
    found = read_list(path, files, Edits())
    assert found == {"1abc_a.cif": ["B:C"], "1abc.cif": ["B"], "2abc.pdb": ["A:B"], "2abc.cif": ["A:B"]}


def test_a_record_without_coordinates_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "1abc.pdb", pdb(chain(SHORT, "A") + chain("GAS", "B")))
    edits = Edits()
    assert read_records(path, "all", edits=edits) == []
    assert "1 record left out with fewer than 10 residues with coordinates (1abc_A:B)" in edits.notices()
    assert read_records(path, ["A:B"]) == []
    ten = write(tmp_path / "2abc.pdb", pdb(chain(SHORT, "A") + chain(SHORT, "B")))
    assert [len(one.cb_L3) for one in read_records(ten, "all")] == [10]


def test_a_folder_is_kept_for_each_way_of_joining(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "pairs.txt", "1abc_A:B\n")
    found = [cached_split(folder, how) for how in (None, "all", str(path))]
    assert [fasta.read_text().count(">") for fasta in found] == [4, 3, 1]
    assert cached_split(folder) == found[0]
    assert "2 records of several chains of a file (1abc_A:B:P, 2abc_model_H:L)" in notices(found[1])
    path.write_text("1abc_B:A\n")
    assert cached_split(folder, str(path)).read_text().startswith(">1abc_B:A\n")
    assert found[2].read_text().startswith(">1abc_A:B\n")
