"""What is particular to PDB, and to to mmCIF."""

from dataclasses import replace
from pathlib import Path

import gemmi
import numpy as np
import pytest
from structure_texts import ATOMS, OTHER, SEQ, Line, chain, cif, expected_cb, pdb, three, water, write

from esmshard.data.structures import structure_files
from esmshard.data.structures.chains import read_chains
from esmshard.errors import InputError

# PDB alone


def test_antibody_numbers_that_skip_where_the_chain_does_not(tmp_path: Path) -> None:
    lines = [replace(x, number=int(x.number) + (3 if (x.seq or 0) > 6 else 0)) for x in chain(SEQ)]
    (found,) = read_chains(write(tmp_path / "x.pdb", pdb(lines, {"A": three("GG" + SEQ + "LL")})))
    np.testing.assert_allclose(found.cb_L3[2:16], expected_cb(14), atol=2e-5)
    assert np.isnan(found.cb_L3[[0, 1, 16, 17]]).all()


def test_a_bond_says_more_than_a_number(tmp_path: Path) -> None:
    sequence = "MAAAAAAAAAAAAK"
    lines = [replace(x, number=int(x.number) + (1 if (x.seq or 0) > 9 else 0)) for x in chain(sequence, missing=[3])]
    (found,) = read_chains(write(tmp_path / "x.pdb", pdb(lines, {"A": three(sequence)})))
    assert np.flatnonzero(np.isnan(found.cb_L3[:, 0])).tolist() == [3]


def test_serials_beyond_the_columns(tmp_path: Path) -> None:
    for serial in (99_990, 0xFFFF0 - 16**4):
        text = pdb(chain(SEQ), {"A": three(SEQ)}, serial=serial)
        (found,) = read_chains(write(tmp_path / "x.pdb", text))
        np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)
    assert "186a0" in pdb(chain(SEQ), serial=99_990)
    starred = "\n".join(f"{x[:6]}*****{x[11:]}" if x.startswith("ATOM") else x for x in text.split("\n"))
    (found,) = read_chains(write(tmp_path / "x.pdb", starred))
    np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)


def test_residue_numbers_in_letters(tmp_path: Path) -> None:
    """Hybrid-36, as many programs write it after 9,999."""
    numbers = ["9998", "9999", *(f"A00{k}" for k in "0123456789AB")]
    lines = [replace(x, number=numbers[(x.seq or 0) - 1]) for x in chain(SEQ, missing=[5])]
    (found,) = read_chains(write(tmp_path / "x.pdb", pdb(lines, {"A": three(SEQ)})))
    np.testing.assert_allclose(found.cb_L3, expected_cb(14, missing=[5]), atol=2e-5)


def test_lines_without_occupancy_and_b_factor(tmp_path: Path) -> None:
    text = "\n".join(line[:54] if line.startswith("ATOM") else line for line in pdb(chain(SEQ)).split("\n"))
    (found,) = read_chains(write(tmp_path / "x.pdb", text))
    np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)


@pytest.mark.parametrize("ends", ["\r\n", "\r"])
def test_line_ends_of_other_systems(tmp_path: Path, ends: str) -> None:
    for name, text in (("x.pdb", pdb(chain(SEQ))), ("x.cif", cif(chain(SEQ), {"A": three(SEQ)}))):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.replace("\n", ends).encode())
        (found,) = read_chains(tmp_path / name)
        np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)


def test_a_chain_goes_on_after_a_ter_in_its_middle(tmp_path: Path) -> None:
    lines = pdb(chain(SEQ), ter=False).split("\n")
    lines.insert(20, "TER")
    (found,) = read_chains(write(tmp_path / "x.pdb", "\n".join(lines)))
    assert found.sequence == SEQ


def test_an_amino_acid_after_the_end_of_the_chain_is_a_ligand(tmp_path: Path) -> None:
    ligand = [replace(x, number=300, seq=None, het=True) for x in chain("E")]
    (found,) = read_chains(write(tmp_path / "x.pdb", pdb(chain(SEQ) + ligand)))
    assert found.sequence == SEQ
    (found,) = read_chains(write(tmp_path / "x.pdb", pdb(chain(SEQ) + ligand, ter=False)))
    assert found.sequence == f"{SEQ}E"
    (found,) = read_chains(
        write(
            tmp_path / "x.pdb", pdb(chain(SEQ) + [replace(x, comp="LIG") for x in ligand], {"A": three(SEQ)}, ter=False)
        )
    )
    assert found.sequence == SEQ


def test_a_chain_without_a_name_and_one_with_two_letters(tmp_path: Path) -> None:
    (found,) = read_chains(write(tmp_path / "model_1.pdb", pdb(chain(SEQ, " "))))
    assert found.id == "model_1"
    found, other = read_chains(write(tmp_path / "x.ent", pdb(chain(SEQ, "A") + chain(OTHER, "BA"))))
    assert (found.id, other.id) == ("x_A", "x_BA")


def test_more_residues_than_seqres(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pdb", pdb(chain(SEQ), {"A": three(SEQ[:10])}))
    with pytest.raises(InputError, match="chain 'A' has 14 residues with atoms, but 10 in SEQRES"):
        read_chains(path)


# mmCIF alone


def test_the_authors_chain_name_is_in_the_id(tmp_path: Path) -> None:
    lines = chain(SEQ, "H", asym="A", first=101) + chain(OTHER, "AA-2", asym="B")
    path = write(tmp_path / "x.cif", cif(lines, {"A": three(SEQ), "B": three(OTHER)}))
    assert [c.id for c in read_chains(path)] == ["x_H", "x_AA-2"]
    assert [c.id for c in read_chains(path, chains=["AA-2"])] == ["x_AA-2"]


def test_two_polymers_under_one_author_name(tmp_path: Path) -> None:
    lines = chain(SEQ, "H", asym="A") + chain(OTHER, "H", asym="B")
    path = write(tmp_path / "x.cif", cif(lines, {"A": three(SEQ), "B": three(OTHER)}))
    assert [(c.id, c.sequence) for c in read_chains(path)] == [("x_H_A", SEQ), ("x_H_B", OTHER)]


def test_the_label_numbers_place_residues_whatever_the_authors_are(tmp_path: Path) -> None:
    lines = [replace(x, number=900 - 3 * int(x.number)) for x in chain("A" * 14, missing=[2, 3])]
    (found,) = read_chains(write(tmp_path / "x.cif", cif(lines, {"A": three("A" * 14)})))
    np.testing.assert_allclose(found.cb_L3, expected_cb(14, missing=[2, 3]), atol=2e-5)


def test_quoted_values(tmp_path: Path) -> None:
    text = (
        cif(chain(SEQ), {"A": three(SEQ)}).replace(" CA . ", " 'CA' . ").replace("ATOM 1 N N .", "ATOM 1 N \"N\" '.'")
    )
    (found,) = read_chains(write(tmp_path / "x.cif", text.replace("'.'", ".")))
    np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)


def test_the_first_of_several_blocks(tmp_path: Path) -> None:
    text = cif(chain(SEQ), {"A": three(SEQ)}) + cif(chain(OTHER, "B"), {"B": three(OTHER)}).replace("1ABC", "2ABC")
    assert [c.id for c in read_chains(write(tmp_path / "x.mmcif", text))] == ["x_A"]


def test_few_columns_are_enough(tmp_path: Path) -> None:
    items = ("label_atom_id", "label_comp_id", "label_asym_id", "auth_seq_id", "Cartn_x", "Cartn_y", "Cartn_z")
    rows = [f"{x.name} {x.comp} {x.asym} {x.number} {x.xyz[0]} {x.xyz[1]} {x.xyz[2]}" for x in chain(SEQ)]
    text = "\n".join(["data_x", "loop_", *(f"_atom_site.{i}" for i in items), *rows, ""])
    (found,) = read_chains(write(tmp_path / "x.cif", text))
    assert (found.id, found.sequence) == ("x_A", SEQ)
    np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)
    for item in ("label_atom_id", "label_comp_id", "label_asym_id", "Cartn_y"):
        with pytest.raises(InputError, match=f"_atom_site has no column {item}"):
            read_chains(write(tmp_path / "x.cif", text.replace(item, "other")))


def test_a_modified_residue_without_a_label_number(tmp_path: Path) -> None:
    """As Biopython writes it, without sequences. What stands after the chain's end is a ligand."""
    comps = [*three(SEQ[:6]), "MSE", *three(SEQ[7:])]
    lines = [replace(x, seq=None if x.comp == "MSE" else x.seq) for x in chain(comps)]
    lines += [replace(x, number=300, seq=None, het=True) for x in chain("E")] + water("A", "A")
    (found,) = read_chains(write(tmp_path / "x.cif", cif(lines)))
    assert found.sequence == "MKTAYIMKQRGGLV"


def alternatives(place: int, *comps: str) -> list[Line]:
    """A chain with alternative residues at one place, counted on by label_seq_id; the last one is the most frequent."""
    lines, more = list[Line](), 0
    for x in chain(SEQ):
        seq = (x.seq or 0) + more
        if x.seq != place:
            lines.append(replace(x, seq=seq))
            continue
        for k, comp in enumerate(comps):
            het = comp == "MSE"
            of_alternative = {"comp": comp, "alt": "ABC"[k], "occupancy": 0.2 + 0.1 * k, "het": het}
            lines.append(replace(x, seq=None if het else seq + k, **of_alternative))  # type: ignore[arg-type]
        more = len(comps) - 1 if x.name == "CB" else 0
    return lines


@pytest.mark.parametrize(
    ("place", "comps", "letter"),
    [(4, ("PRO", "SER"), "S"), (4, ("PRO", "SER", "VAL"), "V"), (4, ("LEU", "MSE"), "X"), (14, ("MSE", "LEU"), "L")],
)
def test_alternative_residues_at_one_place_are_one_residue(
    tmp_path: Path, place: int, comps: tuple[str, ...], letter: str
) -> None:
    """Without a listed sequence, whichever program wrote the file. `MSE` is written as HETATM, without a number."""
    lines = alternatives(place, *comps)
    expected = SEQ[: place - 1] + letter.replace("X", "M") + SEQ[place:]
    in_pdb = write(tmp_path / "x.pdb", pdb(lines))
    structure = gemmi.read_structure(str(in_pdb))
    structure.setup_entities()
    by_gemmi = structure.make_mmcif_document(gemmi.MmcifOutputGroups(False, atoms=True)).as_string()
    files = [in_pdb, write(tmp_path / "y.cif", cif(lines)), write(tmp_path / "z.cif", by_gemmi)]
    for file in files:
        (read,) = read_chains(file)
        assert read.sequence == expected, file
        np.testing.assert_allclose(read.cb_L3, expected_cb(14), atol=2e-3)


def test_a_place_whose_first_alternative_is_modified_is_in_the_sequence(tmp_path: Path) -> None:
    (read,) = read_chains(write(tmp_path / "x.pdb", pdb(alternatives(1, "MSE", "MET"), {"A": three(SEQ)})))
    np.testing.assert_allclose(read.cb_L3, expected_cb(14), atol=2e-3)


def test_water_under_the_label_of_the_chain(tmp_path: Path) -> None:
    path = write(tmp_path / "x.cif", cif(chain(SEQ) + water("A", "A"), {"A": three(SEQ)}))
    (found,) = read_chains(path)
    np.testing.assert_allclose(found.cb_L3, expected_cb(14), atol=2e-5)


def test_insertion_codes_without_label_numbers(tmp_path: Path) -> None:
    items = ("label_atom_id", "label_comp_id", "label_asym_id", "auth_seq_id", "pdbx_PDB_ins_code")
    rows = [
        f"{x.name} {x.comp} A 52 {'?ABCDEFGHIJKLM'[int(x.number) - 1]} {x.xyz[0]} {x.xyz[1]} {x.xyz[2]}"
        for x in chain(SEQ)
    ]
    names = (*items, "Cartn_x", "Cartn_y", "Cartn_z")
    text = "\n".join(["data_x", "loop_", *(f"_atom_site.{i}" for i in names), *rows, ""])
    (found,) = read_chains(write(tmp_path / "x.cif", text))
    assert found.sequence == SEQ


def test_a_coordinate_that_is_not_there(tmp_path: Path) -> None:
    first = chain(SEQ)[4]
    text = cif(chain(SEQ), {"A": three(SEQ)}).replace(f"{first.xyz[0]:.3f} {first.xyz[1]:.3f}", "? ?")
    (found,) = read_chains(write(tmp_path / "x.cif", text))
    assert np.flatnonzero(np.isnan(found.cb_L3[:, 0])).tolist() == [1]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("MET A 1 1 ?", "MET A 1 15 ?", "row 1 of _atom_site has label_seq_id '15', but .* residues 1 to 14"),
        ("MET A 1 1 ?", "MET A 1 0 ?", "label_seq_id '0'"),
        ("MET A 1 1 ?", "MET A 1 x ?", "label_seq_id 'x'"),
        ("\n1 14 VAL n", "\n1 16 VAL n", "_entity_poly_seq of entity '1' is not numbered from 1 on without gaps"),
        ("\n1 14 VAL n", "\n1 a VAL n", "_entity_poly_seq of entity '1' is not numbered"),
        ("1.458 0.000", "1.4.58 0.000", r"x\.cif: _atom_site row 1: '1\.4\.58' is no coordinate"),
        ("1.458 0.000", "nan 0.000", "'nan' is no coordinate"),
        ("1.458 0.000", "1e300 0.000", "'1e300' is no coordinate"),
        ("1.00 20.00 1 MET A N", "1,00 20.00 1 MET A N", "'1,00' is no occupancy"),
        ("1.00 20.00 1 MET A N", "1.00 inf 1 MET A N", "'inf' is no B-factor"),
        ("_atom_site.", "_atoms.", "has no _atom_site table"),
        ("data_1ABC", "1ABC", "cannot be read as mmCIF"),
        (" A N 1\n", " 'A N 1\n", "cannot be read as mmCIF"),
        (" A CB 1\n#", " A CB\n#", "x.cif: "),
    ],
)
def test_a_damaged_table(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = cif(chain(SEQ), {"A": three(SEQ)})
    assert old in text
    path = write(tmp_path / "x.cif", text.replace(old, new))
    with pytest.raises(InputError, match=message) as raised:
        read_chains(path)
    assert "\n" not in str(raised.value)


def test_a_chain_name_that_no_id_can_have(tmp_path: Path) -> None:
    path = write(tmp_path / "x.cif", cif(chain(SEQ, "A B", asym="A"), {"A": three(SEQ)}))
    with pytest.raises(InputError, match="chain name 'A B' has characters"):
        read_chains(path)


def test_atoms_are_named_as_in_the_formats() -> None:
    """What the texts of these tests look like, against PDB format 3.3: columns, not words."""
    line = pdb(chain(SEQ)).split("\n")[2]
    assert line == "ATOM      2  CA  MET A   1       0.000   0.000   0.000  1.00 20.00           C"
    assert [line[12:16], line[17:20], line[21], line[22:26], line[30:38]] == [" CA ", "MET", "A", "   1", "   0.000"]
    assert set(ATOMS) == structure_files.BACKBONE
