"""Converts PDB and mmCIF files to a FASTA file and an `.npz` file with the coordinates.

The record `1abc_A:B` is chain A followed by chain B of `1abc.cif`. Its sequence has a colon between the chains
(docs/structures.md), and the `.npz` file has no row for the colon.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.labels.coordinates import UNRESOLVED
from esmshard.data.structures.chains import ENDINGS, Chain, chain_prefix, is_structure_name, read_chains
from esmshard.errors import InputError, UsageError
from esmshard.io.paths import cached_directory, read_json, replacing, state
from esmshard.io.store import is_store
from esmshard.io.symbols import Edits, shown
from esmshard.io.tables import counted, read_text
from esmshard.progress import Progress
from esmshard.recipe.sections import EVERY
from esmshard.vocab import BETWEEN

FEWEST = 10
"""Records that have coordinates for fewer residues are left out."""


def read_records(
    path: Path, wanted: str | Collection[str] | None, *, min_plddt: float | None = None, edits: Edits | None = None
) -> list[Chain]:
    """Read the records of a structure file. A record is a chain, or several chains one after the other.

    Args:
        path: the structure file.
        wanted: the chain names of each record to read, such as `A` or `A:B`. The word `all` makes one record of all
            protein chains. None makes a record of each chain, except chains with the sequence of an earlier chain.
        min_plddt: see the function `read_chains`.
        edits: counts changes, left-out records, and records of several chains.

    Raises:
        InputError: see the function `read_chains`; or two chains of the file have the name of a wanted chain.
    """
    edits = Edits() if edits is None else edits
    names_of = None if wanted is None or wanted == EVERY else [names.split(BETWEEN) for names in wanted]
    names_wanted = None if names_of is None else [name for names in names_of for name in names]
    chains = read_chains(path, chains=names_wanted, min_plddt=min_plddt, edits=edits)
    prefix, groups = f"{chain_prefix(path)}_", [[chain] for chain in chains]
    if wanted == EVERY:
        groups = [chains] if chains else []
    elif names_of is not None:
        by_id = {chain.id: chain for chain in chains}
        missing = [name for name in names_wanted or () if prefix + name not in by_id]
        if missing:
            alike = ", ".join(chain_id for chain_id in by_id if chain_id.startswith(f"{prefix}{missing[0]}_"))
            raise InputError(
                f"{path}: several molecules have the chain name '{missing[0]}' ({alike}); rename the chains"
            )
        groups = [[by_id[prefix + name] for name in names] for names in names_of]
    records: dict[str, Chain] = {}
    for group in groups:
        record_id = prefix + BETWEEN.join(chain.id.removeprefix(prefix) for chain in group)
        record = group[0]
        if len(group) > 1:
            record = Chain(
                record_id,
                BETWEEN.join(chain.sequence for chain in group),
                np.concatenate([chain.cb_L3 for chain in group]),
                np.concatenate([chain.backbone_L33 for chain in group]),
            )
        if (~np.isnan(record.cb_L3[:, 0])).sum() < FEWEST:
            edits.add(f"record(s) left out with fewer than {FEWEST} residues with coordinates", record.id)
        elif wanted is None and record.sequence in records:
            edits.add("chain(s) left out with the sequence of another chain of the file", record.id)
        else:
            edits.add("record(s) of several chains of a file", record.id, int(len(group) > 1))
            records[record.sequence if wanted is None else record.id] = record
    return list(records.values())


def read_list(path: Path, files: Sequence[Path], edits: Edits) -> dict[str, list[str]]:
    """Read a list of records, one per line. Return the chain names of the records by file name, for the paths `files`.

    The line `1abc_A:B` gives `{"1abc.cif": ["A:B"]}` for the file `1abc.cif`. Empty lines and lines that begin with #
    are skipped. `edits` counts the records without a structure file. Raises `InputError` if a line is not a valid
    record, or no record has a structure file.
    """
    files_of: dict[str, list[str]] = {}
    for file in files:
        files_of.setdefault(chain_prefix(file), []).append(file.name)
    chains_of: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(read_text(path, "a list of records").splitlines(), 1):
        record = line.strip()
        if not record or record.startswith("#"):
            continue
        where = f"{path}:{number}: '{shown(record)}'"
        if "_" not in record or len(record.split()) > 1 or "" in (parts := record.split(BETWEEN)):
            raise InputError(f"{where} is no record; write one record on each line, such as 1abc_A:B for 1abc.cif")
        if record in lines:
            raise InputError(f"{where} is in line {lines[record]} too; remove one of the two")
        lines[record] = number
        # File names and chain names may contain underscores too, so the longest matching file name is chosen.
        beginnings = (parts[0][:k].lower() for k in range(len(parts[0]) - 1, 0, -1) if parts[0][k] == "_")
        entry = next((name for name in beginnings if name in files_of), None)
        if entry is None:
            edits.add(f"record(s) of {path.name} without a structure file left out", record)
            continue
        names = [parts[0][len(entry) + 1 :], *parts[1:]]
        if len(set(names)) < len(names):
            raise InputError(f"{where} has a chain twice; name each chain once")
        for file_name in files_of[entry]:
            chains_of.setdefault(file_name, []).append(BETWEEN.join(names))
    if not chains_of:
        count, example = counted(len(files), "structure file"), f"{chain_prefix(files[0])}_A:B"
        raise InputError(f"{path}: has no record from {count}; write records such as {example}")
    return chains_of


VERSION = 3
"""The version of the code that converts structures. When this number changes, all structures are read again."""
_FASTA = "structures.fasta"
MANY = 100
"""Progress is shown if there are at least this number of structure files."""


def holds_structures(path: Path) -> bool:
    """Return whether a path has the extension of a structure file, or is a directory that is not a token store."""
    return not is_store(path) if path.is_dir() else is_structure_name(path.name)


def require_structures(path: Path, complexes: str | None) -> None:
    """Raise `UsageError` if the option `--complexes` is given, but `path` is no structure file or folder."""
    if complexes is not None and not holds_structures(path):
        raise UsageError(f"--complexes {complexes}: is for structure files, and {path} has sequences; leave it out")


def cached_split(source: Path, complexes: str | None = None) -> Path:
    """Convert structures to a FASTA file and an `.npz` file in the user's cache. Return the path of the FASTA file.

    The structures are read again if the path, one of the files or `complexes` changes (see the recipe key
    `data.complexes`). While one process reads them, other processes wait. For errors see the function `to_split`.
    """
    how = complexes if complexes in (None, EVERY) else read_text(Path(complexes), "a list of records")
    key = json.dumps([VERSION, str(source.resolve()), states(source), how])

    def make(work: Path) -> list[str]:
        return to_split(source, work / _FASTA, work / "structures.npz", complexes=complexes)

    return cached_directory("structures", key, make) / _FASTA


def states(source: Path) -> list[Any]:
    """Return the name, inode, size, mtime and ctime of a file, or of each structure file in a folder."""
    try:
        return [(path.name, *state(path)) for path in (listed_files(source, Edits()) if source.is_dir() else [source])]
    except OSError as error:
        raise InputError(f"{source}: {(error.strerror or 'cannot be read').lower()}") from None


def notices(fasta: Path) -> list[str]:
    """Return sentences about the changes that `cached_split` made when it wrote `fasta`."""
    sentences: list[str] = read_json(fasta.parent / "manifest.json")["notices"]
    return sentences


def to_split(
    source: Path, fasta: Path, npz: Path, *, complexes: str | None = None, min_plddt: float | None = None
) -> list[str]:
    """Write the protein chains of a structure file or a directory to a FASTA file, and Cb coordinates to an `.npz` file
    (data/README.md). Return sentences about changed and left-out parts.

    The files of a directory are read in the order of their names. Recipes expect `x.npz` in the folder of `x.fasta`.
    For `complexes` see the recipe key `data.complexes`, for `min_plddt` the function `read_chains`. Raises `InputError`
    if a file is damaged, two records have the same id, or no record is left; or `UsageError` if an output file exists.
    """
    for out in (fasta, npz):
        if out.exists():
            raise UsageError(f"{out}: exists already; choose another name or delete it")
    edits = Edits()
    files = listed_files(source, edits)
    wanted: Mapping[str, str | Collection[str] | None] = dict.fromkeys((path.name for path in files), complexes)
    if complexes is not None and complexes != EVERY:
        wanted = read_list(Path(complexes), files, edits)
        files = [path for path in files if path.name in wanted]
    records: dict[str, tuple[Path, str, npt.NDArray[np.uint16]]] = {}
    with Progress(f"structures in {source.name}", len(files), show=len(files) >= MANY) as progress:
        for done, path in enumerate(files, 1):
            chains = read_records(path, wanted[path.name], min_plddt=min_plddt, edits=edits)
            edits.add("file(s) without a usable chain", path.name, int(not chains))
            for chain in chains:
                if chain.id in records:
                    raise InputError(f"{path}: chain '{chain.id}' is in {records[chain.id][0]} too; remove one file")
                records[chain.id] = path, chain.sequence, _stored(path, chain)
            progress.update(done, f"{path.name}")
    if not records:
        reasons = "; ".join(edits.notices())
        raise InputError(f"{source}: has no protein chain with {FEWEST} or more residues with coordinates ({reasons})")
    _, sequences, coordinates = zip(*records.values(), strict=True)
    with replacing(npz, binary=True) as npz_file, replacing(fasta) as fasta_file:
        np.savez_compressed(
            npz_file,
            names=np.array(list(records)),
            seqs=np.array(sequences),
            offsets=np.cumsum([0, *map(len, coordinates)], dtype=np.int32),
            cb_dA=np.concatenate(coordinates),
        )
        fasta_file.writelines(f">{name}\n{sequence}\n" for name, (_, sequence, _) in records.items())
    return edits.notices()


def listed_files(source: Path, edits: Edits) -> list[Path]:
    """Return the structure files of the directory `source`, sorted by name, or `[source]` for a file. `edits` counts
    all other files and the inner folders, which are not read. Raises `InputError` if the path does not exist, or the
    directory has a broken link or no structure file.
    """
    if not source.is_dir():
        if not source.exists():
            raise InputError(f"{source}: no such file or directory")
        return [source]
    files = []
    with os.scandir(source) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                edits.add("inner folder(s) not read", entry.name)
            elif not is_structure_name(entry.name) or entry.name.startswith("."):
                edits.add("file(s) not read, as the name is not a structure file name", entry.name)
            elif not entry.is_file():
                raise InputError(f"{source}/{ascii(entry.name)[1:-1]}: no file, or a broken link; remove it")
            else:
                files.append(source / entry.name)
    if not files:
        raise InputError(f"{source}: has no structure file; names ending in {ENDINGS} are expected")
    return files


def _stored(path: Path, chain: Chain) -> npt.NDArray[np.uint16]:
    """Return Cb coordinates in units of 0.1 A, uint16 [L, 3]. A shift makes the minimum on each axis 0."""
    cb_L3 = chain.cb_L3.astype(np.float64)
    cb_dA_L3 = np.rint((cb_L3 - np.nanmin(cb_L3, axis=0)) * 10)
    widest = np.nanmax(cb_dA_L3)
    if widest >= UNRESOLVED:
        raise InputError(
            f"{path}: chain '{chain.id}' is {widest / 10:,.0f} A wide, more than can be stored; correct it"
        )
    return np.where(np.isnan(cb_dA_L3), UNRESOLVED, cb_dA_L3).astype(np.uint16)
