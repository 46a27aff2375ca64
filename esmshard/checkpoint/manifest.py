"""A directory of checkpoints: which of them are finished or damaged, and which may be removed. It needs no torch.

    checkpoints/step_000100/    finished: MANIFEST.json names every other file with its size in bytes and sha256
    checkpoints/LATEST           the name of the newest checkpoint
    checkpoints/BEST             the name of the checkpoint with the best validation, with `checkpoint.keep_best`
    checkpoints/.tmp-*           being written or removed; never read
    checkpoints/step_000300.damaged, .abandoned    set aside on resume, see `set_aside`

A checkpoint gets its name when all its bytes are on disk, so nothing that a killed run leaves looks like a checkpoint.
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
"""The number of files hashed at once. A core computes sha256 at 0.5 to 2 GB/s, and file systems are faster with several
readers.
"""

Entry = dict[str, Any]


def path_of(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return directory / f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint from its name; None if a checkpoint has no such name."""
    match = _NAME.match(path.name)
    return int(match[1]) if match else None


def named(directory: Path) -> list[Path]:
    """Return directories with the name of a checkpoint, oldest first. They may be damaged."""
    steps = [(step, path) for path in directory.glob("step_*") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(steps) if path.is_dir()]


def complete(directory: Path) -> list[Path]:
    """Return finished checkpoints, oldest first. Their files are not checked."""
    return [path for path in named(directory) if (path / MANIFEST).is_file()]


def seal(work: Path, final: Path, files: Mapping[str, Entry]) -> None:
    """Write the manifest of a directory whose files are on disk, and rename the directory to `final`. The checkpoint
    then survives a power cut.
    """
    replace_text(work / MANIFEST, json.dumps({"files": dict(files)}, indent=1))
    sync_directory(work)
    if final.exists():  # another process wrote it, since a run that continues sets later checkpoints aside
        set_aside(final, "abandoned")
    work.rename(final)
    sync_directory(final.parent)


def point(directory: Path, pointer: str, name: str) -> None:
    """Change the checkpoint that `LATEST` or `BEST` names, in one operation."""
    replace_text(directory / pointer, name + "\n")
    sync_directory(directory)


def pointed(directory: Path, pointer: str) -> Path | None:
    """Return the checkpoint that `LATEST` or `BEST` names; None if there is none."""
    try:
        path = directory / PurePath((directory / pointer).read_text(encoding="utf-8").strip()).name
    except (OSError, ValueError):
        return None
    return path if path in complete(directory) else None


def prune(directory: Path, newest: Path, keep: int) -> None:
    """Remove damaged checkpoints. Of the checkpoints up to `newest`, remove all except the `keep` newest and `BEST`."""
    checkpoints = [path for path in complete(directory) if (step_of(path) or 0) <= (step_of(newest) or 0)]
    kept = {*checkpoints[-keep:], newest, pointed(directory, "BEST")}
    for path in [*(path for path in checkpoints if path not in kept), *directory.glob("step_*.damaged")]:
        remove(path)


def remove(path: Path) -> None:
    """Remove a directory. It first gets a hidden name, so that `sweep` finds what a killed process has not removed."""
    hidden = path.with_name(f".tmp-removed-{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove directories that an earlier run left while it was writing or removing them."""
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
    """Return the manifest's entry of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def damage(path: Path) -> str:
    """Return a phrase for each bad file of a checkpoint, or an empty text.

    A file of tensors that the manifest does not name is damage, too, because torch would read this file. Additional
    files of other kinds are ignored.
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
        return "; ".join([*bad, *(f"{path / name}: is not of the checkpoint" for name in sorted(unknown))])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path}: its {MANIFEST} is missing or damaged ({error})"


def verify(path: Path) -> None:
    """Compare every file with the manifest. Raise `InputError` with the names of all bad files."""
    if bad := damage(path):
        raise InputError(f"{bad}; use another checkpoint of the run")


def newest_good(directory: Path, warn: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint with unchanged files; None if there is no checkpoint.

    `warn` is called with the bad files of each damaged checkpoint, which is skipped. `InputError` if all are damaged.
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
    """Return the checkpoint of a path: the verified checkpoint itself, or the newest good checkpoint of a run. With
    `prefer_best`, return the checkpoint of the run's best validation, unless it is damaged.

    Raises:
        InputError: there is no good checkpoint.
        UsageError: the best checkpoint was requested, and the run kept none.
    """
    if step_of(run_or_checkpoint) is not None and run_or_checkpoint.is_dir():
        if prefer_best:
            raise UsageError(
                f"{run_or_checkpoint}: is one checkpoint and not a run to choose the best of; leave --best out"
            )
        verify(run_or_checkpoint)
        return run_or_checkpoint
    directory = run_or_checkpoint / "checkpoints"
    if not directory.is_dir():
        raise InputError(f"{run_or_checkpoint}: neither a run nor a checkpoint (it has no checkpoints/ directory)")
    if prefer_best:
        best = pointed(directory, "BEST")
        if best is None:
            raise UsageError(
                f"{run_or_checkpoint}: kept no checkpoint of the best validation (checkpoint.keep_best, "
                "train.early_stop); leave --best out for the newest one"
            )
        bad = damage(best)
        if not bad:
            return best
        warn(f"{bad}; taking the newest checkpoint instead of the best")
    checkpoint = newest_good(directory, warn)
    if checkpoint is None:
        raise InputError(f"{directory}: no complete checkpoint yet; let the run reach one, or lower checkpoint.every")
    return checkpoint
