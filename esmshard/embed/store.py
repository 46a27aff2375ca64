"""The embedding store: the embeddings of a whole input as a directory of parts, read by id without merging.

    OUT/
      plan.json            what is computed, of which input, and the bounds of the parts; `manifest.json` at the end
      parts/               000012-1f9c2a34.safetensors: rows `bounds[12]` to `bounds[13]`; the name ends in
                           the plan's digest. One tensor for each output, rows end to end: `mean_6` [n, D],
                           `residue_6` [sum of L, D], `logits` [sum of L, 33], `contacts` [sum of L^2],
                           `attentions_6` [sum of H x L^2]; `keys` [n, 16]; in the metadata a JSON `note` on failed
                           rows, device, versions
      index/
        ids.txt, ids.npy       ids of the N records, one on each line, and the first byte of each, int64 [N + 1]
        id_keys.npy, id_rows.npy   `token_store.keys` of the ids, sorted, and the record of each
        lengths.npy            int32 [N]: residues of each record
        rows.npy               int64 [N]: the row of each record; equal sequences share one of U rows
        first.npy              int64 [U]: the first record of each row
        keys.npy, key_rows.npy  `Spec.row_key` of each row, S16 [U], and the rows in the order of their keys
        chains.tsv             residues of each chain, of the records with several
      failed.tsv           id, residues and reason of each record without a row, if there are any

A part is finished when its file exists: it is written under another name and renamed, or is an object in a bucket. An
unfinished store is at `OUT.partial`.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from esmshard.embed.spec import TORCH, Spec
from esmshard.errors import InputError, UsageError
from esmshard.io import remote
from esmshard.io.array_formats import NUMPY, About, Output, Row, as_float
from esmshard.io.paths import read_json, replace_json, replacing, without_directories
from esmshard.io.remote import RemoteDirectory
from esmshard.io.store import TokenStore, keys
from esmshard.vocab import decode

FORMAT, VERSION = "esmshard-embeddings", 2
CHAINS = "chains.tsv"
_OPEN_PARTS = 16
_AT_ONCE = 1 << 13


class RowIndex:
    """The index of records and rows, memory-mapped.

    Args:
        path: the directory `index`.
        bounds: the first row of each part, and the number of rows.
    """

    def __init__(self, path: Path, bounds: Sequence[int]) -> None:
        self.path, self.bounds = path, bounds
        names = ("ids", "id_keys", "id_rows", "lengths", "rows", "first", "keys", "key_rows")
        try:
            found = [np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names]
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: the index is damaged ({error}); copy it again, or embed again") from None
        self.ids, self.id_keys, self.id_rows, self.lengths, self.rows, self.first, self.keys, self.key_rows = found

    def lengths_of(self, part: int) -> npt.NDArray[np.int64]:
        """Return the residues of the sequences of a part, int64 [n]."""
        first_n = self.first[self.bounds[part] : self.bounds[part + 1]]
        return np.asarray(self.lengths[first_n], np.int64)

    def id_list(self, start: int, stop: int) -> list[str]:
        """Return the ids of the records from `start` to `stop`."""
        at = self.ids[start : stop + 1].tolist()
        with open(self.path / "ids.txt", "rb") as file:
            file.seek(at[0])
            text = file.read(at[-1] - at[0])
        return [text[a - at[0] : b - at[0] - 1].decode() for a, b in itertools.pairwise(at)]

    def find(self, record_id: str) -> int | None:
        """Return the record of an id; None if there is none."""
        wanted = keys([record_id.encode(errors="surrogatepass")])[0]
        begin, end = (int(self.id_keys.searchsorted(wanted, side)) for side in ("left", "right"))
        for record in self.id_rows[begin:end].tolist():
            if self.id_list(record, record + 1) == [record_id]:
                return int(record)
        return None

    def rows_of(self, keys_M: npt.NDArray[np.bytes_]) -> npt.NDArray[np.int64]:
        """Return the row of each key, or -1, int64 [M]."""
        place_M = np.searchsorted(self.keys, keys_M, sorter=self.key_rows).clip(max=len(self.keys) - 1)
        row_M = self.key_rows[place_M]
        return np.where(self.keys[row_M] == keys_M, row_M, -1)

    def chains(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield id and residues of each chain, of the records with several chains, in input order."""
        path = self.path / CHAINS
        if path.is_file():
            with open(path, encoding="utf-8") as file:
                for line in itertools.islice(file, 1, None):
                    record_id, lengths = line.rstrip("\n").split("\t")
                    yield record_id, tuple(map(int, lengths.split(",")))


class Layout:
    """The rows of each output in the tensors of a part.

    Args:
        spec: the spec of the store.
        length_n: the residues of each row of the part, int64 [n].
    """

    def __init__(self, spec: Spec, length_n: npt.NDArray[np.int64]) -> None:
        self.spec, self.kept_n = spec, spec.long.kept(length_n)
        self._starts = {
            one.name: np.concatenate([[0], np.cumsum(one.numbers(self.kept_n, spec.dim) // self.width(one))])
            for one in spec.outputs
        }

    def width(self, output: Output) -> int:
        """Return the numbers of a row of the tensor."""
        return 1 if output.paired else output.shape(1, self.spec.dim)[-1]

    def slice(self, output: Output, row: int) -> slice:
        """Return where in its tensor a row of the store begins and ends."""
        return slice(int(self._starts[output.name][row]), int(self._starts[output.name][row + 1]))

    def empty(self, output: Output) -> torch.Tensor:
        """Return a tensor for all rows, filled with zeros."""
        n = int(self._starts[output.name][-1])
        return torch.zeros((n,) if output.paired else (n, self.width(output)), dtype=TORCH[self.spec.dtype])


class Parts:
    """The parts of a store that is being made: which are finished, and how a part is finished.

    Args:
        directory: `OUT.partial`. Its file `bucket.json`, if there is one, names the address where the parts lie.
        plan: the plan of the store.
    """

    def __init__(self, directory: Path, plan: Mapping[str, Any]) -> None:
        self.folder, self._plan = directory / "parts", plan
        self.index = RowIndex(directory / "index", plan["bounds"])
        self.bucket: RemoteDirectory | None = None
        if (directory / "bucket.json").is_file():
            known = read_json(directory / "bucket.json")
            self.bucket, self._keeps = RemoteDirectory(known["url"]), known["keeps_parts"]

    def __len__(self) -> int:
        return len(self.index.bounds) - 1

    def name(self, part: int) -> str:
        """Return the file name of a part. Parts of another plan have other names."""
        return f"{part:06d}-{self._plan['digest'][:8]}.safetensors"

    def missing(self) -> list[int]:
        """Return the numbers of the parts that are not finished."""
        if self.bucket is not None:
            there = {name.rpartition("/")[2] for name in self.bucket.listing("parts")}
        else:
            there = {entry.name for entry in os.scandir(self.folder)}
        return [part for part in range(len(self)) if self.name(part) not in there]

    def is_done(self, part: int) -> bool:
        """Whether a part is finished, by anybody."""
        if self.bucket is not None:
            return self.bucket.look(f"parts/{self.name(part)}") is not None
        return (self.folder / self.name(part)).exists()

    def write(self, part: int, tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> None:
        """Finish a part. If two processes finish the same one, the second file replaces an equal one."""
        path = self.folder / self.name(part)
        scratch = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            scratch.touch()
            mode = scratch.stat().st_mode
            save_file(dict(tensors), scratch, {"note": json.dumps(note)})
            scratch.chmod(mode)  # it makes private files, which workers of other users could not read
            with open(scratch, "rb") as file:
                os.fsync(file.fileno())
            if self.bucket is not None:
                self.bucket.upload(scratch, f"parts/{path.name}")
            if self.bucket is None or self._keeps:
                scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)

    def notes(self) -> list[dict[str, Any]]:
        """Return the notes of all parts, which must be finished.

        Raises:
            DamagedError: if a part is truncated, or is not of this plan. It is removed, so that it is computed again.
        """
        return [self._note(part) for part in range(len(self))]

    def _note(self, part: int) -> dict[str, Any]:
        path = self.folder / self.name(part)
        if self.bucket is not None and not path.exists():
            if self._keeps:
                self.bucket.download(f"parts/{path.name}", path)
            else:
                head = self.bucket.first_bytes(f"parts/{path.name}", 1 << 16)
                size = int.from_bytes(head[:8], "little")
                if size + 8 > len(head):
                    head = self.bucket.first_bytes(f"parts/{path.name}", size + 8)
                note: dict[str, Any] = json.loads(json.loads(head[8 : size + 8])["__metadata__"]["note"])
                return note
        try:
            with safe_open(path, "pt") as file:
                if not np.array_equal(file.get_tensor("keys").numpy(), key_bytes(self.index, part)):
                    raise SafetensorError("it holds other rows than the plan says")
                read: dict[str, Any] = json.loads(file.metadata()["note"])
                return read
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            if self.bucket is not None:
                self.bucket.remove([f"parts/{path.name}"])
            raise InputError(f"{path}: is damaged ({error}); run the command again, which computes it again") from None


def key_bytes(index: RowIndex, part: int) -> npt.NDArray[np.uint8]:
    """Return the keys of the rows of a part, uint8 [n, 16]."""
    keys_n = np.array(index.keys[index.bounds[part] : index.bounds[part + 1]])
    return keys_n.view(np.uint8).reshape(-1, 16)


class EmbeddingStore:
    """Embeddings by id.

    `store["P12345"]` is an array, or a dictionary of arrays by name where there are several outputs. `store[["P12345",
    "Q67890"]]` is an array [N, D] of vectors, or a list of arrays.

    Args:
        path: the directory, or its address in a bucket, of which a copy is kept in the local cache.
        unfinished: accept a store that is not finished; rows of missing parts raise `InputError`.

    Raises:
        InputError: if the directory is no embedding store, or is damaged or unfinished.
    """

    def __init__(self, path: str | Path, *, unfinished: bool = False) -> None:
        if (url := remote.address(path)) is not None and not remote.exists(f"{url}/manifest.json"):
            raise InputError(f"{url}: is not finished, or is no directory of embeddings; run the same embed again")
        self.path = remote.local(path)
        self.finished = (self.path / "manifest.json").is_file()
        if not self.finished and not (unfinished and (self.path / "plan.json").is_file()):
            begun = [self.path, self.path.with_name(f"{self.path.name}.partial")]
            for place in begun:
                if (place / "plan.json").is_file():
                    raise InputError(f"{place}: is not finished; run the same embed again")
            raise InputError(f"{self.path}: is no directory of embeddings (it has no manifest.json)")
        self.manifest = read_plan(self.path, "manifest.json" if self.finished else "plan.json")
        self.spec = Spec.of(self.manifest)
        self.outputs = self.spec.outputs
        """The outputs of each record."""
        self.parts = Parts(self.path, self.manifest)
        self.index = self.parts.index
        self._open: OrderedDict[int, tuple[Any, Layout]] = OrderedDict()

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
        only = self.outputs[0].name if len(self.outputs) == 1 else None
        if isinstance(ids, str):
            values = self._get(ids)
            return values if only is None else values[only]
        records = [self._get(record_id) for record_id in ids]
        by_name: dict[str, Any] = {}
        for one in self.outputs:
            arrays = [values[one.name] for values in records]
            by_name[one.name] = np.stack(arrays) if one.pooled and arrays else arrays
        return by_name if only is None else by_name[only]

    def __repr__(self) -> str:
        names = ", ".join(one.name for one in self.outputs)
        return f"<EmbeddingStore {self.path}: {names} of {len(self):,} records by {self.manifest['facts']['model']}>"

    @property
    def attributes(self) -> dict[str, str | int]:
        """Return the attributes for files: what was computed, and how."""
        spec, long = self.spec, self.spec.long
        layers = dict.fromkeys(one.layer for one in self.outputs if one.layer is not None)
        attributes: dict[str, str | int] = {
            "model": without_directories(self.manifest["facts"]["model"]),
            "model_hash": spec.model_hash,
            "layer": ",".join(map(str, layers)) if len(layers) != 1 else int(next(iter(layers))),
            "pool": ",".join(dict.fromkeys(one.pool for one in self.outputs)),
            "dtype": {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[spec.dtype],
            "compute": spec.compute,
            "long": long.mode,
            "esmshard": self.manifest["esmshard"],
        }
        for heads in {one.heads for one in self.outputs if one.heads}:  # all attentions have the same heads
            attributes["heads"] = ",".join(map(str, heads))
        if tracks := self.manifest["tracks"]:
            attributes["tracks"] = ",".join(tracks)
        if self.manifest["chained"]:
            attributes["join"] = spec.chains.text
        if long.mode != "full":
            attributes["window"] = long.window
        if long.mode == "window":
            attributes["overlap"] = long.overlap
        return attributes

    @property
    def chains(self) -> dict[str, tuple[int, ...]]:
        """Return the residues of each chain, by id, of the records with several chains. Rows are those of one chain
        after the other, so the second chain begins at the row whose number is the first entry.
        """
        return dict(self.index.chains())

    @functools.cached_property
    def failed(self) -> dict[str, str]:
        """Return the reasons why records have no values, by id."""
        return {record_id: reason for record_id, _, reason in self.failures()}

    def failures(self) -> Iterator[tuple[str, int, str]]:
        """Yield id, residues and reason of each record without values, in input order."""
        reasons = {
            self.index.bounds[part] + row: reason for part, row, reason in self.manifest.get("failed_rows", ())
        } or {
            self.index.bounds[part] + row: reason
            for part, note in enumerate([] if self.finished else self.parts.notes())
            for row, reason in note["failed"]
        }
        records = np.flatnonzero(np.isin(self.index.rows, list(reasons))).tolist() if reasons else []
        for record in records:
            record_id = self.index.id_list(record, record + 1)[0]
            yield record_id, int(self.index.lengths[record]), reasons[int(self.index.rows[record])]

    def about(self) -> About:
        """Return the description for a file of these rows."""
        return About(self.outputs, self.spec.dim, self.spec.dtype, len(self) - len(self.failed), self.attributes)

    def rows(self, sequences: TokenStore | None = None) -> Iterator[Row]:
        """Yield the records that have values, in input order; bf16 as its bits.

        Args:
            sequences: the token store of the input, for formats that need the sequences.
        """
        chained = self.index.chains()
        next_id, next_chains = next(chained, (None, ()))
        for start in range(0, len(self), _AT_ONCE):
            stop = min(start + _AT_ONCE, len(self))
            columns = self.index.id_list(start, stop), self.index.lengths[start:stop], self.index.rows[start:stop]
            for n, (record_id, length, row) in enumerate(zip(*columns, strict=True), start):
                chains: tuple[int, ...] = ()
                if record_id == next_id:  # Ids are unique, and both are in input order.
                    chains, (next_id, next_chains) = next_chains, next(chained, (None, ()))
                if record_id not in self.failed:
                    residues = "" if sequences is None else decode(sequences.residues(n))
                    yield Row(record_id, int(length), self.values(int(row)), residues, chains=chains)

    def values(self, row: int) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a row by output; bf16 as its bits. A failed row has zeros."""
        part = int(np.searchsorted(self.index.bounds, row, side="right")) - 1
        if part not in self._open:
            path = self.path / "parts" / self.parts.name(part)
            if not path.exists():
                raise InputError(f"{path}: is missing; run the same embed again, or copy the store again")
            try:
                self._open[part] = safe_open(path, "pt"), Layout(self.spec, self.index.lengths_of(part))
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path}: is damaged ({error}); copy it again, or embed again") from None
            if len(self._open) > _OPEN_PARTS:
                self._open.popitem(last=False)
        self._open.move_to_end(part)
        file, layout = self._open[part]
        at, values = row - self.index.bounds[part], {}
        for one in self.outputs:
            x = file.get_slice(one.name)[layout.slice(one, at)]
            x = x.view(torch.uint16) if self.spec.dtype == "bf16" else x
            shape = one.shape(int(layout.kept_n[at]), self.spec.dim)
            values[one.name] = x.numpy().reshape(shape)
            assert values[one.name].dtype == NUMPY[self.spec.dtype]
        return values

    def _get(self, record_id: str) -> dict[str, npt.NDArray[Any]]:
        record = self.index.find(record_id)
        if record is None:
            raise KeyError(f"{self.path}: has no record '{record_id}'")
        if record_id in self.failed:
            raise KeyError(f"{self.path}: '{record_id}' has no values: {self.failed[record_id]}")
        values = self.values(int(self.index.rows[record]))
        return {name: as_float(array, self.spec.dtype) for name, array in values.items()}


def read_plan(directory: Path, name: str = "plan.json") -> dict[str, Any]:
    """Read `plan.json` or `manifest.json` of a store.

    Raises:
        InputError: if it cannot be read, or was changed.
        UsageError: if it is of another version.
    """
    try:
        return checked_plan((directory / name).read_bytes(), directory)
    except OSError as error:
        raise InputError(f"{directory}/{name}: cannot be read ({error.strerror}); --overwrite starts over") from None


def checked_plan(text: bytes, place: Path | str) -> dict[str, Any]:
    """Parse a plan; see `read_plan`."""
    try:
        plan: dict[str, Any] = json.loads(text)
        if (plan["format"], plan["version"]) != (FORMAT, VERSION):
            raise UsageError(f"{place}: was made by another version of esmshard; --overwrite starts over")
        if plan["digest"] != digest(plan):
            raise ValueError
        return plan
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{place}: its plan is damaged; --overwrite starts over") from None


def digest(plan: Mapping[str, Any]) -> str:
    """Return the sha256 of the entries of a plan on which its parts depend."""
    known = {name: plan[name] for name in ("format", "version", "spec", "input", "tracks", "bounds")}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def seal(embeddings: EmbeddingStore) -> None:
    """Write `failed.tsv` and the manifest of a store whose parts are finished, and remove what is no longer needed."""
    directory, parts = embeddings.path, embeddings.parts
    notes = parts.notes()
    manifest = without_directories({name: value for name, value in embeddings.manifest.items() if name != "store"})
    manifest["digest"] = embeddings.manifest["digest"]
    manifest["failed_rows"] = [[part, *entry] for part, note in enumerate(notes) for entry in note["failed"]]
    manifest["windowed_rows"] = [
        parts.index.bounds[k] + row for k, note in enumerate(notes) for row, _ in note["windowed"]
    ]
    manifest["made_by"] = sorted(
        {f"{note['device']}, kernel {note['kernel']}, torch {note['torch']}" for note in notes}
    )
    manifest["counts"], manifest["failed_records"] = counts(notes), len(embeddings.failed)
    write_failed(embeddings, directory / "failed.tsv")
    replace_json(directory / "manifest.json", manifest)
    kept = {parts.name(part) for part in range(len(parts))}
    for path in parts.folder.iterdir():
        if path.name not in kept:
            path.unlink(missing_ok=True)
    remove(directory / "work")
    for path in directory.iterdir():  # the plan, and files of killed workers
        if path.name not in ("manifest.json", "index", "parts", "failed.tsv"):
            path.unlink(missing_ok=True)


def counts(notes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the numbers of rows by what happened to them, over all parts."""
    reused = sum(note["reused"] for note in notes)
    windowed = sum(len(note["windowed"]) for note in notes)
    return {"computed": sum(note["rows"] for note in notes) - reused, "reused": reused, "windowed": windowed}


def write_failed(embeddings: EmbeddingStore, path: Path) -> None:
    """Write `failed.tsv`, or remove an old one if no record failed."""
    lines = [f"{record_id}\t{length}\t{reason}\n" for record_id, length, reason in embeddings.failures()]
    path.unlink(missing_ok=True)
    if lines:
        with replacing(path) as file:
            file.writelines(["id\tlength\treason\n", *lines])


def remove(directory: Path, successor: Path | None = None) -> None:
    """Remove a directory, if it exists, and give its name to `successor`.

    The directory is first renamed, so that its name never shows a half-removed directory and no process adds a file to
    it.
    """
    clear(directory)
    if directory.exists():
        directory.rename(_removed(directory))
    if successor is not None:
        successor.rename(directory)
    clear(directory)


def clear(directory: Path) -> None:
    """Finish a removal that was interrupted."""
    shutil.rmtree(_removed(directory), ignore_errors=True)


def _removed(directory: Path) -> Path:
    return directory.with_name(f".removed-{directory.name}")


class Reuse:
    """An earlier embedding store from which rows of equal keys are copied.

    Args:
        path: the directory of the earlier store.
        spec: the spec of the new store.

    Raises:
        UsageError: if the earlier store lacks an output or has another spec, so that nothing could be copied.
        InputError: if the directory is no embedding store, or is damaged.
    """

    def __init__(self, path: Path, spec: Spec) -> None:
        self._store, self._outputs = EmbeddingStore(path), spec.outputs
        missing = [one.title for one in spec.outputs if one not in self._store.outputs]
        if missing:
            held = ", ".join(sorted(one.title for one in self._store.outputs))
            raise UsageError(f"--reuse {path}: holds {held}, and no {' and '.join(missing)}")
        alike = dataclasses.replace(self._store.spec, outputs=spec.outputs)
        if difference := spec.differs(alike, "", str(self._store.manifest["facts"]["model"])):
            raise UsageError(f"--reuse {path}: was made {difference}")
        failed = [self._store.index.bounds[part] + row for part, row, _ in self._store.manifest["failed_rows"]]
        self._without = {*failed, *self._store.manifest["windowed_rows"]}

    def rows(self, keys_M: npt.NDArray[np.bytes_]) -> npt.NDArray[np.int64]:
        """Return the row of each key, or -1 where there is none that was computed as asked for, int64 [M]."""
        row_M = self._store.index.rows_of(keys_M)
        return np.where(np.isin(row_M, list(self._without)), -1, row_M) if self._without else row_M

    def values(self, row: int) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a row, bf16 as its bits."""
        return self._store.values(row)
