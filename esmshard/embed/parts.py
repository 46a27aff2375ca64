"""Write and read the directory of an `embed` job: the plan, the parts of the output, and an index by record id.

    OUT/
      plan.json            the settings, facts about the input, and the first row of each part (`bounds`)
      manifest.json        written last: the plan, with failed rows, counts, devices and torch versions
      parts/               000012-1f9c2a34.safetensors has the rows `bounds[12]` to `bounds[13]` - 1. The name ends in
                           the plan's digest. Each output is one tensor, with the rows one after the other: `mean_6`
                           [n, D], `residue_6` [sum(L), D], `logits` [sum(L), 33], `contacts` [sum(L^2)] and
                           `attentions_6` [sum(H L^2)]. The metadata `note` is JSON: failed rows, device and so on
      index/
        ids.txt, ids.npy       ids of the N records, one on each line, and the byte where each id begins, int64 [N + 1]
        id_keys.npy, id_rows.npy   sorted hashes of the ids (`io.store.keys`), and the record of each hash
        lengths.npy            int32 [N]: number of residues of each record
        rows.npy               int64 [N]: the row of each record. Records with equal sequences share one of the U rows
        first.npy              int64 [U]: the first record of each row
        keys.npy, key_rows.npy  `Spec.row_key` of each row, S16 [U], and the rows in the order of sorted keys
        chains.json            number of residues of each chain, by id, for records with several chains
      failed.tsv           id, residues and reason of each failed record; absent if no record failed

A row has the values of one sequence. Rows are in the order in which their sequences first occur. A part is finished
when its file, or its object in a bucket, exists. So a file is written under another name and then renamed. The
directory is called `OUT.partial` until all parts are finished. All machines make the same plan from the same input.
"""

import copy
import errno
import functools
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from esmshard import __version__
from esmshard.data.tracks import RecordTracks, TrackStore, state_of, write_track
from esmshard.embed.spec import TORCH, EmbedRequest, Spec, difference
from esmshard.errors import InputError, UsageError
from esmshard.io import remote
from esmshard.io.array_formats import NUMPY, Output, Row, as_float
from esmshard.io.paths import read_json, remembered_sha256, replace_json, without_directories
from esmshard.io.remote import RemoteDirectory
from esmshard.io.store import TokenStore, ingest, is_store, keys
from esmshard.io.symbols import Rules
from esmshard.io.tables import counted
from esmshard.io.writers import write_failures
from esmshard.model.config import ModelConfig
from esmshard.progress import say
from esmshard.vocab import chain_spans, decode

FORMAT = "3"
"""The format version of `plan.json` and the parts."""
LEAST_PART, MOST_PART = 1 << 14, 1 << 18
"""The minimum and maximum number of tokens of a part. MOST_PART is for a model of 8 million parameters. Larger models
get smaller parts, so that each part needs about the same time.
"""
SHARE_OF_PART, MOST_PARTS = 128, 4096
"""A part is 1/SHARE_OF_PART of the input, so that several processes end at about the same time. A very large input
gets larger parts, so that there are at most about MOST_PARTS parts.
"""
PART_BYTES = 1 << 29
"""The approximate maximum size of a part's values in bytes. They are in memory until the part is written."""
_OPEN_PARTS = 16
_AT_ONCE = 1 << 14


def partial(out: Path) -> Path:
    """Return `OUT.partial`, the directory of the unfinished output."""
    if out.name in ("", "..", "."):
        raise UsageError(f"{out}: is no name for an output; pass a name, such as -o embeddings")
    return out.with_name(f"{out.name}.partial")


def settings_of(asked: EmbedRequest, fasta: Path) -> dict[str, str]:
    """Return the settings that determine an output, as strings by name, with digests of the input and the tracks."""
    try:
        content = remembered_sha256(fasta / "manifest.json" if is_store(fasta) else fasta)
    except OSError as error:
        raise InputError(f"{fasta}: {(error.strerror or 'cannot be read').lower()}") from None
    tracks = {f"--track {name}": state["state"] for name, state in state_of(asked.tracks).items()}
    return {**asked.settings, "input": content[:16], **tracks, "format": FORMAT}


def begin(
    work: Path, fasta: Path, asked: EmbedRequest, notices: Sequence[str] = (), part_tokens: int | None = None
) -> dict[str, Any]:
    """Write the plan and the index of an `embed` job into a new directory `OUT.partial`, and return the plan. If the
    directory has a plan already, return this plan.

    Args:
        work: the directory `OUT.partial`.
        fasta: a FASTA file or a token store.
        asked: the request, with a path for each track.
        notices: sentences for the user about the input. The plan stores them.
        part_tokens: the number of tokens of a part; by default it depends on the sizes of input and model.

    Raises:
        UsageError: if a sequence is too long for the model, or `--long truncate` would cut chains.
    """
    if not (work / "plan.json").exists():
        work.parent.mkdir(parents=True, exist_ok=True)
        # A directory with a complete plan is renamed to `work`. If two commands begin at the same time, the first
        # command to do so determines the plan.
        with tempfile.TemporaryDirectory(prefix=f".planning-{work.name}-", dir=work.parent) as scratch:
            planning = Path(scratch) / work.name
            for folder in ("work", "parts", "index"):
                (planning / folder).mkdir(parents=True)
            plan = _plan(planning, fasta, asked, notices, part_tokens)
            replace_json(planning / "plan.json", without_directories(plan))
            try:
                planning.rename(work)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    return dict(read_json(work / "plan.json"))


def _plan(
    work: Path, fasta: Path, asked: EmbedRequest, notices: Sequence[str], part_tokens: int | None
) -> dict[str, Any]:
    index, spec, long, linker = work / "index", asked.spec, asked.spec.long, asked.spec.chains.tokens
    store = TokenStore(fasta) if is_store(fasta) else ingest([fasta], work / "work" / "input", Rules(linker=linker))
    store.check_linker(linker, fasta)
    for notice in () if is_store(fasta) else store.notices:
        say(f"{fasta}: {notice}")
    folder = work / "work" / "tracks"
    tracks = [write_track(file.track, file.path, store, folder / file.track.name) for file in asked.tracks]
    unique, chained = write_index(index, store, spec, tracks)
    length_N = store.lengths if chained else np.load(index / "lengths.npy", mmap_mode="r")  # including linkers
    most, positions = int(length_N.max()), asked.weights.config.most_tokens
    if positions is not None and long.mode == "full" and most > positions - 2:
        record = int(length_N.argmax())
        raise UsageError(
            f"{fasta}: '{store.id(record)}' has {length_N[record]:,} residues, and {asked.model} has positions for "
            f"{positions - 2:,}; pass --long window or --long truncate"
        )
    if chained and long.mode == "truncate" and most > long.window:
        raise UsageError(
            f"{fasta}: --long truncate would cut chains of {counted(chained, 'record')} with several chains; pass "
            "--long window or --long full"
        )
    new = RecordTracks(tracks, asked.tracks).notices(np.arange(len(store)))
    if long.mode == "full" and (longer := int((length_N > long.window).sum())):
        new.append(
            f"{counted(longer, 'record')} over {long.window:,} residues computed whole; in training the model got at "
            "most this length, and --long window computes windows of this length"
        )
    for notice in new:
        say(notice)
    tokens = int(store.offsets[-1]) + len(store)
    identity = {
        "spec": asdict(spec),
        "settings": settings_of(asked, fasta),
        "bounds": _bounds(index, spec, part_tokens or _part_tokens(tokens, asked.weights.config)),
    }
    return {
        "esmshard": __version__,
        "model": asked.model,
        **identity,
        "digest": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        "source": fasta.name,
        "notices": [*notices, *store.notices, *new],
        "records": len(store),
        "unique": unique,
        "chained": chained,
        "tracks": state_of(asked.tracks),
    }


def write_index(index: Path, store: TokenStore, spec: Spec, tracks: Sequence[TrackStore] = ()) -> tuple[int, int]:
    """Write the index of records and rows (see the docstring of this module) into the empty directory `index`.

    This needs 60 bytes of memory for each record. Return the number of rows, and of records with several chains.
    """
    n, chains = len(store), dict[str, list[int]]()
    length_N, id_N, keys_N = np.empty(n, np.int32), np.zeros(n + 1, np.int64), np.empty(n, "S16")
    with open(index / "ids.txt", "wb") as ids:
        for start in range(0, n, _AT_ONCE):
            records = range(start, min(start + _AT_ONCE, n))
            store = copy.copy(store)  # maps the files again, which frees the memory of the pages read so far
            tracks = [TrackStore(track.path, track.track, store) for track in tracks]
            names = [store.id(k).encode() + b"\n" for k in records]
            ids.write(b"".join(names))
            id_N[start + 1 : records.stop + 1] = id_N[start] + np.cumsum([len(name) for name in names])
            length_N[start : records.stop] = np.diff(store.offsets[start : records.stop + 1]) - 1
            for k in records if store.linker is not None else ():
                chain_lengths = [end - begin for begin, end in chain_spans(store.residues(k))]
                length_N[k] = sum(chain_lengths)
                chains |= {store.id(k): chain_lengths} if len(chain_lengths) > 1 else {}
            keys_N[start : records.stop] = [
                spec.row_key(store.residues(k), {t.track.name: t[k].tobytes() for t in tracks if t.known_N[k]})
                for k in records
            ]
    _, first_S, group_N = np.unique(keys_N, return_index=True, return_inverse=True)  # S: rows in the order of keys
    order_U = np.argsort(first_S)  # rows in the order in which their sequences first occur
    row_S = np.empty_like(order_U)
    row_S[order_U] = np.arange(len(order_U))
    first_U = first_S[order_U]
    arrays = {"ids": id_N, "id_keys": store.keys, "id_rows": store.rows, "lengths": length_N, "rows": row_S[group_N]}
    arrays |= {"first": first_U, "keys": keys_N[first_U], "key_rows": row_S}
    for name, values in arrays.items():
        np.save(index / f"{name}.npy", values)
    replace_json(index / "chains.json", chains)
    return len(first_U), len(chains)


def _part_tokens(tokens: int, config: ModelConfig) -> int:
    """Return the number of tokens of a part for an input with `tokens` tokens."""
    most = max(LEAST_PART, MOST_PART * 6 * 320**2 // (config.n_layers * config.dim**2))
    return max(min(max(tokens // SHARE_OF_PART, LEAST_PART), most), tokens // MOST_PARTS)


def _bounds(index: Path, spec: Spec, per_part: int) -> list[int]:
    """Return the first row of each part, and at the end the number of rows. A part has about `per_part` tokens, but
    fewer if its values would be larger than PART_BYTES.
    """
    first_U, length_N = (np.load(index / f"{name}.npy", mmap_mode="r") for name in ("first", "lengths"))
    kept_U = spec.long.kept(length_N[first_U].astype(np.int64))
    bytes_U = spec.numbers(kept_U) * np.dtype(NUMPY[spec.dtype]).itemsize
    cost_U = np.maximum((kept_U + 2) * PART_BYTES // per_part, bytes_U)
    part_U = (np.cumsum(cost_U) - cost_U) // PART_BYTES
    return [*np.flatnonzero(np.diff(part_U, prepend=-1)).tolist(), len(first_U)]


class RowIndex:
    """The index of records and rows in the directory `path`, memory-mapped. For `bounds` see `_bounds`."""

    def __init__(self, path: Path, bounds: Sequence[int]) -> None:
        self.path, self.bounds = path, bounds
        names = ("ids", "id_keys", "id_rows", "lengths", "rows", "first", "keys", "key_rows")
        arrays = [np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names]
        self.ids, self.id_keys, self.id_rows, self.lengths, self.rows, self.first, self.keys, self.key_rows = arrays

    def lengths_of(self, part: int) -> npt.NDArray[np.int64]:
        """Return the number of residues of each row of a part, int64 [n]."""
        first_n = self.first[self.bounds[part] : self.bounds[part + 1]]
        return np.asarray(self.lengths[first_n], np.int64)

    def id_list(self, start: int, stop: int) -> list[str]:
        """Return the ids of the records `start` to `stop` - 1."""
        at = self.ids[start : stop + 1].tolist()
        with open(self.path / "ids.txt", "rb") as file:
            file.seek(at[0])
            text = file.read(at[-1] - at[0])
        return [text[a - at[0] : b - at[0] - 1].decode() for a, b in itertools.pairwise(at)]

    def find(self, record_id: str) -> int | None:
        """Return the index of the record with the id `record_id`; None if no record has this id."""
        wanted = keys([record_id.encode(errors="surrogatepass")])[0]
        begin, end = (int(self.id_keys.searchsorted(wanted, side)) for side in ("left", "right"))
        for record in self.id_rows[begin:end].tolist():
            if self.id_list(record, record + 1) == [record_id]:
                return int(record)
        return None

    def rows_of(self, keys_M: npt.NDArray[np.bytes_]) -> npt.NDArray[np.int64]:
        """Return the index of the row with each key (`Spec.row_key`), int64 [M]; -1 if no row has the key."""
        place_M = np.searchsorted(self.keys, keys_M, sorter=self.key_rows).clip(max=len(self.keys) - 1)
        row_M = self.key_rows[place_M]
        return np.where(self.keys[row_M] == keys_M, row_M, -1)


class RowPlaces:
    """Where each row of a part lies in the part's tensors. `length_n` [n]: the number of residues of each row."""

    def __init__(self, spec: Spec, length_n: npt.NDArray[np.int64]) -> None:
        self.spec, self.kept_n = spec, spec.long.kept(length_n)
        self._starts = {
            output.name: np.cumsum([0, *(output.numbers(self.kept_n, spec.dim) // self.width(output))])
            for output in spec.outputs
        }

    def width(self, output: Output) -> int:
        """Return the number of columns of an output's tensor; 1 for values of residue pairs, whose tensor is 1-d."""
        return 1 if output.paired else output.shape(1, self.spec.dim)[-1]

    def slice(self, output: Output, row: int) -> slice:
        """Return which slice of the output's tensor has the values of the row `row`, counted from 0 in the part."""
        return slice(*self._starts[output.name][row : row + 2].tolist())

    def empty(self, output: Output) -> torch.Tensor:
        """Return a tensor of zeros with the size of all values of an output in the part."""
        n = int(self._starts[output.name][-1])
        return torch.zeros((n,) if output.paired else (n, self.width(output)), dtype=TORCH[self.spec.dtype])


class Parts:
    """The part files of an `embed` job in `directory`, or in `bucket` if the output is in a bucket."""

    def __init__(self, directory: Path, plan: Mapping[str, Any], bucket: RemoteDirectory | None = None) -> None:
        self.folder, self._digest, self._bucket = directory / "parts", plan["digest"][:8], bucket
        self.index = RowIndex(directory / "index", plan["bounds"])

    def __len__(self) -> int:
        return len(self.index.bounds) - 1

    def name(self, part: int) -> str:
        """Return the file name of a part. It ends in the digest of the plan, so parts of two plans differ in name."""
        return f"{part:06d}-{self._digest}.safetensors"

    def missing(self) -> list[int]:
        """Return the indices of the unfinished parts."""
        names = self.folder.iterdir() if self._bucket is None else map(Path, self._bucket.listing("parts"))
        finished = {path.name for path in names}
        return [part for part in range(len(self)) if self.name(part) not in finished]

    def is_done(self, part: int) -> bool:
        """Return whether this or another process has finished a part."""
        if self._bucket is not None:
            return self._bucket.look(f"parts/{self.name(part)}") is not None
        return (self.folder / self.name(part)).exists()

    def write(self, part: int, tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> None:
        """Write the values of a part. If two processes write the same part, the second file replaces the first."""
        path = self.folder / self.name(part)
        scratch = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            scratch.touch()
            mode = scratch.stat().st_mode
            save_file(dict(tensors), scratch, {"note": json.dumps(note)})
            scratch.chmod(mode)  # other users cannot read the files of save_file
            with open(scratch, "rb") as file:
                os.fsync(file.fileno())
            if self._bucket is None:
                scratch.replace(path)
            else:
                self._bucket.upload(scratch, f"parts/{path.name}")
        finally:
            scratch.unlink(missing_ok=True)

    def note(self, part: int) -> dict[str, Any]:
        """Return the metadata `note` of a finished part: failed rows, device and so on. Raise `InputError` if the file
        is truncated or contains another part.
        """
        path = self.folder / self.name(part)
        if self._bucket is None or path.exists():
            with opened(path) as file:
                metadata = file.metadata()
        else:  # A safetensors file begins with the length of its header in 8 bytes, and the header as JSON.
            size = int.from_bytes(self._bucket.first_bytes(f"parts/{path.name}", 8), "little")
            metadata = json.loads(self._bucket.first_bytes(f"parts/{path.name}", size + 8)[8:])["__metadata__"]
        note: dict[str, Any] = json.loads(metadata["note"])
        if note["part"] != part:
            raise InputError(_DAMAGED.format(path, f"it contains part {note['part']}"))
        return note


_DAMAGED = "{}: is damaged ({}); remove this file, and run the same embed command again"


def opened(path: Path) -> Any:
    """Open the file of a part. Raise `InputError` if the file is missing or truncated."""
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise InputError(_DAMAGED.format(path, error)) from None


def conclude(directory: Path, plan: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """Write `failed.tsv` and `manifest.json` when all parts are finished, and return the manifest."""
    index, notes = parts.index, [parts.note(part) for part in range(len(parts))]
    reasons = {index.bounds[k] + row: why for k, note in enumerate(notes) for row, why in note["failed"]}
    records = np.flatnonzero(np.isin(index.rows, list(reasons))).tolist() if reasons else []
    failed = [(index.id_list(n, n + 1)[0], int(index.lengths[n]), reasons[int(index.rows[n])]) for n in records]
    reused = sum(note["reused"] for note in notes)
    windowed = [index.bounds[k] + row for k, note in enumerate(notes) for row in note["windowed"]]
    made_by = {f"{note['device']}, kernel {note['kernel']}, torch {note['torch']}" for note in notes}
    write_failures(directory / "failed.tsv", failed)
    manifest = {
        **plan,
        "computed": len(index.first) - reused,
        "reused": reused,
        "failed_rows": sorted(reasons),
        "windowed_rows": windowed,
        "failed_records": len(failed),
        "made_by": sorted(made_by),
    }
    replace_json(directory / "manifest.json", manifest)
    return manifest


def remove(directory: Path) -> None:
    """Rename a directory, if it exists, then remove it, so that no process reads half of it or adds a file to it."""
    removed = directory.with_name(f".removed-{directory.name}")
    shutil.rmtree(removed, ignore_errors=True)
    if directory.exists():
        directory.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


class EmbeddingStore:
    """The embeddings in a finished directory of parts, by record id.

    `store["P12345"]` is an array. `store[["P12345", "Q67890"]]` is an array [N, D] if each record has one vector, else
    a list of arrays. If the store has several outputs, both expressions give a dictionary by output name.

    `path` is the directory, or its address in a bucket. A directory in a bucket is copied to the local cache. Raise
    `InputError` if the directory is unfinished or contains no embeddings.
    """

    def __init__(self, path: str | Path) -> None:
        url = remote.address(path)
        finished = (Path(path) / "manifest.json").is_file() if url is None else remote.exists(f"{url}/manifest.json")
        if not finished:
            raise InputError(f"{url or path}: is no finished directory of embeddings; run the embed command again")
        self.path = remote.local(path)
        self.manifest = read_json(self.path / "manifest.json")
        self.spec = Spec.of(self.manifest["spec"])
        self.outputs = self.spec.outputs
        """The outputs of each record, such as the mean over residues in layer 6."""
        self.parts = Parts(self.path, self.manifest)
        self.index = self.parts.index
        self.chains: dict[str, list[int]] = read_json(self.index.path / "chains.json")
        """The number of residues of each chain, by record id, for records with several chains. The arrays of a record
        have the residues of its chains in this order.
        """
        self.failed: dict[str, str] = {}
        """The reason why a failed record has no values, by record id."""
        if (failed := self.path / "failed.tsv").is_file():
            lines = failed.read_text(encoding="utf-8").splitlines()[1:]
            self.failed = {record_id: reason for record_id, _, reason in (line.split("\t") for line in lines)}
        parts, spec = self.parts, self.spec

        @functools.lru_cache(maxsize=_OPEN_PARTS)
        def open_part(part: int) -> tuple[Any, RowPlaces]:  # The cache of a method would keep the store in memory.
            return opened(parts.folder / parts.name(part)), RowPlaces(spec, parts.index.lengths_of(part))

        self._open_part = open_part

    def __len__(self) -> int:
        return int(self.manifest["records"])

    def __contains__(self, record_id: object) -> bool:
        return isinstance(record_id, str) and self.index.find(record_id) is not None

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self.index.id_list(start, min(start + _AT_ONCE, len(self)))

    def __getitem__(self, ids: str | Sequence[str]) -> Any:
        only = self.outputs[0].name if len(self.outputs) == 1 else None
        if isinstance(ids, str):
            values = self._get(ids)
            return values if only is None else values[only]
        records = [self._get(record_id) for record_id in ids]
        by_name: dict[str, Any] = {}
        for output in self.outputs:
            arrays = [values[output.name] for values in records]
            by_name[output.name] = np.stack(arrays) if output.pooled and arrays else arrays
        return by_name if only is None else by_name[only]

    def __repr__(self) -> str:
        names = ", ".join(output.name for output in self.outputs)
        return f"<EmbeddingStore {self.path}: {names} of {len(self):,} records by {self.manifest['model']}>"

    @property
    def attributes(self) -> dict[str, str | int]:
        """Return the metadata that an output file stores: model, outputs and settings."""
        spec, long = self.spec, self.spec.long
        layers = [*dict.fromkeys(output.layer for output in self.outputs if output.layer is not None)]
        attributes: dict[str, str | int] = {
            "model": self.manifest["model"],
            "model_hash": spec.model_hash,
            "layer": layers[0] if len(layers) == 1 else ",".join(map(str, layers)),
            "pool": ",".join(dict.fromkeys(output.pool for output in self.outputs)),
            "dtype": {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[spec.dtype],
            "compute": spec.compute,
            "long": long.mode,
            "esmshard": self.manifest["esmshard"],
        }
        for heads in {output.heads for output in self.outputs if output.heads}:  # all attentions have the same heads
            attributes["heads"] = ",".join(map(str, heads))
        attributes |= {"tracks": ",".join(tracks)} if (tracks := self.manifest["tracks"]) else {}
        attributes |= {"join": spec.chains.text} if self.chains else {}
        attributes |= {"window": long.window} if long.mode != "full" else {}
        return attributes | ({"overlap": long.overlap} if long.mode == "window" else {})

    def rows(self, sequences: TokenStore | None = None) -> Iterator[Row]:
        """Yield each record that has values, in input order. bf16 values are uint16 with the same bits. For formats
        that need the sequences, pass the token store of the input as `sequences`.
        """
        for start in range(0, len(self), _AT_ONCE):
            stop = min(start + _AT_ONCE, len(self))
            columns = self.index.id_list(start, stop), self.index.lengths[start:stop], self.index.rows[start:stop]
            for n, (record_id, length, row) in enumerate(zip(*columns, strict=True), start):
                if record_id not in self.failed:
                    residues = "" if sequences is None else decode(sequences.residues(n))
                    chains = tuple(self.chains.get(record_id, ()))
                    yield Row(record_id, int(length), self.values(int(row)), residues, chains=chains)

    def values(self, row: int) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a row by output name. bf16 values are uint16 with equal bits. A failed row has zeros."""
        part = int(np.searchsorted(self.index.bounds, row, side="right")) - 1
        file, places = self._open_part(part)
        at, values = row - self.index.bounds[part], {}
        for output in self.outputs:
            x = file.get_slice(output.name)[places.slice(output, at)]
            x = x.view(torch.uint16) if self.spec.dtype == "bf16" else x
            values[output.name] = x.numpy().reshape(output.shape(int(places.kept_n[at]), self.spec.dim))
        return values

    def _get(self, record_id: str) -> dict[str, npt.NDArray[Any]]:
        record = self.index.find(record_id)
        if record is None:
            raise KeyError(f"{self.path}: has no record '{record_id}'")
        if record_id in self.failed:
            raise KeyError(f"{self.path}: '{record_id}' has no values: {self.failed[record_id]}")
        values = self.values(int(self.index.rows[record]))
        return {name: as_float(array, self.spec.dtype) for name, array in values.items()}

    def check_reuse(self, spec: Spec) -> None:
        """Raise `UsageError` if no row can be copied for `spec`, because a setting differs or an output is missing."""
        if different := difference(self.spec.settings, spec.settings):
            raise UsageError(f"--reuse {self.path}: was made with {different}; leave --reuse out")
        if missing := [output.title for output in spec.outputs if output not in self.outputs]:
            titles = ", ".join(sorted(output.title for output in self.outputs))
            lacks = " and ".join(missing)
            raise UsageError(f"--reuse {self.path}: contains {titles}, and no {lacks}; leave --reuse out")

    def rows_to_reuse(self, keys_M: npt.NDArray[np.bytes_]) -> npt.NDArray[np.int64]:
        """Return the index of the row to copy for each key, int64 [M]; -1 if no row has the key, or if the row failed
        or was computed in windows for lack of memory.
        """
        row_M = self.index.rows_of(keys_M)
        without = [*self.manifest["failed_rows"], *self.manifest["windowed_rows"]]
        return np.where(np.isin(row_M, without), -1, row_M)
