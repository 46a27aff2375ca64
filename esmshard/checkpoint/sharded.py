"""Sharded checkpoints, written with torch.distributed.checkpoint (DCP), which any number of ranks can load.

    step_000100/    shard-00001-model-00001-of-00001.safetensors ...    shards of weights and optimizer state
                    state.json                                          step, recipe, configuration, versions
                    MANIFEST.json                                       size in bytes and sha256 of every other file

No file contains a pickle, so reading a checkpoint runs no code. torch's reader reads every `*.safetensors` in a
directory, checks no checksum, infers a tensor's shape from its shards, and converts types silently. Therefore the files
are compared with the manifest before loading (`esmshard.checkpoint.manifest`), and `load` compares shapes and types.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from esmshard.checkpoint import manifest
from esmshard.errors import InputError
from esmshard.io.paths import read_json, replace_text

FORMAT, VERSION = "esmshard-checkpoint", 3
FILE_BYTES = 10**9
"""The approximate size, in bytes, of each file of a rank. While torch writes a file, the host's memory holds two copies
of the file's tensors, besides the tensors that `write` gets."""
PATIENCE = 60.0
"""After an error, a rank waits at most this number of seconds until its last checkpoint is written. Without the limit
it could wait forever for ranks that are gone or stuck."""


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
    """Write the checkpoint of a step. Every rank calls this with its shards. A single process needs no process group.

    `directory` is the directory `checkpoints` of the run. `tensors` are DTensors and plain tensors, with the same names
    on all ranks. A plain tensor must have the same values on all ranks. `state` has the values that a resumed run needs
    besides `tensors`, and is written as JSON. The newest `keep` checkpoints stay, and older ones are removed. With
    `best`, the file `BEST` names this checkpoint. `group` is a gloo process group of all ranks.

    All ranks raise `InputError` if any rank could not write its files. Earlier checkpoints are then unchanged.
    """
    alone = not dist.is_initialized()
    rank, ranks = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
    work, final = directory / f".tmp-step_{step:06d}", manifest.path_of(directory, step)
    files, total = {}, 0
    for name, tensor in tensors.items():
        files[name] = 1 + total // (FILE_BYTES * ranks)
        total += tensor.numel() * tensor.element_size()
    writer = HuggingFaceStorageWriter(str(work), fqn_to_index_mapping=files, save_distributed=True)
    if not any(tensor.is_cuda for tensor in tensors.values()):
        # Otherwise DCP would use memory on the machine's first GPU, if there is one.
        writer.per_thread_copy_ahead = 0

    def prepare() -> None:
        if rank:
            return
        if work.exists():
            shutil.rmtree(work)
        work.mkdir(parents=True)

    def hashes_of_shards() -> dict[str, manifest.Entry]:
        # Each rank hashes its files: its memory has them, and another machine may not see them yet.
        return {path.name: manifest.entry(path) for path in work.glob(f"shard-{rank + 1:05d}-*")}

    def finish() -> None:
        if rank:
            return
        text = json.dumps({"format": FORMAT, "version": VERSION, "step": step, **state}, indent=1)
        replace_text(work / "state.json", text)
        hashes["state.json"] = manifest.entry(work / "state.json")
        manifest.seal(work, final, hashes)
        manifest.point(directory, "LATEST", final.name)
        if best:
            manifest.point(directory, "BEST", final.name)

    try:
        _together(prepare, group)
        with _plain_errors():
            state_dict_saver.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=alone)
        hashes = {name: entry for part in _together(hashes_of_shards, group) for name, entry in part.items()}
        _together(finish, group)
    except OSError as error:
        if rank == 0:
            shutil.rmtree(work, ignore_errors=True)
        raise _shared(
            f"{directory}: the checkpoint of step {step} could not be written ({error.strerror or error}); earlier "
            "checkpoints are unchanged; make room, or lower checkpoint.keep; then go on with --resume auto"
        ) from error
    if rank == 0:
        with suppress(OSError):  # an old checkpoint does no harm, and the next prune tries again
            manifest.prune(directory, final, keep)
    return final


def newest(directory: Path, warn: Callable[[str], None]) -> Path | None:
    """Return the newest undamaged checkpoint, on every rank; None if there is no checkpoint.

    All ranks call this together, with the same `directory` as for `write`. The first rank checks the files, and calls
    `warn` with a sentence for each damaged checkpoint. All ranks raise `InputError` if every checkpoint is damaged.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    chosen: Path | None = _together(lambda: manifest.newest_good(directory, warn) if first else None, None)[0]
    return chosen


def load(path: Path, tensors: dict[str, torch.Tensor], *, alone: bool = False) -> None:
    """Overwrite `tensors` with the values of the checkpoint at `path`, which any number of ranks may have written.

    Call `manifest.verify` first. With `alone`, this process reads without the other ranks of its process group.
    Raises `InputError` if a tensor is missing or incomplete, or has another shape or type.
    """
    storage = HuggingFaceStorageReader(str(path))
    saved = _tensors_of(storage.read_metadata())
    for name, tensor in tensors.items():
        entry = saved.get(name)
        if entry is None or (entry.size, entry.properties.dtype) != (tensor.size(), tensor.dtype):
            stored = f"{list(entry.size)} in {entry.properties.dtype}" if entry else "not in it"
            raise _shared(
                f"{path}: does not fit this model: {name} is {stored}, and {list(tensor.size())} in {tensor.dtype} is "
                "needed; use a checkpoint of this model",
                not alone,
            )
        # A part that the checkpoint lacks would keep its arbitrary value in `tensors`.
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise _shared(f"{path}: a part of {name} is missing or stored twice; use another checkpoint", not alone)
    with _plain_errors():
        state_dict_loader.load(tensors, storage_reader=storage, no_dist=alone or not dist.is_initialized())


def reader(path: Path) -> tuple[dict[str, torch.Size], Callable[[str], torch.Tensor]]:
    """Return the shapes of a verified checkpoint's tensors by name, and a function that reads one tensor.

    Use this function to read one tensor at a time, because `load` reads the index of the checkpoint in each call.
    """
    metadata = HuggingFaceStorageReader(str(path)).read_metadata()
    saved = _tensors_of(metadata)
    file_of = {(piece.fqn, piece.offset): about.relative_path for piece, about in metadata.storage_data.items()}

    def read(name: str) -> torch.Tensor:
        whole = torch.empty(saved[name].size, dtype=saved[name].properties.dtype)
        for chunk in saved[name].chunks:
            part = tuple(slice(first, first + n) for first, n in zip(chunk.offsets, chunk.sizes, strict=True))
            # A file that stays open would keep its pages in memory.
            with safe_open(file_of[name, chunk.offsets], framework="pt") as file:
                whole[part] = file.get_tensor(name)
        return whole

    return {name: entry.size for name, entry in saved.items()}, read


def _tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)  # this format holds only tensors


def read_state(path: Path) -> dict[str, Any]:
    """Read the `state.json` of a verified checkpoint. Raise `InputError` if its format is not the present one."""
    state: dict[str, Any] = read_json(path / "state.json")
    if (state.get("format"), state.get("version")) != (FORMAT, VERSION):
        raise InputError(f"{path}: written by another version of esmshard; use that version, or start again")
    return state


class Saver:
    """The writer of a run's checkpoints. Every rank creates a `Saver`, and calls `save` at the same steps.

    Use it as `with saver:`. If an error ends the block, the rank waits for the checkpoint that is being written.

    With `background`, `save` waits until the previous copy is written, copies this rank's shards to the host's memory,
    and returns. A thread then writes the copy. The thread has its own process group, so its messages do not mix with
    those of training. The copy needs 12 bytes for each trained parameter in the shards: the weight and both moments
    of AdamW. torch's `async_save` is not used, because it ends before the files have hashes and the checkpoint has its
    name.

    A rank that waits more than `timeout` seconds for another rank raises an error.
    """

    def __init__(self, directory: Path, keep: int, background: bool, timeout: int = 1800) -> None:
        self._directory, self._keep, self._background = directory, keep, background
        # With gloo, ranks exchange errors without a GPU kernel.
        seconds = timedelta(seconds=timeout)
        self._group: Any = dist.new_group(backend="gloo", timeout=seconds) if dist.is_initialized() else None
        # In a new thread the current GPU is the machine's first, where each rank would use half a gigabyte.
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        begin = partial(torch.cuda.set_device, torch.cuda.current_device()) if on_gpu else None
        self._pool = ThreadPoolExecutor(1, "checkpoint", begin)
        self._writing: Future[Path] | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
        elif self._writing is not None:
            wait([self._writing], PATIENCE)
        self._pool.shutdown(wait=False)

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], best: bool = False
    ) -> None:
        """Write a checkpoint as the function `write` does. First raise the previous checkpoint's error, if any."""
        self.finish()
        options: dict[str, Any] = {"keep": self._keep, "best": best, "group": self._group}
        if not self._background:
            write(self._directory, step, tensors, state, **options)
            return
        # The DefaultStager of torch 2.11 fails for DTensors (`KeyError: <class 'type'>`).
        staged = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._writing = self._pool.submit(write, self._directory, step, staged, state, **options)

    def finish(self) -> None:
        """Wait until the last checkpoint is written. If that failed, raise the error, but only in the first call."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Replace torch's `CheckpointException` by the error of the lowest rank that failed.

    `CheckpointException` is a `BaseException`, because it may contain Ctrl-C, so `except Exception` does not catch it.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # the argument `no_dist` causes it
            yield
    except CheckpointException as error:
        raise error.failures[min(error.failures)][0] from None


def _together(function: Callable[[], Any], group: Any) -> list[Any]:
    """Call a function on all ranks, and return all results. All raise the lowest rank's `OSError` or `InputError`."""
    try:
        result = function()
    except (OSError, InputError) as error:
        result = error
    results = [result]
    if dist.is_initialized():
        results = [None] * dist.get_world_size(group)
        dist.all_gather_object(results, result, group=group)
    for result in results:
        if isinstance(result, InputError):
            result.shared = True
        if isinstance(result, OSError | InputError):
            raise result
    return results


def _shared(message: str, is_shared: bool = True) -> InputError:
    """Return an error. With `is_shared`, every rank raises it, and only the first rank prints it."""
    error = InputError(message)
    error.shared = is_shared
    return error
