"""Work that dies, or gets an error, at a chosen change of a directory.

Python reports each change before it makes it (PEP 578): files opened for writing, names made, renamed and removed. A
drill therefore needs no hooks in the tested code. Dead work raises an exception that nobody catches, and all its later
changes are refused.
"""

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from esmshard.checkpoint import sharded
from esmshard.io import paths

CHANGES = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "open": 1}
"""The audit events, and the number of paths among their arguments."""


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Return values that identify their step."""
    return {f"w{k}": torch.full((40, 50), float(step * 10 + k)) for k in range(4)}


def write(directory: Path, step: int, *, keep: int = 2, best: bool = False) -> Path:
    return sharded.write(directory, step, tensors(step), {"marker": step}, keep=keep, best=best)


def contents(path: Path) -> int:
    """Return the step that all values of a checkpoint belong to."""
    state = sharded.read_state(path)
    found = {name: torch.empty_like(tensor) for name, tensor in tensors(0).items()}
    sharded.load(path, found)
    assert state["step"] == state["marker"]
    for name, tensor in tensors(state["step"]).items():
        assert torch.equal(found[name], tensor)
    return int(state["step"])


def fork(function: Callable[[], int | None]) -> int:
    """Call a function in a forked process, and return the exit code, or -N after signal N."""
    child = os.fork()
    if not child:
        code = 99
        try:
            code = function() or 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.__stderr__, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class DeadError(BaseException):
    """The work dies here."""


_watching: list[tuple[str, Callable[[str], None]]] = []
"""The watched directories, and the functions that get the changes. An audit hook stays, so there is one for all."""
_hooked: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching or event not in CHANGES:
        return
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    inside, report = _watching[-1]
    # rmtree uses names relative to an open directory.
    names = [str(os.fspath(p)) for p in arguments[: CHANGES[event]] if not isinstance(p, int)]
    if any(name.startswith(inside) or not Path(name).is_absolute() for name in names):
        report(event)


@contextmanager
def on_change(directory: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Call `report(event)` right before each change below `directory`."""
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked.append(True)
    _watching.append((str(directory) + os.sep, report))
    try:
        yield
    finally:
        _watching.pop()


def killed_at(number: int, directory: Path, function: Callable[[Path], Any], *, power_cut: bool = False) -> bool:
    """Whether the work dies at change `number` (from 1) below `directory`; False if it ends before.

    With `power_cut`, new files that were not synced are empty, and new names in directories that were not synced are
    gone.
    """
    synced: dict[int, set[str]] = {}  # the names in each synced directory, by inode
    fsync, count, dead = os.fsync, 0, False
    before = {file.stat().st_ino for file in directory.rglob("*") if file.is_file()}

    def record(handle: int) -> None:
        fsync(handle)
        status = os.fstat(handle)
        synced[status.st_ino] = set(os.listdir(handle)) if stat.S_ISDIR(status.st_mode) else set()

    def die(_event: str) -> None:
        nonlocal count, dead
        count += 1
        if count == number:
            dead = True
            if power_cut:
                lose_power()
        if dead:
            raise DeadError

    def lose_power() -> None:
        _watching.append(("", lambda event: None))
        for file in [path for path in directory.rglob("*") if path.is_file()]:
            if file.stat().st_ino in before:
                continue
            if file.name not in synced.get(file.parent.stat().st_ino, ()):
                file.unlink()
            elif file.stat().st_ino not in synced:
                os.truncate(file, 0)
        _watching.pop()

    with pytest.MonkeyPatch.context() as patch, on_change(directory, die):
        patch.setattr(os, "fsync", record)
        patch.setattr(os, "getpid", lambda: 2**22)  # of no live process
        patch.setattr(paths, "_IN_USE", set())
        try:
            function(directory)
        except BaseException:
            if not dead:
                raise
    return dead


def refused_at(number: int, directory: Path, error: int, function: Callable[[Path], Any], *, for_good: bool) -> str:
    """Refuse change `number` (from 1) below `directory` with `error`. Return the message of the `ValueError`, or "".

    With `for_good`, all later files and directories are refused, too.
    """
    count = 0

    def refuse(event: str) -> None:
        nonlocal count
        count += 1
        if count == number if not for_good else count >= number and event in ("open", "os.mkdir"):
            raise OSError(error, os.strerror(error), str(directory))

    with on_change(directory, refuse):
        try:
            function(directory)
        except ValueError as caught:
            return str(caught)
    return ""
