"""What is particular to PDB, and to to mmCIF."""

from dataclasses import replace
from pathlib import Path

import gemmi
import numpy as np
import pytest
from structure_texts import OTHER, SEQ, Line, chain, cif, expected_cb, pdb, three, water, write

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
    assert found.sequence == SEQ
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


def test_the_first_of_several_blocks(tmp_path: Path) -> None:
    text = cif(chain(SEQ), {"A": three(SEQ)}) + cif(chain(OTHER, "B"), {"B": three(OTHER)}).replace("1ABC", "2ABC")
    assert [c.id for c in read_chains(write(tmp_path / "x.mmcif", text))] == ["x_A"]


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


def test_a_coordinate_that_is_not_there(tmp_path: Path) -> None:
    first = chain(SEQ)[4]
    text = cif(chain(SEQ), {"A": three(SEQ)}).replace(f"{first.xyz[0]:.3f} {first.xyz[1]:.3f}", "? ?")
    (found,) = read_chains(write(tmp_path / "x.cif", text))
    assert np.flatnonzero(np.isnan(found.cb_L3[:, 0])).tolist() == [1]


def test_a_chain_name_that_no_id_can_have(tmp_path: Path) -> None:
    path = write(tmp_path / "x.cif", cif(chain(SEQ, "A B", asym="A"), {"A": three(SEQ)}))
    with pytest.raises(InputError, match="chain name 'A B' has characters"):
        read_chains(path)
