"""Sharded checkpoints through torch's DCP, each complete or absent.

    checkpoints/step_000100/    __0_0.distcp ... .metadata     what DCP writes
                                state.json                     step, recipe, configuration, world size, versions
                                MANIFEST.json                  bytes and sha256 of every other file
    checkpoints/LATEST          the name of the newest one

Written as `.tmp-step_000100` and renamed when every rank has finished and every byte is on disk: a run that dies while
saving leaves a directory that nobody mistakes for a checkpoint. DCP itself has no checksum and loads flipped bits
without a word; the manifest is compared on every load.

A DCP directory holds a pickle (`.metadata`), so load only checkpoints of your own runs; models are exchanged as
safetensors.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from esmshard.errors import InputError

FORMAT, VERSION = "esmshard-checkpoint", 1
_NAME = re.compile(r"step_(\d{6,})$")


def save(directory: Path, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint of a step; every rank calls this with its own shards, or a process that has no group.

    Args:
        directory: `checkpoints` of the run.
        step: optimizer steps done.
        tensors: DTensors and plain tensors by name; plain ones are equal on all ranks.
        state: what else is needed to go on; written as JSON.
        keep: how many of the newest checkpoints stay; older ones are removed once this one is complete.
    """
    alone = not dist.is_initialized()
    rank = 0 if alone else dist.get_rank()
    first = rank == 0
    work, final = directory / f".tmp-step_{step:06d}", directory / f"step_{step:06d}"
    if first:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".tmp-step_*"):
            shutil.rmtree(leftover)
        work.mkdir()
    if not alone:
        dist.barrier()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what `no_dist` asks for
            writer = FileSystemWriter(work, overwrite=False)
            state_dict_saver.save(dict(tensors), storage_writer=writer, no_dist=alone)
    except CheckpointException as error:  # a BaseException: nothing else would catch it
        raise InputError(f"{work}: the checkpoint could not be written ({_cause(error)})") from None
    mine = {f.name: _fingerprint(f) for f in work.glob(f"__{rank}_*")}
    everyone: list[dict[str, Any]] = [mine] * (1 if alone else dist.get_world_size())
    if not alone:
        dist.all_gather_object(everyone, mine)
    if first:
        state = {"format": FORMAT, "version": VERSION, "step": step, **state}
        _write_synced(work / "state.json", json.dumps(state, indent=1))
        files = {name: entry for part in everyone for name, entry in part.items()}
        files |= {name: _fingerprint(work / name) for name in (".metadata", "state.json")}
        _write_synced(work / "MANIFEST.json", json.dumps({"version": VERSION, "files": files}, indent=1))
        if final.exists():  # the same step again, after going back to an older checkpoint
            shutil.rmtree(final)
        work.rename(final)
        _sync_directory(directory)
        _write_synced(directory / ".tmp-LATEST", final.name + "\n")
        (directory / ".tmp-LATEST").replace(directory / "LATEST")
        _sync_directory(directory)
        for old in complete(directory)[:-keep]:
            shutil.rmtree(old)
    if not alone:
        dist.barrier()
    return final


def complete(directory: Path) -> list[Path]:
    """Checkpoints that were finished, oldest first. Their content is not looked at."""
    found = [(int(m[1]), p) for p in directory.glob("step_*") if (m := _NAME.match(p.name))]
    return [p for _, p in sorted(found) if (p / "MANIFEST.json").is_file()]


def newest_good(directory: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are what was written; None if there never was one.

    A damaged one is passed over, with a warning that names its bad files. If all are damaged that is an error.
    """
    candidates = complete(directory)
    for path in reversed(candidates):
        try:
            verify(path)
            return path
        except InputError as error:
            warn(f"{error}; going back to the checkpoint before it")
    if candidates:
        raise InputError(f"{directory}: every checkpoint is damaged; start again with --overwrite")
    return None


def verify(path: Path) -> None:
    """Compare every file with the manifest: size first, then sha256. Raises `InputError` naming the first bad file."""
    manifest = _read_json(path / "MANIFEST.json")
    for name, entry in manifest["files"].items():
        file = path / Path(name).name  # a manifest has no say over other directories
        if not file.is_file():
            raise InputError(f"{file}: missing from the checkpoint")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise InputError(f"{file}: truncated or altered ({size} bytes instead of {entry['bytes']})")
        if _sha256(file) != entry["sha256"]:
            raise InputError(f"{file}: damaged (its sha256 is not the one in MANIFEST.json)")


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint."""
    state: dict[str, Any] = _read_json(path / "state.json")
    if state.get("format") != FORMAT or state.get("version") != VERSION:
        raise InputError(f"{path}: written by another version of esmshard")
    return state


def load(path: Path, tensors: dict[str, torch.Tensor], *, alone: bool = False) -> None:
    """Fill `tensors` in place with the checkpoint's values, resharding as needed. Every name must be there.

    Args:
        path: of a verified checkpoint.
        tensors: DTensors, plain tensors, or part of either.
        alone: read without the other ranks; a process without a group always does.
    """
    alone = alone or not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what `no_dist` asks for
            state_dict_loader.load(tensors, storage_reader=FileSystemReader(path), no_dist=alone)
    except CheckpointException as error:
        raise InputError(f"{path}: does not fit this model or is damaged ({_cause(error)})") from None


def locate(run_or_checkpoint: Path, warn: Callable[[str], None]) -> Path:
    """The checkpoint that a path means: itself, verified, or the newest good one of a run. `InputError` if none."""
    if _NAME.match(run_or_checkpoint.name) and run_or_checkpoint.is_dir():
        try:
            verify(run_or_checkpoint)
        except InputError as error:
            raise InputError(f"{error}; use another checkpoint of the run") from None
        return run_or_checkpoint
    directory = run_or_checkpoint / "checkpoints"
    if not directory.is_dir():
        raise InputError(f"{run_or_checkpoint}: neither a run nor a checkpoint (it has no checkpoints/ directory)")
    found = newest_good(directory, warn)
    if found is None:
        raise InputError(f"{directory}: no complete checkpoint yet; let the run reach one, or lower checkpoint.every")
    return found


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: missing; the checkpoint is not complete") from None
    except (OSError, ValueError):
        raise InputError(f"{path}: damaged (not JSON)") from None


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """Make a rename survive a power cut. Windows cannot open directories, and has no need to."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _cause(error: CheckpointException) -> str:
    """The first rank's own error, in one line."""
    for rank, (cause, _) in sorted(error.failures.items()):
        return f"rank {rank}: {str(cause).splitlines()[0] if str(cause) else type(cause).__name__}"
    return "no rank gave a reason"
