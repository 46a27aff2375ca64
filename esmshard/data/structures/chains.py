"""Protein chains of structure files: the whole sequence of each, and where its Cb atoms lie.

| in the file | becomes |
|---|---|
| models | the first one, counted |
| alternative locations | per residue the one of highest occupancy, the first of equals, counted |
| insertion codes | residues of their own |
| the sequence | SEQRES, or `_entity_poly_seq` with `label_seq_id`; residues without atoms have no coordinates |
| no such sequence | the residues with atoms, counted, and the gaps in their numbers too |
| MSE, SEC, PYL, ASX, GLX, UNK | `M U O B Z X` |
| another residue | its parent by `_chem_comp.mon_nstd_parent_comp_id`, `_pdbx_struct_mod_residue` or MODRES, or `X` |
| hydrogens, water, ligands, nucleic acids | left out |
| chains of an entry with one sequence | the first one, the others counted |
| fewer than ten residues with coordinates | left out, counted |

A chain is called `ENTRY_CHAIN`: the file name without its endings in lower case, and the author's chain name.
"""

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from Bio.Data.PDBData import protein_letters_3to1

from esmshard.data.structures.structure_files import (
    Atom,
    Entry,
    FileChain,
    Residue,
    entry_name,
    read_entry,
)
from esmshard.errors import InputError
from esmshard.io.symbols import Edits

LETTERS: dict[str, str] = {
    **protein_letters_3to1,
    "MSE": "M",
    "SEC": "U",
    "PYL": "O",
    "ASX": "B",
    "GLX": "Z",
    "UNK": "X",
}
"""Residues that need no parent, by name."""
FEWEST = 10
"""Residues with coordinates. A chain with fewer is left out."""
BONDED = 2.0
"""Angstrom between C and the next N, where a peptide bond has 1.33. Anything farther is a break."""

Cb = Literal["virtual", "real"]


@dataclass(frozen=True)
class Chain:
    """A protein chain."""

    id: str
    sequence: str
    """Letters of `vocab.RESIDUES`, unresolved residues too."""
    cb_L3: npt.NDArray[np.float32]
    """Cb in Angstrom, NaN where the atoms that give it are missing."""
    backbone_L33: npt.NDArray[np.float32]
    """N, CA and C in Angstrom, NaN where an atom is missing."""


def read_chains(
    path: Path,
    *,
    chains: Collection[str] | None = None,
    every: bool = False,
    cb: Cb = "virtual",
    min_plddt: float | None = None,
    edits: Edits | None = None,
) -> list[Chain]:
    """Read the protein chains of one PDB or mmCIF file, plain or compressed, by the rules above.

    Args:
        path: the file; its ending decides the format.
        chains: the author's names of the chains to read, all of them kept; by default every protein chain, and of
            those with one sequence the first.
        every: also return short chains, and chains that have the sequence of another chain.
        cb: `virtual` places Cb by ideal geometry from N, CA and C, glycine's too, as the contact notebook of fair-esm
            does; `real` takes the Cb atom, and CA for glycine.
        min_plddt: residues whose B-factor, which in predicted structures is pLDDT, is lower lose their coordinates.
        edits: collects what was changed and left out.

    Returns:
        The chains in file order; without `every`, none if no protein chain has ten residues with coordinates.

    Raises:
        InputError: naming the file, and line or residue, of what cannot be read, or the chain that is not there.
    """
    edits = Edits() if edits is None else edits
    name = chain_prefix(path)
    entry = read_entry(path)
    letters = LETTERS | {n: LETTERS[p] for n, p in entry.parents.items() if n not in LETTERS and p in LETTERS}
    proteins = [chain for chain in entry.chains if _is_protein(chain, letters)]
    names = [chain.name for chain in proteins]
    missing = [wanted for wanted in chains or () if wanted not in names]
    if missing:
        raise InputError(f"{path}: has no protein chain '{missing[0]}'; it has {', '.join(names) or 'none'}")
    edits.add("file(s) with several models, of which the first was read", path.name, int(entry.several_models))
    other = [c for c in entry.chains if c not in proteins and not all(r.hetero for r in c.residues.values())]
    edits.add("chain(s) of no protein left out", path.name, len(other))

    kept: list[Chain] = []
    known: set[str] = set()
    for chain in proteins:
        if chains is not None and chain.name not in chains:
            continue
        # Two polymers may share the author's chain name; the file has a name of its own for each.
        parts = [name, chain.name, chain.label] if names.count(chain.name) > 1 else [name, chain.name]
        chain_id = "_".join(part for part in parts if part)
        if not re.fullmatch("[!-~]*", chain.name + chain.label):
            raise InputError(f"{path}: chain name {chain.name!a} has characters that no id can have; rename the chain")
        about = Edits()
        result = _chain(path, chain, chain_id, letters, entry, cb, min_plddt, about)
        if not every and (~np.isnan(result.cb_L3[:, 0])).sum() < FEWEST:
            edits.add(f"chain(s) left out with fewer than {FEWEST} residues with coordinates", chain_id)
        elif not every and chains is None and result.sequence in known:
            edits.add("chain(s) left out with the sequence of another chain of the file", chain_id)
        else:
            known.add(result.sequence)
            edits.extend(about)
            kept.append(result)
    return kept


def chain_prefix(path: Path) -> str:
    """Return the entry in chain ids: the file name in lower case without its endings, with `_` for spaces.

    Raises:
        InputError: if the name has characters that no id can have.
    """
    name = "_".join(entry_name(path).lower().split(" "))
    if not name or not name.isprintable() or name.startswith(">"):
        raise InputError(f"{str(path)!a}: the file name becomes the chains' id; rename it with plain characters")
    return name


def virtual_cb(
    n_L3: npt.NDArray[np.float64], ca_L3: npt.NDArray[np.float64], c_L3: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Place Cb by ideal geometry: 1.522 A from CA, angle 1.927 to N, dihedral -2.143 to C (radians), [L, 3].

    It is `extend(C, N, CA, 1.522, 1.927, -2.143)` of the contact notebook of fair-esm. NaN where an atom is missing or
    the three lie on a line.
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
    length_L1[length_L1 < 1e-3] = np.nan  # coordinates have three decimals: what is shorter has no direction
    unit_L3: npt.NDArray[np.float64] = x_L3 / length_L1
    return unit_L3


def _is_protein(chain: FileChain, letters: dict[str, str]) -> bool:
    """Return whether a chain is a protein: by the kind of polymer if the file has it, else by most of its residues."""
    if chain.kind is not None:
        return chain.kind.lower().startswith("polypeptide")
    if chain.listed is not None:
        return 2 * sum(name in letters for name in chain.listed) > len(chain.listed)
    return any(_in_peptide(residue, letters) for residue in chain.residues.values())


def _in_peptide(residue: Residue, letters: dict[str, str]) -> bool:
    """Return whether a residue is an amino acid by its name or by its atoms; water and most ligands are neither."""
    return residue.name in letters or {"N", "CA", "C"} <= {atom.name for atom in residue.atoms}


def _chain(
    path: Path,
    chain: FileChain,
    chain_id: str,
    letters: dict[str, str],
    entry: Entry,
    cb: Cb,
    min_plddt: float | None,
    about: Edits,
) -> Chain:
    residues = list(chain.residues.values())
    placed = all(r.place is not None for r in residues)  # mmCIF has said which residues belong to the sequence
    if not placed:
        residues = [r for r in residues if _in_peptide(r, letters)]
        if chain.listed is not None:
            residues = [r for r in residues if not r.hetero or r.name in chain.listed]
    about.add("atom(s) left out that came twice", chain_id, sum(r.twice for r in residues))
    about.add("residue(s) with alternative locations, read at that of highest occupancy", chain_id, _altered(residues))
    chosen = [_conformer(residue) for residue in residues]
    if chain.listed is None:
        names, places = [name for name, _ in chosen], list(range(len(residues)))
        about.add("chain(s) without SEQRES or _entity_poly_seq, read as the residues with atoms", chain_id)
        gaps = _gaps(residues)
        about.add("gap(s) in residue numbers, where the sequence is shorter than the protein's", chain_id, gaps)
    else:
        names = chain.listed
        known = [r.place for r in residues if r.place is not None]
        places = known if placed else _align(path, chain, residues, chosen, letters)
        _check_names(path, chain, chain_id, [name for name, _ in chosen], places, letters, about)

    unknown = sum(name not in letters for name in names)
    about.add("residue(s) read as X, as the file names no standard parent", chain_id, unknown)
    from_parent = sum(name == "MSE" or (name in letters and name not in LETTERS) for name in names)
    about.add("modified residue(s) read as the standard parent", chain_id, from_parent)

    sequence = "".join(letters.get(name, "X") for name in names)
    atoms_L43 = np.full((len(names), 4, 3), np.nan)
    b_factor_L = np.full(len(names), np.nan)
    glycine_L = np.zeros(len(names), dtype=bool)
    for place, (name, atoms) in zip(places, chosen, strict=True):
        for k, atom in enumerate(("N", "CA", "C", "CB")):
            if atom in atoms:
                atoms_L43[place, k] = atoms[atom].xyz
        if "CA" in atoms:
            b_factor_L[place] = atoms["CA"].b_factor
        glycine_L[place] = letters.get(name) == "G"
    if cb == "virtual":
        cb_L3 = virtual_cb(atoms_L43[:, 0], atoms_L43[:, 1], atoms_L43[:, 2])
    else:
        cb_L3 = np.where(glycine_L[:, None], atoms_L43[:, 1], atoms_L43[:, 3])
    if min_plddt is not None:
        low_L = ~(b_factor_L >= min_plddt) & ~np.isnan(cb_L3[:, 0])
        cb_L3[low_L] = np.nan
        atoms_L43[low_L] = np.nan
        about.add(f"residue(s) left without coordinates for a pLDDT under {min_plddt:g}", chain_id, int(low_L.sum()))
    return Chain(chain_id, sequence, cb_L3.astype(np.float32), atoms_L43[:, :3].astype(np.float32))


def _altered(residues: list[Residue]) -> int:
    return sum(len({atom.altloc for atom in r.atoms if atom.altloc}) > 1 for r in residues)


def _conformer(residue: Residue) -> tuple[str, dict[str, Atom]]:
    """Return name and atoms at the alternative location of highest occupancy, one for the whole residue."""
    best: Atom | None = None
    for atom in residue.atoms:
        if atom.altloc and (best is None or atom.occupancy > best.occupancy):
            best = atom
    altloc = best.altloc if best else ""
    atoms = {atom.name: atom for atom in residue.atoms if not atom.altloc}
    atoms |= {atom.name: atom for atom in residue.atoms if atom.altloc == altloc}
    return best.residue_name if best else residue.name, atoms


def _gaps(residues: list[Residue]) -> int:
    numbers = [r.number for r in residues]
    return sum(a is not None and b is not None and b > a + 1 for a, b in itertools.pairwise(numbers))


def _check_names(
    path: Path,
    chain: FileChain,
    chain_id: str,
    names: list[str],
    places: list[int],
    letters: dict[str, str],
    about: Edits,
) -> None:
    """Refuse a chain with many other residues than its sequence. A few differences are known errors or variants of an
    entry, and are counted.
    """
    assert chain.listed is not None
    differ = sum(
        _symbol(name, letters) != _symbol(chain.listed[place], letters)
        for name, place in zip(names, places, strict=True)
    )
    if differ > 2 and 10 * differ > len(names):
        raise InputError(
            f"{path}: in chain '{chain.name}' {differ} of {len(names)} residues with atoms are not those of its "
            "sequence (SEQRES or _entity_poly_seq); download the file again, or remove that sequence"
        )
    about.add("residue(s) with atoms of another residue than the sequence has, which was followed", chain_id, differ)


def _symbol(name: str, letters: dict[str, str]) -> str:
    """Return what equal residues have in common: the letter of a known residue, the name of an unknown one."""
    letter = letters.get(name, "X")
    return name if letter == "X" else letter


def _align(
    path: Path,
    chain: FileChain,
    residues: list[Residue],
    chosen: list[tuple[str, dict[str, Atom]]],
    letters: dict[str, str],
) -> list[int]:
    """Return the place of each residue in the listed sequence; see `align_to_listed`."""
    assert chain.listed is not None
    observed = [_symbol(name, letters) for name, _ in chosen]
    listed = [_symbol(name, letters) for name in chain.listed]
    steps = [_step(k, residues, chosen) for k in range(1, len(residues))]
    if len(observed) > len(listed):
        raise InputError(
            f"{path}: chain '{chain.name}' has {len(observed)} residues with atoms, but {len(listed)} in SEQRES; "
            "download the file again, or remove SEQRES"
        )
    if len(observed) * len(listed) > LARGEST:
        raise InputError(f"{path}: chain '{chain.name}' is too long to be aligned to SEQRES; use the mmCIF file")
    return align_to_listed(observed, listed, steps, residues[0].number if residues else None)


def _step(k: int, residues: list[Residue], chosen: list[tuple[str, dict[str, Atom]]]) -> int:
    """Return the number of places from residue k - 1 to residue k: 1 over a peptide bond, else the difference of their
    numbers.
    """
    c, n = chosen[k - 1][1].get("C"), chosen[k][1].get("N")
    if c and n and sum((a - b) ** 2 for a, b in zip(c.xyz, n.xyz, strict=True)) < BONDED**2:
        return 1
    before, here = residues[k - 1].number, residues[k].number
    return max(1, here - before) if before is not None and here is not None else 1


MISMATCH, GAP, NUMBERED = -4, -3, 1
"""Score of a residue on another one, of a step that was not expected, and of a start where its number says."""
LARGEST = 10**8
"""Cells of the table of the alignment; four bytes each."""


def align_to_listed(
    observed: Sequence[str], listed: Sequence[str], steps: Sequence[int], first: int | None
) -> list[int]:
    """Return the place of each observed residue in the listed sequence, ascending. Every residue gets a place;
    unresolved ends cost nothing.

    Letters alone leave open where in a repeat the unresolved residues are, so each residue is tried first where a step
    from the one before leads to: 1 over a peptide bond, else the difference of their numbers.

    Args:
        observed: residues with atoms, N, not more than are listed.
        listed: all residues, M.
        steps: N - 1 expected steps, 1 or more.
        first: number of the first observed residue, counted from 1; SEQRES mostly counts so too.

    >>> align_to_listed("GGK", "MGGGGK", [1, 3], None)
    [1, 2, 5]
    """
    if not observed:
        return []
    codes = {symbol: code for code, symbol in enumerate(dict.fromkeys(listed))}
    listed_M = np.array([codes[symbol] for symbol in listed])
    observed_N = np.array([codes.get(symbol, -1) for symbol in observed])
    # Dynamic programming: the best score of residue n at place m follows from those of residue n - 1.
    n, m = len(observed_N), len(listed_M)
    score_NM = np.empty((n, m), dtype=np.int32)
    score_NM[0] = np.where(listed_M == observed_N[0], 0, MISMATCH)
    if first is not None and 1 <= first <= m:
        score_NM[0, first - 1] += NUMBERED
    for k, step in enumerate(steps, 1):
        forerunner_M = np.full(m, -(10**9), dtype=np.int32)  # nothing can stand before place 0
        forerunner_M[1:] = np.maximum.accumulate(score_NM[k - 1])[:-1] + GAP
        if step < m:
            forerunner_M[step:] = np.maximum(forerunner_M[step:], score_NM[k - 1, :-step])
        score_NM[k] = np.where(listed_M == observed_N[k], 0, MISMATCH) + np.maximum(forerunner_M, -(10**9))
    places = [int(np.argmax(score_NM[-1]))]
    for k in range(n - 1, 0, -1):
        before_M, straight = score_NM[k - 1, : places[-1]], places[-1] - steps[k - 1]
        nearest = len(before_M) - 1 - int(np.argmax(before_M[::-1]))
        expected = straight >= 0 and before_M[straight] >= before_M[nearest] + GAP
        places.append(straight if expected else nearest)
    return places[::-1]
