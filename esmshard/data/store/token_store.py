"""The token store: FASTA files as uint8 tokens with int64 offsets, memory-mapped. `esmshard.data.store.ingestion`
writes it.

A store is a directory that is written under another name and renamed when it is complete. Version 3:

    tokens-00000.u8 ...   residues of all records, one byte each; every record is followed by `<eos>`
    headers-00000.txt ... header lines without `>`, one a line; the first word is the id
    offsets.npy           int64 [N + 1]: record n is bytes offsets[n] : offsets[n + 1] of all token shards in order
    headers.npy           int64 [N + 1]: the same for the header shards
    ids.npy               uint64 [N]: `keys` of the ids, sorted
    rows.npy              uint32 or uint64 [N]: the number of the record of each key
    manifest.json         version, alphabet, counts, lengths, sources, rules, edits; sha256 of each file and of itself

Every file is compared with its sha256 before anything of it is used: the manifest and the arrays when a store is
opened, a shard when a process first reads it. So no altered byte is ever read as a residue or an id, and a run reads
each file once more than it needs, at the speed of the disk. Memory does not grow with the number of records.
"""

import bisect
import functools
import hashlib
import json
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esmshard.data.fasta.symbols import JOINED
from esmshard.errors import InputError
from esmshard.files import read_json, sha256
from esmshard.vocab import ALPHABET_HASH

FORMAT, VERSION = "esmshard-tokens", 3
ARRAYS = ("offsets.npy", "headers.npy", "ids.npy", "rows.npy")
_AT_ONCE = 1 << 20
_OPEN_SHARDS = 256
"""Most shards that stay mapped. Each of them uses a file descriptor."""


class TokenStore:
    """A token store opened for reading. Tokens and headers are read from disk when they are used."""

    def __init__(self, path: Path, checked: frozenset[str] = frozenset()) -> None:
        """Open a store.

        Args:
            path: its directory.
            checked: names of files that were compared with their sha256 before.

        Raises:
            InputError: the manifest or an array is missing, or is not as it was written.
        """
        self.path = path
        self.manifest = _manifest(path)
        self._checked = set(checked)
        self.notices: list[str] = self.manifest["notices"]
        """Sentences about data that were changed when the source was read."""
        for name in ARRAYS:
            self._check(name)
        self.offsets, self.header_offsets, self.keys, self.rows = (
            np.asarray(np.load(path / name, mmap_mode="r", allow_pickle=False)) for name in ARRAYS
        )
        # For each shard, the number of its first record, and its first byte of tokens and of headers.
        sizes = [[shard["records"], shard["tokens"], shard["headers"]] for shard in self.manifest["shards"]]
        self._first_records, *self._first_bytes = np.cumsum([[0, 0, 0], *sizes], axis=0).T.tolist()
        self._maps: OrderedDict[str, npt.NDArray[np.uint8]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "checked": frozenset(self._checked)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # Another process maps the files again.

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Number of residues of each record, int32 [N]. Computed on first use."""
        lengths = np.empty(len(self), np.int32)  # No record is longer than `fasta_blocks.LONGEST`, so int32 suffices.
        for at in range(0, len(self), _AT_ONCE):
            lengths[at : at + _AT_ONCE] = np.diff(self.offsets[at : at + _AT_ONCE + 1]) - 1
        return lengths

    @property
    def linker(self) -> int | None:
        """Number of tokens between two chains; None if every record is one chain."""
        return linker_of(self.manifest)

    def check_linker(self, linker: int, path: Path) -> None:
        """Raise `InputError` if the chains of records are joined by a linker of another length.

        Args:
            linker: the number of tokens.
            path: the store, or the file that it was made from, as the user named it.
        """
        if self.linker not in (None, linker):
            raise InputError(
                f"{path}: its chains were joined by a linker of {self.linker}, and a linker of {linker} is asked for; "
                f"make a store with `esmshard ingest FASTA -o STORE --join linker:{linker}`, where FASTA is "
                f"{', '.join(source['path'] for source in self.manifest['sources'])}, or ask for linker:{self.linker}"
            )

    def residues(self, n: int) -> npt.NDArray[np.uint8]:
        """Return the residue tokens of record n, and those between its chains, uint8 [L]."""
        return self._read("tokens", 0, self.offsets, n)

    def description(self, n: int) -> str:
        """Return the header line of record n without `>`."""
        return self.header(n).strip().decode()

    def id(self, n: int) -> str:
        """Return the id of record n."""
        return self.header(n).split(None, 1)[0].decode()

    def find(self, record_id: str) -> int | None:
        """Return the number of the record with this id, or None. Reads some pages of the index, not the ids."""
        name = record_id.encode(errors="surrogatepass")
        wanted = keys([name])[0]
        at = int(self.keys.searchsorted(wanted))
        while at < len(self) and self.keys[at] == wanted:
            n = int(self.rows[at])
            if self.header(n).split(None, 1)[:1] == [name]:
                return n
            at += 1
        return None

    @property
    def digest(self) -> str:
        """A digest of the sequences and their order: the hash of the sha256 of all token shards."""
        hashes = self.manifest["sha256"]
        text = "".join(hashes[token_shard(k)] for k in range(len(self.manifest["shards"])))
        return hashlib.sha256(text.encode()).hexdigest()

    def verify(self) -> None:
        """Compare every file with its sha256 now, and not when it is first read. `InputError` names the first altered
        file.
        """
        for name in self.manifest["sha256"]:
            self._check(name)

    def _check(self, name: str) -> None:
        """Compare a file with its sha256, unless this was done before."""
        if name in self._checked:
            return
        try:
            digest = sha256(self.path / name)
        except OSError as error:
            raise InputError(
                f"{self.path}/{name}: cannot be read ({error.strerror}); delete {self.path} and ingest again"
            ) from None
        if digest != self.manifest["sha256"][name]:
            raise InputError(
                f"{self.path}/{name}: is not as it was written; delete the store {self.path} and ingest again"
            )
        self._checked.add(name)

    def header(self, n: int) -> bytes:
        """Return the header line of record n without `>`, as written in the file."""
        return self._read("headers", 1, self.header_offsets, n).tobytes()

    def _read(self, kind: str, column: int, offsets: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of record n without the byte that ends the record."""
        if not 0 <= n < len(self):
            raise IndexError(n)
        shard = bisect.bisect_right(self._first_records, n) - 1
        name = token_shard(shard) if kind == "tokens" else header_shard(shard)
        mapped = self._maps.get(name)
        if mapped is None:
            self._check(name)
            mapped = np.asarray(np.memmap(self.path / name, dtype=np.uint8, mode="r"))
            self._maps[name] = mapped
            if len(self._maps) > _OPEN_SHARDS:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(name)
        begin = self._first_bytes[column][shard]
        return mapped[int(offsets[n]) - begin : int(offsets[n + 1]) - 1 - begin]


def token_shard(k: int) -> str:
    """Return the file name of the k-th shard of tokens."""
    return f"tokens-{k:05d}.u8"


def header_shard(k: int) -> str:
    """Return the file name of the k-th shard of headers."""
    return f"headers-{k:05d}.txt"


def keys(names: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Hash each id to 64 bits, uint64 [N]. Two ids may have the same hash, so callers compare the ids too.

    >>> [hex(key) for key in keys([b"P69905"])]
    ['0xbc417f960518015e']
    """
    high = np.fromiter(map(zlib.crc32, names), np.uint64, len(names))
    return high << np.uint64(32) | np.fromiter(map(zlib.adler32, names), np.uint64, len(names))


def linker_of(manifest: Mapping[str, Any]) -> int | None:
    """Return the number of tokens between two chains of a store's records; None if every record is one chain."""
    joined = any(kind.startswith(JOINED) for kind in manifest.get("edits", {}))
    return int(manifest["rules"]["linker"]) if joined else None


def is_store(path: Path) -> bool:
    """Return whether a path is a token store, which has a manifest."""
    return (path / "manifest.json").is_file()


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = read_json(path / "manifest.json")
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: not a token store (it has no manifest.json)") from None
    except (OSError, ValueError):
        raise InputError(f"{path}/manifest.json: cannot be read; delete the store and ingest again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path}: not a token store")
    if manifest.get("version") != VERSION or manifest.get("alphabet") != ALPHABET_HASH:
        raise InputError(f"{path}: a token store of another version; delete it and ingest again")
    if manifest.get("manifest_sha256") != manifest_sha256(manifest):
        raise InputError(f"{path}/manifest.json: is not as it was written; delete the store {path} and ingest again")
    return manifest


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of the values of a manifest, without its own entry."""
    values = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
