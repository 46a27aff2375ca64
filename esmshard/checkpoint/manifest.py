"""The files of a directory of checkpoints. This module needs no torch.

    checkpoints/step_000100/    a finished checkpoint; MANIFEST.json has the size in bytes and sha256 of all files
    checkpoints/LATEST           the name of the newest checkpoint
    checkpoints/BEST             the name of the checkpoint with the best validation, with `checkpoint.keep_best`
    checkpoints/.tmp-*           a directory that is being written or removed; it is never read
    checkpoints/step_000300.damaged, .abandoned    not used by the resumed run, see `set_aside`

A checkpoint gets its name after all its files are on disk, so a killed run leaves no unfinished checkpoint.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any

from esmshard.errors import InputError, UsageError
from esmshard.io.paths import read_json, replace_text, sha256, sync_directory

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"step_(\d{6,})$")
_READERS = 8
"""The number of files that are read at the same time for their sha256. One core computes sha256 at 0.5 to 2 GB/s."""

Entry = dict[str, Any]


def path_of(directory: Path, step: int) -> Path:
    """Return the path of a checkpoint."""
    return directory / f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name; None for a name of another form than `step_000100`."""
    match = _NAME.match(path.name)
    return int(match[1]) if match else None


def named(directory: Path) -> list[Path]:
    """Return the directories with the name of a checkpoint, in the order of steps. Some may be damaged."""
    steps = [(step, path) for path in directory.glob("step_*") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(steps) if path.is_dir()]


def complete(directory: Path) -> list[Path]:
    """Return the finished checkpoints, in the order of steps. Their files are not checked."""
    return [path for path in named(directory) if (path / MANIFEST).is_file()]


def seal(work: Path, final: Path, files: Mapping[str, Entry]) -> None:
    """Write the manifest to `work`, whose other files are on disk. Rename `work` to `final`, safe from a power cut."""
    replace_text(work / MANIFEST, json.dumps({"files": dict(files)}, indent=1))
    sync_directory(work)
    if final.exists():  # another process wrote it, because a resumed run sets later checkpoints aside
        set_aside(final, "abandoned")
    work.rename(final)
    sync_directory(final.parent)


def point(directory: Path, pointer: str, name: str) -> None:
    """Write a checkpoint's name to the file `LATEST` or `BEST` in one operation."""
    replace_text(directory / pointer, name + "\n")
    sync_directory(directory)


def pointed(directory: Path, pointer: str) -> Path | None:
    """Return the finished checkpoint that `LATEST` or `BEST` names, or None."""
    try:
        path = directory / PurePath((directory / pointer).read_text(encoding="utf-8").strip()).name
    except (OSError, ValueError):
        return None
    return path if path in complete(directory) else None


def prune(directory: Path, newest: Path, keep: int) -> None:
    """Remove old checkpoints up to `newest`. Keep the last `keep` and BEST. Also remove all `step_*.damaged`."""
    checkpoints = [path for path in complete(directory) if (step_of(path) or 0) <= (step_of(newest) or 0)]
    kept = {*checkpoints[-keep:], newest, pointed(directory, "BEST")}
    for path in [*(path for path in checkpoints if path not in kept), *directory.glob("step_*.damaged")]:
        remove(path)


def remove(path: Path) -> None:
    """Rename a directory to a hidden name, which `sweep` finds if the process is killed, and remove it."""
    hidden = path.with_name(f".tmp-removed-{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove the files and directories that an earlier run was writing or removing when it ended."""
    for leftover in directory.glob(".tmp-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint that a run does not use, such as to `step_000300.damaged`, and return the new path."""
    aside = path.with_name(f"{path.name}.{why}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return aside


def entry(path: Path) -> Entry:
    """Return a file's entry in the manifest: its size in bytes and its sha256."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def damage(path: Path) -> str:
    """Return a text with a phrase for each bad file of a checkpoint; empty if all files are good.

    A `*.safetensors` file that is not in the manifest is bad, because torch would read it. Other such files are
    ignored.
    """
    try:
        known: dict[str, Entry] = read_json(path / MANIFEST)["files"]
        names = {file.name for file in path.iterdir()}
        unknown = {name for name in names if name.endswith(".safetensors")} - known.keys()

        def check(name: str) -> str:
            file, size = path / name, known[name]["bytes"]
            if name not in names or not file.is_file() or file.is_symlink():
                return f"{file}: missing from the checkpoint"
            if file.stat().st_size != size:
                return f"{file}: truncated or altered ({file.stat().st_size} bytes instead of {size})"
            return "" if sha256(file) == known[name]["sha256"] else f"{file}: damaged (its sha256 has changed)"

        with ThreadPoolExecutor(_READERS) as readers:
            bad = [phrase for phrase in readers.map(check, sorted({"state.json", *known})) if phrase]
        return "; ".join([*bad, *(f"{path / name}: is not part of the checkpoint" for name in sorted(unknown))])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path}: its {MANIFEST} is missing or damaged ({error})"


def verify(path: Path) -> None:
    """Compare each file of a checkpoint with the manifest. Raise `InputError` with the names of all bad files."""
    if bad := damage(path):
        raise InputError(f"{bad}; use another checkpoint of the run")


def newest_good(directory: Path, warn: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint with unchanged files; None if there is no checkpoint.

    `warn` gets a text for each damaged checkpoint. Raise `InputError` if all checkpoints are damaged.
    """
    candidates = named(directory)
    for path in reversed(candidates):
        bad = damage(path)
        if not bad:
            return path
        warn(f"{bad}; going back to the checkpoint before it")
    if candidates:
        raise InputError(f"{directory}: every checkpoint is damaged; start again with --overwrite")
    return None


def locate(run_or_checkpoint: Path, warn: Callable[[str], None], *, prefer_best: bool = False) -> Path:
    """Return the checkpoint at a path, or the newest good checkpoint if the path is a run directory.

    With `prefer_best`, return the run's checkpoint with the best validation score, unless that checkpoint is damaged.

    Raises:
        InputError: there is no good checkpoint, or no run.
        UsageError: `prefer_best` is given for a single checkpoint, or for a run without a best checkpoint.
    """
    if step_of(run_or_checkpoint) is not None and run_or_checkpoint.is_dir():
        if prefer_best:
            raise UsageError(f"{run_or_checkpoint}: is one checkpoint and not a run; omit --best")
        verify(run_or_checkpoint)
        return run_or_checkpoint
    directory = run_or_checkpoint / "checkpoints"
    if not directory.is_dir():
        raise InputError(f"{run_or_checkpoint}: neither a run nor a checkpoint (it has no checkpoints/ directory)")
    if prefer_best:
        best = pointed(directory, "BEST")
        if best is None:
            raise UsageError(
                f"{run_or_checkpoint}: has no best checkpoint (checkpoint.keep_best, train.early_stop); "
                "omit --best for the newest checkpoint"
            )
        bad = damage(best)
        if not bad:
            return best
        warn(f"{bad}; taking the newest checkpoint instead of the best")
    checkpoint = newest_good(directory, warn)
    if checkpoint is None:
        raise InputError(f"{directory}: no complete checkpoint yet; let the run reach one, or lower checkpoint.every")
    return checkpoint
