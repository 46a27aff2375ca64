"""Chains of structure files: the rules, one by one, through PDB and through mmCIF."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structure_texts import OTHER, SEQ, Line, chain, cif, expected_cb, nucleic, of, pdb, three, water, write

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


@pytest.mark.parametrize("along", [(1.5, 0.0, 0.0), (0.3, 0.7, 1.1), (0.1, 0.2, 0.3), (0.0, 0.0, 0.0)])
def test_atoms_on_a_line_give_no_cb(read: Read, along: tuple[float, float, float]) -> None:
    """Rounding leaves some of these a hair beside the line, where any direction might come out."""
    x, y, z = along
    flat = {"N": (0.0, 0.0, 0.0), "CA": along, "C": (3 * x, 3 * y, 3 * z), "CB": (1.5, 1.5, 0.0)}
    lines = [replace(a, xyz=flat[a.name]) if a.seq == 7 else a for a in chain(SEQ)]
    (found,) = read(lines, {"A": three(SEQ)})
    assert np.flatnonzero(np.isnan(found.cb_L3).any(1)).tolist() == [6]


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
    assert notices(read)[0].startswith("1 file with several models, of which the first was read (1ABC.")


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


@pytest.mark.parametrize(("atom", "is_there"), [("N", False), ("CA", False), ("C", False), ("CB", True)])
def test_a_missing_atom(read: Read, atom: str, is_there: bool) -> None:
    (found,) = read([x for x in chain(SEQ) if not (x.seq == 5 and x.name == atom)], {"A": three(SEQ)})
    assert found.sequence == SEQ
    assert np.flatnonzero(np.isnan(found.cb_L3).any(1)).tolist() == ([] if is_there else [4])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.text(alphabet="ACDEFGHIKLMNPQRSTVWY", min_size=12, max_size=30) | st.sampled_from(["MAAAAAAAAAAAAAAAK"]),
    st.integers(-50, 9000),
    st.data(),
)
def test_residues_without_atoms_keep_their_place(
    tmp_path: Path, sequence: str, first: int, data: st.DataObject
) -> None:
    """Whatever the first number. Unresolved ends are left out here, since a repeat would leave them open in PDB."""
    inner = data.draw(st.sets(st.integers(1, len(sequence) - 2), max_size=4))
    for form, as_text in {"cif": cif, "pdb": pdb}.items():
        text = as_text(chain(sequence, first=first, missing=inner), {"A": three(sequence)})
        (found,) = read_chains(write(tmp_path / f"x.{form}", text))
        assert found.sequence == sequence
        np.testing.assert_allclose(found.cb_L3, expected_cb(len(sequence), missing=list(inner)), atol=2e-5)


@pytest.mark.parametrize("listed", [True, False])
def test_modified_residues(read: Read, listed: bool) -> None:
    """The parent of SEP is in gemmi's table, that of XYZ may be in the file."""
    comps = [*three("MKTA"), "MSE", "SEC", "PYL", "ASX", "GLX", "UNK", "SEP", "XYZ", "MSE", *three("GV")]
    (found,) = read(chain(comps), {"A": comps} if listed else None)
    assert found.sequence == "MKTAMUOBZXSXMGV"
    np.testing.assert_allclose(found.cb_L3, expected_cb(15), atol=2e-5)
    assert "modified residues read as the standard parent" in "".join(notices(read))


def test_a_parent_that_the_file_names(tmp_path: Path) -> None:
    (found,) = read_chains(write(tmp_path / "x.pdb", pdb(chain([*three("MKTA"), "XYZ"]), modres={"XYZ": "SER"})))
    assert found.sequence == "MKTAS"


def test_two_chains(read: Read) -> None:
    lines = chain(SEQ, "A") + chain(OTHER, "b", shift=40)
    found = read(lines, {"A": three(SEQ), "b": three(OTHER)})
    assert [(c.id, c.sequence) for c in found] == [("1abc_A", SEQ), ("1abc_b", OTHER)]
    np.testing.assert_allclose(found[1].cb_L3, expected_cb(12) + 40, atol=2e-5)
    assert notices(read) == []
    assert [c.id for c in read(lines, {"A": three(SEQ), "b": three(OTHER)}, chains=["b"])] == ["1abc_b"]
    with pytest.raises(InputError, match="no protein chain 'B'; it has A, b"):
        read(lines, {"A": three(SEQ), "b": three(OTHER)}, chains=["A", "B"])


def test_residues_that_differ_from_the_sequence(read: Read) -> None:
    """A few are counted, many are refused."""
    (found,) = read(chain("MKTAYIAWQRGWLV", missing=[3]), {"A": three(SEQ)})
    assert found.sequence == SEQ
    np.testing.assert_allclose(found.cb_L3, expected_cb(14, missing=[3]), atol=2e-5)
    assert [notice.split()[0] for notice in notices(read)] == ["2"]
    for atoms, sequence in (("MKTAYIAWQRWWLV", SEQ), (SEQ, "W" * 16), (SEQ, SEQ[:10])):
        with pytest.raises(InputError, match="sequence"):
            read(chain(atoms), {"A": three(sequence)})
