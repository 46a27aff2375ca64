"""Chains of structure files, through PDB and mmCIF, and folders of structures as splits."""

import gzip
import itertools
import math
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structure_texts import ATOMS, OTHER, SEQ, Line, chain, cif, expected_cb, nucleic, pdb, three, water, write

from esmshard.data.labels.coordinates import UNRESOLVED, contact_labels
from esmshard.data.structures import structure_folder
from esmshard.data.structures.chains import Chain, read_chains
from esmshard.data.structures.structure_folder import cached_split, notices, read_records, to_split
from esmshard.errors import InputError, UsageError
from esmshard.io.symbols import Edits

Read = Callable[..., list[Chain]]
SHORT, THIRD = "MKTAY", "AVILMFYWSTNQ"
changes: list[str] = []
"""Notices about the file that was read last."""


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Write lines as a PDB and as an mmCIF file, and read the same chains from both."""

    def run(
        lines: list[Line],
        sequences: Mapping[str, Sequence[str]] | None = None,
        kinds: Mapping[str, str] | None = None,
        modres: Mapping[str, str] | None = None,
        **options: object,
    ) -> list[Chain]:
        files = {"1ABC.pdb": pdb(lines, sequences, modres), "1ABC.cif": cif(lines, sequences, kinds, modres)}
        edits = [Edits() for _ in files]
        pairs = zip(files.items(), edits, strict=True)
        chains, others = (read_chains(write(tmp_path / n, t), edits=e, **options) for (n, t), e in pairs)  # type: ignore[arg-type]
        for one, other in zip(chains, others, strict=True):
            assert (one.id, one.sequence) == (other.id, other.sequence)
            np.testing.assert_array_equal(one.cb_L3, other.cb_L3)
            np.testing.assert_array_equal(one.backbone_L33, other.backbone_L33)
        changes[:], others_changes = (e.notices() for e in edits)
        assert [c.replace("1ABC.pdb", "1ABC.cif") for c in changes] == others_changes
        return chains

    return run


def same(chains: list[Chain], sequence: str, missing: Sequence[int] = ()) -> None:
    (found,) = chains
    assert found.sequence == sequence
    np.testing.assert_allclose(found.cb_L3, expected_cb(len(sequence), missing=missing), atol=2e-5)


def test_atoms_on_a_line_and_missing_atoms_give_no_cb(read: Read) -> None:
    for x, y, z in ((1.5, 0.0, 0.0), (0.3, 0.7, 1.1), (0.0, 0.0, 0.0)):
        flat = {"N": (0.0, 0.0, 0.0), "CA": (x, y, z), "C": (3 * x, 3 * y, 3 * z), "CB": (1.5, 1.5, 0.0)}
        lines = [replace(a, xyz=flat[a.name]) if a.seq == 7 else a for a in chain(SEQ)]
        (found,) = read(lines, {"A": three(SEQ)})
        assert np.flatnonzero(np.isnan(found.cb_L3).any(1)).tolist() == [6]
    for atom in ("N", "CA", "C", "CB"):
        (found,) = read([x for x in chain(SEQ) if not (x.seq == 5 and x.name == atom)], {"A": three(SEQ)})
        assert found.sequence == SEQ
        assert np.flatnonzero(np.isnan(found.cb_L3).any(1)).tolist() == ([] if atom == "CB" else [4])


def test_the_alternative_location_of_highest_occupancy(read: Read) -> None:
    """All atoms of a residue are from one location, and from the first of equal ones."""
    for atoms, locations, moved in (
        (ATOMS, (("A", 0.4, 0.0), ("B", 0.6, 5.0)), 5.0),
        (ATOMS, (("A", 0.6, 0.0), ("B", 0.4, 5.0)), 0.0),
        (ATOMS, (("B", 0.5, 0.0), ("A", 0.5, 5.0)), 0.0),
        (("C",), (("A", 0.3, 1.0), ("B", 0.7, 0.0)), 0.0),
    ):
        lines = [
            replace(x, alt=alt, occupancy=occupancy, xyz=(x.xyz[0] + by, *x.xyz[1:]))
            for x in chain(SEQ)
            for alt, occupancy, by in (locations if x.seq == 4 and x.name in atoms else [("", 1.0, 0.0)])
        ]
        expected = expected_cb(14)
        expected[3, 0] += moved
        (found,) = read(lines, {"A": three(SEQ)})
        np.testing.assert_allclose(found.cb_L3, expected, atol=2e-5)
        assert changes == ["1 residue with alternative locations, read at the location of highest occupancy (1abc_A)"]


def test_nucleic_acids_waters_and_ligands_are_left_out(read: Read) -> None:
    calcium = [Line("CA", "CA", "A", 300, (1.0, 1.0, 1.0), None, "D", het=True, element="CA")]
    free = [replace(x, number=400, seq=None, asym="E", het=True) for x in chain("E")]
    lines = chain(SEQ) + nucleic("B") + water("A", "C") + calcium + free
    sequences = {"A": three(SEQ), "B": ["DA", "DG", "DC", "DT"] * 4}
    (found,) = read(lines, sequences, {"B": "polydeoxyribonucleotide"})
    assert (found.id, found.sequence) == ("1abc_A", SEQ)
    np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)
    assert [notice.split(" (")[0] for notice in changes] == ["1 non-protein chain left out"]
    assert [bare.sequence for bare in read(lines, None)] == [SEQ]


def test_residues_under_a_plddt_lose_their_coordinates(read: Read) -> None:
    lines = [replace(x, b={2: 69.99, 9: 12.0, 4: 70.0}.get(x.seq or 0, 91.0)) for x in chain(SEQ)]
    (found,) = read(lines, {"A": three(SEQ)}, min_plddt=70)
    np.testing.assert_allclose(found.cb_L3, expected_cb(14, missing=[1, 8]), atol=2e-5)
    assert changes == ["2 residues left without coordinates for a pLDDT under 70 (1abc_A)"]


def test_pdb_and_mmcif_of_one_entry_give_equal_maps(read: Read) -> None:
    """With a gap, alternatives, insertion codes, a modified residue, water and two models."""
    comps = [*three("MKTAY"), "MSE", *three("IAKQRGGLVNDECHW"), "SEP", *three("FP")]
    lines, missing = list[Line](), [0, 9, 10, 23]
    for x in chain(comps, first=-2, missing=missing):
        ins = {12: "A", 13: "B"}.get(x.seq or 0, "")
        lines.append(replace(x, number=7 if x.seq in (11, 12, 13) else x.number, ins=ins))
        if x.seq == 5:
            lines[-1:] = [replace(x, alt="A", occupancy=0.5), replace(x, alt="B", occupancy=0.5, xyz=(1.0, 2.0, 3.0))]
    lines += water("A", "B") + chain(comps, model=2, shift=5)
    (found,) = read(lines, {"A": comps}, modres={"SEP": "SER"})
    same([found], "MKTAYMIAKQRGGLVNDECHWSFP", missing)
    assert changes[0].startswith("1 file with several models, read as the first model (1ABC.")
    labels_LL = contact_labels(found.cb_L3)
    assert np.flatnonzero(labels_LL.diagonal() < 0).tolist() == missing
    assert labels_LL[1, 4:9].tolist() == [1, 1, 0, 0, 0]  # a helix: i + 4 at 6.2 A, i + 5 at 8.4 A
    (found,) = read(lines, None, modres={"SEP": "SER"})
    assert found.sequence == "KTAYMIAKGGLVNDECHWSF"
    assert [notice for notice in changes if "SEQRES" in notice]
    assert [notice for notice in changes if notice.startswith("1 gap in residue numbers")]
    np.testing.assert_allclose(found.cb_L3, np.delete(expected_cb(24), missing, 0), atol=2e-5)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, derandomize=True)
@given(st.text("ACDEFGHIKLMNPQRSTVWY", min_size=12, max_size=30), st.integers(-50, 9000), st.sets(st.integers(1, 10)))
def test_residues_without_atoms_keep_their_place(read: Read, sequence: str, first: int, inner: set[int]) -> None:
    for letters in (sequence, "MAAAAAAAAAAAAAAAK"):
        missing = list(inner)[:4]
        same(read(chain(letters, first=first, missing=missing), {"A": three(letters)}), letters, missing)


def test_modified_residues(read: Read) -> None:
    comps = [*three("MKTA"), "MSE", "SEC", "PYL", "ASX", "GLX", "UNK", "SEP", "XYZ", "MSE", *three("GV")]
    for listed in ({"A": comps}, None):
        same(read(chain(comps), listed), "MKTAMUOBZXSXMGV")
        assert "modified residues read as the standard parent" in "".join(changes)


def test_two_chains(read: Read) -> None:
    lines = chain(SEQ, "A") + chain(OTHER, "b", shift=40)
    found = read(lines, {"A": three(SEQ), "b": three(OTHER)})
    assert [(c.id, c.sequence) for c in found] == [("1abc_A", SEQ), ("1abc_b", OTHER)]
    np.testing.assert_allclose(found[1].cb_L3, expected_cb(12) + 40, atol=2e-5)
    assert changes == []
    assert [c.id for c in read(lines, {"A": three(SEQ), "b": three(OTHER)}, chains=["b"])] == ["1abc_b"]
    with pytest.raises(InputError, match="no protein chain 'B'; it has A, b"):
        read(lines, {"A": three(SEQ), "b": three(OTHER)}, chains=["A", "B"])


def test_residues_that_differ_from_the_sequence(read: Read) -> None:
    same(read(chain("MKTAYIAWQRGWLV", missing=[3]), {"A": three(SEQ)}), SEQ, [3])
    assert [notice.split()[0] for notice in changes] == ["2"]
    for atoms, sequence in (("MKTAYIAWQRWWLV", SEQ), (SEQ, "W" * 16), (SEQ, SEQ[:10])):
        with pytest.raises(InputError, match="sequence"):
            read(chain(atoms), {"A": three(sequence)})


def test_a_bond_says_more_than_a_number(tmp_path: Path) -> None:
    """Residue numbers skip inside a bonded chain, as in antibodies, or jump backwards."""
    for letters, missing, (after, by), listed, unresolved in (
        (SEQ, [], (6, 3), f"GG{SEQ}LL", [0, 1, 16, 17]),
        ("MAAAAAAAAAAAAA", [3], (9, 1), "MAAAAAAAAAAAAAAA", [3, 14, 15]),
        ("A" * 14, [2, 3], (9, 0), "A" * 16, [2, 3, 14, 15]),
        (SEQ, [5, 6], (7, -20), f"GG{SEQ}", [0, 1, 7, 8]),
        (SEQ, [], (9, -9), SEQ, []),
        ("MKTAYIAWQRGGLV", [5], (0, 0), f"{SEQ}GG", [5, 14, 15]),
    ):
        skipped = [
            replace(x, number=int(x.number) + by * ((x.seq or 0) > after)) for x in chain(letters, missing=missing)
        ]
        (found,) = read_chains(write(tmp_path / "x.pdb", pdb(skipped, {"A": three(listed)})))
        assert np.flatnonzero(np.isnan(found.cb_L3[:, 0])).tolist() == unresolved
        resolved_L3 = found.cb_L3[~np.isnan(found.cb_L3[:, 0])]
        np.testing.assert_allclose(resolved_L3, np.delete(expected_cb(14), missing, 0), atol=2e-5)


WHOLE = pdb(chain(SEQ), {"A": three(SEQ)})
LIGAND = [replace(x, number=300, seq=None, het=True) for x in chain("E")]
LETTERED = [
    replace(x, number=["9998", "9999", *(f"A00{k}" for k in "0123456789AB")][(x.seq or 1) - 1]) for x in chain(SEQ)
]


def test_lines_of_other_programs(tmp_path: Path) -> None:
    for name, text in (
        ("x.pdb", pdb(chain(SEQ), {"A": three(SEQ)}, serial=99_990)),
        ("x.pdb", re.sub(r"(?m)^(ATOM  ).{5}", r"\1*****", WHOLE)),
        ("x.pdb", pdb(LETTERED, {"A": three(SEQ)})),
        ("x.pdb", re.sub(r"(?m)^(ATOM.{50}).*", r"\1", WHOLE)),
        ("x.pdb", "\ufeff" + WHOLE.replace("\n", "\r\n")),
        ("x.cif", "\ufeff" + cif(chain(SEQ), {"A": three(SEQ)}).replace("\n", "\r")),
        ("x.pdb", pdb(chain(SEQ), ter=False).replace("ATOM     20", "TER\nATOM     20")),
        ("x.pdb", pdb(chain(SEQ) + LIGAND)),
        ("x.pdb", pdb(chain(SEQ) + LIGAND, ter=False)),
        ("x.pdb", pdb(chain(SEQ) + [replace(x, comp="LIG") for x in LIGAND], {"A": three(SEQ)}, ter=False)),
    ):
        (tmp_path / name).write_bytes(text.encode())
        same(read_chains(tmp_path / name), SEQ)


def test_names_of_chains_and_a_coordinate_that_is_not_there(tmp_path: Path) -> None:
    (found,) = read_chains(write(tmp_path / "model_1.pdb", pdb(chain(SEQ, " "))))
    assert found.id == "model_1"
    found, other = read_chains(write(tmp_path / "Entry.1.PDB", pdb(chain(SEQ, "A") + chain(OTHER, "BA"))))
    assert (found.id, other.id) == ("entry.1_A", "entry.1_BA")
    first = chain(SEQ)[4]
    text = cif(chain(SEQ), {"A": three(SEQ)}).replace(f"{first.xyz[0]:.3f} {first.xyz[1]:.3f}", "? ?")
    (found,) = read_chains(write(tmp_path / "x.cif", text))
    assert np.flatnonzero(np.isnan(found.cb_L3[:, 0])).tolist() == [1]


def test_alternative_residues_at_one_place_are_one_residue(read: Read) -> None:
    for at, comps, letter in ((4, ("PRO", "SER", "VAL"), "V"), (4, ("LEU", "MSE"), "M"), (14, ("MSE", "LEU"), "L")):
        lines = list[Line]()
        for x in chain(SEQ):
            seq = (x.seq or 0) + (len(comps) - 1) * ((x.seq or 0) > at)
            for k, comp in enumerate(comps if seq == at else [x.comp]):
                line = replace(x, comp=comp, seq=None if comp == "MSE" else seq + k, het=comp == "MSE")
                lines.append(replace(line, alt="ABC"[k], occupancy=0.2 + 0.1 * k) if seq == at else line)
        same(read(lines), SEQ[: at - 1] + letter + SEQ[at:])


_ATOM = "ATOM      1  N   MET A   1       1.458   "


def test_what_is_no_structure(tmp_path: Path) -> None:
    for name, text, token in (
        ("x.fasta", ">a\nMKT\n", "by its name"),
        ("x.pdb", "", "no atoms"),
        ("x.cif", " \n\n", "mmCIF"),
        ("x.cif", "data_x\n_entry.id x\n", "no atoms"),
        ("x.pdb", f"{_ATOM}0.000   0.0\n", "too short"),
        ("x.pdb", f"\n{_ATOM}0.0x0   0.000\n", r"x\.pdb:2: .* no coordinate"),
        ("x.cif", cif(chain(SEQ), {"A": three(SEQ)}).replace("MET A 1 1 ?", "MET A 1 15 ?"), "outside its sequence"),
        ("x.cif", cif(chain(SEQ), {"A": three(SEQ)}).replace("1.458 0.000", "1e300 0.000"), "beyond"),
        ("x.cif", cif(chain(SEQ, "A B", asym="A"), {"A": three(SEQ)}), "chain name 'A B'"),
    ):
        with pytest.raises(InputError, match=token) as raised:
            read_chains(write(tmp_path / name, text))
        assert str(tmp_path / name) in str(raised.value)
    for name in ("a\nb.pdb", "a\x1b[31mb.pdb", "\udcff.pdb", ".pdb", ">a.pdb"):
        with pytest.raises(InputError, match="the file name") as raised:
            read_chains(write(tmp_path / name, pdb(chain(SEQ))))
        assert str(raised.value).isprintable()


def test_damaged_files_give_one_sentence_or_a_whole_chain(tmp_path: Path) -> None:
    comps, rng, whole, messages = [*three("MKTAY"), "MSE", *three("IAKQRGGLV")], random.Random(1), 0, list[str]()
    lines = chain(comps, missing=[3]) + water("A", "D")
    texts = {"x.pdb": [pdb(lines, {"A": comps}), pdb(chain(SEQ))], "x.cif": [cif(lines, {"A": comps}), cif(chain(SEQ))]}
    for k in range(160):
        name = ("x.pdb", "x.cif")[k % 2]
        rows = rng.choice(texts[name]).split("\n")
        at = rng.randrange(len(rows))
        words = rows[at].split(" ")
        words[rng.randrange(len(words))] = rng.choice(
            ["?", ".", "-1", "99999", "nan", "'", ";", "loop_", "_a.b", "\xb5"]
        )
        digits = "".join(rng.choice("0123456789") if c.isdigit() and rng.random() < 0.5 else c for c in rows[at])
        row = rng.choice([" ".join(words), digits, rows[at][: len(digits) // 2]])
        rest = rng.choice([[], rows[at + 3 :], [row, *rows[at + 1 :]], [row, *rows[at + 1 :]]])
        (tmp_path / name).write_bytes("\n".join([*rows[:at], *rest]).encode("latin-1"))
        try:
            for found in read_chains(tmp_path / name):
                assert found.cb_L3.shape == (len(found.sequence), 3)
                assert (np.isnan(found.cb_L3).all(1) == np.isnan(found.cb_L3).any(1)).all()
            whole += 1
        except InputError as error:
            messages.append(str(error))
    assert [m for m in messages if not m.isprintable() or len(m) > 700] == []
    assert min(whole, len(messages)) > 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "set"
    path.mkdir()
    (path / "2abc.pdb").write_text(pdb(chain(SEQ, missing=[4]), {"A": three(SEQ)}))
    both = chain(OTHER, "A") + chain(OTHER, "B", shift=20) + chain(THIRD, "C", shift=-700)
    (path / "1ABC.cif").write_text(cif(both, {name: three(s) for name, s in zip("ABC", (OTHER, OTHER, THIRD))}))  # noqa: B905
    (path / "3abc.ent.gz").write_bytes(gzip.compress(pdb(chain(THIRD, "X", missing=[0, 11])).encode()))
    return path


def split(source: Path, **options: str) -> tuple[dict[str, str], dict[str, np.ndarray], list[str]]:
    """Return sequences and coordinates in 0.1 A by id, and the notices."""
    fasta, npz = source.parent / "out.fasta", source.parent / "out.npz"
    said = to_split(source, fasta, npz, **options)
    with np.load(npz) as file:
        assert set(file.files) == {"names", "seqs", "offsets", "cb_dA"}
        ends = file["offsets"]
        rows = {str(name): file["cb_dA"][ends[k] : ends[k + 1]] for k, name in enumerate(file["names"])}
        sequences = {str(name): str(sequence) for name, sequence in zip(file["names"], file["seqs"], strict=True)}
    assert fasta.read_text() == "".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items())
    fasta.unlink()
    npz.unlink()
    return sequences, rows, said


def test_the_pair_of_files(folder: Path) -> None:
    (folder / "inner").mkdir()
    for name in ("inner/9abc.pdb", "README.md", "a.fasta", "._2abc.pdb", "list\x1b.txt"):
        (folder / name).write_text("x")
    sequences, rows, said = split(folder)
    assert list(sequences.items()) == [
        *(("1abc_A", OTHER), ("1abc_C", THIRD), ("2abc_A", SEQ), ("3abc_X", THIRD[1:-1])),
    ]
    assert [notice.split(" not read")[0] for notice in said[:2]] == ["4 files", "1 inner folder"]
    assert [notice.split()[-1] for notice in said[2:]] == ["(1abc_B)", "(3abc_X)"]
    assert [(cb.dtype, len(cb)) for cb in rows.values()] == [(np.uint16, n) for n in (12, 12, 14, 10)]
    assert (rows["2abc_A"][4] == UNRESOLVED).all()
    cb = expected_cb(12)
    for name in ("1abc_A", "1abc_C"):  # each chain begins at 0 on each axis, wherever it lies
        np.testing.assert_allclose(rows[name] / 10, cb - cb.min(0), atol=0.0501)
        assert rows[name].min(0).tolist() == [0, 0, 0]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["set"]


def test_what_cannot_be_written_is_refused_and_nothing_is_left_or_written_over(folder: Path, tmp_path: Path) -> None:
    def refused(token: str, kind: type[Exception] = InputError) -> None:
        with pytest.raises(kind, match=token) as raised:
            split(folder)
        assert "\n" not in str(raised.value)

    for name in ("out.fasta", "out.npz"):
        write(tmp_path / name, "mine")
        refused(f"{name}: exists already", UsageError)
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    write(folder / "1abc.pdb", pdb(chain(SEQ, "A")))
    refused(r"set/1abc\.pdb: chain '1abc_A' .*set/1ABC\.cif")
    for path in folder.iterdir():
        path.unlink()
    refused("set: has no structure file")
    moved = [replace(x, xyz=(x.xyz[0] + 7000 * (x.seq == 14), x.xyz[1], x.xyz[2])) for x in chain(SEQ)]
    write(folder / "x.cif", cif(moved, {"A": three(SEQ)}))
    refused(r"x\.cif: chain 'x_A' is .* A wide")
    write(folder / "x.cif", cif(chain("MKTAY"), {"A": three("MKTAY")}))
    refused("set: has no protein chain with 10 or more residues .*1 record left out with fewer")
    (folder / "y.pdb").symlink_to(tmp_path / "nowhere")
    refused(r"y\.pdb: .*link")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["set"]
    with pytest.raises(InputError, match="none: no such file"):
        to_split(tmp_path / "none", tmp_path / "out.fasta", tmp_path / "out.npz")


def test_a_folder_is_read_once_and_again_after_a_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ESMSHARD_CACHE", str(tmp_path / "cache"))
    reads: list[Path] = []
    monkeypatch.setattr(structure_folder, "to_split", lambda *a, **k: (reads.append(a[0]), to_split(*a, **k))[1])
    fasta = cached_split(folder)
    assert notices(fasta)[0].endswith("(1abc_B)")
    assert cached_split(folder) == cached_split(Path(f"{folder}/../set")) == fasta
    assert len(reads) == 1
    seen = {fasta}
    for change in (
        lambda: os.utime(folder / "2abc.pdb", ns=(1, 1)),
        lambda: (folder / "2abc.pdb").rename(folder / "4abc.pdb"),
        (folder / "4abc.pdb").unlink,
    ):
        change()
        seen.add(cached_split(folder))
    assert len(reads) == len(seen) == 4


@pytest.fixture
def complexes(tmp_path: Path) -> Path:
    path = tmp_path / "set"
    path.mkdir()
    lines = chain(SEQ, "A", missing=[3]) + chain(OTHER, "B", shift=4) + chain(SHORT, "P", shift=30) + nucleic("D")
    kinds = {"D": "polydeoxyribonucleotide"}
    poly = {"A": three(SEQ), "B": three(OTHER), "P": three(SHORT), "D": ["DA", "DG", "DC", "DT"] * 4}
    write(path / "1ABC.cif", cif(lines, poly, kinds))
    write(path / "2abc_model.pdb", pdb(chain(SEQ, "H") + chain(SEQ, "L", shift=5)))
    write(path / "3abc.pdb", pdb(chain(OTHER, "A")))
    return path


def test_records_of_several_chains(complexes: Path) -> None:
    sequences, rows, said = split(complexes, complexes="all")
    joined = {"1abc_A:B:P": f"{SEQ}:{OTHER}:{SHORT}", "2abc_model_H:L": f"{SEQ}:{SEQ}", "3abc_A": OTHER}
    assert sequences == joined
    assert {name: len(cb) for name, cb in rows.items()} == {"1abc_A:B:P": 31, "2abc_model_H:L": 28, "3abc_A": 12}
    assert "2 records of several chains of a file (1abc_A:B:P, 2abc_model_H:L)" in said
    assert not [sentence for sentence in said if "sequence of another chain" in sentence]
    first, second = expected_cb(len(SEQ), missing=[3]), expected_cb(len(OTHER)) + 4
    cb_dA_L3 = rows["1abc_A:B:P"].astype(float)
    assert (cb_dA_L3[3] == UNRESOLVED).all()
    for i, j in itertools.product((0, 5, 13), (0, 7, 11)):
        assert math.dist(cb_dA_L3[i], cb_dA_L3[14 + j]) / 10 == pytest.approx(math.dist(first[i], second[j]), abs=0.2)


def test_a_list_names_the_records(complexes: Path) -> None:
    (complexes / "3abc.pdb").write_text("<html>")
    path = write(complexes.parent / "pairs.txt", "# my pairs\n\n1ABC_B:A\n2abc_model_H:L\n9xyz_A:B\n8xyz_A:B\n")
    sequences, _, said = split(complexes, complexes=str(path))
    assert sequences == {"1abc_B:A": f"{OTHER}:{SEQ}", "2abc_model_H:L": f"{SEQ}:{SEQ}"}
    assert any(notice.startswith("2 records of pairs.txt") for notice in said)
    for text, token in (
        ("1abc_A:B\n1abc\n", r"pairs\.txt:2: '1abc'"),
        ("1abc_A:\n", r"pairs\.txt:1: '1abc_A:'"),
        ("1abc_A:B\n\n1abc_A:B\n", r"pairs\.txt:3: '1abc_A:B'"),
        ("1abc_A:A\n", r"pairs\.txt:1: '1abc_A:A' has a chain twice"),
        ("7abc_A:B\n", r"pairs\.txt: has no record from 3 structure files"),
        ("1abc_A:D\n", r"1ABC\.cif: has no protein chain 'D'; it has A, B, P"),
    ):
        with pytest.raises(InputError, match=token):
            split(complexes, complexes=str(write(path, text)))


def test_molecules_that_share_a_chain_name_cannot_be_joined(tmp_path: Path) -> None:
    lines = [replace(line, asym="AA") for line in chain(SEQ, "A")]
    lines += [replace(line, asym="AB") for line in chain(OTHER, "A", first=30)] + chain(OTHER, "B", asym="B")
    path = write(tmp_path / "1abc.cif", cif(lines, {"AA": three(SEQ), "AB": three(OTHER), "B": three(OTHER)}))
    with pytest.raises(InputError, match=r"\(1abc_A_AA, 1abc_A_AB\)"):
        read_records(path, ["A:B"])
    assert [one.id for one in read_records(path, "all")] == ["1abc_A_AA:A_AB:B"]


def test_a_folder_is_kept_for_each_way_of_joining(complexes: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.txt", "1abc_A:B\n")
    found = [cached_split(complexes, how) for how in (None, "all", str(path))]
    assert [fasta.read_text().count(">") for fasta in found] == [4, 3, 1]
    assert cached_split(complexes) == found[0]
    assert "2 records of several chains of a file (1abc_A:B:P, 2abc_model_H:L)" in notices(found[1])
    path.write_text("1abc_B:A\n")
    assert cached_split(complexes, str(path)).read_text().startswith(">1abc_B:A\n")
    assert found[2].read_text().startswith(">1abc_A:B\n")
