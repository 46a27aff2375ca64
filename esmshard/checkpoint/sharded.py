"""Sharded checkpoints through torch's DCP: written completely or not at all, loaded on any number of ranks.

    step_000100/    __0_0.distcp ... .metadata     written by DCP: tensors, and a pickled index of them
                    state.json                     step, recipe, configuration, world size, versions
                    MANIFEST.json                  bytes and sha256 of every other file

DCP itself has no checksum and loads changed bits without an error. So every file is hashed while it is written, and the
manifest is compared before anything is loaded (`esmshard.checkpoint.manifest`).
"""

import errno
import hashlib
import io
import json
import os
import pickle
import shutil
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from esmshard.checkpoint import manifest
from esmshard.checkpoint.manifest import Entry, read_json
from esmshard.errors import InputError, UsageError, reading
from esmshard.files import replace_text
from esmshard.model.families.family_registry import recorded_config

T = TypeVar("T")

FORMAT, VERSION = "esmshard-checkpoint", 2


def write(
    directory: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    *,
    keep: int,
    best: bool = False,
    group: Any = None,
) -> Path:
    """Write the checkpoint of a step. Every rank calls this with its own shards, or a single process without a group.

    Args:
        directory: `checkpoints` of the run.
        step: the number of optimizer steps done.
        tensors: DTensors and plain tensors by name. A plain tensor is equal on all ranks that have it.
        state: other values that are needed to continue, written as JSON.
        keep: the number of newest checkpoints to keep. Older ones are removed once this one is finished.
        best: let `BEST` name this checkpoint.
        group: a gloo group of all ranks; by default the default group.

    Raises:
        InputError: on all ranks, if any rank could not write. Earlier checkpoints are unchanged.
    """
    alone = not dist.is_initialized()
    first = alone or dist.get_rank(group) == 0
    work, final = directory / f".tmp-step_{step:06d}", manifest.path_of(directory, step)

    def prepare() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if work.exists():
            shutil.rmtree(work)
        work.mkdir()

    def finish(files: dict[str, Entry]) -> None:
        text = json.dumps({"format": FORMAT, "version": VERSION, "step": step, **state}, indent=1)
        replace_text(work / "state.json", text)
        files["state.json"] = {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        manifest.seal(work, final, files)
        manifest.point(directory, "LATEST", final.name)
        if best:
            manifest.point(directory, "BEST", final.name)

    try:
        _on_first(prepare, first, group)
        writer = _Writer(work, from_gpu=any(tensor.is_cuda for tensor in tensors.values()))
        with _quick(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # `no_dist` intends this
            state_dict_saver.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=alone)
        files = {name: entry for part in _gather(writer.files.entries, group) for name, entry in part.items()}
        _on_first(lambda: finish(files), first, group)
    except (CheckpointException, OSError) as error:  # the first is a BaseException and would not be caught otherwise
        if first:
            shutil.rmtree(work, ignore_errors=True)
        raise InputError(_unwritten(directory, step, error)) from None
    if first:
        try:
            manifest.prune(directory, final, keep)
        except OSError:  # an old checkpoint only takes room; the next prune tries again
            pass
    return final


def newest(directory: Path, warn: Callable[[str], None], *, trust: bool = False) -> Path | None:
    """Return the newest checkpoint whose files are unchanged, on every rank; None if there never was one.

    All ranks call this together. The first one reads and hashes the files.

    Args:
        directory: the directory that was given to `write`.
        warn: called on the first rank with a sentence for each damaged checkpoint that is skipped.
        trust: take a checkpoint that another user wrote.

    Raises:
        InputError: on all ranks, if every checkpoint is damaged.
        UsageError: on all ranks, if another user wrote it.
    """
    found: Path | InputError | UsageError | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found = manifest.newest_good(directory, warn, trust=trust)
        except (InputError, UsageError) as error:
            error.shared, found = True, error
    found = _gather(found, None)[0]
    if isinstance(found, Exception):
        raise found
    return found


def load(
    path: Path, tensors: dict[str, torch.Tensor], *, alone: bool = False, reader: "CheckpointReader | None" = None
) -> None:
    """Fill `tensors` in place with the checkpoint's values, resharding as needed. Every name must exist.

    Args:
        path: a verified checkpoint.
        tensors: DTensors, plain tensors, or both.
        alone: read without the other ranks. A process without a group always does.
        reader: a reader of this path, for loading a few tensors at a time; it reads the index once.
    """
    alone = alone or not dist.is_initialized()
    reader = reader or CheckpointReader(path)
    # This comes before torch reads the index: where several ranks load, torch would log its own traceback.
    for failure in [reader.unreadable()] if alone else _gather(reader.unreadable(), None):
        if failure is not None:
            failure.shared = not alone  # each rank has this error, and the first rank reports it
            raise failure
    entries = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        saved = entries.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            continue  # torch's planner says so
        if (saved.size, saved.properties.dtype) != (tensor.size(), tensor.dtype):
            mismatch = InputError(
                f"{path}: does not fit this model: {name} is {list(saved.size)} in {saved.properties.dtype}, not "
                f"{list(tensor.size())} in {tensor.dtype}; take a checkpoint of this model"
            )
            mismatch.shared = not alone
            raise mismatch
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # `no_dist` intends this
            state_dict_loader.load(tensors, storage_reader=reader, planner=_TensorsOnly(), no_dist=alone)
    except CheckpointException as error:
        rank, cause = _cause(error)
        raise InputError(f"{path}: does not fit this model or is damaged (rank {rank}: {_phrase(cause)})") from None


def index(path: Path, reader: "CheckpointReader | None" = None) -> dict[str, TensorStorageMetadata]:
    """Return shape and dtype of every tensor of a verified checkpoint, by name."""
    entries = (reader or CheckpointReader(path)).read_metadata().state_dict_metadata
    return cast(dict[str, TensorStorageMetadata], entries)  # `_read_index` refuses any other type


_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("recipe", "facts", "config", "data", "versions"), dict),
    "unlearned": list,
    "step": int,
}
"""The types of some values of `state.json`, if these values exist."""


def read_state(path: Path) -> dict[str, Any]:
    """Read `state.json` of a checkpoint. `InputError` for another version or a value of another type."""
    state: dict[str, Any] = read_json(path / "state.json")
    if not isinstance(state, dict):
        raise InputError(f"{path / 'state.json'}: damaged (not a JSON object); take another checkpoint")
    if state.get("format") != FORMAT or state.get("version") != VERSION:
        raise InputError(f"{path}: written by another version of esmshard; go on with that one, or start again")
    with reading(f"{path / 'state.json'}", "take another checkpoint"):
        wrong = [key for key, kind in _KINDS.items() if not isinstance(state.get(key, kind()), kind)]
        wrong += [key for key, facts in state.get("data", {}).items() if not isinstance(facts, dict)]
        if wrong:
            raise ValueError(f"{wrong[0]} is not what a run writes there")
        if "config" in state:
            recorded_config(state["config"])
    return state


@contextmanager
def _quick() -> Iterator[None]:
    """Switch off torch's CRC32 of saved data: it is as slow as sha256, which is computed for every byte anyway."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Hashed:
    """A file open for writing whose bytes are counted and hashed as they are written."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream, self._sha256, self._bytes = stream, hashlib.sha256(), 0
        self.flush, self.fileno, self.tell, self.close = stream.flush, stream.fileno, stream.tell, stream.close

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        self._bytes += memoryview(data).nbytes
        return int(self._stream.write(data))  # type: ignore[attr-defined]

    def entry(self) -> Entry:
        return {"bytes": self._bytes, "sha256": self._sha256.hexdigest()}


class _HashedFiles(FileSystem):
    """Files on disk, with size and sha256 of each written file, computed without reading the file again."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            hashed = _Hashed(stream)
            yield hashed  # type: ignore[misc]  # it has all that DCP and torch.save use
        self.entries[PurePath(path).name] = hashed.entry()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.entries[PurePath(new_path).name] = self.entries.pop(PurePath(path).name)


class _Writer(FileSystemWriter):
    """DCP's writer, with one file for each rank, which is on disk when the writer returns."""

    def __init__(self, path: Path, *, from_gpu: bool) -> None:
        super().__init__(path, overwrite=False)
        if not from_gpu:
            # DCP would copy ahead over a stream of the machine's first GPU, if there is one, and take memory there.
            self.per_thread_copy_ahead = 0
        self.files = _HashedFiles()
        self.fs = self.files

    def storage_meta(self) -> StorageMeta:
        # DCP's own metadata pickles a Path, a class whose name changes between Python versions.
        return StorageMeta(checkpoint_id=PurePath(self.path).name, save_id=self.save_id)


class _Index(pickle.Unpickler):
    """A reader of `.metadata` that refuses every unexpected class, because a pickle can call any function."""

    _classes = {  # noqa: RUF012
        *(("torch.distributed.checkpoint.metadata", name) for name in (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return super().find_class(module, name)
        # early releases of Python 3.11 pickle the member of an Enum in this way
        if (module, name) == ("builtins", "getattr"):
            return self._member
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        raise pickle.UnpicklingError(f"its index asks for {module}.{name}, which no checkpoint of ours holds")

    @staticmethod
    def _member(kind: Any, name: Any) -> Any:
        if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
            return kind[name]
        raise pickle.UnpicklingError(f"its index asks for {kind}.{name}, which no checkpoint of ours holds")


class _TensorsOnly(DefaultLoadPlanner):
    """DCP's planner without its loading of pickled objects: DCP unpickles all that the index calls bytes."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse bytes: our checkpoints hold tensors, and torch would run the code of a pickle."""
        raise pickle.UnpicklingError(
            f"{read_item.dest_index.fqn} is stored as a pickle, which no checkpoint of ours holds"
        )


class CheckpointReader(FileSystemReader):
    """DCP's reader, limited to the checkpoint's directory and without running the code of a pickle.

    It reads the index once: with 64 ranks and the optimizer state of 600 tensors that takes seconds.
    """

    _read: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index, which is read at the first call."""
        if self._read is None:
            self._read = _read_index(Path(self.path) / ".metadata")
        self._read.storage_meta = StorageMeta(load_id=self.load_id)
        return self._read

    def unreadable(self) -> InputError | None:
        """Return why the index cannot be read; None if it can."""
        try:
            self.read_metadata()
        except InputError as error:
            return error
        return None


def _read_index(path: Path) -> Metadata:
    """Read the index of a checkpoint, and check that all tensors are in files of its own directory."""
    try:
        with open(path, "rb") as file:
            metadata: Metadata = _Index(file).load()
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise pickle.UnpicklingError(f"its index says that {name} is no tensor")
            if not covers(entry.size, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]):
                raise pickle.UnpicklingError(f"its chunks hold numbers of {name} twice or not at all")
        for info in metadata.storage_data.values():
            if info.relative_path != PurePath(info.relative_path).name:
                raise pickle.UnpicklingError(f"its index names a file outside it ({info.relative_path!r})")
        return metadata
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()})") from None
    except Exception as error:  # a damaged pickle may raise any error
        raise InputError(f"{path}: not the index of a checkpoint ({_phrase(error)})") from None


def covers(shape: Sequence[int], chunks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether chunks, each with its first indices and its shape, hold every number of a tensor exactly once.

    A number that no chunk holds would be whatever the memory held before.

    >>> covers([4, 2], [([0, 0], [3, 2]), ([3, 0], [1, 2])]), covers([4, 2], [([0, 0], [3, 2])])
    (True, False)
    """
    bounds = [[range(a, a + n) for a, n in zip(first, size, strict=True)] for first, size in chunks]
    if any(len(chunk) != len(shape) for chunk in bounds):
        return False
    # Between two neighbouring edges of chunks all numbers are alike, so one count for each such cell is enough.
    edges = [sorted({0, n, *(e for c in bounds for e in (c[d].start, c[d].stop))}) for d, n in enumerate(shape)]
    if any(ends[0] < 0 or ends[-1] > n for ends, n in zip(edges, shape, strict=True)):
        return False
    count = np.zeros([len(ends) - 1 for ends in edges], dtype=np.int64)
    for chunk in bounds:
        cells = [slice(bisect_left(e, r.start), bisect_left(e, r.stop)) for e, r in zip(edges, chunk, strict=True)]
        count[tuple(cells)] += 1
    return bool((count == 1).all())


def _gather(value: Any, group: Any) -> list[Any]:
    """Gather the values of all ranks, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _on_first(function: Callable[[], None], first: bool, group: Any) -> None:
    """Call a function on the first rank; all ranks raise its `OSError`."""
    error = None
    try:
        if first:
            function()
    except OSError as caught:
        error = caught
    failed = [e for e in _gather(error, group) if e is not None]
    if failed:
        raise failed[0]


def _unwritten(directory: Path, step: int, error: BaseException) -> str:
    """Describe a failed save: the error, the path, the remaining checkpoints, and the fix."""
    rank, cause = _cause(error) if isinstance(error, CheckpointException) else (0, error)
    number = cause.errno if isinstance(cause, OSError) else None
    what = (os.strerror(number).lower() if number else _phrase(cause)) + (f", rank {rank}" if rank else "")
    fix = {
        errno.ENOSPC: "free some space, or lower checkpoint.keep",
        errno.EDQUOT: "free some of your quota, or lower checkpoint.keep",
        **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make the directory writable"),
    }.get(number or 0, "look at the file system")
    left = manifest.complete(directory) if directory.is_dir() else []
    kept = f"the newest one is {left[-1].name}; " if left else ""
    return f"{directory}: the checkpoint of step {step} could not be written ({what}); {kept}{fix}, then --resume auto"


def _cause(error: CheckpointException) -> tuple[int, BaseException]:
    """Return the first failing rank and its original error: the `OSError` behind torch's error, if there is one.

    Raises:
        BaseException: for an exception that is no failure, such as Ctrl-C or a request to stop; DCP catches these, too.
    """
    for cause, _ in error.failures.values():
        if not isinstance(cause, Exception):
            raise cause from None
    for rank, (cause, _) in sorted(error.failures.items()):
        behind: BaseException | None = cause
        while behind is not None and not isinstance(behind, OSError):
            behind = behind.__cause__ or behind.__context__
        return rank, behind or cause
    return 0, error


def _phrase(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
