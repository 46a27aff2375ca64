"""Records of several chains of one structure file: which chains are joined, and in what order.

A record is named by its chains as they follow each other: `1abc_A:B` is chain A and then chain B of `1abc.cif`. The
sequences stand in one record with a colon between them, as in a FASTA file (docs/structures.md), and the coordinates
follow each other without one.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from esmshard.data.fasta.symbols import Edits, shown
from esmshard.data.structures.chains import FEWEST, Cb, Chain, chain_prefix, read_chains
from esmshard.data.tables import read_text
from esmshard.errors import InputError
from esmshard.joined_chains import BETWEEN
from esmshard.recipe.data_section import EVERY


def read_records(
    path: Path,
    wanted: str | Collection[str] | None,
    *,
    cb: Cb = "virtual",
    min_plddt: float | None = None,
    edits: Edits | None = None,
) -> list[Chain]:
    """Read the records of one structure file.

    Args:
        path: the file.
        wanted: the author's names of the chains of each record, as `A` or `A:B`, of which `A:B` is chain A followed by
            chain B. `all`: all protein chains are one record, in the order of the file; short chains and chains of one
            sequence stay in it. None: every chain is a record, see `read_chains`.
        cb: see `read_chains`.
        min_plddt: see `read_chains`.
        edits: see `read_chains`.

    Returns:
        The records. One of several chains is called as its chains, `1abc_A:B`; it is left out, and counted, if it has
        fewer than ten residues with coordinates.

    Raises:
        InputError: see `read_chains`; or two polymers of the file have the name of a chain that is to be joined.
    """
    edits = Edits() if edits is None else edits
    if wanted is None:
        return read_chains(path, cb=cb, min_plddt=min_plddt, edits=edits)
    if wanted == EVERY:
        every = read_chains(path, every=True, cb=cb, min_plddt=min_plddt, edits=edits)
        return _join(path, every, edits)
    alone = [one for one in wanted if BETWEEN not in one]
    joined = [one.split(BETWEEN) for one in wanted if BETWEEN in one]
    found = read_chains(path, chains=alone, cb=cb, min_plddt=min_plddt, edits=edits) if alone else []
    if joined:
        names = {name for one in joined for name in one}
        chains = read_chains(path, chains=names, every=True, cb=cb, min_plddt=min_plddt, edits=edits)
        for one in joined:
            found += _join(path, [_called(path, chains, name) for name in one], edits)
    return found


def read_list(path: Path, files: Sequence[Path], edits: Edits) -> dict[str, list[str]]:
    """Read a list of records, one on each line, such as `1abc_A:B`. Empty lines and those that begin with # are passed
    over.

    Args:
        path: the list.
        files: structure files.
        edits: collects the records of other files.

    Returns:
        The chains of each record, as `A:B`, by the name of the file.

    Raises:
        InputError: naming the line that is no record, or if no record is of one of the files.
    """
    files_of: dict[str, list[str]] = {}
    for file in files:
        files_of.setdefault(chain_prefix(file), []).append(file.name)
    found: dict[str, list[str]] = {}
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
        entry = next((name for name in _beginnings(parts[0]) if name in files_of), None)
        if entry is None:
            edits.add(f"record(s) of {path.name} left out, as there is no such file here", record)
            continue
        names = [parts[0][len(entry) + 1 :], *parts[1:]]
        if len(set(names)) < len(names):
            raise InputError(f"{where} has a chain twice; name each chain once")
        for file_name in files_of[entry]:
            found.setdefault(file_name, []).append(BETWEEN.join(names))
    if not found:
        raise InputError(
            f"{path}: has no record of the {len(files):,} structure file{'s' if len(files) > 1 else ''} here "
            f"({files[0].name}{', ...' if len(files) > 1 else ''}); write records as {chain_prefix(files[0])}_A:B"
        )
    return found


def _beginnings(text: str) -> list[str]:
    """Return what stands before each underscore, in lower case, the longest first.

    >>> _beginnings("AF_P1_A")
    ['af_p1', 'af']
    """
    return [text[:k].lower() for k in range(len(text) - 1, 0, -1) if text[k] == "_"]


def _join(path: Path, chains: Sequence[Chain], edits: Edits) -> list[Chain]:
    """Return chains of one file as one record, in this order; none if it has too few residues with coordinates. A
    single chain stays what it is.
    """
    if not chains:
        return []
    entry = f"{chain_prefix(path)}_"
    record = Chain(
        chains[0].id + "".join(BETWEEN + chain.id.removeprefix(entry) for chain in chains[1:]),
        BETWEEN.join(chain.sequence for chain in chains),
        np.concatenate([chain.cb_L3 for chain in chains]),
        np.concatenate([chain.backbone_L33 for chain in chains]),
    )
    if (~np.isnan(record.cb_L3[:, 0])).sum() < FEWEST:
        edits.add(f"record(s) left out with fewer than {FEWEST} residues with coordinates", record.id)
        return []
    edits.add("record(s) of several chains of a file", record.id, int(len(chains) > 1))
    return [record]


def _called(path: Path, chains: Sequence[Chain], name: str) -> Chain:
    """Return the chain with a name. `InputError` if two polymers of the file share the name."""
    chain_id = f"{chain_prefix(path)}_{name}"
    for chain in chains:
        if chain.id == chain_id:
            return chain
    alike = [chain.id for chain in chains if chain.id.startswith(f"{chain_id}_")]
    raise InputError(
        f"{path}: has several molecules with the chain name '{name}' ({', '.join(alike)}), of which none can be joined "
        "to others; give them names of their own"
    )
