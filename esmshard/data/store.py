"""The token store: a FASTA file as uint8 tokens behind int64 offsets, memory-mapped.

A store is a directory, written under another name and renamed when it is whole:

    tokens.u8       all residues end to end, one byte each, without `<cls>` and `<eos>`
    offsets.npy     int64 [N + 1]: record n is tokens[offsets[n] : offsets[n + 1]]
    ids.txt         one id a line, in the same order
    manifest.json   format version, alphabet, counts, source, edits, sha256 of each file
"""

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.fasta import Edits, Seen, read_fasta
from esmshard.errors import InputError, UsageError
from esmshard.vocab import ALPHABET_HASH, encode_residues

FORMAT, VERSION = "esmshard-tokens", 1


class TokenStore:
    """Read side. Opening maps the files; tokens are read from disk when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = _manifest(path)
        try:
            sizes = {name: (path / name).stat().st_size for name in ("tokens.u8", "offsets.npy", "ids.txt")}
            self.offsets: npt.NDArray[np.int64] = np.load(path / "offsets.npy", mmap_mode="r", allow_pickle=False)
            self._tokens = np.memmap(path / "tokens.u8", dtype=np.uint8, mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{path}: the token store is damaged ({error}); delete it and ingest again") from None
        whole = len(self.offsets) - 1 == self.manifest.get("records") and self.offsets[-1] == len(self._tokens)
        if not whole or sizes != self.manifest.get("bytes"):
            raise InputError(f"{path}: the token store is truncated; delete it and ingest again")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Residues of each record, int64 [N]."""
        return np.diff(self.offsets)

    @functools.cached_property
    def ids(self) -> list[str]:
        """Ids in file order; read when they are first asked for."""
        try:
            return (self.path / "ids.txt").read_text(encoding="utf-8").split("\n")[:-1]
        except (OSError, ValueError):
            raise InputError(f"{self.path}/ids.txt: cannot be read; delete the store and ingest again") from None

    def residues(self, n: int) -> npt.NDArray[np.uint8]:
        """Residue tokens of record n, uint8 [L]."""
        return self._tokens[self.offsets[n] : self.offsets[n + 1]]

    @property
    def notices(self) -> list[str]:
        """What was changed when the source was read, one sentence each."""
        edits: list[str] = self.manifest["edits"]
        return edits


def ingest(fastas: Sequence[Path], out: Path) -> TokenStore:
    """Read FASTA files into a new store at `out`. An id in two files is a duplicate like any other.

    Raises `InputError` if a file cannot be read, `UsageError` if `out` exists; nothing is left behind then.
    """
    if out.exists():
        raise UsageError(f"{out}: exists already; choose another directory or delete it")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".tmp-{out.name}-", dir=out.parent))
    try:
        work.chmod(0o755)  # mkdtemp's private mode is for secrets
        _write(fastas, work)
        try:
            work.rename(out)
        except OSError:
            if not (out / "manifest.json").is_file():  # otherwise another process made the same store meanwhile
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return TokenStore(out)


def cached(fasta: Path) -> TokenStore:
    """The store of one FASTA file, ingested on first use and kept in the user's cache.

    The cache (`$ESMSHARD_CACHE`, else `$XDG_CACHE_HOME/esmshard`, else `~/.cache/esmshard`) is keyed by path, size and
    modification time, so an edited file is read anew.
    """
    try:
        stat = fasta.stat()
    except OSError as error:
        raise InputError(f"{fasta}: {(error.strerror or 'cannot be read').lower()}") from None
    key = f"{FORMAT}/{VERSION}/{ALPHABET_HASH}/{fasta.resolve()}/{stat.st_size}/{stat.st_mtime_ns}"
    out = cache_directory() / "stores" / hashlib.sha256(key.encode()).hexdigest()[:24]
    if out.exists():
        try:
            return TokenStore(out)
        except InputError:
            shutil.rmtree(out)  # a damaged copy of what the FASTA file still holds
    return ingest([fasta], out)


def cache_directory() -> Path:
    """Where stores are kept between runs."""
    if "ESMSHARD_CACHE" in os.environ:
        return Path(os.environ["ESMSHARD_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "esmshard"


def _write(fastas: Sequence[Path], work: Path) -> None:
    edits, offsets, total = Edits(), [0], 0
    seen: Seen = {}
    tokens_hash, ids_hash = hashlib.sha256(), hashlib.sha256()
    with open(work / "tokens.u8", "wb") as tokens_file, open(work / "ids.txt", "wb") as ids_file:
        for fasta in fastas:
            for record in read_fasta(fasta, edits, seen):
                tokens, line = encode_residues(record.sequence), f"{record.id}\n".encode()
                tokens_file.write(tokens)
                ids_file.write(line)
                tokens_hash.update(tokens)
                ids_hash.update(line)
                total += len(tokens)
                offsets.append(total)
    np.save(work / "offsets.npy", np.array(offsets, dtype=np.int64))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "alphabet": ALPHABET_HASH,
        "records": len(offsets) - 1,
        "residues": total,
        "sources": [{"path": str(f.resolve()), "bytes": f.stat().st_size} for f in fastas],
        "edits": edits.notices(),
        "bytes": {name: (work / name).stat().st_size for name in ("tokens.u8", "offsets.npy", "ids.txt")},
        "sha256": {
            "tokens.u8": tokens_hash.hexdigest(),
            "ids.txt": ids_hash.hexdigest(),
            "offsets.npy": hashlib.sha256((work / "offsets.npy").read_bytes()).hexdigest(),
        },
    }
    (work / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: not a token store (it has no manifest.json)") from None
    except (OSError, ValueError):
        raise InputError(f"{path}/manifest.json: cannot be read; delete the store and ingest again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path}: not a token store")
    if manifest.get("version") != VERSION or manifest.get("alphabet") != ALPHABET_HASH:
        raise InputError(f"{path}: a token store of another version; delete it and ingest again")
    return manifest
