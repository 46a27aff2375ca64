"""Structure files as a split: a folder of PDB and mmCIF files, or one, to a FASTA file and its `.npz`.

A record of several chains is named by its chains as they follow each other: `1abc_A:B` is chain A and then chain B of
`1abc.cif`. The sequences stand in one record with a colon between them, as in a FASTA file (docs/structures.md), and
the coordinates follow each other without one.
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
from esmshard.io.tables import read_text
from esmshard.progress import Progress
from esmshard.recipe.sections import EVERY
from esmshard.vocab import BETWEEN

FEWEST = 10
"""Residues with coordinates. A record with fewer is left out."""


def read_records(
    path: Path, wanted: str | Collection[str] | None, *, min_plddt: float | None = None, edits: Edits | None = None
) -> list[Chain]:
    """Read the records of one structure file.

    Args:
        path: the file.
        wanted: the author's names of the chains of each record, as `A` or `A:B`, of which `A:B` is chain A followed by
            chain B. `all`: all protein chains are one record, in the order of the file; short chains and chains of one
            sequence stay in it. None: every chain is a record, and of those with one sequence the first.
        min_plddt: see `read_chains`.
        edits: see `read_chains`.

    Returns:
        The records. One of several chains is called as its chains, `1abc_A:B`. A record with fewer than ten residues
        with coordinates is left out, and counted.

    Raises:
        InputError: see `read_chains`; or two polymers of the file have the name of a chain that is wanted.
    """
    edits = Edits() if edits is None else edits
    split = None if wanted is None or wanted == EVERY else [names.split(BETWEEN) for names in wanted]
    names_wanted = None if split is None else [name for names in split for name in names]
    chains = read_chains(path, chains=names_wanted, min_plddt=min_plddt, edits=edits)
    prefix, groups = f"{chain_prefix(path)}_", [[chain] for chain in chains]
    if wanted == EVERY:
        groups = [chains] if chains else []
    elif split is not None:
        by_id = {chain.id: chain for chain in chains}
        missing = [name for name in names_wanted or () if prefix + name not in by_id]
        if missing:
            alike = ", ".join(chain_id for chain_id in by_id if chain_id.startswith(f"{prefix}{missing[0]}_"))
            raise InputError(
                f"{path}: has several molecules with the chain name '{missing[0]}' ({alike}); give them names of "
                "their own"
            )
        groups = [[by_id[prefix + name] for name in names] for names in split]
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
    """Read a list of records such as `1abc_A:B`, one on each line: the chains, as `A:B`, by the name of the file.

    Empty lines and those that begin with # are passed over. `edits` collects the records of other files.

    Raises:
        InputError: naming the line that is no record, or if no record is of one of the files.
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
            raise InputError(
                f"{where} is no record; write the name of a file without its ending, an underscore and the chains, as "
                "1abc_A:B, one record on a line"
            )
        if record in lines:
            raise InputError(f"{where} stands in line {lines[record]} too; remove one of the two")
        lines[record] = number
        # The name of a file may have underscores too, and that of a chain: the longest name of a file counts.
        beginnings = (parts[0][:k].lower() for k in range(len(parts[0]) - 1, 0, -1) if parts[0][k] == "_")
        entry = next((name for name in beginnings if name in files_of), None)
        if entry is None:
            edits.add(f"record(s) of {path.name} left out, as there is no such file here", record)
            continue
        names = [parts[0][len(entry) + 1 :], *parts[1:]]
        if len(set(names)) < len(names):
            raise InputError(f"{where} has a chain twice; name each chain once")
        for file_name in files_of[entry]:
            chains_of.setdefault(file_name, []).append(BETWEEN.join(names))
    if not chains_of:
        raise InputError(
            f"{path}: has no record of the {len(files):,} structure file{'s' if len(files) > 1 else ''} here "
            f"({files[0].name}{', ...' if len(files) > 1 else ''}); write records as {chain_prefix(files[0])}_A:B"
        )
    return chains_of


VERSION = 3
"""The version of the rules by which structures become a split. After a change, all structures are read again."""
_FASTA = "structures.fasta"
MANY = 100
"""The number of files from which on progress is shown."""


def holds_structures(path: Path) -> bool:
    """Return whether a data path means structures: a directory that is no token store, or a file with the ending of
    one.
    """
    return not is_store(path) if path.is_dir() else is_structure_name(path.name)


def require_structures(path: Path, complexes: str | None) -> None:
    """Refuse the option `--complexes` for data that are no structures."""
    if complexes is not None and not holds_structures(path):
        raise UsageError(f"--complexes {complexes}: is for structure files, and {path} has sequences; leave it out")


def cached_split(source: Path, complexes: str | None = None) -> Path:
    """Return the FASTA file of a directory of structures, or of one file. It is made on first use and kept in the
    user's cache.

    Its `.npz` lies beside it; `notices` returns what was changed. The key is the path, the names and `paths.state` of
    all files, and the records that they give, so a changed directory is read anew. Processes that ask at the same time
    wait for the one that reads.

    Args:
        source: the directory or file.
        complexes: see `recipe.DataSettings.complexes`.

    Raises:
        InputError: see `to_split`.
    """
    how = complexes if complexes in (None, EVERY) else read_text(Path(complexes), "a list of records")
    key = json.dumps([VERSION, str(source.resolve()), states(source), how])

    def make(work: Path) -> list[str]:
        return to_split(source, work / _FASTA, work / "structures.npz", complexes=complexes)

    return cached_directory("structures", key, make) / _FASTA


def states(source: Path) -> list[Any]:
    """Return, ready for JSON, what changes when a file or a directory of structures changes.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return [(path.name, *state(path)) for path in (listed_files(source, Edits()) if source.is_dir() else [source])]
    except OSError as error:
        raise InputError(f"{source}: {(error.strerror or 'cannot be read').lower()}") from None


def notices(fasta: Path) -> list[str]:
    """Return what was changed and left out when `cached_split` made this file, one sentence each."""
    sentences: list[str] = read_json(fasta.parent / "manifest.json")["notices"]
    return sentences


def to_split(
    source: Path, fasta: Path, npz: Path, *, complexes: str | None = None, min_plddt: float | None = None
) -> list[str]:
    """Write the protein chains of structure files as FASTA and, beside it, coordinates (format: data/README.md).

    A directory is read by itself, without those in it, in the order of its file names.

    Args:
        source: a structure file or a directory.
        fasta: file to write.
        npz: file to write; a task looks for it beside the FASTA file under the same name.
        complexes: see `recipe.DataSettings.complexes`.
        min_plddt: see `read_chains`.

    Returns:
        What was changed and left out, one sentence each.

    Raises:
        InputError: for a broken file, two records of one id, or if there is no record to write; see also `read_list`.
        UsageError: if one of the files to write exists.
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
            edits.add("file(s) without a chain to take", path.name, int(not chains))
            for chain in chains:
                if chain.id in records:
                    raise InputError(
                        f"{path}: chain '{chain.id}' comes from {records[chain.id][0]} too; rename or remove one of "
                        "the files"
                    )
                records[chain.id] = path, chain.sequence, _stored(path, chain)
            progress.update(done, f"{path.name}")
    if not records:
        said = f" ({'; '.join(edits.notices())})" if edits.counts else ""
        raise InputError(f"{source}: has no protein chain with {FEWEST} residues with coordinates{said}")
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
    """Return the structure files that a path means, a directory or one file, sorted by name. `edits` collects what was
    not read.

    Raises:
        InputError: there is no such path, or no structure in the directory.
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
                edits.add("file(s) not read, as the name is not that of a structure", entry.name)
            elif not entry.is_file():
                raise InputError(
                    f"{source}/{ascii(entry.name)[1:-1]}: not a file, or a link that leads nowhere; remove it"
                )
            else:
                files.append(source / entry.name)
    if not files:
        raise InputError(f"{source}: has no structure file; names ending in {ENDINGS} are expected")
    return files


def _stored(path: Path, chain: Chain) -> npt.NDArray[np.uint16]:
    """Return the coordinates in 0.1 A from the chain's own corner, uint16 [L, 3]."""
    cb_L3 = chain.cb_L3.astype(np.float64)
    cb_dA_L3 = np.rint((cb_L3 - np.nanmin(cb_L3, axis=0)) * 10)
    widest = np.nanmax(cb_dA_L3)
    if widest >= UNRESOLVED:
        raise InputError(
            f"{path}: chain '{chain.id}' is {widest / 10:,.0f} A wide, more than any protein and than the "
            f"{(UNRESOLVED - 1) / 10:,.1f} A that can be stored; look at its coordinates"
        )
    return np.where(np.isnan(cb_dA_L3), UNRESOLVED, cb_dA_L3).astype(np.uint16)
