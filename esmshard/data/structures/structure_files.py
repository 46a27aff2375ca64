"""The chains of a PDB or mmCIF file: listed sequences and backbone atoms. `chains` interprets them.

gemmi splits mmCIF into its tables. The rows of `_atom_site` are read here, because gemmi's own model of a structure
merges two polymers of one author chain name, and takes the whole sequence from entries with an `_entity` table only.
PDB is read by its columns (format 3.3), because gemmi reads a column that holds no number as 0 and says nothing.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import gemmi

from esmshard.errors import InputError
from esmshard.io.tables import read_whole

BACKBONE = frozenset({"N", "CA", "C", "CB"})
"""The atoms that are read."""
FARTHEST = 1e5
"""Angstrom. PDB coordinates have room for 9,999; anything beyond this is no coordinate, and squares stay exact."""

_ENDING = re.compile(r"\.(?:(pdb|ent)|(cif|mmcif))(?:\.(?:gz|bz2|xz|zst))?$", re.IGNORECASE)
ENDINGS = ".pdb, .ent, .cif or .mmcif, plain or with .gz, .bz2, .xz or .zst"


class Atom(NamedTuple):
    """A backbone atom as written in the file."""

    name: str
    altloc: str
    """Alternative location; empty where there is one only."""
    residue_name: str
    occupancy: float
    b_factor: float
    xyz: tuple[float, float, float]
    """Angstrom."""


@dataclass
class Residue:
    """The atoms of one place in the chain. There may be alternative residues at that place."""

    name: str
    """The residue name of the first atom."""
    number: int | None
    """Author's residue number; None where it is no plain number."""
    hetero: bool
    """HETATM in all rows: a modified residue, a ligand or water."""
    place: int | None = None
    """Index into the listed sequence, if the file has one."""
    atoms: list[Atom] = field(default_factory=list)
    twice: int = 0
    """Atoms left out because the same one was there before."""
    numbered: bool = False
    """Whether a row has a `label_seq_id`."""

    def add(self, atom: Atom) -> None:
        """Add an atom unless it is there already."""
        if any(a.name == atom.name and a.altloc == atom.altloc for a in self.atoms):
            self.twice += 1
        else:
            self.atoms.append(atom)


@dataclass
class FileChain:
    """A chain of the first model, in file order."""

    name: str
    """The author's; may be empty."""
    label: str
    """`label_asym_id`; empty for PDB, and for mmCIF without sequences, where the author's name alone counts."""
    listed: list[str] | None
    """Residue names of the whole sequence (SEQRES, `_entity_poly_seq`); None where the file has none for this chain."""
    kind: str | None
    """`_entity_poly.type`, where there is one."""
    residues: dict[tuple[str, ...], Residue] = field(default_factory=dict)


@dataclass
class Entry:
    """The first model of a file."""

    chains: list[FileChain]
    parents: dict[str, str]
    """Standard residue that a modified one comes from, by residue name."""
    several_models: bool = False


def is_structure_name(name: str) -> bool:
    """Return whether a file name has one of `ENDINGS`."""
    return _ENDING.search(name) is not None


def entry_name(path: Path) -> str:
    """Return the file name without its endings.

    >>> entry_name(Path("set/1ABC.pdb.gz"))
    '1ABC'
    """
    return _ENDING.sub("", path.name)


def read_entry(path: Path) -> Entry:
    """Read one structure file, plain or compressed.

    Raises:
        InputError: naming the file, and line or atom, of what cannot be read.
    """
    ending = _ENDING.search(path.name)
    if ending is None:
        raise InputError(f"{path}: not a structure file by its name; {ENDINGS} is expected")
    text = _text(path)
    if ending[1]:
        return _pdb(path, text)
    try:
        tables = _tables(text)
    except Exception as error:  # whatever the parser trips over, it is the file that is damaged
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{path}: cannot be read as mmCIF ({reason}); copy or download it again") from None
    return _mmcif(path, tables)


def _text(path: Path) -> str:
    data = read_whole(path, "a structure file")
    if b"\0" in data:
        raise InputError(f"{path}: not text; a PDB or mmCIF file is expected")
    data = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    text = data.decode("latin-1")  # never fails, and a column stays a column
    if not text.strip():
        raise InputError(f"{path}: is empty; copy or download it again")
    return text


def _atom(path: Path, where: str, row: int, names: tuple[str, str, str], texts: Sequence[str]) -> Atom:
    """Make an atom from its name, alternative location and residue name, and from x, y, z, occupancy and B-factor as
    written.
    """
    values = []
    for text, what in zip(texts, ("coordinate", "coordinate", "coordinate", "occupancy", "B-factor"), strict=True):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not abs(value) <= FARTHEST:
            raise InputError(f"{path}:{where}{row}: '{_shown(text)}' is no {what}; copy or download the file again")
        values.append(value)
    x, y, z, occupancy, b_factor = values
    return Atom(*names, occupancy, b_factor, (x, y, z))


def _shown(text: str) -> str:
    return ascii(text.strip()[:20])[1:-1]


def _plain_int(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[-+]?[0-9]{1,9}", text) else None


def _pdb(path: Path, text: str) -> Entry:
    chains: dict[str, FileChain] = {}
    listed: dict[str, list[str]] = {}
    ended: set[str] = set()
    entry = Entry([], {})
    model_over, name, last = False, "", ("",)
    for number, line in enumerate(text.split("\n"), 1):
        record = line[:6].rstrip()
        if record in ("ATOM", "HETATM"):
            if model_over:
                entry.several_models = True
                break
            if len(line) < 54:
                raise InputError(
                    f"{path}:{number}: the line ends before its coordinates do; copy or download the file again"
                )
            # Two columns: with more than 62 chains, programs take the blank one before the chain name too.
            name, atom_name, key = line[20:22].strip(), line[12:16].strip(), (line[20:27],)
            if (key == last and atom_name not in BACKBONE) or (record == "HETATM" and name in ended):
                continue  # ligands and water come after the chain's end
            last, residue_name = key, line[17:20].strip()
            if name not in chains:
                chains[name] = FileChain(name, "", None, None)
            residue = chains[name].residues.get(key)
            if residue is None:
                residue = Residue(residue_name, _plain_int(line[22:26].strip()), record == "HETATM")
                chains[name].residues[key] = residue
            residue.hetero &= record == "HETATM"
            if atom_name in BACKBONE:
                texts = line[30:38], line[38:46], line[46:54], line[54:60].strip() or "1", line[60:66].strip() or "0"
                residue.add(_atom(path, "", number, (atom_name, line[16].strip(), residue_name), texts))
        elif record == "TER":
            ended.add(name)
        elif record in ("ENDMDL", "MODEL", "END"):
            model_over = bool(chains)
        elif record == "SEQRES":
            listed.setdefault(line[10:12].strip(), []).extend(line[19:70].split())
        elif record == "MODRES":
            entry.parents.setdefault(line[12:15].strip(), line[24:27].strip())
    if not chains:
        raise InputError(f"{path}: has no ATOM record; a PDB file is expected; take the file away, or fetch it again")
    for chain in chains.values():
        chain.listed = listed.get(chain.name)
    entry.chains = list(chains.values())
    return entry


Tables = dict[str, dict[str, list[str]]]
"""Columns of `CATEGORIES` by category and item, empty where there are none; `.` and `?` as empty strings."""

CATEGORIES = (
    *("_atom_site", "_struct_asym", "_entity_poly", "_entity_poly_seq"),
    *("_chem_comp", "_pdbx_struct_mod_residue"),
)


def _tables(text: str) -> Tables:
    """Return the tables of the first data block."""
    block = gemmi.cif.read_string(text)[0]
    tables = {name: block.get_mmcif_category(f"{name}.") for name in CATEGORIES}
    # None for `?`, False for `.`
    return {name: {item: [v or "" for v in tables[name][item]] for item in tables[name]} for name in tables}


class _AtomSite:
    """The table `_atom_site` of a file. Every column has the same number of rows."""

    def __init__(self, path: Path, columns: dict[str, list[str]]) -> None:
        self._path, self._columns = path, columns
        self._count = len(next(iter(columns.values()), []))
        if self._count == 0:
            raise InputError(f"{path}: has no _atom_site table; an mmCIF file with coordinates is expected")

    def column(self, *items: str, needed: bool = False) -> Sequence[str]:
        """Return the first of these columns that the file has, and empty strings if it has none of them."""
        for item in items:
            if item in self._columns:
                return self._columns[item]
        if needed:
            raise InputError(f"{self._path}: _atom_site has no column {items[0]}, without which no chain can be read")
        return [""] * self._count

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield for each row its number, from 1, and the columns that `_mmcif` reads."""
        return zip(
            range(1, self._count + 1),
            self.column("pdbx_PDB_model_num"),
            self.column("auth_asym_id", "label_asym_id"),
            self.column("label_asym_id", "auth_asym_id", needed=True),
            self.column("label_seq_id"),
            self.column("auth_seq_id", "label_seq_id"),
            self.column("pdbx_PDB_ins_code"),
            self.column("group_PDB"),
            self.column("label_comp_id", "auth_comp_id", needed=True),
            self.column("label_atom_id", "auth_atom_id", needed=True),
            self.column("label_alt_id"),
            self.column("Cartn_x", needed=True),
            self.column("Cartn_y", needed=True),
            self.column("Cartn_z", needed=True),
            self.column("occupancy"),
            self.column("B_iso_or_equiv"),
            strict=True,
        )


@dataclass(frozen=True)
class _Entities:
    """The molecules of an mmCIF file, whose copies are the chains."""

    listed: dict[str, list[str]]
    """Residue names by entity; empty where the file lists no sequence."""
    kind_of: dict[str, str]
    of_chain: dict[str, str]
    """Entity by `label_asym_id`."""

    def chain(self, author: str, asym: str) -> FileChain | None:
        """Make a new chain. None if the file lists sequences, but none for this chain."""
        entity = self.of_chain[asym]
        if self.listed and entity not in self.listed:
            return None
        label = asym if self.listed else ""
        return FileChain(author, label, self.listed.get(entity), self.kind_of.get(entity) or None)


def _entities(path: Path, tables: Tables, site: _AtomSite) -> _Entities:
    asyms = site.column("label_asym_id", "auth_asym_id", needed=True)
    listed, kinds, struct_asym = (
        _listed(path, tables["_entity_poly_seq"]),
        tables["_entity_poly"],
        tables["_struct_asym"],
    )
    entity_of = dict(zip(asyms, site.column("label_entity_id"), strict=True))
    entity_of |= dict(zip(struct_asym.get("id", ()), struct_asym.get("entity_id", ()), strict=False))
    return _Entities(listed, dict(zip(kinds.get("entity_id", ()), kinds.get("type", ()), strict=False)), entity_of)


def _mmcif(path: Path, tables: Tables) -> Entry:
    site = _AtomSite(path, tables["_atom_site"])
    models, numbered = site.column("pdbx_PDB_model_num"), any(site.column("label_seq_id"))
    entities = _entities(path, tables, site)
    listed, first_model = bool(entities.listed), models[0]
    chains: dict[tuple[str, str], FileChain] = {}
    places: dict[tuple[str, str, str], tuple[str, ...]] = {}  # the first row's key
    last: tuple[str, ...] = ()
    entry = Entry([], _parents(tables), several_models=len(set(models)) > 1)
    for row, model, author, asym, seq, auth_seq, ins, group, comp, atom, alt, x, y, z, occupancy, b in site.rows():
        if model != first_model or (listed and not seq):
            continue  # without a place in a sequence that is listed: a ligand or water
        label = asym if listed else ""
        chain = chains.get((author, label))
        if chain is None:
            if (chain := entities.chain(author, asym)) is None:
                continue
            chains[author, label] = chain
        if (here := (author, asym, seq, auth_seq, ins)) == last and atom not in BACKBONE:
            continue
        last = here
        key: tuple[str, ...] = (seq,) if listed else (seq, auth_seq, ins)
        if not listed:
            # Some programs count alternative residues at one place on: there the author's number decides.
            first_key = places.setdefault((author, auth_seq or seq, ins), key)
            key = first_key if alt else key
        residue = chain.residues.get(key)
        if residue is None:
            place = None if chain.listed is None else _place(path, row, seq, len(chain.listed))
            residue = chain.residues[key] = Residue(comp, _plain_int(auth_seq), group == "HETATM", place)
        residue.hetero &= group == "HETATM"
        residue.numbered |= bool(seq)
        if atom in BACKBONE and x and y and z:
            texts = x, y, z, occupancy or "1", b or "0"
            residue.add(_atom(path, " _atom_site row ", row, (atom, alt, comp), texts))
    entry.chains = list(chains.values())
    for chain in entry.chains:
        # Without sequences, some programs number no modified residue either; ligands come after the chain's end.
        while numbered and chain.residues and not next(reversed(chain.residues.values())).numbered:
            chain.residues.popitem()
    return entry


def _place(path: Path, row: int, seq: str, length: int) -> int:
    """Convert `label_seq_id` to an index into a listed sequence of this length."""
    place = _plain_int(seq)
    if place is None or not 1 <= place <= length:
        raise InputError(
            f"{path}: row {row} of _atom_site has label_seq_id '{_shown(seq)}', but the sequence of its "
            f"chain has residues 1 to {length}; download the file again"
        )
    return place - 1


def _listed(path: Path, table: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the residue names of each entity. Of alternatives at one place (`hetero`) the first counts."""
    names: dict[str, dict[int, str]] = {}
    columns = [table.get(item, []) for item in ("entity_id", "num", "mon_id")]
    if len({len(values) for values in columns}) != 1:
        raise InputError(f"{path}: _entity_poly_seq is not whole; copy or download the file again")
    for entity, number, name in zip(*columns, strict=True):
        names.setdefault(entity, {}).setdefault(_plain_int(number) or 0, name)
    for entity, by_number in names.items():
        if sorted(by_number) != list(range(1, len(by_number) + 1)):
            raise InputError(
                f"{path}: _entity_poly_seq of entity '{_shown(entity)}' is not numbered from 1 on without gaps; "
                "copy or download the file again"
            )
    return {entity: [by_number[k] for k in sorted(by_number)] for entity, by_number in names.items()}


def _parents(tables: Tables) -> dict[str, str]:
    """Return the parents of modified residues, from the dictionary of components and from the table that is mmCIF's
    MODRES.
    """
    components, modified = tables["_chem_comp"], tables["_pdbx_struct_mod_residue"]
    pairs = [
        *zip(modified.get("label_comp_id", ()), modified.get("parent_comp_id", ()), strict=False),
        *zip(components.get("id", ()), components.get("mon_nstd_parent_comp_id", ()), strict=False),
    ]
    return {name: parent for name, parent in pairs if name and parent}
