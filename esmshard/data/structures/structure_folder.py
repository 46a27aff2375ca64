"""Structure files as a split: a folder of PDB and mmCIF files, or one, to a FASTA file and its `.npz`.

A record of several chains is named by its chains as they follow each other: `1abc_A:B` is chain A and then chain B of
`1abc.cif`. The sequences stand in one record with a colon between them, as in a FASTA file (docs/structures.md), and
the coordinates follow each other without one.
"""

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from esmshard.data.labels.coordinates import UNRESOLVED
from esmshard.data.structures.chains import FEWEST, Cb, Chain, chain_prefix, read_chains
from esmshard.data.structures.structure_files import ENDINGS, is_structure_name
from esmshard.errors import InputError, UsageError
from esmshard.io.paths import cache_directory, read_json, state
from esmshard.io.store import is_store
from esmshard.io.symbols import Edits, shown
from esmshard.io.tables import read_text
from esmshard.progress import Progress
from esmshard.recipe.data_section import EVERY
from esmshard.vocab import BETWEEN


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


VERSION = 1
"""The version of the rules by which structures become a split. After a change, all structures are read again."""
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

    Its `.npz` lies beside it; `notices` returns what was changed. The key is the path, the names and `files.state` of
    all files, and the records that they give, so a changed directory is read anew. Processes that ask at the same time
    wait for the one that reads.

    Args:
        source: the directory or file.
        complexes: see `recipe.DataSettings.complexes`.

    Raises:
        InputError: see `to_split`.
    """
    edits = Edits()
    files = [(path.name, *state(path)) for path in listed_files(source, edits)]
    how = complexes if complexes in (None, EVERY) else read_text(Path(complexes), "a list of records")
    key = json.dumps([VERSION, str(source.resolve()), files, *([] if how is None else [how])])
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    out, locks = cache_directory() / "structures" / digest, cache_directory() / "locks"
    fasta = out / "structures.fasta"
    out.parent.mkdir(parents=True, exist_ok=True)
    locks.mkdir(exist_ok=True)
    with FileLock(locks / f"{digest}.lock"):
        if _is_whole(out):
            return fasta
        shutil.rmtree(out, ignore_errors=True)  # a damaged copy of what the files still hold
        work = Path(tempfile.mkdtemp(prefix=f".tmp-{out.name}-", dir=out.parent))
        try:
            work.chmod(0o755)  # mkdtemp's private mode is for secrets
            notices = to_split(source, work / fasta.name, work / "structures.npz", complexes=complexes)
            sizes = {file.name: file.stat().st_size for file in work.iterdir()}
            manifest = {"source": str(source.resolve()), "notices": notices, "bytes": sizes}
            (work / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            work.rename(out)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return fasta


def notices(fasta: Path) -> list[str]:
    """Return what was changed and left out when `cached_split` made this file, one sentence each."""
    found: list[str] = read_json(fasta.parent / "manifest.json")["notices"]
    return found


def to_split(
    source: Path,
    fasta: Path,
    npz: Path,
    *,
    chains: Mapping[str, Collection[str]] | None = None,
    complexes: str | None = None,
    cb: Cb = "virtual",
    min_plddt: float | None = None,
    on_broken: Literal["error", "skip"] = "error",
) -> list[str]:
    """Write the protein chains of structure files as FASTA and, beside it, coordinates (format: data/README.md).

    A directory is read by itself, without those in it, in the order of its file names. One file is in memory at a time.

    Args:
        source: a structure file or a directory.
        fasta: file to write.
        npz: file to write; a task looks for it beside the FASTA file under the same name.
        chains: the author's chain names of each record to take, as `A` or `A:B`, by file name; files that it does not
            name are not read.
        complexes: see `recipe.DataSettings.complexes`; not together with `chains`.
        cb: see `read_chains`.
        min_plddt: see `read_chains`.
        on_broken: `skip` leaves out, and counts, files that cannot be read.

    Returns:
        What was changed and left out, one sentence each.

    Raises:
        InputError: for a broken file, two records of one id, or if there is no record to write; see also `read_list`.
        UsageError: if one of the files to write exists.
    """
    for out in (fasta, npz):
        if out.exists():
            raise UsageError(f"{out}: exists already; choose another name or delete it")
    edits, broken = Edits(), list[str]()
    files = listed_files(source, edits)
    if complexes is not None and complexes != EVERY:
        chains = read_list(Path(complexes), files, edits)
    if chains is not None:
        absent = sorted(set(chains) - {path.name for path in files})
        if absent:
            raise InputError(f"{source}: has no structure file '{absent[0]}', of which chains are wanted")
        files = [path for path in files if path.name in chains]

    def found() -> Iterator[tuple[Path, Chain, npt.NDArray[np.uint16]]]:
        with Progress(f"structures in {source.name}", len(files), show=len(files) >= MANY) as progress:
            for done, path in enumerate(files, 1):
                wanted, about = complexes if chains is None else chains[path.name], Edits()
                try:
                    read = read_records(path, wanted, cb=cb, min_plddt=min_plddt, edits=about)
                    stored = [(path, chain, _stored(path, chain)) for chain in read]
                except InputError as error:
                    if on_broken == "error":
                        raise
                    broken.append(str(error))
                    edits.add("broken file(s) left out", path.name)
                else:
                    edits.extend(about)
                    if not stored:
                        edits.add("file(s) without a chain to take", path.name)
                    yield from stored
                progress.update(done, f"{path.name}")

    # One directory for both: a half-written pair is seen by nobody.
    with tempfile.TemporaryDirectory(prefix=f".tmp-{fasta.name}-", dir=fasta.parent) as work:
        fasta_work, npz_work = Path(work) / "fasta", Path(work) / "npz"
        count = _write(found(), fasta_work, npz_work)
        notices = [*edits.notices(), *broken[:3]]
        if count == 0:
            raise InputError(
                f"{source}: has no protein chain with {FEWEST} residues with coordinates"
                + (f" ({'; '.join(notices)})" if notices else "")
            )
        npz_work.replace(npz)
        fasta_work.replace(fasta)
    return notices


def listed_files(source: Path, edits: Edits) -> list[Path]:
    """Return the structure files that a path means, a directory or one file, sorted by name.

    Args:
        source: the path.
        edits: collects what was not read.

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


def _write(found: Iterable[tuple[Path, Chain, npt.NDArray[np.uint16]]], fasta: Path, npz: Path) -> int:
    """Write both files and return the number of chains. Sequences and coordinates go through the disk."""
    files: dict[str, Path] = {}
    offsets, longest = [0], 0
    rows = npz.with_suffix(".rows")
    with open(fasta, "w", encoding="utf-8") as fasta_file, open(rows, "wb") as rows_file:
        for path, chain, cb_dA_L3 in found:
            if chain.id in files:
                other = files[chain.id]
                raise InputError(
                    f"{path}: chain '{chain.id}' comes from {other} too; rename or remove one of the files"
                )
            files[chain.id] = path
            fasta_file.write(f">{chain.id}\n{chain.sequence}\n")
            rows_file.write(cb_dA_L3.astype("<u2").tobytes())
            offsets.append(offsets[-1] + len(chain.cb_L3))
            longest = max(longest, len(chain.sequence))
    if not files:
        return 0
    with zipfile.ZipFile(npz, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in (("names", np.array(list(files))), ("offsets", np.array(offsets, dtype=np.int32))):
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
        with archive.open("cb_dA.npy", "w", force_zip64=True) as member, open(rows, "rb") as rows_file:
            header = {"descr": "<u2", "fortran_order": False, "shape": (offsets[-1], 3)}
            np.lib.format.write_array_header_1_0(member, header)
            shutil.copyfileobj(rows_file, member)
        with archive.open("seqs.npy", "w", force_zip64=True) as member, open(fasta, encoding="utf-8") as fasta_file:
            header = {"descr": f"<U{longest}", "fortran_order": False, "shape": (len(files),)}
            np.lib.format.write_array_header_1_0(member, header)
            for line in fasta_file:
                if not line.startswith(">"):
                    member.write(line.rstrip("\n").encode("utf-32-le").ljust(4 * longest, b"\0"))
    return len(files)


def _is_whole(out: Path) -> bool:
    try:
        manifest = read_json(out / "manifest.json")
        return all((out / name).stat().st_size == size for name, size in manifest["bytes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
