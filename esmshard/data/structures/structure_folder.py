"""Structure files as a split: a folder of PDB and mmCIF files, or one, to a FASTA file and its `.npz`."""

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from esmshard.data.fasta.symbols import Edits
from esmshard.data.labels.coordinates import UNRESOLVED
from esmshard.data.store.token_store import is_store
from esmshard.data.structures.chains import FEWEST, Cb, Chain
from esmshard.data.structures.complexes import read_list, read_records
from esmshard.data.structures.structure_files import ENDINGS, is_structure_name
from esmshard.data.tables import read_text
from esmshard.errors import InputError, UsageError
from esmshard.files import cache_directory, read_json, state
from esmshard.progress import Progress
from esmshard.recipe.data_section import EVERY

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
