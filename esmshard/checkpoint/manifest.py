"""The files in the directory `checkpoints` of a run. This module does not import torch.

    checkpoints/step_000100/    a finished checkpoint; MANIFEST.json has the size in bytes and sha256 of the other files
    checkpoints/LATEST           the name of the newest checkpoint
    checkpoints/BEST             the name of the checkpoint with the best validation, if `Recipe.keeps_best`
    checkpoints/.tmp-*           a directory that is being written or removed; it is never read
    checkpoints/step_000300.damaged, .abandoned    a checkpoint that a resumed run does not use, see `set_aside`

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
"""The number of files whose sha256 is computed at the same time. One core computes it at only 0.5 to 2 GB/s."""

Entry = dict[str, Any]


def path_of(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps. `directory` is the directory `checkpoints` of a run."""
    return directory / f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name, such as 100 for `step_000100`; None for any other name."""
    match = _NAME.match(path.name)
    return int(match[1]) if match else None


def named(directory: Path) -> list[Path]:
    """Return the directories with names such as `step_000100`, in the order of steps. Some may be damaged."""
    steps = [(step, path) for path in directory.glob("step_*") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(steps) if path.is_dir()]


def complete(directory: Path) -> list[Path]:
    """Return the checkpoints that have a manifest, in the order of steps. The other files are not checked."""
    return [path for path in named(directory) if (path / MANIFEST).is_file()]


def seal(work: Path, final: Path, files: Mapping[str, Entry]) -> None:
    """Write the manifest (`files`) to `work`, and rename `work` to `final`. The other files of `work` must be on disk
    already. After a power cut, `final` is complete or does not exist.
    """
    replace_text(work / MANIFEST, json.dumps({"files": dict(files)}, indent=1))
    sync_directory(work)
    if final.exists():  # another process wrote it, because a resumed run sets later checkpoints aside
        set_aside(final, "abandoned")
    work.rename(final)
    sync_directory(final.parent)


def point(directory: Path, pointer: str, name: str) -> None:
    """Replace the file `pointer` (`LATEST` or `BEST`) by one with a checkpoint's `name`, in one operation."""
    replace_text(directory / pointer, name + "\n")
    sync_directory(directory)


def pointed(directory: Path, pointer: str) -> Path | None:
    """Return the checkpoint that the file `pointer` (`LATEST` or `BEST`) names; None if it is not finished."""
    try:
        path = directory / PurePath((directory / pointer).read_text(encoding="utf-8").strip()).name
    except (OSError, ValueError):
        return None
    return path if path in complete(directory) else None


def prune(directory: Path, newest: Path, keep: int) -> None:
    """Of the checkpoints up to `newest`, keep the last `keep` and the one in `BEST`, and remove the others. Also
    remove all `step_*.damaged`.
    """
    checkpoints = [path for path in complete(directory) if (step_of(path) or 0) <= (step_of(newest) or 0)]
    kept = {*checkpoints[-keep:], newest, pointed(directory, "BEST")}
    for path in [*(path for path in checkpoints if path not in kept), *directory.glob("step_*.damaged")]:
        remove(path)


def remove(path: Path) -> None:
    """Remove a directory. It first gets a hidden name, so `sweep` can finish the removal if the process is killed."""
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
    """Append `.` and `why` to a checkpoint's name, such as `step_000300.damaged`. Return the new path."""
    aside = path.with_name(f"{path.name}.{why}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return aside


def entry(path: Path) -> Entry:
    """Return a file's entry in the manifest: its size in bytes and its sha256."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def damage(path: Path) -> str:
    """Return a text with a phrase for each file of a checkpoint that is missing or altered; empty if there is none.

    A `*.safetensors` file that is not in the manifest counts, too, because torch would read it. Other files that are
    not in the manifest are ignored.
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
    """Return the newest checkpoint whose files agree with its manifest; None if there is no checkpoint.

    `warn` is called with a text for each damaged checkpoint. Raise `InputError` if all checkpoints are damaged.
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
    """Return the checkpoint at a path, or the newest undamaged checkpoint if the path is a run directory.

    With `prefer_best`, return the run's checkpoint with the best validation score, unless that checkpoint is damaged.

    Raises:
        InputError: the path is neither a checkpoint nor a run, or there is no undamaged checkpoint.
        UsageError: `prefer_best` is true for a single checkpoint, or for a run without the file `BEST`.
    """
    if step_of(run_or_checkpoint) is not None and run_or_checkpoint.is_dir():
        if prefer_best:
            raise UsageError(f"{run_or_checkpoint}: is one checkpoint and not a run; omit --best")
        verify(run_or_checkpoint)
        return run_or_checkpoint
    directory = run_or_checkpoint / "checkpoints"
    if not directory.is_dir():
        raise InputError(
            f"{run_or_checkpoint}: neither a run (it has no directory checkpoints/) nor a checkpoint; give one of these"
        )
    if prefer_best:
        best = pointed(directory, "BEST")
        if best is None:
            raise UsageError(
                f"{run_or_checkpoint}: has no best checkpoint, which needs checkpoint.keep_best or "
                "train.early_stop in the recipe; omit --best for the newest checkpoint"
            )
        bad = damage(best)
        if not bad:
            return best
        warn(f"{bad}; taking the newest checkpoint instead of the best")
    checkpoint = newest_good(directory, warn)
    if checkpoint is None:
        raise InputError(f"{directory}: no complete checkpoint yet; wait for one, or set a lower checkpoint.every")
    return checkpoint
