"""Reads protein chains from structure files with gemmi: the whole sequence and the coordinates of each chain.

| in the file | what is read |
|---|---|
| several models | the first model; such files are counted |
| alternative locations | the first location with the highest occupancy; such residues are counted |
| insertion codes | a residue with an insertion code is an additional residue |
| SEQRES, or `_entity_poly_seq` with `label_seq_id` | the sequence; residues without atoms have no coordinates |
| none of these sequences | the residues with atoms; such chains, and gaps in the residue numbers, are counted |
| MSE, SEC, PYL, ASX, GLX, UNK | `M U O B Z X` |
| other residues | the parent's letter (gemmi's table, `_pdbx_struct_mod_residue`, MODRES), else `X`; both are counted |
| hydrogens, water, ligands, nucleic acids | not read |

A chain has the id `FILE_CHAIN`: the file name in lower case without extensions, and the chain name (in mmCIF files
`auth_asym_id`).
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import gemmi
import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError
from esmshard.io.symbols import Edits
from esmshard.io.tables import read_whole
from esmshard.vocab import RESIDUES

FARTHEST = 1e5
"""The maximum absolute coordinate in Angstrom (9,999 in PDB files). Larger coordinates are refused."""
ENDINGS = ".pdb, .ent, .cif or .mmcif, plain or with .gz, .bz2, .xz or .zst"
_ENDING = re.compile(r"\.(?:(pdb|ent)|(cif|mmcif))(?:\.(?:gz|bz2|xz|zst))?$", re.IGNORECASE)
NAMELESS = "_"
"""The name for a PDB chain without a name. Chain ids do not include it."""
BONDED = 2.0
"""Two residues are bonded if atom C of the first and atom N of the second are closer than this, in Angstrom."""
_BACKBONE = ("N", "CA", "C")
_PDB_NUMBER = re.compile(r" *[-+]?(\d+\.?\d*|\.\d+) *")
_PEPTIDES = (gemmi.PolymerType.PeptideL, gemmi.PolymerType.PeptideD, gemmi.PolymerType.CyclicPseudoPeptide)


@dataclass(frozen=True)
class Chain:
    """A protein chain of L residues, or several chains that are one record."""

    id: str
    sequence: str
    """The letters of all residues (`vocab.RESIDUES`), also of residues without coordinates."""
    cb_L3: npt.NDArray[np.float32]
    """Cb coordinates in Angstrom from ideal geometry, also for glycine; NaN if atom N, CA or C is missing."""
    backbone_L33: npt.NDArray[np.float32]
    """Coordinates of atoms N, CA and C in Angstrom; NaN for a missing atom."""


def is_structure_name(name: str) -> bool:
    """Return whether a file name has an extension of structure files (ENDINGS)."""
    return _ENDING.search(name) is not None


def chain_prefix(path: Path) -> str:
    """Return the first part of chain ids: the file name in lower case, without extensions, with `_` for each space.
    Raises `InputError` if the name has characters that are not allowed in an id.
    """
    name = _ENDING.sub("", path.name).lower().replace(" ", "_")
    if not name or not name.isprintable() or name.startswith(">"):
        raise InputError(f"{str(path)!a}: the file name becomes the chain id; rename the file with plain characters")
    return name


def read_chains(
    path: Path,
    *,
    chains: Collection[str] | None = None,
    min_plddt: float | None = None,
    edits: Edits | None = None,
) -> list[Chain]:
    """Read the protein chains of a PDB or mmCIF file, plain or compressed, as described at the top of this module.

    Args:
        path: the structure file. The file extension decides the format.
        chains: the names of the chains to read (`auth_asym_id` in mmCIF); by default every protein chain.
        min_plddt: a residue gets no coordinates if its atom CA is missing or has a lower B-factor. In predicted
            structures, the B-factor is the pLDDT (predicted accuracy of the residue).
        edits: counts changed residues, left-out chains, and similar edits.

    Raises:
        InputError: the file cannot be read or contradicts itself, or a chain of `chains` is missing.
    """
    edits, prefix = Edits() if edits is None else edits, chain_prefix(path)
    structure = _read_structure(path)
    parents = {modified.res_id.name: modified.parent_comp_id for modified in structure.mod_residues}
    polymers, other = [], 0
    for chain in structure[0]:
        for span in chain.subchains():
            entity = structure.get_entity_of(span)
            if entity is None or entity.entity_type != gemmi.EntityType.Polymer:
                continue
            names = entity.full_sequence or [residue.name for residue in span]
            amino_acids = sum(gemmi.find_tabulated_residue(name).is_amino_acid() for name in names)
            if entity.polymer_type in _PEPTIDES or 2 * amino_acids > len(names):  # polymer_type may be missing
                polymers.append((chain.name, span, [gemmi.Entity.first_mon(name) for name in entity.full_sequence]))
            else:
                other += 1
    edits.add("file(s) with several models, read as the first model", path.name, int(len(structure) > 1))
    edits.add("non-protein chain(s) left out", path.name, other)
    count = Counter(name for name, _, _ in polymers)
    for wanted in chains or ():
        if wanted not in count:
            raise InputError(f"{path}: has no protein chain '{wanted}'; it has {', '.join(count) or 'none'}")
    result = []
    for name, span, listed in polymers:
        if chains is not None and name not in chains:
            continue
        if not re.fullmatch("[!-~]*", name):
            raise InputError(f"{path}: chain name {name!a} has characters that no id can have; rename the chain")
        # Two polymers may have the same chain name by the author. Then the id also has gemmi's subchain name.
        parts = [prefix, name, span[0].subchain] if count[name] > 1 else [prefix, name]
        chain_id = "_".join(part for part in parts if part != NAMELESS)
        result.append(_chain(path, chain_id, span, listed, parents, min_plddt, edits))
    return result


def virtual_cb(
    n_L3: npt.NDArray[np.float64], ca_L3: npt.NDArray[np.float64], c_L3: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Compute Cb coordinates, [L, 3]: bond CA-Cb 1.522 A, angle N-CA-Cb 1.927 rad, dihedral C-N-CA-Cb -2.143 rad.

    The geometry is from the contact notebook of fair-esm: `extend(C, N, CA, 1.522, 1.927, -2.143)`. The result is NaN
    if an atom is missing, or if the three atoms lie on a line.
    """
    length, angle, dihedral = 1.522, 1.927, -2.143
    to_n_L3 = _unit(n_L3 - ca_L3)
    normal_L3 = _unit(np.cross(n_L3 - c_L3, to_n_L3))
    across_L3 = np.cross(normal_L3, to_n_L3)
    cb_L3: npt.NDArray[np.float64] = ca_L3 + length * (
        np.cos(angle) * to_n_L3
        + np.sin(angle) * np.cos(dihedral) * across_L3
        - np.sin(angle) * np.sin(dihedral) * normal_L3
    )
    return cb_L3


def _unit(x_L3: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    length_L1 = np.linalg.norm(x_L3, axis=-1, keepdims=True)
    length_L1[length_L1 < 1e-3] = np.nan  # With three decimals, a shorter vector is zero.
    unit_L3: npt.NDArray[np.float64] = x_L3 / length_L1
    return unit_L3


def _read_structure(path: Path) -> gemmi.Structure:
    """Read a structure file with gemmi. If the file lists the sequence of a chain, `label_seq` of a residue is its
    position in the listed sequence, counted from 1.
    """
    ending = _ENDING.search(path.name)
    if ending is None:
        raise InputError(f"{path}: not a structure file by its name; the ending {ENDINGS} is expected")
    data = read_whole(path, "a structure file").removeprefix(b"\xef\xbb\xbf")
    data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    text = data.decode("latin-1")  # Latin-1 decodes all bytes, one character per byte.
    kind = "PDB" if ending[1] else "mmCIF"
    if kind == "PDB":
        _check_coordinates(path, text)
    try:
        structure = _from_pdb(text) if kind == "PDB" else _from_mmcif(text)
    except Exception as error:  # gemmi raises errors of many classes for a damaged file.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{path}: cannot be read as {kind} ({reason!a}); copy or download it again") from None
    if not len(structure) or not structure[0].count_atom_sites():
        raise InputError(f"{path}: has no atoms, so it is no {kind} file; remove it, or download it again")
    return structure


def _check_coordinates(path: Path, text: str) -> None:
    """Raise `InputError` if a coordinate in a PDB file is no number, since gemmi would read it as 0."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith(("ATOM", "HETATM")):
            for column in (line[30:38], line[38:46], line[46:54]):
                if not _PDB_NUMBER.fullmatch(column):
                    raise InputError(f"{path}:{number}: {column!a} is no coordinate; copy or download the file again")


def _from_mmcif(text: str) -> gemmi.Structure:
    block = gemmi.cif.read_string(text)[0]
    if not block.find_values("_entity.id"):  # Without the table `_entity`, gemmi ignores listed sequences.
        loop = block.init_loop("_entity.", ["id", "type"])
        for entity in dict.fromkeys(block.find_values("_entity_poly_seq.entity_id")):
            loop.add_row([entity, "polymer"])
    structure = gemmi.make_structure_from_block(block)
    structure.setup_entities()
    return structure


def _from_pdb(text: str, ignore_ter: bool = False) -> gemmi.Structure:
    structure = gemmi.read_pdb_string(text, ignore_ter=ignore_ter)
    chains = structure[0] if len(structure) else ()
    for chain in chains:
        chain.name = chain.name.strip() or NAMELESS  # gemmi makes no entity for a chain without a name
    structure.setup_entities()
    # Some programs write TER where residues are missing inside a chain. gemmi reads all residues after TER as ligands.
    if not ignore_ter and any(
        residue.entity_type == gemmi.EntityType.NonPolymer
        and residue.het_flag == "A"
        and gemmi.find_tabulated_residue(residue.name).is_amino_acid()
        for chain in chains
        for residue in chain
    ):
        return _from_pdb(text, ignore_ter=True)
    structure.assign_label_seq_id()
    for chain in chains:
        _place_by_numbers(structure.get_entity_of(chain.get_polymer()), chain.get_polymer())
    return structure


def _place_by_numbers(entity: gemmi.Entity | None, polymer: gemmi.ResidueSpan) -> None:
    """Compute the position of each residue in SEQRES from bonds and residue numbers. Use the positions unless gemmi's
    alignment fits better. If residues of a repeat are missing, an alignment cannot tell which ones.
    """
    residues = list(polymer)
    if entity is None:
        return
    listed, steps = entity.full_sequence, [_step(*pair) for pair in itertools.pairwise(residues)]
    places = list(itertools.accumulate(steps, initial=0))

    def differing(places: Sequence[int | None]) -> int:
        pairs = zip(places, residues, strict=True)
        return sum(place is None or listed[place - 1] != residue.name for place, residue in pairs)

    firsts = sorted(range(1, len(listed) - places[-1] + 1), key=lambda first: abs(first - _number(residues[0])))
    shifted = min(([first + place for place in places] for first in firsts), key=differing, default=None)
    if shifted is not None and differing(shifted) <= differing([residue.label_seq for residue in residues]):
        for place, residue in zip(shifted, residues, strict=True):
            residue.label_seq = place


def _step(before: gemmi.Residue, after: gemmi.Residue) -> int:
    """Return the number of positions from one residue to the next: 0 for alternatives at one position, 1 for bonded
    residues (their numbers may jump), else the difference of the residue numbers, at least 1.
    """
    if before.seqid == after.seqid:
        return 0
    c, n = before.find_atom("C", "*"), after.find_atom("N", "*")
    bonded = c is not None and n is not None and c.pos.dist(n.pos) < BONDED
    return 1 if bonded else max(1, _number(after) - _number(before))


def _number(residue: gemmi.Residue) -> int:
    return residue.seqid.num or 0


def _letter(name: str, parents: dict[str, str]) -> str:
    letter: str = gemmi.find_tabulated_residue(name).one_letter_code.upper()
    if not letter.strip() and name in parents:
        letter = gemmi.find_tabulated_residue(parents[name]).one_letter_code.upper()
    return letter if letter in RESIDUES else "X"


def _chain(
    path: Path,
    chain_id: str,
    span: gemmi.ResidueSpan,
    listed: list[str],
    parents: dict[str, str],
    min_plddt: float | None,
    edits: Edits,
) -> Chain:
    """Make a chain from `span`, its residues with atoms. `listed` has the residue names in SEQRES or
    `_entity_poly_seq`; [] without them. `parents` has the standard parent of modified residues by name.
    """
    at_place: dict[object, list[gemmi.Residue]] = defaultdict(list)  # Alternative residues have the same position.
    for residue in span:
        if residue.entity_type != gemmi.EntityType.Polymer and residue.label_seq is None:
            continue
        at_place[residue.label_seq if listed else str(residue.seqid)].append(residue)
    # Residues without a position in the listed sequence are ligands if they are HETATM, and errors if they are ATOM.
    wrong = sum(residue.het_flag == "A" for residue in at_place.pop(None, ()))
    if listed:
        places = [place - 1 for place in at_place if isinstance(place, int)]
        if places and not 0 <= min(places) <= max(places) < len(listed):
            raise InputError(f"{path}: chain {chain_id} has residues outside its sequence; download the file again")
    else:
        places = list(range(len(at_place)))
        edits.add("chain(s) without SEQRES or _entity_poly_seq, read as the residues with atoms", chain_id)
        numbers = [_number(residues[0]) for residues in at_place.values()]
        gaps = sum(after > before + 1 for before, after in itertools.pairwise(numbers))
        edits.add("gap(s) in residue numbers, where the sequence lacks residues of the protein", chain_id, gaps)

    names = listed or [""] * len(places)
    atoms_L33, b_factor_L = np.full((len(names), 3, 3), np.nan), np.full(len(names), np.nan)
    differing = wrong
    for place, residues in zip(places, at_place.values(), strict=True):
        name, atoms = _conformer(residues, chain_id, edits)
        if not listed:
            names[place] = name
        elif name != names[place] and (_letter(name, parents) != _letter(names[place], parents)):
            differing += 1
        for k, atom in enumerate(atoms.get(atom_name) for atom_name in _BACKBONE):
            if atom is not None:
                atoms_L33[place, k] = atom.pos.tolist()
        if "CA" in atoms:
            b_factor_L[place] = atoms["CA"].b_iso
    if differing > 2 and 10 * differing > len(at_place) + wrong:  # A few differences are usual: errors or variants.
        raise InputError(
            f"{path}: in chain {chain_id} {differing} of {len(at_place) + wrong} residues with atoms differ from its "
            "sequence (SEQRES or _entity_poly_seq); download the file again, or remove this sequence from the file"
        )
    edits.add("residue(s) with atoms of another residue, read as in the sequence", chain_id, differing)
    sequence = "".join(_letter(name, parents) for name in names)
    unknown = sum(letter == "X" and name != "UNK" for letter, name in zip(sequence, names, strict=True))
    edits.add("residue(s) without a standard parent, read as X", chain_id, unknown)
    modified = sum(
        letter != "X" and not gemmi.find_tabulated_residue(name).is_standard()
        for letter, name in zip(sequence, names, strict=True)
    )
    edits.add("modified residue(s) read as the standard parent", chain_id, modified)
    far_L33 = ~(np.abs(atoms_L33) <= FARTHEST) & ~np.isnan(atoms_L33)
    if far_L33.any():
        raise InputError(f"{path}: chain {chain_id} has coordinates beyond {FARTHEST:,.0f} A; correct them")
    if min_plddt is not None:
        low_L = ~(b_factor_L >= min_plddt) & ~np.isnan(atoms_L33).all((1, 2))
        atoms_L33[low_L] = np.nan
        edits.add(f"residue(s) left without coordinates for a pLDDT under {min_plddt:g}", chain_id, int(low_L.sum()))
    cb_L3 = virtual_cb(atoms_L33[:, 0], atoms_L33[:, 1], atoms_L33[:, 2])
    return Chain(chain_id, sequence, cb_L3.astype(np.float32), atoms_L33.astype(np.float32))


def _conformer(residues: list[gemmi.Residue], chain_id: str, edits: Edits) -> tuple[str, dict[str, gemmi.Atom]]:
    """Choose the alternative location with the highest occupancy among the `residues` at one position. Return the
    residue name of this location, and the atoms N, CA, C and CB by name.
    """
    atoms = [(residue.name, atom) for residue in residues for atom in residue if atom.name in (*_BACKBONE, "CB")]
    by_location: dict[tuple[str, str], gemmi.Atom] = {}
    for _, atom in atoms:
        by_location.setdefault((atom.name, atom.altloc), atom)
    edits.add("repeated atom(s) left out", chain_id, len(atoms) - len(by_location))
    altered = [(name, atom) for name, atom in atoms if atom.has_altloc()]
    several = len({atom.altloc for _, atom in altered}) > 1
    edits.add(
        "residue(s) with alternative locations, read at the location of highest occupancy", chain_id, int(several)
    )
    name, best = max(altered, key=lambda pair: pair[1].occ, default=(residues[0].name, None))
    locations = ["\0"] if best is None else ["\0", best.altloc]
    return name, {
        atom_name: atom for at in locations for (atom_name, altloc), atom in by_location.items() if altloc == at
    }
