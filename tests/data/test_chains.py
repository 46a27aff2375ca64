"""Chains of structure files: the rules, one by one, through PDB and through mmCIF."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structure_texts import OTHER, SEQ, Line, backbone, chain, cif, expected_cb, nucleic, of, pdb, three, water

from esmshard.data.labels.coordinates import contact_labels
from esmshard.data.structures.chains import Chain, read_chains, virtual_cb
from esmshard.errors import InputError
from esmshard.io.symbols import Edits

FORMS = ("pdb", "cif")
Seqs = Mapping[str, Sequence[str]]
Read = Callable[..., list[Chain]]


@pytest.fixture(params=FORMS)
def read(request: pytest.FixtureRequest, tmp_path: Path) -> Read:
    """Writes lines as a file of one form and reads it; what was changed is in `read.edits`."""
    form: str = request.param

    def run(
        lines: list[Line],
        sequences: Seqs | None = None,
        *,
        modres: Mapping[str, str] | None = None,
        parents: Mapping[str, str] | None = None,
        kinds: Mapping[str, str] | None = None,
        **options: object,
    ) -> list[Chain]:
        path = tmp_path / f"1ABC.{form}"
        if form == "pdb":
            path.write_text(pdb(lines, sequences, modres or parents))
        else:
            path.write_text(cif(lines, sequences, kinds, parents, modres))
        run.edits = Edits()  # type: ignore[attr-defined]
        return read_chains(path, edits=run.edits, **options)  # type: ignore[attr-defined, arg-type]

    return run


def notices(read: Read) -> list[str]:
    return read.edits.notices()  # type: ignore[attr-defined, no-any-return]


def test_a_whole_chain(read: Read) -> None:
    (found,) = read(chain(SEQ), {"A": three(SEQ)})
    assert (found.id, found.sequence) == ("1abc_A", SEQ)
    assert found.cb_L3.dtype == np.float32
    np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)
    assert notices(read) == []


def test_virtual_cb_of_one_residue_by_hand() -> None:
    """N on the x axis, C in the plane z = 0: from CA, cos of the angle along N, and the dihedral turns about it."""
    cb_L3 = virtual_cb(np.array([[1.46, 0, 0]]), np.zeros((1, 3)), np.array([[-0.55, 1.42, 0]]))
    x, radius = 1.522 * math.cos(1.927), 1.522 * math.sin(1.927)
    np.testing.assert_allclose(cb_L3[0], [x, radius * math.cos(2.143), radius * math.sin(2.143)], atol=1e-12)
    np.testing.assert_allclose(cb_L3[0], [-0.5307, -0.7726, 1.1992], atol=1e-3)


def test_virtual_cb_lies_where_an_l_amino_acid_has_it() -> None:
    """Measured, not placed: length, angle and dihedral, and the side of the plane that makes it L."""
    for (nitrogen, ca, c, _), cb in zip(backbone(6), expected_cb(6), strict=True):
        assert math.dist(ca, cb) == pytest.approx(1.522, abs=1e-9)
        to_n, to_cb = (nitrogen - ca) / math.dist(nitrogen, ca), (cb - ca) / 1.522
        assert math.acos(float(to_n @ to_cb)) == pytest.approx(1.927, abs=1e-6)
        assert float(np.cross(nitrogen - ca, c - ca) @ (cb - ca)) > 0


def test_virtual_and_real_cb_are_close_but_for_glycine(read: Read) -> None:
    (virtual,) = read(chain(SEQ), {"A": three(SEQ)})
    (real,) = read(chain(SEQ), {"A": three(SEQ)}, cb="real")
    apart = np.linalg.norm(virtual.cb_L3 - real.cb_L3, axis=1)
    glycine = [10, 11]
    assert np.delete(apart, glycine).max() < 0.3
    np.testing.assert_allclose(np.delete(real.cb_L3, glycine, 0), np.delete(backbone(14)[:, 3], glycine, 0), atol=1e-5)
    np.testing.assert_allclose(real.cb_L3[glycine], backbone(14)[glycine, 1], atol=1e-5)
    np.testing.assert_allclose(apart[glycine], 1.522, atol=1e-4)


@pytest.mark.parametrize(
    ("atom", "virtual_is_there", "real_is_there"),
    [("N", False, True), ("CA", False, True), ("C", False, True), ("CB", True, False)],
)
def test_a_missing_atom(read: Read, atom: str, virtual_is_there: bool, real_is_there: bool) -> None:
    lines = [x for x in chain(SEQ) if not (x.seq == 5 and x.name == atom)]
    for cb, there in (("virtual", virtual_is_there), ("real", real_is_there)):
        (found,) = read(lines, {"A": three(SEQ)}, cb=cb)
        assert found.sequence == SEQ
        gone = np.flatnonzero(np.isnan(found.cb_L3).any(1)).tolist()
        assert gone == ([] if there else [4])


@pytest.mark.parametrize("along", [(1.5, 0.0, 0.0), (0.3, 0.7, 1.1), (0.1, 0.2, 0.3), (0.0, 0.0, 0.0)])
def test_atoms_on_a_line_give_no_cb(read: Read, along: tuple[float, float, float]) -> None:
    """Rounding leaves some of these a hair beside the line, where any direction might come out."""
    x, y, z = along
    flat = {"N": (0.0, 0.0, 0.0), "CA": along, "C": (3 * x, 3 * y, 3 * z), "CB": (1.5, 1.5, 0.0)}
    lines = [replace(a, xyz=flat[a.name]) if a.seq == 7 else a for a in chain(SEQ)]
    (found,) = read(lines, {"A": three(SEQ)})
    assert np.flatnonzero(np.isnan(found.cb_L3).any(1)).tolist() == [6]


def test_residues_without_atoms_keep_their_place(read: Read) -> None:
    missing = [0, 6, 7, 13]
    (found,) = read(chain(SEQ, missing=missing) + chain(SEQ, "B"), {"A": three(SEQ), "B": three(SEQ)}, chains=["A"])
    assert found.sequence == SEQ
    np.testing.assert_allclose(found.cb_L3, expected_cb(14, missing=missing), atol=2e-5)


@pytest.mark.parametrize("first", [1, -5, 100, 9986])
def test_numbers_may_begin_anywhere(read: Read, first: int) -> None:
    lines = chain(SEQ, first=first, missing=[3, 4])
    (found,) = read(lines, {"A": three(SEQ)})
    np.testing.assert_allclose(found.cb_L3, expected_cb(14, missing=[3, 4]), atol=2e-5)


def test_in_a_repeat_the_numbers_and_bonds_say_where_the_gap_is(read: Read) -> None:
    sequence = "MAAAAAAAAAAAAAAAK"
    for missing in ([4, 5, 6], [1, 2], [2], [13, 14, 15]):
        (found,) = read(chain(sequence, missing=missing), {"A": three(sequence)})
        assert np.flatnonzero(np.isnan(found.cb_L3[:, 0])).tolist() == missing


def test_numbers_that_jump_backwards_change_nothing(read: Read) -> None:
    lines = [replace(x, number=int(x.number) + (50 if x.seq is not None and x.seq <= 7 else -10)) for x in chain(SEQ)]
    for sequences in ({"A": three(SEQ)}, None):
        (found,) = read(lines, sequences)
        assert found.sequence == SEQ
        np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)


def test_insertion_codes_are_residues_of_their_own(read: Read) -> None:
    numbers = {3: (2, "A"), 4: (2, "B"), 5: (3, "")}
    lines = [replace(x, number=numbers.get(x.seq or 0, (x.number, ""))[0]) for x in chain(SEQ)]
    lines = [replace(x, ins=numbers.get(x.seq or 0, (0, ""))[1]) for x in lines]
    lines = [replace(x, number=int(x.number) - 2) if (x.seq or 0) > 5 else x for x in lines]
    for sequences in ({"A": three(SEQ)}, None):
        (found,) = read(lines, sequences)
        assert found.sequence == SEQ
        np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [((0.4, "A"), (0.6, "B"), "B"), ((0.6, "A"), (0.4, "B"), "A"), ((0.5, "B"), (0.5, "A"), "B")],
)
def test_the_alternative_location_of_highest_occupancy(
    read: Read, first: tuple[float, str], second: tuple[float, str], taken: str
) -> None:
    """All atoms of a residue come from one alternative; of equals from the first."""
    lines, move = [], {first[1]: 0.0, second[1]: 5.0}
    for x in chain(SEQ):
        if x.seq == 4:
            for occupancy, alt in (first, second):
                xyz = (x.xyz[0] + move[alt], x.xyz[1], x.xyz[2])
                lines.append(replace(x, alt=alt, occupancy=occupancy, xyz=xyz))
        else:
            lines.append(x)
    expected = expected_cb(14)
    expected[3, 0] += move[taken]
    (found,) = read(lines, {"A": three(SEQ)})
    np.testing.assert_allclose(found.cb_L3, expected, atol=2e-5)
    assert notices(read) == ["1 residue with alternative locations, read at that of highest occupancy (1abc_A)"]


def test_atoms_without_an_alternative_go_with_any(read: Read) -> None:
    lines = []
    for x in chain(SEQ):
        if x.seq == 4 and x.name == "C":
            moved = (x.xyz[0], x.xyz[1], x.xyz[2] + 1)
            lines += [replace(x, alt="A", occupancy=0.3, xyz=moved), replace(x, alt="B", occupancy=0.7)]
        else:
            lines.append(x)
    (found,) = read(lines, {"A": three(SEQ)})
    np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)


def test_an_atom_that_comes_twice_is_read_once(read: Read) -> None:
    lines = chain(SEQ)
    lines.insert(9, replace(lines[8], xyz=(50.0, 50.0, 50.0)))
    (found,) = read(lines, {"A": three(SEQ)})
    np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)
    assert notices(read) == ["1 atom left out that came twice (1abc_A)"]


def test_two_residues_at_one_place(read: Read) -> None:
    """The sequence has the one that the file lists first, the coordinates are the more frequent one's."""
    lines = []
    for x in chain(SEQ):
        other = replace(x, comp="VAL", alt="B", occupancy=0.8, xyz=(x.xyz[0] + 2, x.xyz[1], x.xyz[2]))
        lines += [replace(x, alt="A", occupancy=0.2), other] if x.seq == 4 else [x]
    for_pdb, for_cif = three(SEQ), [*three(SEQ)[:3], "ALA|VAL", *three(SEQ)[4:]]
    in_pdb = form_of(read) == "pdb"
    (found,) = read(lines, {"A": for_pdb if in_pdb else for_cif})
    expected = expected_cb(14)
    expected[3, 0] += 2
    assert found.sequence == SEQ
    np.testing.assert_allclose(found.cb_L3, expected, atol=2e-5)
    assert "1 residue with atoms of another residue than the sequence has, which was followed (1abc_A)" in notices(read)


def form_of(read: Read) -> str:
    return str(read.__closure__[0].cell_contents)  # type: ignore[attr-defined]


MODIFIED = [*three("MKTA"), "MSE", "SEC", "PYL", "ASX", "GLX", "UNK", "SEP", "XYZ", "MSE", *three("GV")]


@pytest.mark.parametrize("where", ["modres", "parents"])
@pytest.mark.parametrize("sequences", [{"A": MODIFIED}, None])
def test_modified_residues(read: Read, where: str, sequences: Seqs | None) -> None:
    """SEP has a parent, XYZ has one that is no standard residue, SEC's own letter comes before its parent's."""
    named = {"SEP": "SER", "XYZ": "QQQ", "SEC": "CYS"}
    (found,) = read(chain(MODIFIED), sequences, **{where: named})
    assert found.sequence == "MKTAMUOBZXSXMGV"
    np.testing.assert_allclose(found.cb_L3, expected_cb(15), atol=2e-5)
    assert [x for x in notices(read) if "SEQRES" not in x] == [
        "1 residue read as X, as the file names no standard parent (1abc_A)",
        "3 modified residues read as the standard parent (1abc_A)",
    ]


def test_a_modified_residue_without_a_parent_is_x(read: Read) -> None:
    (found,) = read(chain([*three("MKTA"), "SEP", *three("AYIAKQ")]), {"A": [*three("MKTA"), "SEP", *three("AYIAKQ")]})
    assert found.sequence == "MKTAXAYIAKQ"


def test_caps_of_the_sequence_are_x(read: Read) -> None:
    comps = ["ACE", *three(SEQ), "NH2"]
    lines = [x for x in chain(comps, first=0) if x.comp not in ("ACE", "NH2") or x.name == "C"]
    (found,) = read(lines, {"A": comps})
    assert found.sequence == f"X{SEQ}X"
    np.testing.assert_allclose(found.cb_L3, expected_cb(16, missing=[0, 15]), atol=2e-5)


def test_only_the_first_model_is_read(read: Read) -> None:
    lines = chain(SEQ) + chain(SEQ, shift=30, model=2) + chain(SEQ, shift=60, model=3)
    (found,) = read(lines, {"A": three(SEQ)})
    np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)
    assert notices(read) == [f"1 file with several models, of which the first was read (1ABC.{form_of(read)})"]


def test_two_chains(read: Read) -> None:
    lines = chain(SEQ, "A") + chain(OTHER, "b", shift=40)
    found = read(lines, {"A": three(SEQ), "b": three(OTHER)})
    assert [(c.id, c.sequence) for c in found] == [("1abc_A", SEQ), ("1abc_b", OTHER)]
    np.testing.assert_allclose(found[1].cb_L3, expected_cb(12) + 40, atol=2e-5)
    assert notices(read) == []
    (second,) = read(lines, {"A": three(SEQ), "b": three(OTHER)}, chains=["b"])
    assert second.id == "1abc_b"
    with pytest.raises(InputError, match=r"1ABC\.\w+: has no protein chain 'B'; it has A, b$"):
        read(lines, {"A": three(SEQ), "b": three(OTHER)}, chains=["A", "B"])


def test_of_chains_with_one_sequence_the_first_is_kept(read: Read) -> None:
    names = "ABCDE"
    lines = [x for k, name in enumerate(names) for x in chain(SEQ, name, shift=20 * k)]
    sequences = {name: three(SEQ) for name in names}
    (found,) = read(lines, sequences)
    assert found.id == "1abc_A"
    np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)
    assert notices(read) == [
        "4 chains left out with the sequence of another chain of the file (1abc_B, 1abc_C, 1abc_D, ...)"
    ]
    assert [c.id for c in read(lines, sequences, chains={"D", "B"})] == ["1abc_B", "1abc_D"]


def test_chains_with_few_resolved_residues_are_left_out(read: Read) -> None:
    lines = chain(SEQ, missing=range(5)) + chain(OTHER, "B", missing=[0, 11])
    (found,) = read(lines, {"A": three(SEQ), "B": three(OTHER)})
    assert (found.id, int((~np.isnan(found.cb_L3[:, 0])).sum())) == ("1abc_B", 10)
    assert notices(read) == ["1 chain left out with fewer than 10 residues with coordinates (1abc_A)"]


def test_of_two_copies_the_resolved_one_is_kept(read: Read) -> None:
    found = read(chain(SEQ, missing=range(5)) + chain(SEQ, "B"), {"A": three(SEQ), "B": three(SEQ)})
    assert [c.id for c in found] == ["1abc_B"]


def test_nucleic_acids_waters_and_ligands_are_left_out(read: Read) -> None:
    calcium = [Line("CA", "CA", "A", 300, (1.0, 1.0, 1.0), None, "D", het=True, element="CA")]
    free = [replace(x, number=400, seq=None, asym="E", het=True) for x in chain("E")]
    lines = chain(SEQ) + nucleic("B") + water("A", "C") + calcium + free
    sequences = {"A": three(SEQ), "B": ["DA", "DG", "DC", "DT"] * 4}
    (found,) = read(lines, sequences, kinds={"B": "polydeoxyribonucleotide"})
    assert (found.id, found.sequence) == ("1abc_A", SEQ)
    np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)
    assert len(notices(read)) == 1
    assert notices(read)[0].startswith("1 chain of no protein left out (1ABC.")
    (bare,) = read(lines, None)
    assert (bare.id, bare.sequence) == ("1abc_A", SEQ)


def test_without_a_sequence_the_residues_with_atoms_are_it(read: Read) -> None:
    (found,) = read(chain(SEQ, missing=[3, 4, 8]), None)
    assert found.sequence == "MKTIAKRGGLV"
    np.testing.assert_allclose(found.cb_L3, np.delete(expected_cb(14), [3, 4, 8], 0), atol=2e-5)
    assert notices(read) == [
        "1 chain without SEQRES or _entity_poly_seq, read as the residues with atoms (1abc_A)",
        "2 gaps in residue numbers, where the sequence is shorter than the protein's (1abc_A)",
    ]


def test_a_residue_of_side_chain_atoms_alone_is_in_the_sequence(read: Read) -> None:
    lines = [x for x in chain(SEQ) if x.seq != 5]
    lines[16:16] = [replace(x, name=name) for x, name in zip(of(chain(SEQ), 5), ("CG", "CD1", "CD2"), strict=False)]
    (found,) = read(lines, None)
    assert found.sequence == SEQ
    assert np.flatnonzero(np.isnan(found.cb_L3[:, 0])).tolist() == [4]


def test_residues_under_a_plddt_lose_their_coordinates(read: Read) -> None:
    lines = [replace(x, b={2: 69.99, 9: 12.0, 4: 70.0}.get(x.seq or 0, 91.0)) for x in chain(SEQ)]
    (found,) = read(lines, {"A": three(SEQ)}, min_plddt=70)
    np.testing.assert_allclose(found.cb_L3, expected_cb(14, missing=[1, 8]), atol=2e-5)
    assert notices(read) == ["2 residues left without coordinates for a pLDDT under 70 (1abc_A)"]
    (whole,) = read(lines, {"A": three(SEQ)})
    assert not np.isnan(whole.cb_L3).any()


def test_atoms_of_another_protein_than_the_sequence(read: Read) -> None:
    with pytest.raises(InputError, match=r"chain 'A' \d+ of 14 residues with atoms are not those of its sequence"):
        read(chain(SEQ), {"A": three("WWWWWWWWWWWWWWWW")})


def test_one_residue_that_differs_from_the_sequence(read: Read) -> None:
    (found,) = read(chain("MKTAYIAWQRGGLV", missing=[3]), {"A": three(SEQ)})
    assert found.sequence == SEQ
    np.testing.assert_allclose(found.cb_L3, expected_cb(14, missing=[3]), atol=2e-5)
    assert notices(read) == [
        "1 residue with atoms of another residue than the sequence has, which was followed (1abc_A)"
    ]
    (found,) = read(chain("MKTAYIAWQRGWLV", missing=[3]), {"A": three(SEQ)})
    assert (found.sequence, notices(read)[0].split()[:2]) == (SEQ, ["2", "residues"])
    with pytest.raises(InputError, match="3 of 14 residues with atoms are not those of its sequence"):
        read(chain("MKTAYIAWQRWWLV"), {"A": three(SEQ)})


def test_pdb_and_mmcif_of_one_entry_give_equal_maps(tmp_path: Path) -> None:
    """Everything at once: a gap, alternatives, insertion codes, a modified residue, a ligand, water, two models."""
    comps = [*three("MKTAY"), "MSE", *three("IAKQRGGLVNDECHW"), "SEP", *three("FP")]
    lines = []
    for x in chain(comps, first=-2, missing=[0, 9, 10, 23]):
        ins = {12: "A", 13: "B"}.get(x.seq or 0, "")
        lines.append(replace(x, number=7 if x.seq in (11, 12, 13) else x.number, ins=ins))
        if x.seq == 5:
            lines[-1:] = [replace(x, alt="A", occupancy=0.5), replace(x, alt="B", occupancy=0.5, xyz=(1.0, 2.0, 3.0))]
    lines += water("A", "B") + chain(comps, model=2, shift=5)
    (tmp_path / "x.pdb").write_text(pdb(lines, {"A": comps}, {"SEP": "SER"}))
    (tmp_path / "x.cif").write_text(cif(lines, {"A": comps}, modres={"SEP": "SER"}))
    (a,) = read_chains(tmp_path / "x.pdb")
    (b,) = read_chains(tmp_path / "x.cif")
    assert a.sequence == b.sequence == "MKTAYMIAKQRGGLVNDECHWSFP"
    np.testing.assert_array_equal(a.cb_L3, b.cb_L3)
    labels_LL = contact_labels(b.cb_L3)
    assert labels_LL.tolist() == contact_labels(a.cb_L3).tolist()
    assert np.flatnonzero(labels_LL.diagonal() < 0).tolist() == [0, 9, 10, 23]
    assert labels_LL[1, 4:9].tolist() == [1, 1, 0, 0, 0]  # a helix: i + 4 at 6.2 A, i + 5 at 8.4 A
    # 1.5 A a residue along the helix: none further than 7 places is within 8 A
