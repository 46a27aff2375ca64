"""PDB and mmCIF texts of made-up chains with realistic geometry."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from Bio.Data.IUPACData import protein_letters_1to3

ATOMS = ("N", "CA", "C", "CB")
THREE = {letter: name.upper() for letter, name in protein_letters_1to3.items()}

SEQ, OTHER = "MKTAYIAKQRGGLV", "GSHMLEDPVRWK"


@dataclass(frozen=True)
class Line:
    name: str
    comp: str
    chain: str
    number: int | str
    xyz: tuple[float, float, float]
    seq: int | None = None
    asym: str = ""
    ins: str = ""
    alt: str = ""
    occupancy: float = 1.0
    b: float = 20.0
    het: bool = False
    model: int = 1
    element: str = "C"


def place(a: np.ndarray, b: np.ndarray, c: np.ndarray, length: float, angle: float, dihedral: float) -> np.ndarray:
    """Return point d with distance cd, angle bcd and dihedral abcd, in radians."""
    axis = (c - b) / math.dist(b, c)
    in_plane = (a - b) - np.dot(a - b, axis) * axis
    in_plane /= math.sqrt(float(np.dot(in_plane, in_plane)))
    turned = math.cos(dihedral) * in_plane + math.sin(dihedral) * np.cross(axis, in_plane)
    return c - length * math.cos(angle) * axis + length * math.sin(angle) * turned


def backbone(n: int) -> np.ndarray:
    """Return N, CA, C and CB of a helix with bonds and angles of Engh and Huber (1991), three decimals, [n, 4, 3]."""
    r = math.radians
    points = [np.array(p) for p in ((1.458, 0.0, 0.0), (0.0, 0.0, 0.0), (-0.551, 1.422, 0.0))]
    for _ in range(n - 1):
        points.append(place(*points[-3:], 1.329, r(116.2), r(-42.0)))
        points.append(place(*points[-3:], 1.458, r(121.7), math.pi))
        points.append(place(*points[-3:], 1.525, r(111.2), r(-63.0)))
    out = []
    for k in range(n):
        nitrogen, ca, c = points[3 * k : 3 * k + 3]
        out.append([nitrogen, ca, c, place(c, nitrogen, ca, 1.530, r(110.4), r(-122.6))])
    return np.round(np.array(out), 3)


def chain(
    sequence: str | Sequence[str],
    name: str = "A",
    *,
    first: int = 1,
    asym: str = "",
    shift: float = 0.0,
    missing: Iterable[int] = (),
    model: int = 1,
) -> list[Line]:
    """Return the atoms of a chain, glycine without CB. The residues `missing` (from 0) have no atoms."""
    comps = [THREE[x] for x in sequence] if isinstance(sequence, str) else sequence
    gone, lines = set(missing), []
    for k, (comp, atoms) in enumerate(zip(comps, backbone(len(comps)) + shift, strict=True)):
        for atom, xyz in zip(ATOMS, atoms.tolist(), strict=True):
            if k in gone or (comp == "GLY" and atom == "CB"):
                continue
            line = Line(atom, comp, name, first + k, (xyz[0], xyz[1], xyz[2]), k + 1, asym or name, model=model)
            lines.append(replace(line, het=comp not in THREE.values(), element=atom[0]))
    return lines


def pdb(
    lines: Iterable[Line],
    seqres: Mapping[str, Sequence[str]] | None = None,
    modres: Mapping[str, str] | None = None,
    ter: bool = True,
    serial: int = 1,
) -> str:
    """Return a PDB file, with TER after the last residue of each chain that has a `label_seq_id`."""
    out = ["HEADER    MADE UP                                 01-JAN-00   1ABC"]
    for number, (name, parent) in enumerate((modres or {}).items()):
        out.append(f"MODRES 1ABC {name:>3} A{number + 1:5d}  {parent:>3}  MODIFIED RESIDUE")
    for name, comps in (seqres or {}).items():
        for row in range(0, len(comps), 13):
            words = "".join(f" {c:>3}" for c in comps[row : row + 13])
            out.append(f"SEQRES {row // 13 + 1:3d} {name[:1] or ' '} {len(comps):4d} {words}")
    lines = list(lines)
    models = sorted({line.model for line in lines})
    for model in models:
        if len(models) > 1:
            out.append(f"MODEL     {model:4d}")
        here = [line for line in lines if line.model == model]
        for k, x in enumerate(here):
            atom = f" {x.name:<3}" if len(x.name) < 4 and len(x.element) == 1 else f"{x.name:<4}"
            position = "".join(f"{v:8.3f}" for v in x.xyz)
            out.append(
                f"{'HETATM' if x.het else 'ATOM  '}{_serial(serial + k)} {atom}{x.alt or ' '}{x.comp:>3}"
                f"{x.chain:>2}{x.number:>4}{x.ins or ' '}   {position}{x.occupancy:6.2f}{x.b:6.2f}"
                f"          {x.element:>2}"
            )
            end = x.seq is not None and all(y.seq is None or y.chain != x.chain for y in here[k + 1 :])
            if ter and end:
                out.append(f"TER   {_serial(serial + k + 1)}      {x.comp:>3}{x.chain:>2}{x.number:>4}{x.ins or ' '}")
        if len(models) > 1:
            out.append("ENDMDL")
    return "\n".join([*out, "END", ""])


def _serial(number: int) -> str:
    return f"{number:5d}" if number < 100_000 else f"{number:5x}"


def quoted(word: str) -> str:
    if not word:
        return "?"
    return f'"{word}"' if "'" in word or " " in word else word


def cif(
    lines: Iterable[Line],
    poly: Mapping[str, Sequence[str]] | None = None,
    kinds: Mapping[str, str] | None = None,
    modres: Mapping[str, str] | None = None,
) -> str:
    """Return an mmCIF file. `poly` has the sequence and `kinds` the polymer type (polypeptide(L)) by label_asym_id."""
    lines = list(lines)
    asyms = list(dict.fromkeys(x.asym for x in lines))
    entity = {asym: str(k + 1) for k, asym in enumerate(asyms)}
    out = ["data_1ABC", "#", "_entry.id 1ABC", "_struct.title", ";A title", "data_ of two lines; loop_", ";"]
    out += ["loop_", "_struct_asym.id", "_struct_asym.entity_id", *(f"{a} {entity[a]}" for a in asyms)]
    if poly:
        out += ["loop_", "_entity_poly.entity_id", "_entity_poly.type", "_entity_poly.pdbx_seq_one_letter_code"]
        out += [f"{entity[a]} '{(kinds or {}).get(a, 'polypeptide(L)')}'\n;MADE\nUP\n;" for a in poly]
        out += ["loop_", *(f"_entity_poly_seq.{i}" for i in ("entity_id", "num", "mon_id", "hetero"))]
        for asym, comps in poly.items():
            for k, comp in enumerate(comps):  # A|B: two residues at one place
                out += [f"{entity[asym]} {k + 1} {c} {'y' if '|' in comp else 'n'}" for c in comp.split("|")]
    if modres is not None:
        out += ["loop_", "_pdbx_struct_mod_residue.label_comp_id", "_pdbx_struct_mod_residue.parent_comp_id"]
        out += [f"{name} {parent}" for name, parent in modres.items()]
    items = ("group_PDB", "id", "type_symbol", "label_atom_id", "label_alt_id", "label_comp_id", "label_asym_id")
    items += ("label_entity_id", "label_seq_id", "pdbx_PDB_ins_code", "Cartn_x", "Cartn_y", "Cartn_z", "occupancy")
    items += ("B_iso_or_equiv", "auth_seq_id", "auth_comp_id", "auth_asym_id", "auth_atom_id", "pdbx_PDB_model_num")
    out += ["loop_", *(f"_atom_site.{item}" for item in items)]
    for k, x in enumerate(lines):
        row = ["HETATM" if x.het else "ATOM", str(k + 1), x.element, quoted(x.name), x.alt or ".", x.comp, x.asym]
        row += [entity[x.asym], "." if x.seq is None else str(x.seq), x.ins or "?", *(f"{v:.3f}" for v in x.xyz)]
        row += [f"{x.occupancy:.2f}", f"{x.b:.2f}", str(x.number), x.comp, quoted(x.chain), quoted(x.name)]
        out.append(" ".join([*row, str(x.model)]))
    return "\n".join([*out, "#", ""])


def three(sequence: str) -> list[str]:
    return [THREE[x] for x in sequence]


def expected_cb(n: int, *, missing: Sequence[int] = ()) -> np.ndarray:
    """Return Cb coordinates by ideal geometry for `backbone(n)`: 1.522 A, 1.927 and -2.143 radians."""
    cb = np.array([place(c, nitrogen, ca, 1.522, 1.927, -2.143) for nitrogen, ca, c, _ in backbone(n)])
    cb[list(missing)] = np.nan
    return cb


def nucleic(name: str, asym: str = "") -> list[Line]:
    comps, atoms = ["DA", "DG", "DC", "DT"] * 4, ("P", "C1'", "N1", "C5'")
    return [
        Line(atom, comp, name, k + 1, (5.0 * k, 3.0 * j, 9.0), k + 1, asym or name, element=atom[0])
        for k, comp in enumerate(comps)
        for j, atom in enumerate(atoms)
    ]


def water(name: str, asym: str) -> list[Line]:
    return [Line("O", "HOH", name, 201 + k, (9.0, 9.0, k), None, asym, het=True, element="O") for k in range(5)]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
