"""Sharded checkpoints through torch's DCP: written whole or not at all, loaded on any number of ranks.

    step_000100/    __0_0.distcp ... .metadata     what DCP writes: tensors, and a pickled index of them
                    state.json                     step, recipe, configuration, world size, versions
                    MANIFEST.json                  bytes and sha256 of every other file

DCP itself has no checksum and loads flipped bits without a word, so every file is hashed while it is written, and the
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast

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
from esmshard.errors import InputError, reading
from esmshard.model.config import EsmConfig

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
    """Write the checkpoint of a step; every rank calls this with its own shards, or a process that has no group.

    Args:
        directory: `checkpoints` of the run.
        step: optimizer steps done.
        tensors: DTensors and plain tensors by name; a plain one is equal on all ranks that have it.
        state: what else is needed to go on; written as JSON.
        keep: how many of the newest checkpoints stay; older ones are removed once this one is finished.
        best: point `BEST` to it.
        group: gloo group of all ranks; the default group by default.

    Raises:
        InputError: on all ranks, if any could not write. Earlier checkpoints are as they were.
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
        manifest.write_synced(work / "state.json", text)
        files["state.json"] = {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        manifest.seal(work, final, files)
        manifest.point(directory, "LATEST", final.name)
        if best:
            manifest.point(directory, "BEST", final.name)

    try:
        _on_first(prepare, first, group)
        writer = _Writer(work)
        with _quick(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what `no_dist` asks for
            state_dict_saver.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=alone)
        files = {name: entry for part in _gather(writer.files.entries, group) for name, entry in part.items()}
        _on_first(lambda: finish(files), first, group)
    except (CheckpointException, OSError) as error:  # the first is a BaseException: nothing else would catch it
        if first:
            shutil.rmtree(work, ignore_errors=True)
        raise InputError(_unwritten(directory, step, error)) from None
    if first:
        try:
            manifest.prune(directory, final, keep)
        except OSError:  # what is old takes room, and does no other harm; the next prune tries again
            pass
    return final


def load(path: Path, tensors: dict[str, torch.Tensor], *, alone: bool = False, reader: "Reader | None" = None) -> None:
    """Fill `tensors` in place with the checkpoint's values, resharding as needed. Every name must be there.

    Args:
        path: of a verified checkpoint.
        tensors: DTensors, plain tensors, or part of either.
        alone: read without the other ranks; a process without a group always does.
        reader: of this path, for whoever loads a few tensors at a time: it reads the index once.
    """
    alone = alone or not dist.is_initialized()
    reader = reader or Reader(path)
    # Before torch asks for it: where several ranks load, torch would log its own traceback of what is wrong.
    for failure in [reader.unreadable()] if alone else _gather(reader.unreadable(), None):
        if failure is not None:
            failure.shared = not alone  # each rank has it, and the first one says it
            raise failure
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what `no_dist` asks for
            state_dict_loader.load(tensors, storage_reader=reader, planner=_TensorsOnly(), no_dist=alone)
    except CheckpointException as error:
        rank, cause = _cause(error)
        raise InputError(f"{path}: does not fit this model or is damaged (rank {rank}: {_phrase(cause)})") from None


def index(path: Path, reader: "Reader | None" = None) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of every tensor of a verified checkpoint, by name."""
    entries = (reader or Reader(path)).read_metadata().state_dict_metadata
    return cast(dict[str, TensorStorageMetadata], entries)  # `_read_index` refuses any other kind


_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("recipe", "facts", "config", "data", "versions"), dict),
    "unlearned": list,
    "step": int,
}
"""Of what type some values of `state.json` are, where they are there."""


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint. `InputError` if it is of another version, or a value of it of another kind."""
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
            EsmConfig(**state["config"])
    return state


@contextmanager
def _quick() -> Iterator[None]:
    """Let torch leave out the CRC32 of what it saves: as slow as sha256, which every byte gets anyway."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Hashed:
    """A file open for writing whose bytes are counted and hashed on their way."""

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
    """Files on disk; of those it writes it knows size and sha256, without reading them again."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            hashed = _Hashed(stream)
            yield hashed  # type: ignore[misc]  # all that DCP and torch.save ask of it
        self.entries[PurePath(path).name] = hashed.entry()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.entries[PurePath(new_path).name] = self.entries.pop(PurePath(path).name)


class _Writer(FileSystemWriter):
    """DCP's writer, one file a rank, each on disk when it returns."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, overwrite=False)
        self.files = _HashedFiles()
        self.fs = self.files

    def storage_meta(self) -> StorageMeta:
        # DCP's own holds the path as a Path: a class whose name changes between Python versions, in a pickle.
        return StorageMeta(checkpoint_id=PurePath(self.path).name, save_id=self.save_id)


class _Index(pickle.Unpickler):
    """Reads `.metadata`, and refuses every class that has no business in it: a pickle can call anything."""

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
        if (module, name) == ("builtins", "getattr"):  # how early releases of Python 3.11 pickle the member of an Enum
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
    """DCP's planner, which unpickles whatever the index calls bytes, without that way in."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: checkpoints of ours hold tensors, and torch would run what a pickle asks for."""
        raise pickle.UnpicklingError(
            f"{read_item.dest_index.fqn} is stored as a pickle, which no checkpoint of ours holds"
        )


class Reader(FileSystemReader):
    """DCP's reader, which never leaves the checkpoint's directory nor runs what a pickle asks for.

    It reads the index once: with 64 ranks and the optimizer state of 600 tensors that takes seconds.
    """

    _read: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, read at the first call."""
        if self._read is None:
            self._read = _read_index(Path(self.path) / ".metadata")
        self._read.storage_meta = StorageMeta(load_id=self.load_id)
        return self._read

    def unreadable(self) -> InputError | None:
        """Why the index cannot be read; None if it can."""
        try:
            self.read_metadata()
        except InputError as error:
            return error
        return None


def _read_index(path: Path) -> Metadata:
    """The index of a checkpoint: tensors, all of them in files of its own directory."""
    try:
        with open(path, "rb") as file:
            metadata: Metadata = _Index(file).load()
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise pickle.UnpicklingError(f"its index says that {name} is no tensor")
        for info in metadata.storage_data.values():
            if info.relative_path != PurePath(info.relative_path).name:
                raise pickle.UnpicklingError(f"its index names a file outside it ({info.relative_path!r})")
        return metadata
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()})") from None
    except Exception as error:  # whatever a damaged pickle leads to
        raise InputError(f"{path}: not the index of a checkpoint ({_phrase(error)})") from None


def _gather(value: Any, group: Any) -> list[Any]:
    """The values of all ranks, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _on_first(function: Callable[[], None], first: bool, group: Any) -> None:
    """Call it on the first rank; all raise its `OSError`."""
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
    """What went wrong, where, what is left, and what to do."""
    rank, cause = _cause(error) if isinstance(error, CheckpointException) else (0, error)
    number = cause.errno if isinstance(cause, OSError) else None
    what = (os.strerror(number).lower() if number else _phrase(cause)) + (f", rank {rank}" if rank else "")
    mend = {
        errno.ENOSPC: "free some space, or lower checkpoint.keep",
        errno.EDQUOT: "free some of your quota, or lower checkpoint.keep",
        errno.EROFS: "make the directory writable",
        errno.EACCES: "make the directory writable",
        errno.EPERM: "make the directory writable",
    }.get(number or 0, "look at the file system")
    left = manifest.complete(directory) if directory.is_dir() else []
    kept = f"the newest one is {left[-1].name}; " if left else ""
    return f"{directory}: the checkpoint of step {step} could not be written ({what}); {kept}{mend}, then --resume auto"


def _cause(error: CheckpointException) -> tuple[int, BaseException]:
    """The first failing rank and its own error: the `OSError` behind what torch made of it, if there is one.

    Raises:
        BaseException: what is no failure, such as Ctrl-C or a request to stop: DCP catches those too.
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
