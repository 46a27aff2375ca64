"""The embedding store: the embeddings of a whole input as a directory of parts, read by id without merging. No torch.

    OUT/
        manifest.json        what was computed: spec, counts, a note for each part, sha256 of the index
      parts/               see `esmshard.embed.store.parts`
      index/
            ids.txt            ids of the records, one on each line, in input order
            ids.npy            int64 [N + 1]: first byte of each id
            id_keys.npy        uint64 [N]: `token_store.keys` of the ids, sorted
            id_rows.npy        [N]: the record of each key
            lengths.npy        int32 [N]: residues of each record
            rows.npy           [N]: the row of each record; equal sequences share one row
            first.npy          [U]: the first record of each row
            content.npy        uint8 [U, 16]: BLAKE2b of each row's residues
            content_keys.npy   uint64 [U]: the first eight bytes of `content.npy`, sorted
            content_rows.npy   [U]: the row of each of these keys
            bounds.npy         int64 [P + 1]: first row of each part, and U
          failed.tsv           id, residues and reason of each record without a row, if there are any

An unfinished store is at `OUT.partial`. This is version 1.
"""

import contextlib
import json
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from esmshard import remote
from esmshard.embed.compute.outputs import About, Row, as_float
from esmshard.embed.store.part_plan import FORMAT, VERSION, Spec, digest, read_plan, store_of
from esmshard.embed.store.parts import DamagedError, PartLayout, PartReader
from esmshard.embed.store.row_index import RowIndex, chain_lengths
from esmshard.errors import InputError, UsageError
from esmshard.files import read_json, replacing, sha256, without_directories
from esmshard.vocab import decode

_OPEN_PARTS = 16
_AT_ONCE = 1 << 13


def note_file(directory: Path, part: int) -> Path:
    """Return the path of a part's note, which exists from the end of the part to the end of the store."""
    return directory / "parts" / f"{part:06d}.json"


def read_note(path: Path) -> dict[str, Any] | None:
    """Read the note of a part; None if the part is not finished."""
    try:
        note: dict[str, Any] = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise InputError(f"{path}: cannot be read; delete it and run the same embed again") from None
    return note


def fix(path: Path) -> str:
    """Return, as a clause, how to fix a damaged embedding store."""
    return f"copy it again, or embed once more with --reuse {path}: only what is damaged is computed then"


class EmbeddingStore:
    """Embeddings by id.

    `store["P12345"]` is an array, or a dictionary of arrays by name where there are several outputs. `store[["P12345",
    "Q67890"]]` is an array [N, D] of vectors, or a list of arrays.

    Args:
        path: the directory, or its address in a bucket, of which a copy is kept in the local cache.
        unfinished: accept a store that is not finished.

    Raises:
        InputError: if the directory is no embedding store, or is damaged or unfinished.
    """

    def __init__(self, path: str | Path, *, unfinished: bool = False) -> None:
        if (url := remote.address(path)) is not None and not remote.exists(f"{url}/manifest.json"):
            raise InputError(f"{url}: is not finished, or is no directory of embeddings; run the same embed again")
        self.path = remote.local(path)
        self.finished = (self.path / "manifest.json").is_file()
        if self.finished:
            self.manifest = _manifest(self.path)
        elif unfinished and (self.path / "plan.json").is_file():
            self.manifest = read_plan(self.path)
            notes = [read_note(note_file(self.path, k)) for k in range(self.manifest["parts"])]
            self.manifest["parts"] = notes
        else:
            begun = self.path
            if not (begun / "plan.json").is_file():
                begun = self.path.with_name(f"{self.path.name}.partial")
            if (begun / "plan.json").is_file():
                raise InputError(f"{begun}: is not finished; run the same embed again")
            raise InputError(f"{self.path}: is no directory of embeddings (it has no manifest.json)")
        self.spec = Spec.of(self.manifest)
        self.index = RowIndex(self.path / "index")
        self.outputs = self.spec.outputs
        """The outputs of each record."""
        self._readers: OrderedDict[int, PartReader] = OrderedDict()

    def __len__(self) -> int:
        return int(self.manifest["records"])

    def __contains__(self, record_id: object) -> bool:
        return isinstance(record_id, str) and self.index.find(record_id) is not None

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self.index.id_list(start, min(start + _AT_ONCE, len(self)))

    @overload
    def __getitem__(self, ids: str) -> npt.NDArray[Any] | dict[str, npt.NDArray[Any]]: ...
    @overload
    def __getitem__(self, ids: Sequence[str]) -> Any: ...
    def __getitem__(self, ids: str | Sequence[str]) -> Any:
        if isinstance(ids, str):
            found = self._get(ids)
            return found[self.outputs[0].name] if len(self.outputs) == 1 else found
        every = [self._get(one) for one in ids]
        by_name: dict[str, Any] = {}
        for one in self.outputs:
            arrays = [values[one.name] for values in every]
            by_name[one.name] = np.stack(arrays) if one.pooled and arrays else arrays
        return by_name[self.outputs[0].name] if len(self.outputs) == 1 else by_name

    def __repr__(self) -> str:
        names = ", ".join(one.name for one in self.outputs)
        return f"<EmbeddingStore {self.path}: {names} of {len(self):,} records by {self.manifest['facts']['model']}>"

    @property
    def attributes(self) -> dict[str, str | int]:
        """Return the attributes for files: what was computed, and how."""
        spec, facts = self.spec, self.manifest["facts"]
        layers = dict.fromkeys(one.layer for one in self.outputs if one.layer is not None)
        long = spec.long
        found = {
            "model": without_directories(facts["model"]),
            "model_hash": spec.model_hash,
            "layer": next(iter(layers)) if len(layers) == 1 else ",".join(map(str, layers)),
            "pool": ",".join(dict.fromkeys(one.pool for one in self.outputs)),
            "dtype": {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[spec.dtype],
            "compute": spec.compute,
            "long": long.mode,
            "esmshard": self.manifest["esmshard"],
        }
        for heads in {one.heads for one in self.outputs if one.heads}:  # all attentions have the same heads
            found["heads"] = ",".join(map(str, heads))
        if tracks := self.manifest.get("tracks"):
            found["tracks"] = ",".join(tracks)
        if self.manifest.get("chained"):
            found["join"] = spec.chains.text
        if long.mode != "full":
            found["window"] = long.window
        if long.mode == "window":
            found["overlap"] = long.overlap
        return found

    @property
    def chains(self) -> dict[str, tuple[int, ...]]:
        """Return the residues of each chain, by id, of the records with several chains. Rows are those of one chain
        after the other, so the second chain begins at the row whose number is the first entry.
        """
        return dict(chain_lengths(self.path / "index"))

    @property
    def failed(self) -> dict[str, str]:
        """Return the reasons why records have no values, by id."""
        return {record_id: reason for record_id, _, reason in failures(self)}

    def about(self) -> About:
        """Return the description for a file of these rows."""
        failed = sum(1 for _ in failures(self))
        return About(self.outputs, self.spec.dim, self.spec.dtype, len(self) - failed, self.attributes)

    def rows(self, *, with_residues: bool = False) -> Iterator[Row]:
        """Yield the records that have values, in input order; bf16 as its bits. `DamagedError` for changed data.

        `with_residues` reads their sequences, which are there until the store is finished.
        """
        chained = chain_lengths(self.path / "index")
        next_id, chains = next(chained, (None, ()))
        for start in range(0, len(self), _AT_ONCE):
            stop = min(start + _AT_ONCE, len(self))
            columns = self.index.id_list(start, stop), self.index.lengths[start:stop], self.index.rows[start:stop]
            sequences = store_of(self.path, self.manifest) if with_residues else None
            for n, (record_id, length, row) in enumerate(zip(*columns, strict=True), start):
                values = self.values(int(row))
                of_record: tuple[int, ...] = ()
                if record_id == next_id:  # Ids are unique, and both are in input order.
                    of_record, (next_id, chains) = chains, next(chained, (None, ()))
                if values is not None:
                    residues = "" if sequences is None else decode(sequences.residues(n))
                    yield Row(record_id, int(length), values, residues, chains=of_record)

    def reader(self, part: int) -> PartReader:
        """Return the reader of a part. `DamagedError` if the part does not hold the data that was written."""
        if part in self._readers:
            self._readers.move_to_end(part)
            return self._readers[part]
        note = self.manifest["parts"][part]
        if note is None:
            raise InputError(f"{self.path}: part {part} is not finished; run the same embed again")
        layout = PartLayout(self.spec.kind, self.spec.long.kept(self.index.lengths_of(part)))
        reader = PartReader(self.path / "parts" / note["file"], layout, note)
        self._readers[part] = reader
        if len(self._readers) > _OPEN_PARTS:
            self._readers.popitem(last=False)[1].close()
        return reader

    def close(self) -> None:
        """Close all files. Reading opens them again."""
        while self._readers:
            self._readers.popitem()[1].close()

    def values(self, row: int) -> dict[str, npt.NDArray[Any]] | None:
        """Return the arrays of a row, bf16 as its bits; None if the row failed. `DamagedError` names the part."""
        part = self.index.part_of(row)
        return self.reader(part).values(row - self.index.bounds[part])

    def _get(self, record_id: str) -> dict[str, npt.NDArray[Any]]:
        record = self.index.find(record_id)
        if record is None:
            raise KeyError(f"{self.path}: has no record '{record_id}'")
        try:
            values = self.values(int(self.index.rows[record : record + 1][0]))
        except DamagedError as error:
            raise InputError(f"{error}; {fix(self.path)}") from None
        if values is None:
            written = self.index.id_list(record, record + 1)[0]
            raise KeyError(f"{self.path}: '{record_id}' has no values: {self.failed[written]}")
        return {name: as_float(array, self.spec.dtype) for name, array in values.items()}


def failures(embeddings: EmbeddingStore) -> Iterator[tuple[str, int, str]]:
    """Yield id, residues and reason of each record without values, in input order."""
    reasons = {
        embeddings.index.bounds[k] + at: reason
        for k, note in enumerate(embeddings.manifest["parts"])
        if note is not None
        for at, reason in note["failed"]
    }
    if not reasons:
        return
    for start in range(0, len(embeddings), _AT_ONCE):
        rows = embeddings.index.rows[start : start + _AT_ONCE]
        for k in np.flatnonzero(np.isin(rows, list(reasons))).tolist():
            record_id = embeddings.index.id_list(start + k, start + k + 1)[0]
            yield record_id, int(embeddings.index.lengths[start + k : start + k + 1][0]), reasons[int(rows[k])]


def failed_table(embeddings: EmbeddingStore) -> str:
    """Return the text of `failed.tsv`; empty if every record has values."""
    lines = [f"{record_id}\t{length}\t{reason}\n" for record_id, length, reason in failures(embeddings)]
    return "".join(["id\tlength\treason\n", *lines]) if lines else ""


def write_failed(embeddings: EmbeddingStore, path: Path) -> None:
    """Write `failed.tsv`, if any record failed."""
    if text := failed_table(embeddings):
        with replacing(path) as file:
            file.write(text)


def seal(directory: Path) -> EmbeddingStore:
    """Write the manifest of an embedding store whose parts are all finished, and remove files that are no longer
    needed.

    Raises `DamagedError` for a part that does not hold the data that was written.
    """
    if not (directory / "manifest.json").exists():
        embeddings = EmbeddingStore(directory, unfinished=True)
        missing = [k for k, note in enumerate(embeddings.manifest["parts"]) if note is None]
        if missing:
            raise UsageError(
                f"{directory}: part {missing[0]} and {len(missing) - 1} others are missing; run embed again"
            )
        for k in range(len(embeddings.manifest["parts"])):
            embeddings.reader(k)
        (directory / "failed.tsv").unlink(missing_ok=True)
        write_failed(embeddings, directory / "failed.tsv")
        with replacing(directory / "manifest.json") as file:
            file.write(json.dumps(manifest_of(embeddings), indent=1) + "\n")
    embeddings = EmbeddingStore(directory)
    kept = {note["file"] for note in embeddings.manifest["parts"]}
    for path in (directory / "parts").iterdir():  # notes, and files of killed workers
        if path.name not in kept:
            path.unlink(missing_ok=True)
    remove(directory / "work")
    for path in directory.iterdir():
        if path.name not in ("manifest.json", "index", "parts", "failed.tsv"):  # the plan, and files of killed workers
            path.unlink(missing_ok=True)
    return embeddings


def manifest_of(embeddings: EmbeddingStore) -> dict[str, Any]:
    """Return the manifest of an embedding store whose parts are all finished."""
    plan = {name: value for name, value in embeddings.manifest.items() if name not in ("store", "digest")}
    manifest: dict[str, Any] = without_directories(plan)
    manifest["index"] = {path.name: sha256(path) for path in sorted((embeddings.path / "index").iterdir())}
    manifest["sha256"] = digest(manifest)
    return manifest


def remove(directory: Path, successor: Path | None = None) -> None:
    """Remove a directory, if it exists, and give its name to `successor`.

    The directory is first renamed, so that its name never shows a half-removed directory and no process adds a file to
    it.
    """
    clear(directory)
    with contextlib.suppress(FileNotFoundError):
        directory.rename(_removed(directory))
    if successor is not None:
        successor.rename(directory)
    clear(directory)


def clear(directory: Path) -> None:
    """Finish a removal that was interrupted."""
    shutil.rmtree(_removed(directory), ignore_errors=True)


def _removed(directory: Path) -> Path:
    return directory.with_name(f".removed-{directory.name}")


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    try:
        manifest: dict[str, Any] = read_json(path)
        if manifest["format"] != FORMAT:
            raise InputError(f"{directory}: is no directory of embeddings")
        if manifest["version"] != VERSION:
            raise InputError(f"{directory}: was made by another version of esmshard; embed again")
        Spec.of(manifest)
        if manifest["sha256"] != digest(manifest):
            raise ValueError("its text was changed")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is damaged ({error}); copy it again, or embed again") from None
    return manifest
